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

pytestmark = pytest.mark.slow

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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DATA = load()
# Two clients of a domain and one of each other, of which one takes two steps a round.
SMALL = {"model": "tiny_data:featured", "rounds": 6, "lr": 0.02, "validation": 0.25, "batch_size": 16}
SMALL |= {"clients_per_domain": {"plain": 2, "noisy": 1, "dark": 1}}


def federation(name: str, **keys: Any) -> Federation:
    return build_federation(quick(**SMALL | {"method": name} | keys), DATA, CPU)


@functools.cache
def _settle(name: str) -> tuple[Federation, RunState]:
    fed = federation(name, participation=0.75)
    return fed, after(fed, 2)


def settled(name: str) -> tuple[Federation, RunState]:
    """A federation whose clients have not all been seen, and its state after two rounds, for tests to use up."""
    fed, state = _settle(name)
    return fed, copy.deepcopy(state)


def step(fed: Federation, state: RunState, order: int = 1, edit: Edit = iter) -> RunState:
    def train(model, shared, tasks):
        return edit(SerialEngine(fed.local_training).train(model, shared, tasks[::order]))

    return run_round(fed, state, SimpleNamespace(train=train), evaluate=False)[0]


def after(fed: Federation, rounds: int, order: int = 1) -> RunState:
    state = initial_state(fed)
    for _ in range(rounds):
        state = step(fed, state, order)
    return state


def flat(state: RunState) -> dict[str, Tensor]:
    """All that a state holds, clients by name."""
    found = {f"model.{f}": getattr(state.model, f) for f in ("params", "buffers", "counters")}
    found |= {f"aggregator.{name}": value for name, value in state.aggregator.to_arrays()[0].items()}
    for i, term in enumerate(state.terms):
        found |= {f"{i}.shared.{name}": value for name, value in term.shared.items()}
        found |= {f"{i}.{c}.{name}": value for c, slot in term.slots.items() for name, value in slot.items()}
    return found


