"""What the methods with prototypes share: collecting and averaging them."""

from __future__ import annotations

import pytest
import torch

from fedheal import methods
from fedheal.data.augment import normalise_images
from fedheal.engine import serial
from fedheal.local.fedproc import FedProc
from fedheal.local.fedproto import FedProto
from fedheal.local.fpl import FPL
from fedheal.local.prototypes import Prototypes
from fedheal.simulate.round import initial_state
from local.prototype_inputs import AXES, absorb_messages, make_batch, make_context, make_message
from local.quadratic import make_packed
from local.rounds import make_federation, run_rounds


def test_class_means_are_collected_in_the_last_epoch_only() -> None:
    """Class 0: the mean of (1, 2) and (3, 6); class 2: (5, 5); class 1 was not seen. Earlier epochs do not count."""
    ctx, term = make_context({}, Prototypes()), Prototypes()
    term.loss(make_batch([[100.0, 100.0]], [0]), ctx)
    assert ctx.scratch == {}
    term.loss(make_batch([[1.0, 2.0], [5.0, 5.0]], [0, 2], last=True), ctx)
    term.loss(make_batch([[3.0, 6.0]], [0], last=True), ctx)
    slot, message = term.finish(ctx, make_packed(0.0))
    assert slot == {}
    assert message["prototypes"].tolist() == [[2.0, 4.0], [0.0, 0.0], [5.0, 5.0]]
    assert message["count"].tolist() == [2, 0, 1]
    assert not message["prototypes"].requires_grad


@pytest.mark.parametrize("method", ["fedproc", "fedproto", "fpl"])
def test_the_engine_counts_each_example_once_and_the_features_it_trained_on(method: str) -> None:
    """One batch an epoch: the last epoch's features are those of the model that the epochs before have made."""
    keys = {"model": "tiny_data:feature_model", "epochs": 3, "batch_size": 100, "momentum": 0.0}
    fed = make_federation(method=method, **keys)
    state = initial_state(fed)
    local_training, task = fed.local_training, serial.Task("noisy-0", 1, ({},))
    done = serial.train_client(local_training, state.model, (state.terms[0].shared,), task)
    examples = local_training.examples["noisy-0"]
    message = done.messages[0]
    assert message["count"].tolist() == [int((examples.labels == y).sum()) for y in range(3)]
    shorter = serial.replace(local_training, training=serial.replace(local_training.training, epochs=2))
    moved = serial.train_client(shorter, state.model, (state.terms[0].shared,), task).reply
    local_training.module.load_state_dict(
        local_training.layout.unpack(type(state.model)(state.model.params + moved.delta, moved.buffers, moved.counters))
    )
    with torch.no_grad():
        z = local_training.module.train().features(normalise_images(examples.images))
    for y in range(3):
        expected = z[examples.labels == y].mean(dim=0)
        assert torch.allclose(message["prototypes"][y], expected, atol=1e-4)


@pytest.mark.parametrize("term", [FedProc(), FedProto()], ids=["fedproc", "fedproto"])
def test_the_servers_mean_is_plain_and_over_the_clients_that_have_the_class(term: Prototypes) -> None:
    """Class 0: the mean of (1, 1) and (3, 5), though counts are 5 and 100 and weights 0.9 and 0.1; class 1: b's alone."""
    a = make_message(([1.0, 1.0], 5), ([0.0, 0.0], 0), ([0.0, 0.0], 0))
    b = make_message(([3.0, 5.0], 100), ([2.0, 2.0], 1), ([0.0, 0.0], 0))
    shared = absorb_messages(term, [a, b], {}, [0.9, 0.1])
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
        make_message(([1.0, 1.0], 5), none, none),
        make_message(([3.0, 5.0], 15), none, none),
        make_message(none, ([2.0, 2.0], 1), none),
    ]
    shared = absorb_messages(kind(proto_weights=by), messages, {}, [0.3, 0.1, 0.6])
    assert shared["prototypes"].flatten().tolist() == pytest.approx([*first, 2.0, 2.0, 0.0, 0.0], rel=1e-6)
    assert shared["known"].tolist() == [1, 1, 0]


def test_a_class_that_only_clients_without_weight_have_keeps_its_prototype() -> None:
    """Under `p`: client a has no weight, so its class 0 counts as nobody's."""
    messages = [make_message(([5.0, 5.0], 2), ([0.0, 0.0], 0)), make_message(([0.0, 0.0], 0), ([7.0, 7.0], 1))]
    before = {"prototypes": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "known": torch.tensor([1, 0])}
    shared = absorb_messages(FedProto("p"), messages, before, [0.0, 1.0])
    assert shared["prototypes"].tolist() == [[1.0, 0.0], [7.0, 7.0]]
    assert shared["known"].tolist() == [1, 1]


def test_the_weights_of_prototypes_reach_the_term_by_name() -> None:
    assert methods.get("fedproto:proto_weights=count").local == (FedProto("count"),)
    assert methods.get("fedproc:proto_weights=p+fedheal").local == (FedProc("p"),)
    assert methods.get("fedproc").local == (FedProc("uniform"),)


def test_a_class_nobody_has_this_round_keeps_its_prototype() -> None:
    a = make_message(([5.0, 5.0], 2), ([0.0, 0.0], 0), ([7.0, 7.0], 1))
    shared = absorb_messages(FedProto(), [a], AXES, [1.0])
    assert shared["prototypes"].tolist() == [[5.0, 5.0], [0.0, 1.0], [7.0, 7.0]]
    assert shared["known"].tolist() == [1, 1, 1]
    assert AXES["prototypes"][0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("term", [FedProc(), FedProto(), FPL()], ids=["fedproc", "fedproto", "fpl"])
def test_nobody_came(term: Prototypes) -> None:
    aggregated = make_packed(1.0)
    model, shared = term.absorb(make_packed(0.0), aggregated, [], AXES, None)
    assert model is aggregated
    assert shared is AXES


def test_prototypes_do_not_depend_on_the_averages_weights() -> None:
    """A first round with any stage leaves the prototypes of plain FedProto: they are features, not parameters."""
    ends = []
    for method in ("fedproto", "fedproto+uniform", "fedproto+afl:gamma=1", "fedproto+fedheal:tau=1"):
        fed = make_federation(method=method, model="tiny_data:feature_model")
        state = run_rounds(fed, 1)
        ends.append(state.terms[0].shared["prototypes"])
    assert all(torch.equal(ends[0], other) for other in ends[1:])
