"""FedProc, FedProto and FPL by hand: what is collected, averaged and clustered, and the losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedheal import methods
from fedheal.data.augment import normalised
from fedheal.engine import serial
from fedheal.local.prototypes import FPL, FedProc, FedProto, Prototypes
from fedheal.local.term import Batch, Context
from fedheal.simulate.build import build_federation
from fedheal.simulate.round import initial_state, run_round
from local.quadratic import absorbed, context, packed, vector
from tiny_data import load, quick

AXES = {"prototypes": torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]), "known": torch.tensor([1, 1, 0])}


def ctx_of(shared: dict[str, Tensor], term: Prototypes | None = None, **keys: Any) -> Context:
    """A context as the term has prepared it."""
    term = term or FedProc()  # which prepares all that the others read
    ctx = context(term, packed(0.0), shared=shared, classes=3, **keys)
    term.prepare(ctx, ctx.received)
    return ctx


def batch(z: list[list[float]], y: list[int], ce: float = 2.0, last: bool = False) -> Batch:
    features = torch.tensor(z, requires_grad=True)
    return Batch(torch.zeros(len(y), 1), torch.tensor(y), torch.zeros(len(y), 3), torch.tensor(ce), features, last)


# What is collected and averaged


def test_class_means_are_collected_in_the_last_epoch_only() -> None:
    """Class 0: the mean of (1, 2) and (3, 6); class 2: (5, 5); class 1 was not seen. Earlier epochs do not count."""
    ctx, term = ctx_of({}, Prototypes()), Prototypes()
    term.loss(batch([[100.0, 100.0]], [0]), ctx)
    assert ctx.scratch == {}
    term.loss(batch([[1.0, 2.0], [5.0, 5.0]], [0, 2], last=True), ctx)
    term.loss(batch([[3.0, 6.0]], [0], last=True), ctx)
    slot, message = term.finish(ctx, packed(0.0))
    assert slot == {}
    assert message["prototypes"].tolist() == [[2.0, 4.0], [0.0, 0.0], [5.0, 5.0]]
    assert message["count"].tolist() == [2, 0, 1]
    assert not message["prototypes"].requires_grad


@pytest.mark.parametrize("method", ["fedproc", "fedproto", "fpl"])
def test_the_engine_counts_each_example_once_and_the_features_it_trained_on(method: str) -> None:
    """One batch an epoch: the last epoch's features are those of the model that the epochs before have made."""
    fed = build_federation(
        quick(method=method, model="tiny_data:featured", epochs=3, batch_size=100, momentum=0.0),
        load(),
        torch.device("cpu"),
    )
    state = initial_state(fed)
    local_training, task = fed.local_training, serial.Task("noisy-0", 1, ({},))
    done = serial.train(local_training, state.model, (state.terms[0].shared,), task)
    examples = local_training.examples["noisy-0"]
    message = done.messages[0]
    assert message["count"].tolist() == [int((examples.labels == y).sum()) for y in range(3)]
    shorter = serial.replace(local_training, training=serial.replace(local_training.training, epochs=2))
    moved = serial.train(shorter, state.model, (state.terms[0].shared,), task).reply
    local_training.module.load_state_dict(
        local_training.layout.unpack(type(state.model)(state.model.params + moved.delta, moved.buffers, moved.counters))
    )
    with torch.no_grad():
        z = local_training.module.train().features(normalised(examples.images))
    for y in range(3):
        expected = z[examples.labels == y].mean(dim=0)
        assert torch.allclose(message["prototypes"][y], expected, atol=1e-4)


def told(*rows: tuple[list[float], float]) -> dict[str, Tensor]:
    """A client's message: per class its prototype and how many samples it had."""
    return {"prototypes": torch.tensor([row for row, _ in rows]), "count": torch.tensor([n for _, n in rows])}


def served(term: Prototypes, messages: list[dict[str, Tensor]], shared: dict[str, Tensor], weights: list[float]):
    locals_ = {str(i): vector(0.0) for i in range(len(messages))}
    return absorbed(term, packed(0.0), locals_, messages, shared, weights=weights)[1]


