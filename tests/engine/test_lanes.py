"""Lanes against the serial engine, on the CPU, where a lane runs its steps as they are: the same bits, whatever the method.

On a GPU the same tests run with graphs and streams: see `test_gpu.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedheal import methods
from fedheal.engine import lanes
from fedheal.engine.graph_inputs import make_shape_key
from fedheal.engine.lane import Lane
from fedheal.engine.lanes import Lanes
from fedheal.engine.serial import SerialEngine
from fedheal.local.term import Batch, Context, NotCapturableError, Term
from fedheal.simulate.federation import Federation
from small_federation import make_federation, run_rounds

pytestmark = pytest.mark.slow

METHODS = [*methods.LOCAL, *methods.WHOLE]
OPTIONS = ["scaffold:option=1", "fedproc:first_round_ce=false", "ditto:feedback=true", "fedavg+afl", "fedavg+qffl"]


@pytest.mark.parametrize(
    "method",
    [
        m if m in ("fedavg", "scaffold", "moon") else pytest.param(m, marks=pytest.mark.slow)
        for m in [*METHODS, *OPTIONS]
    ],
)
def test_lanes_give_the_bits_of_the_serial_engine(method: str) -> None:
    fed = make_federation(method)
    expected = run_rounds(fed, SerialEngine(fed.local_training))
    side_by_side = Lanes(fed.local_training, 3)
    actual = run_rounds(fed, side_by_side)
    assert side_by_side.fallback_reason == ""
    assert len(actual) == len(expected)
    rtol = 1e-6 if fed.local_training.received_loss else 0  # there all clients' losses come from one pass
    for first, second in zip(actual, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("dropout", {"augment": "none"}),
        ("dropout", {"augment": "flip"}),
        ("dropout", {"augment": "crop"}),
        ("tied_weights", {"steps": 5}),
        ("conv_batchnorm", {"augment": "crop"}),
    ],
    ids=str,
)
def test_modules_and_augmentations(model: str, keys: dict[str, Any]) -> None:
    fed = make_federation(model=f"tiny_data:{model}", **keys)
    assert_lanes_equal_serial(fed)


def test_a_residual_network() -> None:
    assert_lanes_equal_serial(make_federation(model="resnet10", width=4, augment="crop"))


def assert_lanes_equal_serial(fed: Federation) -> None:
    rng_state = torch.get_rng_state()
    lanes_end, serial_end = (
        run_rounds(fed, engine) for engine in (Lanes(fed.local_training, 2), SerialEngine(fed.local_training))
    )
    assert all(torch.equal(a, b) for a, b in zip(lanes_end, serial_end, strict=True))
    assert torch.equal(torch.get_rng_state(), rng_state)


def test_the_number_of_lanes_changes_nothing() -> None:
    fed = make_federation("scaffold")
    one_lane, many = run_rounds(fed, Lanes(fed.local_training, 1)), run_rounds(fed, Lanes(fed.local_training, 12))
    assert all(torch.equal(a, b) for a, b in zip(one_lane, many, strict=True))


@pytest.mark.parametrize("most", [1, 2, 5, 20])
def test_clients_are_shared_out_evenly_and_all_once(most: int) -> None:
    steps = [120] * 5 + [100] * 5 + [20] * 10
    queues = lanes._assign_clients(steps, most)
    assert sorted(i for queue in queues for i in queue) == list(range(20))
    loads = [sum(steps[i] for i in queue) for queue in queues]
    assert len(queues) <= most
    assert max(loads) <= sum(steps) / len(queues) + 120


def test_no_more_lanes_than_end_soonest() -> None:
    assert len(lanes._assign_clients([100, 10, 10], 3)) == 2
    assert lanes._assign_clients([], 3) == []


@dataclass(frozen=True)
class ReadsContext(Term):
    """Reads an attribute of the context that differs between clients."""

    what: str = "slot"

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        getattr(ctx, self.what)
        return None


@pytest.mark.parametrize("what", ["client", "round", "steps", "effective_step", "received", "slot", "shared"])
def test_a_term_that_reads_more_than_its_scratch_falls_back_with_one_line(what: str, caplog: Any) -> None:
    fed = make_federation()
    fed = replace(fed, local_training=replace(fed.local_training, terms=(ReadsContext(what),)))
    engine = Lanes(fed.local_training, 2)
    actual, expected = run_rounds(fed, engine, 1), run_rounds(fed, SerialEngine(fed.local_training), 1)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert f"ctx.{what}" in engine.fallback_reason
    assert len([record for record in caplog.records if "one client after another" in record.message]) == 1


@dataclass(frozen=True)
class OddScratch(Term):
    def prepare(self, ctx: Context, start: Any) -> Any:
        ctx.scratch["odd"] = object()
        return start


def test_scratch_that_cannot_be_refilled_is_named() -> None:
    with pytest.raises(NotCapturableError, match="of type object"):
        make_shape_key({"odd": object()})
    fed = make_federation()
    fed = replace(fed, local_training=replace(fed.local_training, terms=(OddScratch(),)))
    engine = Lanes(fed.local_training)
    run_rounds(fed, engine, 1)
    assert "of type object" in engine.fallback_reason


def test_out_of_memory_halves_the_lanes_and_gives_the_same(monkeypatch: Any, caplog: Any) -> None:
    fed = make_federation("moon")
    expected = run_rounds(fed, SerialEngine(fed.local_training))
    engine = Lanes(fed.local_training, 4)
    really = Lanes._train_in_lanes

    def train_with_little_memory(self: Lanes, *arguments: Any) -> Any:
        done = really(self, *arguments)
        if len(self.lanes) > 1:
            raise torch.OutOfMemoryError("none left")
        return done

    monkeypatch.setattr(Lanes, "_train_in_lanes", train_with_little_memory)
    actual = run_rounds(fed, engine)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    messages = [record.message for record in caplog.records if "out of memory" in record.message]
    assert messages == [
        "out of memory with 4 lanes: continuing with 2",
        "out of memory with 2 lanes: continuing with 1",
    ]


def test_one_lane_will_do_where_there_is_no_memory_for_a_second(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    fed = make_federation()
    expected = run_rounds(fed, Lanes(fed.local_training, 1))
    engine = Lanes(fed.local_training, 4)

    class ScarceLane(Lane):
        def __init__(self, *arguments: Any) -> None:
            if engine.lanes:
                raise torch.OutOfMemoryError("none left")
            super().__init__(*arguments)

    monkeypatch.setattr(lanes, "Lane", ScarceLane)
    actual = run_rounds(fed, engine)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert [record.message for record in caplog.records] == ["out of memory with 2 lanes: continuing with 1"]


def test_out_of_memory_with_one_lane_is_said() -> None:
    fed = make_federation()
    engine = Lanes(fed.local_training, 1)

    def train_with_little_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    engine._train_in_lanes = train_with_little_memory  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        run_rounds(fed, engine, 1)
