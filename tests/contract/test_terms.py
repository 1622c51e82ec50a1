"""What every method must do in the loop, run over all of them: a new one joins by being in the table of methods."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save
from torch import Tensor

from fedheal import methods
from fedheal.core.parameter import Parameter, get_parameters
from fedheal.core.state import RunState
from fedheal.engine import serial
from fedheal.engine.serial import ClientResult, SerialEngine
from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round, sample_cohort
from tiny_data import load, quick

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

VARIANTS = [
    "fedprox:preset=group",
    "scaffold:option=1",
    "scaffold:fair_controls=p",
    "scaffold:fair_controls=p+fedheal",
    "scaffold:preset=group",
    "feddyn:fair_controls=p",
    "feddyn:fair_controls=p+afl",
    "feddyn:eval_model=broadcast",
    "feddyn:preset=group",
    "fedproc:first_round_ce=false",
    "fedproc:proto_weights=count",
    "fedproto:proto_weights=p+fedheal",
    "ditto:feedback=true",
    "fedce:mode=plus",
    "fedfv:tau=3",
    "moon+fedheal:variant=released",
    "fedavg+fedheal:soft=true,forget=0.1,per_domain=true",
    "scaffold+fedheal:variant=released,soft=true,forget=0.1,per_domain=true",
]
STAGES = [name.partition("+")[2] for name in methods.names() if name.startswith("fedavg+")]
OTHERS = [name for name in methods.LOCAL if name != "fedavg"]
# Terms and stages know nothing of each other: every local method with one stage, and every stage with plain training.
COMBINED = [f"{local}+{stage}" for local, stage in zip(OTHERS, STAGES, strict=False)]
NAMES = [*methods.LOCAL, *methods.WHOLE, *(f"fedavg+{stage}" for stage in STAGES), *COMBINED, *VARIANTS]
QUICK = [name for name in NAMES if "+" not in name or name in VARIANTS or name == "fedavg+fedheal"]
CPU = torch.device("cpu")
every = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
quickly = pytest.mark.parametrize("name", QUICK)
Edit = Callable[[Iterator[ClientResult]], Iterator[ClientResult]]


DATA = load()
# Two clients of a domain and one of each other, of which one takes two steps a round.
SMALL = {"model": "tiny_data:feature_model", "rounds": 6, "lr": 0.02, "validation": 0.25, "batch_size": 16}
SMALL |= {"clients_per_domain": {"plain": 2, "noisy": 1, "dark": 1}}


def make_federation(name: str, **keys: Any) -> Federation:
    return build_federation(quick(**SMALL | {"method": name} | keys), DATA, CPU)


@functools.cache
def _run_two_rounds(name: str) -> tuple[Federation, RunState]:
    fed = make_federation(name, participation=0.75)
    return fed, run_rounds(fed, 2)


def run_two_rounds(name: str) -> tuple[Federation, RunState]:
    """Return a federation of which some clients have not trained yet, and a copy of its state after two rounds."""
    fed, state = _run_two_rounds(name)
    return fed, copy.deepcopy(state)


def run_one_round(fed: Federation, state: RunState, order: int = 1, edit: Edit = iter) -> RunState:
    def train(model, shared, tasks):
        return edit(SerialEngine(fed.local_training).train(model, shared, tasks[::order]))

    return run_round(fed, state, SimpleNamespace(train=train), evaluate=False)[0]


def run_rounds(fed: Federation, rounds: int, order: int = 1) -> RunState:
    state = initial_state(fed)
    for _ in range(rounds):
        state = run_one_round(fed, state, order)
    return state


def flatten_state(state: RunState) -> dict[str, Tensor]:
    """Return all tensors of a state by name."""
    tensors = {f"model.{f}": getattr(state.model, f) for f in ("params", "buffers", "counters")}
    tensors |= {f"aggregator.{name}": value for name, value in state.aggregator.to_arrays()[0].items()}
    for i, term in enumerate(state.terms):
        tensors |= {f"{i}.shared.{name}": value for name, value in term.shared.items()}
        tensors |= {f"{i}.{c}.{name}": value for c, slot in term.slots.items() for name, value in slot.items()}
    return tensors


def copy_tensors(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


# State


@every
def test_a_state_survives_saving_and_the_next_round_is_the_same_bit_for_bit(name: str) -> None:
    """The state goes through safetensors and JSON."""
    fed, state = run_two_rounds(name)
    arrays, described = state.to_arrays()
    data = save({key: value.contiguous() for key, value in arrays.items()})
    text = json.dumps(described)
    copies = copy_tensors(flatten_state(state))
    restored = RunState.from_arrays(load_bytes(data), json.loads(text), CPU)
    assert_same(flatten_state(restored), copies)
    assert (restored.round, restored.seed, restored.sent, restored.received) == (2, 0, state.sent, state.received)
    assert restored == state
    assert_same(flatten_state(run_one_round(fed, restored)), flatten_state(run_one_round(fed, state)))


@every
def test_nothing_that_a_client_is_given_is_changed(name: str) -> None:
    """Training changes neither the global model nor shared values nor slots, and can be repeated."""
    fed, state = run_two_rounds(name)
    shared = tuple(term.shared for term in state.terms)
    copies = copy_tensors(flatten_state(state))
    replies = []
    for client in fed.clients:
        task = serial.Task(client, 3, tuple(term.slots.get(client, {}) for term in state.terms))
        first, second = (serial.train_client(fed.local_training, state.model, shared, task) for _ in range(2))
        assert torch.equal(first.reply.delta, second.reply.delta)
        assert first.reply.metrics == second.reply.metrics
        for left, right in ((first.slots, second.slots), (first.messages, second.messages)):
            for mine, other in zip(left, right, strict=True):
                assert_same(dict(mine), dict(other))
        replies.append(first)
    assert_same(flatten_state(state), copies)
    assert len({reply.reply.delta.numpy().tobytes() for reply in replies}) == len(fed.clients)


@every
def test_nothing_that_the_server_is_given_is_changed(name: str) -> None:
    """Only the buffers of the aggregator's state may be reused."""
    fed, state = run_two_rounds(name)
    before = {key: value for key, value in flatten_state(state).items() if not key.startswith("aggregator.")}
    copies = copy_tensors(before)
    run_one_round(fed, state)
    assert_same(before, copies)


