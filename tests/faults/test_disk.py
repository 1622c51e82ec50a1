"""A full disk stops a run with a sentence, spoils nothing, and the run goes on once there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedheal
from fedheal.runs import folder as records
from fedheal.runs.lock import LOCK
from needs import needs, skip_or_fail
from tiny_data import quick, words

TESTS = Path(__file__).parents[1]
KEYS = ["rounds=30", "save_seconds=0", "participation=0.6", "server_momentum=0.5"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    needs("tmpfs")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        if os.environ.get("FEDHEAL_TEST_ALL"):
            pytest.fail(f"FEDHEAL_TEST_ALL is set, but a tmpfs cannot be mounted here: {mounted.stderr}")
        skip_or_fail(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def fill(disk: Path, leaving: int) -> Path:
    """Fill the disk with a file that leaves this many bytes free."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    with ballast.open("wb") as file:
        file.write(b"\0" * max(0, free.f_bavail * free.f_frsize - leaving))
    return ballast


@pytest.mark.slow
def test_a_full_disk_is_a_sentence_and_resume_finishes_with_the_same_bits(disk: Path, tmp_path: Path) -> None:
    experiment = quick(rounds=30, participation=0.6, server_momentum=0.5)
    fedheal.run(experiment, tmp_path / "whole", progress=False)
    ballast = fill(disk, leaving=16 * 4096)
    command = [sys.executable, "-m", "fedheal", "run", *words(*KEYS), "--out", str(disk / "run"), "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("fedheal: ")
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr
    states = records.list_checkpoints(disk / "run")
    assert states, "there should have been room for a state"
    for path in states:
        records.load_checkpoint(path, experiment.identity)  # every state that is there is whole
    assert [path.name for path in (disk / "run").rglob("*.tmp")] == [LOCK]
    stopped = quick(rounds=30, participation=0.6, server_momentum=0.5, save_seconds=0)
    with pytest.raises(OSError, match="No space left"):  # still full
        fedheal.run(stopped, disk / "run", resume=True, progress=False)
    ballast.unlink()
    fedheal.run(stopped, disk / "run", resume=True, progress=False)
    assert (disk / "run" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert [r.round for r in records.read_rounds(disk / "run")] == list(range(1, 31))


@pytest.mark.slow
@pytest.mark.parametrize("leaving", range(0, 24 * 4096, 3 * 4096))
def test_a_disk_that_fills_up_at_any_point_is_an_error_with_its_reason(
    disk: Path, tmp_path: Path, leaving: int
) -> None:
    """Every such failure is an OSError, whichever file did not fit."""
    experiment = quick(rounds=6, save_seconds=0)
    whole = fedheal.run(experiment, progress=False)
    ballast = fill(disk, leaving)
    try:
        result = fedheal.run(experiment, disk / "run", progress=False)
    except OSError as error:
        assert error.errno == 28  # noqa: PT017
        with pytest.raises(OSError, match="No space left"):  # still full
            fedheal.run(experiment, disk / "run", resume=True, progress=False)
        ballast.unlink()
        result = fedheal.run(experiment, disk / "run", resume=True, progress=False)
    else:
        assert leaving > 4096
    bits = [value.numpy().tobytes() for value in result.model.state_dict().values()]
    assert bits == [value.numpy().tobytes() for value in whole.model.state_dict().values()]
