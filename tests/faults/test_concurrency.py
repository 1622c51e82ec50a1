"""Several processes with the same folder at once, and processes without shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from command_line import ENVIRONMENT, Done, assert_sentence
from fedheal.report.rows import ORDER_FILE
from fedheal.runs import folder as records
from needs import needs
from tiny_data import words

FIELDS = [word for word in words("rounds=3", "save_seconds=0") if not word.startswith("data=")]
COMMAND = ["compare", "fedavg", "fedheal", "--data", "tiny_data:load", *FIELDS]

# Starts the same command in several forks at once, on a disk on which every operation takes up to 10 ms, as over a network.
# Each fork writes its exit code and what it printed to a file, and the rounds that it ran to one that all share.
STARTER = """
import os, random, sys, time
from pathlib import Path
import fedheal
from disk_hooks import watch
from fedheal.cli.app import main
from fedheal.runs import folder as files
from tiny_data import quick

root, number, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
fedheal.run(quick(rounds=1), progress=False)  # compiles what there is to compile, once for all

def run_command(fork):
    os.dup2(os.open(root / f"{fork}.out", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(root / f"{fork}.err", os.O_WRONLY | os.O_CREAT), 2)
    log = os.open(root / "rounds.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append, chance = files.append_round, random.Random(fork)
    def append_round(folder, record):
        os.write(log, f"{folder.name} {record.round}\\n".encode())
        append(folder, record)
    files.append_round, sys.argv = append_round, ["fedheal", *words]
    with watch(root / "runs", lambda operation: time.sleep(chance.uniform(0, 0.01))):
        main()

children = []
for fork in range(number):
    if (child := os.fork()) == 0:
        code = 1
        try:
            run_command(fork)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    children.append(child)
for fork, child in enumerate(children):
    (root / f"{fork}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


def start_at_once(root: Path, number: int, seeds: int) -> list[Done]:
    """Start the same comparison in so many processes; return how each has ended."""
    words = [*COMMAND, "--seeds", str(seeds), "--jobs", "1", "--out", str(root / "runs")]
    command = [sys.executable, "-c", STARTER, str(root), str(number), *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    read = [[(root / f"{fork}.{part}").read_text() for part in ("code", "out", "err")] for fork in range(number)]
    return [Done(int(code), out, err) for code, out, err in read]


def check_shared(root: Path, ends: list[Done], seeds: int) -> None:
    """Assert that no run was done twice, finished commands print the same table, and the others print one sentence."""
    finished = [done for done in ends if done.code == 0]
    assert finished, ends
    for done in ends:
        if done.code != 0:
            # It has printed which runs it would do before it found one of them in use.
            assert_sentence(Done(done.code, "", done.err), "is in use by another run: wait until it ends, or stop it")
    tables = {done.out.partition("AVG")[2] for done in finished}
    assert len(tables) == 1
    rounds = Counter((root / "rounds.log").read_text().splitlines())
    folders = [path.parent for path in (root / "runs").rglob("result.json")]
    assert len(folders) == 2 * seeds
    assert rounds == Counter(f"{folder.name} {number}" for folder in folders for number in range(1, 4))
    for folder in folders:
        assert [record.round for record in records.read_rounds(folder)] == [1, 2, 3]
    assert list(json.loads((root / "runs" / ORDER_FILE).read_text())) == ["methods"]
    assert {path.name for path in (root / "runs").rglob("*.tmp")} == {"lock.tmp"}


@pytest.mark.slow
def test_three_processes_with_one_comparison_on_a_slow_disk_do_each_run_once(tmp_path: Path) -> None:
    check_shared(tmp_path, start_at_once(tmp_path, 3, seeds=1), seeds=1)


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(3))
def test_eight_processes_with_one_comparison_on_a_slow_disk_do_each_run_once(tmp_path: Path, trial: int) -> None:
    check_shared(tmp_path, start_at_once(tmp_path, 8, seeds=2), seeds=2)


@pytest.mark.soak
@pytest.mark.parametrize("options", ["ro", "size=4k,nr_inodes=1"], ids=["read-only", "full"])
def test_without_shared_memory_several_processes_are_refused_and_workers_run(tmp_path: Path, options: str) -> None:
    needs("tmpfs", "unshare")
    mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    start = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-m", "fedheal"]

    def call(*arguments: str) -> Done:
        done = subprocess.run([*start, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    refused = call(*COMMAND, "--seeds", "1", "--jobs", "2", "--out", str(tmp_path / "runs"), "--quiet")
    assert_sentence(refused, "jobs = 2: processes need semaphores", "/dev/shm", "use jobs=1")
    done = call(*COMMAND, "--seeds", "1", "--jobs", "1", "--out", str(tmp_path / "runs"), "--quiet")
    assert (done.code, done.err) == (0, "")
    done = call("run", *words("workers=2"), "--out", str(tmp_path / "run"), "--quiet")
    assert (done.code, done.err) == (0, "")