@pytest.mark.parametrize("term", [FedProc(), FedProto()], ids=["fedproc", "fedproto"])
def test_the_servers_mean_is_plain_and_over_the_clients_that_have_the_class(term: Prototypes) -> None:
    """Class 0: the mean of (1, 1) and (3, 5), though counts are 5 and 100 and weights 0.9 and 0.1; class 1: b's alone."""
    a = told(([1.0, 1.0], 5), ([0.0, 0.0], 0), ([0.0, 0.0], 0))
    b = told(([3.0, 5.0], 100), ([2.0, 2.0], 1), ([0.0, 0.0], 0))
    shared = served(term, [a, b], {}, [0.9, 0.1])
    assert shared["prototypes"].tolist() == [[2.0, 3.0], [2.0, 2.0], [0.0, 0.0]]
    assert shared["known"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("by", "first"),
    [
        ("uniform", [2.0, 3.0]),
        # 5 samples at (1, 1) and 15 at (3, 5): 1/4 and 3/4
        ("count", [2.5, 4.0]),
        # weights 0.3 and 0.1 of the two that have the class, not of all three: 3/4 and 1/4
        ("p", [1.5, 2.0]),
    ],
)
@pytest.mark.parametrize("kind", [FedProc, FedProto])
def test_which_weights_average_the_prototypes(kind: type[Prototypes], by: str, first: list[float]) -> None:
    """Class 0: a and b have it. Class 1: c alone, whatever the weights. Class 2: nobody."""
    none = ([0.0, 0.0], 0.0)
    messages = [
        told(([1.0, 1.0], 5), none, none),
        told(([3.0, 5.0], 15), none, none),
        told(none, ([2.0, 2.0], 1), none),
    ]
    shared = served(kind(proto_weights=by), messages, {}, [0.3, 0.1, 0.6])
    assert shared["prototypes"].flatten().tolist() == pytest.approx([*first, 2.0, 2.0, 0.0, 0.0], rel=1e-6)
    assert shared["known"].tolist() == [1, 1, 0]


def test_a_class_that_only_clients_without_weight_have_keeps_its_prototype() -> None:
    """Under `p`: client a has no weight, so its class 0 counts as nobody's."""
    messages = [told(([5.0, 5.0], 2), ([0.0, 0.0], 0)), told(([0.0, 0.0], 0), ([7.0, 7.0], 1))]
    before = {"prototypes": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "known": torch.tensor([1, 0])}
    shared = served(FedProto("p"), messages, before, [0.0, 1.0])
    assert shared["prototypes"].tolist() == [[1.0, 0.0], [7.0, 7.0]]
    assert shared["known"].tolist() == [1, 1]


def test_the_weights_of_prototypes_reach_the_term_by_name() -> None:
    assert methods.get("fedproto:proto_weights=count").local == (FedProto("count"),)
    assert methods.get("fedproc:proto_weights=p+fedheal").local == (FedProc("p"),)
    assert methods.get("fedproc").local == (FedProc("uniform"),)