@every
def test_the_order_of_tasks_changes_nothing(name: str) -> None:
    """Sums over clients are in the order of their ids."""
    backward = run_rounds(make_federation(name, participation=0.75), 2, order=-1)
    assert_same(flatten_state(run_two_rounds(name)[1]), flatten_state(backward))


# Who takes part


@every
def test_absent_clients_and_late_joiners(name: str) -> None:
    """A client has slots once it has taken part, and they change in no round without it."""
    fed = make_federation(name, participation=0.4)
    state, seen, late = initial_state(fed), set(), set()
    for number in range(4):
        before, cohort = copy_tensors(flatten_state(state)), []

        def record_clients(trained, cohort=cohort):
            for result in trained:
                cohort.append(result.reply.client)
                yield result

        state = run_one_round(fed, state, edit=record_clients)
        late |= set(cohort) - seen if number else set()
        seen |= set(cohort)
        assert len(cohort) < len(fed.clients)
        for i, term in enumerate(state.terms):
            assert set(term.slots) <= seen
            assert not term.slots or set(term.slots) == seen
            for client in set(term.slots) - set(cohort):
                for key, value in term.slots[client].items():
                    assert torch.equal(value, before[f"{i}.{client}.{key}"]), (client, key)
        assert all(value.isfinite().all() for value in flatten_state(state).values())
    assert late


@quickly
def test_a_skipped_client_keeps_its_slots_and_one_skipped_at_first_has_none(name: str) -> None:
    """plain-0 sends NaN in the second round, dark-0 in every round."""
    fed = make_federation(name, on_bad_update="skip")

    def spoil_updates(trained):
        for result in trained:
            bad = result.reply.client == "dark-0" or (result.reply.client == "plain-0" and state.round == 1)
            reply = result.reply._replace(delta=torch.full_like(result.reply.delta, math.nan)) if bad else result.reply
            yield replace(result, reply=reply)

    state = initial_state(fed)
    state = run_one_round(fed, state, edit=spoil_updates)
    copies = copy_tensors(flatten_state(state))
    state = run_one_round(fed, state, edit=spoil_updates)
    for i, term in enumerate(state.terms):
        assert "dark-0" not in term.slots
        for key, value in term.slots.get("plain-0", {}).items():
            assert torch.equal(value, copies[f"{i}.plain-0.{key}"])
    assert all(value.isfinite().all() for value in (state.model.params, state.model.buffers))


