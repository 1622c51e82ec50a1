"""A power failure at any moment of a run: what is left can be read, has every save, and resumes to the same model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fedheal
from disk_hooks import Operation, watch
from fedheal.runs import folder as records
from fedheal.runs.schema import RoundRecord
from power_loss import MANNERS, Disk
from tiny_data import quick
from tiny_runs import Stop, drop_seconds, get_model_bytes

KEYS: dict[str, Any] = {"rounds": 3, "save_seconds": 0, "server_momentum": 0.5}
FINISHED = 99  # more rounds than there are


class RecordSaves(fedheal.Callback):
    """Records after how many operations each round's checkpoint is safe."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations, self.saved = operations, dict[int, int]()

    def round(self, record: RoundRecord) -> None:
        self.saved[record.round] = len(self.operations)


class RecordResume(fedheal.Callback):
    """Records how many finished rounds a resumed run starts from."""

    rounds = 0

    def started(self, described: Any, history: Sequence[RoundRecord]) -> None:
        self.rounds = len(history)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Operation], dict[int, int], Any]:
    """A run that is stopped after two rounds, killed in the middle of a line, and resumed: its operations, saves and result."""
    root, operations = tmp_path_factory.mktemp("recorded"), list[Operation]()
    folder, saves = root / "runs" / "run", RecordSaves(operations)
    with watch(root, operations.append):
        with pytest.raises(KeyboardInterrupt):
            fedheal.run(quick(**KEYS), folder, callbacks=[saves, Stop()], progress=False)
        with (folder / "rounds.jsonl").open("a") as file:
            file.write((folder / "rounds.jsonl").read_text()[:99])
        result = fedheal.run(quick(**KEYS), folder, resume=True, callbacks=[saves], progress=False)
    return root, operations, saves.saved | {FINISHED: len(operations)}, result


def check_after_crash(recording: Any, folder: Path, at: int, manner: str, seed: int) -> None:
    """Crash after `at` operations, then resume."""
    root, operations, saved, whole = recording
    Disk(root, operations[:at]).crash(folder, manner, seed)
    run = folder / "runs" / "run"
    saved_rounds = max((number for number, after in saved.items() if after <= at), default=0)
    for path in run.glob("*.toml"):
        records.read_toml(path)
    for path in records.list_checkpoints(run):
        records.load_checkpoint(path, quick(**KEYS).identity)
    if is_finished := (run / "result.json").exists():
        records.read_result(run)
        fedheal.load(run)
    resumed = RecordResume()
    result = fedheal.run(quick(**KEYS), run, resume=True, callbacks=[resumed], progress=False)
    assert is_finished or resumed.rounds >= saved_rounds
    assert get_model_bytes(result.model) == get_model_bytes(whole.model)
    assert drop_seconds(result.history) == drop_seconds(whole.history)
    assert [record.round for record in records.read_rounds(run)] == [1, 2, 3]
    shutil.rmtree(folder)


def test_a_power_failure_loses_no_save(recording: Any, tmp_path: Path) -> None:
    """Every third moment, with one manner of loss; the long trial has all of them."""
    for at in range(0, len(recording[1]) + 1, 3):
        check_after_crash(recording, tmp_path / "crashed", at, MANNERS[at // 3 % len(MANNERS)], seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("manner", MANNERS)
def test_every_manner_of_loss_after_any_operation_loses_no_save(recording: Any, tmp_path: Path, manner: str) -> None:
    for seed in range(8 if manner == "torn" else 1):
        for at in range(len(recording[1]) + 1):
            check_after_crash(recording, tmp_path / "crashed", at, manner, seed)