def test_a_class_nobody_has_this_round_keeps_its_prototype() -> None:
    a = told(([5.0, 5.0], 2), ([0.0, 0.0], 0), ([7.0, 7.0], 1))
    shared = served(FedProto(), [a], AXES, [1.0])
    assert shared["prototypes"].tolist() == [[5.0, 5.0], [0.0, 1.0], [7.0, 7.0]]
    assert shared["known"].tolist() == [1, 1, 1]
    assert AXES["prototypes"][0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("term", [FedProc(), FedProto(), FPL()], ids=["fedproc", "fedproto", "fpl"])
def test_nobody_came(term: Prototypes) -> None:
    aggregated = packed(1.0)
    model, shared = term.absorb(packed(0.0), aggregated, [], AXES, None)
    assert model is aggregated
    assert shared is AXES


# FedProc


@pytest.mark.parametrize(("number", "alpha"), [(1, 1.0), (2, 0.75), (3, 0.5), (4, 0.25), (5, 0.0)])
def test_fedproc_by_hand(number: int, alpha: float) -> None:
    """Cosines of (3, 0) to the axes: 1 and 0; of (0, 2): 0 and 1. Both of class 0, so L_con is the mean of
    log(1 + e^-1) = 0.313262 and log(1 + e) = 1.313262: 0.813262. In all alpha L_con + (1 - alpha) CE with CE = 2.
    """
    b = batch([[3.0, 0.0], [0.0, 2.0]], [0, 0])
    added = FedProc().pulled(b, b.features, ctx_of(AXES, round=number, rounds=5))
    assert 2.0 + added.item() == pytest.approx(alpha * 0.813262 + (1 - alpha) * 2.0, rel=1e-5)


def test_fedprocs_temperature() -> None:
    """Halved, it doubles the cosines: log(1 + e^-2)."""
    b = batch([[3.0, 0.0]], [0])
    added = FedProc(temperature=0.5).pulled(b, b.features, ctx_of(AXES))
    assert 2.0 + added.item() == pytest.approx(math.log1p(math.exp(-2)), rel=1e-5)


def test_fedproc_leaves_classes_without_a_prototype_out_of_the_contrast() -> None:
    """Class 2 is unknown: no part of the sum over classes, and its sample adds 0 to the mean over two."""
    b = batch([[3.0, 0.0], [1.0, 1.0]], [0, 2])
    added = FedProc().pulled(b, b.features, ctx_of(AXES))
    assert 2.0 + added.item() == pytest.approx(0.313262 / 2, rel=1e-5)
    b = batch([[1.0, 1.0]], [2])
    assert FedProc().pulled(b, b.features, ctx_of(AXES)).item() == -2.0


def test_fedprocs_first_round() -> None:
    """Without prototypes: CE alone or, as published, a loss of exactly 0, which falls to (1 - alpha) CE later."""
    b = batch([[3.0, 0.0]], [0])
    assert FedProc().pulled(b, b.features, ctx_of({})) is None
    strict = FedProc(first_round_ce=False)
    assert 2.0 + strict.pulled(b, b.features, ctx_of({})).item() == 0.0
    assert 2.0 + strict.pulled(b, b.features, ctx_of({}, round=3, rounds=5)).item() == 1.0


def test_fedproc_without_first_round_ce_learns_nothing_at_first() -> None:
    """Only weight decay moves parameters, so without it nothing does."""
    keys = {"model": "tiny_data:featured", "weight_decay": 0.0}
    for first, moves in ((True, True), (False, False)):
        fed = build_federation(quick(method=f"fedproc:first_round_ce={first}", **keys), load(), torch.device("cpu"))
        state = initial_state(fed)
        done = serial.train(fed.local_training, state.model, ({},), serial.Task("plain-0", 1, ({},)))
        assert bool(done.reply.delta.any()) == moves


def test_a_run_of_one_round() -> None:
    b = batch([[3.0, 0.0]], [0])
    assert math.isfinite(FedProc().pulled(b, b.features, ctx_of(AXES, round=1, rounds=1)).item())


# FedProto


def test_fedproto_by_hand() -> None:
    """(1, 2) of class 0 is 0 and 2 off (1, 0); (3, 4) is of class 2, unknown: 4 / (2 x 2) = 1, times lam."""
    b = batch([[1.0, 2.0], [3.0, 4.0]], [0, 2])
    added = FedProto(lam=0.5).pulled(b, b.features, ctx_of(AXES))
    assert added.item() == pytest.approx(0.5)
    added.backward()
    # d/dz of lam (z - c)^2 / 4: 0.5 * 2 * 2 / 4 on the one entry that is off
    assert b.features.grad.tolist() == [[0.0, 0.5], [0.0, 0.0]]


def test_fedproto_has_no_term_without_prototypes_or_weight() -> None:
    b = batch([[1.0, 2.0]], [0])
    assert FedProto().pulled(b, b.features, ctx_of({})) is None
    assert FedProto(lam=0.0).pulled(b, b.features, ctx_of(AXES)) is None


# FPL

CLUSTERS = {
    "clusters": torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]),
    "owner": torch.tensor([0, 0, 1]),
    "prototypes": torch.tensor([[0.5, 0.5], [-1.0, 0.0], [0.0, 0.0]]),
    "known": torch.tensor([1, 1, 0]),
}


def test_fpl_by_hand() -> None:
    """z = (1, 0) of class 0, T = 1: cosines 1, 0 and -1, the first two of its class.

    CPCL = log(e + 1 + 1/e) - log(e + 1) = 0.094348; UPCR = (0.5^2 + 0.5^2) / 2 = 0.25.
    """
    b = batch([[1.0, 0.0]], [0])
    added = FPL(temperature=1.0).pulled(b, b.features, ctx_of(CLUSTERS, FPL()))
    contrast = math.log(math.e + 1 + 1 / math.e) - math.log(math.e + 1)
    assert added.item() == pytest.approx(contrast + 0.25, rel=1e-6)