@quickly
def test_a_round_without_any_reply_leaves_everything(name: str) -> None:
    fed, state = run_two_rounds(name)
    copies = copy_tensors(flatten_state(state))
    state = run_one_round(fed, state, edit=lambda trained: iter(()))
    assert_same(flatten_state(state), copies)


@quickly
def test_one_client_alone(name: str) -> None:
    state = run_rounds(make_federation(name, only=["dark-0"]), 2)
    assert all(value.isfinite().all() for value in flatten_state(state).values() if value.is_floating_point())


# Kinds of modules


@quickly
def test_a_frozen_parameter_does_not_move(name: str) -> None:
    fed = make_federation(name)
    fed.local_training.module.body[0].weight.requires_grad_(False)
    start, state = initial_state(fed), run_rounds(fed, 2)
    frozen = fed.local_training.module.body[0].weight.numel()
    assert torch.equal(state.model.params[:frozen], start.model.params[:frozen])
    assert not torch.equal(state.model.params, start.model.params)


@pytest.mark.parametrize("model", ["tied_weights", "dropout", "linear"])
@pytest.mark.parametrize(
    "name", [n for n in QUICK if not any(term.features for term in methods.get(n).local) and "+" not in n]
)
def test_tied_weights_layers_that_draw_and_models_without_buffers(name: str, model: str) -> None:
    """Two runs are equal, whatever the state of torch's global random generator."""
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        fed = make_federation(name, model=f"tiny_data:{model}", only=["plain-0", "dark-0"])
        ends.append(copy_tensors(flatten_state(run_rounds(fed, 2))))
    assert_same(*ends)


@pytest.mark.parametrize("name", [n for n in QUICK if any(term.features for term in methods.get(n).local)])
def test_methods_that_look_at_features_say_so_to_a_model_without(name: str) -> None:
    with pytest.raises(ValueError, match="needs a model with `features` and `head`"):
        make_federation(name, model="tiny_data:linear")


@pytest.mark.parametrize("name", ["fedga", "fedce", "fedce:mode=plus"])
@pytest.mark.parametrize("keys", [{"validation": 0.0}, {"pool": True}], ids=["none", "pooled"])
def test_methods_that_need_validation_data_say_so(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"held out of each client's training data: give validation=0\.2"):
        make_federation(name, **keys)


# Bytes

P, BUFFERS, FEATURES, CLASSES = 3 * 4 * 9 + 4 + 8 + 36 * 3 + 3, 8, 36, 3
SIZE = 4 * (P + BUFFERS) + 8  # float32, and a counter
PROTOTYPES = 4 * CLASSES * FEATURES
PUBLIC, PUBLIC_BATCH = 12 + 24 + 7, 256  # images that no client holds, and the columns of their similarity
# What goes along with the model: up, down in the first round, down in the second.
ALONG = {
    "fedavg": (0, 0, 0),
    "fedavg+fedheal": (0, 0, 0),
    "fedprox": (0, 0, 0),
    "moon": (0, 0, 0),
    "feddyn": (0, 0, 0),
    "scaffold": (4 * P, 4 * P, 4 * P),
    "scaffold:option=1": (4 * P, 4 * P, 4 * P),
    "fedproc": (PROTOTYPES + 4 * CLASSES, 0, PROTOTYPES + 8 * CLASSES),
    "fedproto": (PROTOTYPES + 4 * CLASSES, 0, PROTOTYPES + 8 * CLASSES),
    "fccl": (4 * PUBLIC * CLASSES, 0, 4 * PUBLIC * CLASSES),
    "fcclplus": (4 * PUBLIC * (CLASSES + PUBLIC_BATCH), 0, 4 * PUBLIC * (CLASSES + PUBLIC_BATCH)),
    # Four clients, and 3 x 1 x 1 amplitudes of each of three images: the images have 8 x 8 pixels, of which a tenth is none.
    "feddg:spectra=3": (4 * 3 * 3, 0, 4 * 4 * 3 * 3),
    "fedsam": (0, 0, 0),
    "fedlesam": (0, 0, 0),
    "fedism": (8, 0, 0),  # the sharpness
    "ditto": (4 * (P + BUFFERS), 0, 0),  # the personal model without its counter
    "fedavg+afl": (8, 0, 0),  # a loss
    "fedavg+qffl": (16, 0, 0),  # and how far the client's steps reach
    "fedpw": (8, 0, 0),
    "fedga": (24, 0, 0),
    "fedce": (16, 0, 8),  # the accuracy without a client, and of how many rounds; the weight that its model had
    "fedavg+fedheal:per_domain=true": (0, 0, 0),
    # Less a batch normalisation of 4 channels: weight, bias, mean and variance, and its counter, which a client has to be given
    # once.
    "fedbn": (-(4 * 16 + 8), 0, -(4 * 16 + 8)),
}


