"""Checkpoints of a federation: written while clients train, only when due, and never lost without a word."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message

from disk_hooks import raise_disk_full
from fedheal.aggregate import Aggregator
from fedheal.federation.node_sampling import NotEnoughNodes
from fedheal.flower import FedHEAL
from fedheal.flower.strategy import FairStrategy
from fedheal.runs import folder as files
from flower.local_grid import LocalGrid
from flower.sites import Sites
from flower.test_stock_client import EXAMPLES, make_module, make_stock_app

ROUNDS = 5
save_now = files.save_checkpoint


def run_stock_clients(rounds: int = ROUNDS, spoil: Any = None, **settings: Any) -> FairStrategy:
    """Run stock clients; `spoil(strategy, reply)` may change their replies."""
    strategy = FedHEAL(**{"fraction_evaluate": 0.0, "min_train_nodes": 3, **settings})
    nodes = {7 + i: {"partition-id": i} for i in EXAMPLES}
    grid = LocalGrid(make_stock_app(), nodes, spoil and (lambda node, reply: spoil(strategy, reply)))
    strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=rounds)
    return strategy


@pytest.fixture(scope="module")
def uninterrupted_run() -> FairStrategy:
    return run_stock_clients()


def list_rounds(folder: Path) -> list[int]:
    return [int(path.stem) for path in files.list_checkpoints(folder)]


def assert_resumes_to(whole: FairStrategy, folder: Path) -> None:
    resumed = run_stock_clients(folder=folder, resume=True)
    assert torch.equal(resumed.state.model.params, whole.state.model.params)
    assert resumed.state.aggregator == whole.state.aggregator
    assert [record.weights for record in resumed.history] == [record.weights for record in whole.history]


def stop_in_round(number: int, error: type[BaseException]) -> Any:
    def spoil(strategy: FairStrategy, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == number:
            raise error
        return [reply]

    return spoil


def test_clients_train_while_a_checkpoint_is_written_and_the_next_step_waits_for_it(
    tmp_path, monkeypatch, uninterrupted_run
):
    clients_asked, events = threading.Event(), []

    def save_late(folder: Path, number: int, *args: Any, **named: Any) -> None:
        assert number == ROUNDS or clients_asked.wait(20), "clients were not asked before the checkpoint was written"
        clients_asked.clear()
        events.append(f"begin {number}")
        save_now(folder, number, *args, **named)
        events.append(f"saved {number}")

    def spoil(strategy: FairStrategy, reply: Message) -> list[Message]:
        if strategy.rounds.current.number > 1:
            clients_asked.set()
        return [reply]

    monkeypatch.setattr(files, "save_checkpoint", save_late)
    apply = Aggregator.apply
    monkeypatch.setattr(Aggregator, "apply", lambda *a, **k: (events.append("step"), apply(*a, **k))[1])
    strategy = run_stock_clients(spoil=spoil, folder=tmp_path / "run")
    rounds = [("step", f"begin {n}", f"saved {n}") for n in range(1, ROUNDS + 1)]
    assert events == [event for names in rounds for event in names]
    assert torch.equal(strategy.state.model.params, uninterrupted_run.state.model.params)
    # The checkpoint of a round holds that round's counts: the last but one leads to the same end.
    files.list_checkpoints(tmp_path / "run")[0].unlink()
    assert_resumes_to(uninterrupted_run, tmp_path / "run")


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "an error"])
def test_rounds_since_the_last_due_checkpoint_are_repeated(is_killed, tmp_path, monkeypatch, uninterrupted_run):
    with monkeypatch.context() as patch:
        if is_killed:  # nothing is done after the error
            patch.setattr(FairStrategy, "_save_after_error", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            run_stock_clients(spoil=stop_in_round(4, KeyboardInterrupt), folder=tmp_path / "run", save_seconds=1e9)
    assert list_rounds(tmp_path / "run") == ([1] if is_killed else [3, 1])
    assert len(files.read_rounds(tmp_path / "run")) == 3
    assert_resumes_to(uninterrupted_run, tmp_path / "run")


def test_a_run_that_ends_saves_its_last_round(tmp_path):
    run_stock_clients(folder=tmp_path / "whole", save_seconds=1e9)
    assert list_rounds(tmp_path / "whole") == [ROUNDS, 1]
    assert (tmp_path / "whole" / "model.safetensors").exists()

    def leave(strategy: FairStrategy, reply: Message) -> list[Message]:
        strategy.settings.__dict__["min_available_nodes"] = 4 if strategy.rounds.current.number == 3 else 2
        return [reply]

    with pytest.raises(NotEnoughNodes, match="resume=True continues from them"):
        run_stock_clients(spoil=leave, folder=tmp_path / "left", save_seconds=1e9, wait_seconds=0.0)
    assert list_rounds(tmp_path / "left") == [3, 1]


@pytest.mark.parametrize("number", [2, ROUNDS], ids=["in the middle", "at the end"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(number, tmp_path, monkeypatch, uninterrupted_run):
    def fill_disk(folder: Path, at: int, *args: Any, **named: Any) -> None:
        if at == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_now(folder, at, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(files, "save_checkpoint", fill_disk)
        with pytest.raises(OSError, match=r"a checkpoint was not written \(.*No space left.*; make room") as caught:
            run_stock_clients(folder=tmp_path / "run")
    assert caught.value.errno == errno.ENOSPC
    assert list_rounds(tmp_path / "run")[0] == number - 1
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert_resumes_to(uninterrupted_run, tmp_path / "run")


def test_a_first_checkpoint_that_cannot_be_written_says_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "save_checkpoint", lambda *_, **__: raise_disk_full())
    with pytest.raises(OSError, match=r"No space left.*then resume: no checkpoint exists yet$"):
        run_stock_clients(folder=tmp_path / "run")


def deny_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[OSError]:
    def refuse(*_: object) -> None:  # file modes do not stop the superuser
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / "rounds.jsonl"))

    monkeypatch.setattr(files, "append_round", refuse)
    return PermissionError


def remove_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[OSError]:
    shutil.rmtree(folder)
    return FileNotFoundError


def replace_states_by_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[OSError]:
    shutil.rmtree(folder / "state")
    (folder / "state").write_text("")
    return FileExistsError


@pytest.mark.parametrize("spoil_folder", [deny_writing, remove_folder, replace_states_by_file])
def test_a_round_that_cannot_be_saved_ends_the_run_with_the_remedy(spoil_folder, tmp_path, monkeypatch):
    expected: list[type[OSError]] = []

    def spoil(strategy: FairStrategy, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 3 and not expected:
            strategy.folder.settle()
            expected.append(spoil_folder(tmp_path / "run", monkeypatch))
        return [reply]

    words = r"run: round 3 was not saved \(.*\); make room or restore access, then resume: "
    with pytest.raises(OSError, match=words) as caught:
        run_stock_clients(spoil=spoil, folder=tmp_path / "run")
    assert type(caught.value) is expected[0]


def test_a_model_that_cannot_be_written_ends_the_run_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "save_tensors", raise_disk_full)
    with pytest.raises(OSError, match=r"the result was not written .*then resume: the last checkpoint is whole$"):
        run_stock_clients(folder=tmp_path / "run")


def test_where_clients_keep_a_state_every_round_is_saved(tmp_path):
    sites = Sites(tmp_path / "sites", method="scaffold", rounds=3)
    strategy = sites.strategy(folder=tmp_path / "run", save_seconds=1e9, fraction_evaluate=0.0)
    strategy.start(sites.grid(), sites.initial, num_rounds=3)
    assert list_rounds(tmp_path / "run") == [3, 2]


def test_save_seconds_must_not_be_negative():
    with pytest.raises(ValueError, match="save_seconds = -1"):
        FedHEAL(save_seconds=-1.0)