def copied(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype, name
        assert torch.equal(value, two[name]), name


# State


@every
def test_a_state_survives_saving_and_the_next_round_is_the_same_bit_for_bit(name: str) -> None:
    """Tensors as safetensors, the rest as JSON, and back."""
    fed, state = settled(name)
    arrays, described = state.to_arrays()
    data = save({key: value.contiguous() for key, value in arrays.items()})
    text = json.dumps(described)
    kept = copied(flat(state))
    restored = RunState.from_arrays(load_bytes(data), json.loads(text), CPU)
    assert_same(flat(restored), kept)
    assert (restored.round, restored.seed, restored.sent, restored.received) == (2, 0, state.sent, state.received)
    assert restored == state
    assert_same(flat(step(fed, restored)), flat(step(fed, state)))


@every
def test_nothing_that_a_client_is_given_is_changed(name: str) -> None:
    """The global model, the shared values and every slot, whoever trains; nor does training again give anything else."""
    fed, state = settled(name)
    shared = tuple(term.shared for term in state.terms)
    kept = copied(flat(state))
    replies = []
    for client in fed.clients:
        task = serial.Task(client, 3, tuple(term.slots.get(client, {}) for term in state.terms))
        one, two = (serial.train_client(fed.local_training, state.model, shared, task) for _ in range(2))
        assert torch.equal(one.reply.delta, two.reply.delta)
        assert one.reply.metrics == two.reply.metrics
        for left, right in ((one.slots, two.slots), (one.messages, two.messages)):
            for mine, other in zip(left, right, strict=True):
                assert_same(dict(mine), dict(other))
        replies.append(one)
    assert_same(flat(state), kept)
    assert len({reply.reply.delta.numpy().tobytes() for reply in replies}) == len(fed.clients)


@every
def test_nothing_that_the_server_is_given_is_changed(name: str) -> None:
    """But for the aggregator's state, whose buffers may be reused."""
    fed, state = settled(name)
    before = {key: value for key, value in flat(state).items() if not key.startswith("aggregator.")}
    kept = copied(before)
    step(fed, state)
    assert_same(before, kept)


@every
def test_the_order_of_tasks_changes_nothing(name: str) -> None:
    """Not a bit: sums over clients go by their ids, not by who came first."""
    backward = after(federation(name, participation=0.75), 2, order=-1)
    assert_same(flat(settled(name)[1]), flat(backward))


# Who takes part


@every
def test_absent_clients_and_late_joiners(name: str) -> None:
    """A client has slots once it has taken part, and they change in no round without it."""
    fed = federation(name, participation=0.4)
    state, seen, late = initial_state(fed), set(), set()
    for number in range(4):
        before, cohort = copied(flat(state)), []

        def noted(trained, cohort=cohort):
            for one in trained:
                cohort.append(one.reply.client)
                yield one

        state = step(fed, state, edit=noted)
        late |= set(cohort) - seen if number else set()
        seen |= set(cohort)
        assert len(cohort) < len(fed.clients)
        for i, term in enumerate(state.terms):
            assert set(term.slots) <= seen
            assert not term.slots or set(term.slots) == seen
            for client in set(term.slots) - set(cohort):
                for key, value in term.slots[client].items():
                    assert torch.equal(value, before[f"{i}.{client}.{key}"]), (client, key)
        assert all(value.isfinite().all() for value in flat(state).values())
    assert late


@quickly
def test_a_skipped_client_keeps_its_slots_and_one_skipped_at_first_has_none(name: str) -> None:
    """plain-0 sends NaN in the second round, dark-0 in every round."""
    fed = federation(name, on_bad_update="skip")

    def spoilt(trained):
        for one in trained:
            bad = one.reply.client == "dark-0" or (one.reply.client == "plain-0" and state.round == 1)
            reply = one.reply._replace(delta=torch.full_like(one.reply.delta, math.nan)) if bad else one.reply
            yield replace(one, reply=reply)

    state = initial_state(fed)
    state = step(fed, state, edit=spoilt)
    kept = copied(flat(state))
    state = step(fed, state, edit=spoilt)
    for i, term in enumerate(state.terms):
        assert "dark-0" not in term.slots
        for key, value in term.slots.get("plain-0", {}).items():
            assert torch.equal(value, kept[f"{i}.plain-0.{key}"])
    assert all(value.isfinite().all() for value in (state.model.params, state.model.buffers))


@quickly
def test_a_round_without_any_reply_leaves_everything(name: str) -> None:
    fed, state = settled(name)
    kept = copied(flat(state))
    state = step(fed, state, edit=lambda trained: iter(()))
    assert_same(flat(state), kept)


@quickly
def test_one_client_alone(name: str) -> None:
    state = after(federation(name, only=["dark-0"]), 2)
    assert all(value.isfinite().all() for value in flat(state).values() if value.is_floating_point())


# Kinds of modules


@quickly
def test_a_frozen_parameter_does_not_move(name: str) -> None:
    fed = federation(name)
    fed.local_training.module.body[0].weight.requires_grad_(False)
    start, state = initial_state(fed), after(fed, 2)
    frozen = fed.local_training.module.body[0].weight.numel()
    assert torch.equal(state.model.params[:frozen], start.model.params[:frozen])
    assert not torch.equal(state.model.params, start.model.params)


@pytest.mark.parametrize("model", ["tied", "dropping", "linear"])
@pytest.mark.parametrize(
    "name", [n for n in QUICK if not any(term.features for term in methods.get(n).local) and "+" not in n]
)
def test_tied_weights_layers_that_draw_and_models_without_buffers(name: str, model: str) -> None:
    """The same twice, whatever the global stream is at."""
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        fed = federation(name, model=f"tiny_data:{model}", only=["plain-0", "dark-0"])
        ends.append(copied(flat(after(fed, 2))))
    assert_same(*ends)


@pytest.mark.parametrize("name", [n for n in QUICK if any(term.features for term in methods.get(n).local)])
def test_methods_that_look_at_features_say_so_to_a_model_without(name: str) -> None:
    with pytest.raises(ValueError, match="needs a model with `features` and `head`"):
        federation(name, model="tiny_data:linear")


@pytest.mark.parametrize("name", ["fedga", "fedce", "fedce:mode=plus"])
@pytest.mark.parametrize("keys", [{"validation": 0.0}, {"pool": True}], ids=["none", "pooled"])
def test_methods_that_need_validation_data_say_so(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"held out of each client's training data: give validation=0\.2"):
        federation(name, **keys)


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
    "ditto": (SIZE, 0, 0),
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
    fed = federation(name)
    up, first, second = ALONG[name]
    one = step(fed, initial_state(fed))
    two = step(fed, one)
    clients = len(fed.clients)
    assert one.received == clients * (SIZE + up)
    assert two.received - one.received == clients * (SIZE + up)
    assert one.sent == clients * (SIZE + first)
    assert two.sent - one.sent == clients * (SIZE + second)


def test_fedbn_under_partial_participation_gives_each_client_its_first_layers() -> None:
    """Whoever has not taken part yet is sent the whole model."""
    fed = federation("fedbn", participation=0.5)
    state, known, norm = initial_state(fed), set(), 4 * 16 + 8
    for number in range(1, 5):
        cohort = sample_cohort(fed, state.seed, number)
        now = step(fed, copy.copy(state))
        assert now.sent - state.sent == sum(SIZE - norm * (client in known) for client in cohort)
        assert now.received - state.received == len(cohort) * (SIZE - norm)
        known |= set(cohort)
        state = now
    assert len(known) > len(cohort)


def test_scaffold_sends_every_parameter_twice() -> None:
    fed, plain = federation("scaffold"), federation("fedavg")
    one, two = after(fed, 3), after(plain, 3)
    rest = 3 * len(fed.clients) * (4 * BUFFERS + 8)  # buffers and counters go once
    for way in ("sent", "received"):
        assert getattr(one, way) - rest == 2 * (getattr(two, way) - rest)


def test_fpl_sends_cluster_prototypes_along() -> None:
    fed = federation("fpl")
    one = after(fed, 1)
    clusters = len(one.terms[0].shared["owner"])
    assert CLASSES <= clusters <= CLASSES * len(fed.clients)
    two = step(fed, copy.copy(one))
    down = SIZE + PROTOTYPES + 8 * CLASSES + clusters * (4 * FEATURES + 8)
    assert two.sent - one.sent == len(fed.clients) * down
    assert one.received == len(fed.clients) * (SIZE + PROTOTYPES + 4 * CLASSES)


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
