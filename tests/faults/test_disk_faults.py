"""Disks that fail at one operation, are slow or read-only, and a clock that jumps: a sentence, and the same bits in the end."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import fedheal
from command_line import Done, assert_sentence
from disk_hooks import Operation, watch
from fedheal.report.figures import save_figure
from fedheal.runs import folder as records
from tiny_data import quick, words
from tiny_runs import drop_seconds, get_model_bytes

KEYS = {"rounds": 2, "save_seconds": 0, "server_momentum": 0.5}
NEEDS_ROOM = ("create", "mkdir", "write", "fsync", "rename")  # a disk may find out late that it is full
OPEN = os.open  # before anything watches


def fail_at(number: int, error: int = errno.ENOSPC, halves: bool = False) -> Callable[[Operation], None]:
    """Fail from the operation of this number on; with `halves`, a failing write leaves half of its bytes."""
    numbers = count()

    def on_operation(operation: Operation) -> None:
        if operation.kind not in NEEDS_ROOM or next(numbers) < number:
            return
        if halves and operation.kind == "write":
            descriptor = OPEN(operation.path, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, operation.data[: len(operation.data) // 2])
            os.close(descriptor)
        raise OSError(error, os.strerror(error))

    return on_operation


def count_operations(folder: Path) -> int:
    seen: list[str] = []
    with watch(folder.parent, lambda operation: seen.append(operation.kind)):
        fedheal.run(quick(**KEYS), folder, progress=False)
    return sum(kind in NEEDS_ROOM for kind in seen)


def check_full_disk(folder: Path, at: int, whole: fedheal.Result) -> None:
    """Run until the disk is full, then resume with enough room, and compare with the uninterrupted run."""
    refuses = pytest.raises((OSError, ValueError), match="No space left on device")
    with watch(folder.parent, fail_at(at, halves=at % 2 == 0)), refuses:
        fedheal.run(quick(**KEYS), folder, progress=False)
    for path in records.list_checkpoints(folder):
        records.load_checkpoint(path, quick(**KEYS).identity)
    result = fedheal.run(quick(**KEYS), folder, resume=True, progress=False)
    assert get_model_bytes(result.model) == get_model_bytes(whole.model)
    assert drop_seconds(result.history) == drop_seconds(whole.history)
    assert [path.name for path in folder.rglob("*.tmp")] == ["lock.tmp"]
    shutil.rmtree(folder)


def test_a_disk_that_is_full_from_one_write_on_spoils_nothing(tmp_path: Path) -> None:
    """Every fifth operation; the long trial has all of them."""
    operations = count_operations(tmp_path / "whole")
    whole = fedheal.run(quick(**KEYS), tmp_path / "whole", resume=True, progress=False)
    for at in range(0, operations, 5):
        check_full_disk(tmp_path / "run", at, whole)


@pytest.mark.soak
def test_a_disk_that_is_full_from_any_write_on_spoils_nothing(tmp_path: Path) -> None:
    operations = count_operations(tmp_path / "whole")
    whole = fedheal.run(quick(**KEYS), tmp_path / "whole", resume=True, progress=False)
    assert operations > 20
    for at in range(operations):
        check_full_disk(tmp_path / "run", at, whole)


COMPARISON = ["compare", "fedavg", "fedheal", "--data", "tiny_data:load", "--seeds", "1", "--jobs", "1"]
SWEEP = ["sweep", "method=fedheal", "tau=0,0.3", "data=tiny_data:load", "--jobs", "1"]


@pytest.mark.soak
@pytest.mark.parametrize("command", [COMPARISON, SWEEP], ids=["compare", "sweep"])
def test_a_campaign_on_a_disk_that_is_full_from_any_write_on_ends_with_the_same_table(
    command: list[str], call: Callable[..., Done], tmp_path: Path
) -> None:
    fields = [word for word in words("rounds=2", "save_seconds=0") if not word.startswith("data=")]
    seen: list[str] = []
    with watch(tmp_path, lambda operation: seen.append(operation.kind)):
        whole = call(*command, *fields, "--out", str(tmp_path / "whole"))
    assert whole.code == 0
    for at in range(sum(kind in NEEDS_ROOM for kind in seen)):
        again = [*command, *fields, "--out", str(tmp_path / "full")]
        with watch(tmp_path, fail_at(at)):
            done = call(*again)
        assert (done.code, "No space left on device" in done.err) == (2, True), done
        done = call(*again)
        table = done.out.replace(str(tmp_path / "full"), str(tmp_path / "whole"))
        assert (done.code, table.splitlines()[-5:]) == (0, whole.out.splitlines()[-5:])
        shutil.rmtree(tmp_path / "full")


def test_a_finished_comparison_can_be_shown_from_a_read_only_disk(call: Callable[..., Done], tmp_path: Path) -> None:
    fields = [word for word in words("rounds=2") if not word.startswith("data=")]
    command = [*COMPARISON, *fields, "--out", str(tmp_path / "runs")]
    assert call(*command).code == 0
    with watch(tmp_path, fail_at(0, errno.EROFS)):
        again, report = call(*command), call("report", str(tmp_path / "runs"))
        refused = call("run", *words("rounds=2"), "--out", str(tmp_path / "new"), "--quiet")
    assert (again.code, again.err, report.code) == (0, "", 0)
    assert report.out in again.out
    assert_sentence(refused, "Read-only file system", str(tmp_path / "new"))


def test_a_slow_disk_and_a_clock_that_jumps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fedheal.run(quick(**KEYS), tmp_path / "whole", progress=False)
    chance, real = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + chance.choice([-1e9, -3600.0, 0.0, 3600.0, 1e9]))
    with watch(tmp_path, lambda operation: time.sleep(chance.choice([0, 0.001, 0.01]))):
        result = fedheal.run(quick(**KEYS), tmp_path / "slow", progress=False)
    assert get_model_bytes(result.model) == get_model_bytes(whole.model)
    assert drop_seconds(records.read_rounds(tmp_path / "slow")) == drop_seconds(whole.history)
    assert len(records.list_checkpoints(tmp_path / "slow")) == records.CHECKPOINTS_KEPT


def test_a_figure_that_finds_no_room_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "domains.png").write_bytes(b"before")
    with watch(tmp_path, fail_at(0)), pytest.raises(OSError, match="No space left on device"):
        save_figure(tmp_path / "domains", Figure)
    assert (tmp_path / "domains.png").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["domains.png"]