@pytest.mark.parametrize("name", ALONG)
def test_bytes_are_those_of_the_model_and_what_goes_along(name: str) -> None:
    fed = make_federation(name)
    up, first, second = ALONG[name]
    after_first = run_one_round(fed, initial_state(fed))
    after_second = run_one_round(fed, after_first)
    clients = len(fed.clients)
    assert after_first.received == clients * (SIZE + up)
    assert after_second.received - after_first.received == clients * (SIZE + up)
    assert after_first.sent == clients * (SIZE + first)
    assert after_second.sent - after_first.sent == clients * (SIZE + second)


def test_fedbn_under_partial_participation_gives_each_client_its_first_layers() -> None:
    """Whoever has not taken part yet is sent the whole model."""
    fed = make_federation("fedbn", participation=0.5)
    state, known, norm = initial_state(fed), set(), 4 * 16 + 8
    for number in range(1, 5):
        cohort = sample_cohort(fed, state.seed, number)
        now = run_one_round(fed, copy.copy(state))
        assert now.sent - state.sent == sum(SIZE - norm * (client in known) for client in cohort)
        assert now.received - state.received == len(cohort) * (SIZE - norm)
        known |= set(cohort)
        state = now
    assert len(known) > len(cohort)


def test_scaffold_sends_every_parameter_twice() -> None:
    fed, plain = make_federation("scaffold"), make_federation("fedavg")
    first, second = run_rounds(fed, 3), run_rounds(plain, 3)
    rest = 3 * len(fed.clients) * (4 * BUFFERS + 8)  # buffers and counters go once
    for way in ("sent", "received"):
        assert getattr(first, way) - rest == 2 * (getattr(second, way) - rest)


def test_fpl_sends_cluster_prototypes_along() -> None:
    fed = make_federation("fpl")
    first = run_rounds(fed, 1)
    clusters = len(first.terms[0].shared["owner"])
    assert CLASSES <= clusters <= CLASSES * len(fed.clients)
    second = run_one_round(fed, copy.copy(first))
    down = SIZE + PROTOTYPES + 8 * CLASSES + clusters * (4 * FEATURES + 8)
    assert second.sent - first.sent == len(fed.clients) * down
    assert first.received == len(fed.clients) * (SIZE + PROTOTYPES + 4 * CLASSES)


# Parameters


def _find_bad_values(parameter: Parameter) -> list[str]:
    """Return texts that are no value of this parameter: of another kind, and beyond each of its bounds."""
    if parameter.choices or isinstance(parameter.default, str):
        return ["nonsense", "3", "true", ""]
    if isinstance(parameter.default, bool):
        return ["maybe", "2", "no"]
    bounds = [(parameter.ge, -1), (parameter.gt, 0), (parameter.le, 1), (parameter.lt, 0)]
    return [*(f"{bound + step}" for bound, step in bounds if bound is not None), "nan", "inf", "true", "abc", ""]


PARAMETERS = [
    (part, parameter)
    for part, constructor in methods.PARTS.items()
    for parameter in get_parameters(constructor).values()
]


@pytest.mark.parametrize(("part", "parameter"), PARAMETERS, ids=lambda value: getattr(value, "name", value))
def test_a_parameter_out_of_range_is_refused_with_one_sentence(part: str, parameter: Parameter) -> None:
    """The sentence names the parameter and its value, whether it stands in the name or beside it."""
    for value in _find_bad_values(parameter):
        for name, keys in ((f"{part}:{parameter.name}={value}", {}), (part, {parameter.name: value})):
            with pytest.raises(ValueError) as caught:  # noqa: PT011  (the sentence is checked below)
                methods.get(name, **keys)
            sentence = str(caught.value)
            assert parameter.name in sentence
            assert value.lower() in sentence.lower()
            assert "\n" not in sentence