def test_fpls_temperature_and_unknown_classes() -> None:
    """T = 0.5 doubles the cosines; the second sample's class is unknown and adds 0 to both means over two."""
    b = batch([[1.0, 0.0], [4.0, 4.0]], [0, 2])
    added = FPL(temperature=0.5).pulled(b, b.features, ctx_of(CLUSTERS))
    contrast = math.log(math.exp(2) + 1 + math.exp(-2)) - math.log(math.exp(2) + 1)
    assert added.item() == pytest.approx(contrast / 2 + 0.25 / 2, rel=1e-6)
    added.backward()
    assert b.features.grad.isfinite().all()
    assert b.features.grad[1].tolist() == [0.0, 0.0]


def test_fpl_with_only_unknown_classes_adds_nothing() -> None:
    b = batch([[4.0, 4.0]], [2])
    added = FPL().pulled(b, b.features, ctx_of(CLUSTERS))
    added.backward()
    assert added.item() == 0.0
    assert b.features.grad.tolist() == [[0.0, 0.0]]


def test_fpls_server_by_hand() -> None:
    """Class 0: three clients near (1, 0), two near (0, 1): two clusters with means (1, 0.1) and (0.1, 1), and the mean of
    these is (0.55, 0.55), not the mean of the five clients. Class 1: one client. Class 2: nobody.
    """
    none = ([0.0, 0.0], 0.0)
    messages = [
        told(([1.0, 0.0], 5), none, none),
        told(([1.0, 0.1], 1), none, none),
        told(([1.0, 0.2], 1), ([3.0, 4.0], 2), none),
        told(([0.0, 1.0], 9), none, none),
        told(([0.2, 1.0], 9), none, none),
    ]
    shared = served(FPL(), messages, {}, [0.9, 0.025, 0.025, 0.025, 0.025])
    assert shared["owner"].tolist() == [0, 0, 1]
    assert shared["clusters"].flatten().tolist() == pytest.approx([1.0, 0.1, 0.1, 1.0, 3.0, 4.0], rel=1e-6)
    assert shared["prototypes"].flatten().tolist() == pytest.approx([0.55, 0.55, 3.0, 4.0, 0.0, 0.0], rel=1e-6)
    assert shared["known"].tolist() == [1, 1, 0]


def test_fpl_keeps_the_clusters_of_a_class_that_nobody_has_this_round() -> None:
    """Class 0 had two clusters and class 1 one; now one client comes, with classes 1 and 2."""
    none = ([0.0, 0.0], 0.0)
    message = told(none, ([5.0, 5.0], 3), ([7.0, 0.0], 1))
    shared = served(FPL(), [message], CLUSTERS, [1.0])
    assert shared["owner"].tolist() == [0, 0, 1, 2]
    assert shared["clusters"].tolist() == [[1.0, 0.0], [0.0, 1.0], [5.0, 5.0], [7.0, 0.0]]
    assert shared["prototypes"].tolist() == [[0.5, 0.5], [5.0, 5.0], [7.0, 0.0]]
    assert shared["known"].tolist() == [1, 1, 1]
    assert CLUSTERS["owner"].tolist() == [0, 0, 1]
    nothing = served(FPL(), [told(none, none, none)], CLUSTERS, [1.0])
    assert all(torch.equal(nothing[name], CLUSTERS[name]) for name in CLUSTERS)


def test_prototypes_do_not_depend_on_the_averages_weights() -> None:
    """A first round with any stage leaves the prototypes of plain FedProto: they are features, not parameters."""
    ends = []
    for method in ("fedproto", "fedproto+uniform", "fedproto+afl:gamma=1", "fedproto+fedheal:tau=1"):
        fed = build_federation(quick(method=method, model="tiny_data:featured"), load(), torch.device("cpu"))
        state, _ = run_round(
            fed,
            initial_state(fed),
            lambda m, s, tasks, fed=fed: (serial.train(fed.local_training, m, s, t) for t in tasks),
            evaluate=False,
        )
        ends.append(state.terms[0].shared["prototypes"])
    assert all(torch.equal(ends[0], other) for other in ends[1:])
