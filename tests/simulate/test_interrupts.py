"""Ctrl-C at any moment: the last finished round is saved, and the run that goes on ends like one never stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedheal
from fedheal.engine import serial
from fedheal.runs import folder as records
from fedheal.simulate.interrupts import Interrupts
from tiny_data import quick

LOOP = sys.modules["fedheal.simulate.round"]  # the module, whose name the function took
KEYS: dict[str, Any] = {"rounds": 6, "method": "scaffold+fedheal", "participation": 0.8}
KEYS |= {"model": "tiny_data:conv_batchnorm", "server_momentum": 0.5}


@pytest.fixture(autouse=True)
def enable_interrupts() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt_in(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, call: int, times: int = 1) -> None:
    """Raise Ctrl-C at the end of a function's n-th call."""
    original, calls = getattr(where, name), [0]

    def call_and_interrupt(*args: Any, **keys: Any) -> Any:
        calls[0] += 1
        result = original(*args, **keys)
        if calls[0] == call:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(where, name, call_and_interrupt)


def find_newest_round(folder: Path) -> int:
    return int(records.list_checkpoints(folder)[0].stem)


def assert_ends_like(folder: Path, whole: Path) -> None:
    fedheal.run(quick(**KEYS), folder, resume=True, progress=False)
    for name in ("model.safetensors", "state/00000006.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    fedheal.run(quick(**KEYS), folder, progress=False)
    return folder


def test_while_clients_train_it_stops_at_once_and_saves_the_round_before(
    tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients a round: the tenth is in the third round. Nothing had been saved: `save_seconds` is a minute."""
    with monkeypatch.context() as patch:
        interrupt_in(patch, serial, "train_client", 10)
        with pytest.raises(KeyboardInterrupt):
            fedheal.run(quick(**KEYS), tmp_path / "run", progress=False)
    assert find_newest_round(tmp_path / "run") == 2
    assert len(records.read_rounds(tmp_path / "run")) == 2
    assert_ends_like(tmp_path / "run", whole_run)


@pytest.mark.parametrize("name", ["measure_traffic", "apply_server_step", "evaluate_domains", "mean_train_loss"])
def test_from_aggregation_on_the_round_is_finished_first(
    tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, LOOP, name, 3)
        with pytest.raises(KeyboardInterrupt):
            fedheal.run(quick(**KEYS), tmp_path / "run", progress=False)
    assert find_newest_round(tmp_path / "run") == 3
    assert_ends_like(tmp_path / "run", whole_run)


def test_a_second_one_does_not_wait(tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round before cannot be saved, since its memory is in use, so a resumed run starts again."""
    with monkeypatch.context() as patch:
        interrupt_in(patch, LOOP, "evaluate_domains", 3, times=2)
        with pytest.raises(KeyboardInterrupt):
            fedheal.run(quick(**KEYS), tmp_path / "run", progress=False)
    assert records.list_checkpoints(tmp_path / "run") == []
    assert_ends_like(tmp_path / "run", whole_run)


def test_before_the_first_round_there_is_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, serial, "train_client", 1)
        with pytest.raises(KeyboardInterrupt):
            fedheal.run(quick(**KEYS), tmp_path / "run", progress=False)
    assert records.list_checkpoints(tmp_path / "run") == []


def test_where_it_is_ignored_it_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.hold()
            signal.raise_signal(signal.SIGINT)
            interrupts.release()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
