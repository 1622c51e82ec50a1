"""Kill runs, comparisons, sweeps and reports at random moments, a thousand times, and check their files each time.

    python benchmarks/kills.py --kills 1000 --seed 0 --out FOLDER

A command is started, killed with SIGKILL after a random time, and started again until it ends by itself. Then the next command
begins in a new folder. A seed draws the moments, and the processes that the signal hits: the first one, one of its workers, or
all of them. Every other kill comes right before an operation on a file (`tests/disk_hooks.py`), whose number is drawn.

After each kill these must hold:

- every file can be read, except the last line of `rounds.jsonl` and temporary files;
- no checkpoint is lost, and the records of saved rounds are the same bytes as before: those rounds were not run again;
- a finished run has the same files as before, untouched;
- no process is left.

A command that ends by itself must leave the same bits as an undisturbed command: models, states, pages, and records without
their seconds.

Most commands run in a fork of a process that has imported fedheal, and their workers come from multiprocessing's fork server.
This is the same code as `fedheal ...`, without the seconds of an import. Every 50th kill hits `python -m fedheal` in a new
process. The commands work in memory (/dev/shm) if that folder exists. FOLDER gets the table as `kills.md` and `kills.json`, and
the folder and log of each failure. The exit code is 1 after a failure or too few kills.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TESTS = str(HERE.parent / "tests")
# This script's folder comes last: its flower.py would hide the package of the tests.
sys.path[:] = [TESTS, *(path for path in sys.path if Path(path) != HERE), str(HERE)]
INHERITED = filter(None, [os.environ.get("PYTHONPATH")])
os.environ |= {"PYTHONPATH": os.pathsep.join([TESTS, *INHERITED, str(HERE)]), "OMP_NUM_THREADS": "1"}

from safetensors.torch import load_file  # noqa: E402

import fedheal.campaign.pool  # noqa: E402
import fedheal.engine.workers  # noqa: E402
import warm_fedheal  # noqa: E402, F401
from arguments import parse_folder, parse_positive, parse_seconds  # noqa: E402
from disk_hooks import Operation, watch  # noqa: E402
from fedheal.cli.app import main as run_command_line  # noqa: E402
from fedheal.runs.folder import list_checkpoints, load_checkpoint, read_result  # noqa: E402
from fedheal.runs.lock import LOCK  # noqa: E402
from tiny_data import words  # noqa: E402

EVERY_SAVE, FRESH_EVERY, PATIENCE = "save_seconds=0", 50, 600.0
GRACE_SECONDS = 5.0  # that a pool waits after a kill, instead of a minute: runs here take less than a second
MEMORY = Path("/dev/shm")
MOST_KILLS = 12  # of one command: a report cannot be resumed, and would never end
NEVER = -1  # no operation has this number: all are counted, and none is fatal
RUN_FILES = ("experiment.toml", "rounds.jsonl", "model.safetensors", "result.json")
Files = dict[str, tuple[int, int, str]]  # of a finished run: inode, time of change and digest


class Failure(Exception):
    """Something that a kill must not do."""


def drop_data(*fields: str) -> list[str]:
    """Return the fields of a tiny experiment without its data."""
    return [word for word in words(*fields) if not word.startswith("data=")]


def make_comparison(jobs: int) -> Callable[[Path], list[str]]:
    """Return a function that makes the command for a folder."""
    fields = drop_data("rounds=3", EVERY_SAVE)
    head = ["compare", "fedavg", "fedheal", "--data", "tiny_data:load", "--seeds", "2", "--jobs", str(jobs)]
    return lambda folder: [*head, *fields, "--out", str(folder / "runs"), "--quiet"]


def make_sweep(jobs: int) -> Callable[[Path], list[str]]:
    """Return a function that makes the command for a folder."""
    fields = words("rounds=3", EVERY_SAVE)
    head = ["sweep", "method=fedheal", "tau=0,0.3", "beta=0,0.4", "--jobs", str(jobs)]
    return lambda folder: [*head, *fields, "--out", str(folder / "runs"), "--quiet"]


def make_run(*fields: str) -> Callable[[Path], list[str]]:
    """Return a function that makes the command for a folder."""
    all_fields = words("participation=0.6", "server_momentum=0.5", *fields)
    return lambda folder: ["run", *all_fields, "--out", str(folder / "run"), "--resume", "--quiet"]


def make_report(folder: Path) -> list[str]:
    """Return the command for a folder."""
    return ["report", str(folder / "runs"), "--html"]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "run, every round saved": make_run("rounds=8", EVERY_SAVE),
    "run, saved every 0.03 s": make_run("rounds=16", "save_seconds=0.03"),
    "run, 2 workers": make_run("rounds=6", EVERY_SAVE, "workers=2"),
    "comparison": make_comparison(1),
    "comparison, 2 processes": make_comparison(2),
    "sweep": make_sweep(1),
    "sweep, 2 processes": make_sweep(2),
    "report": make_report,
}


@dataclass
class Snapshot:
    """What a folder holds: for each run its last checkpoint, the lines up to it, and its files if it is finished."""

    saved: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    finished: dict[str, Files] = field(default_factory=dict)

    @classmethod
    def take(cls, folder: Path) -> Snapshot:
        """Read every file. Raise Failure if one cannot be read."""
        snapshot = cls()
        for path in (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp"):
            try:
                check_readable(path)
            except (ValueError, OSError) as error:
                raise Failure(f"{path.relative_to(folder)} cannot be read: {error}") from error
        for run in (path.parent for path in folder.rglob("experiment.toml")):
            name = str(run.relative_to(folder))
            states, rounds = list_checkpoints(run), run / "rounds.jsonl"
            snapshot.saved[name] = int(states[0].stem) if states else 0
            lines = rounds.read_bytes().splitlines() if rounds.exists() else []
            snapshot.lines[name] = lines[: snapshot.saved[name]]
            if len(snapshot.lines[name]) < snapshot.saved[name]:
                raise Failure(f"{name}: the save of round {snapshot.saved[name]} has {len(lines)} records")
            if (run / "result.json").exists():
                snapshot.finished[name] = {file: identify_file(run / file) for file in RUN_FILES}
        return snapshot

    def check_follows(self, before: Snapshot) -> None:
        """Raise Failure if something in an earlier snapshot is lost or was done again."""
        for name, number in before.saved.items():
            if self.saved.get(name, -1) < number:
                raise Failure(f"{name}: saved {number} rounds before, {self.saved.get(name)} now")
            if self.lines[name][:number] != before.lines[name]:
                raise Failure(f"{name}: a round up to {number} was run again")
        for name, files in before.finished.items():
            if self.finished.get(name) != files:
                raise Failure(f"{name}: was finished, and was changed")


def check_readable(path: Path) -> None:
    """Raise ValueError or OSError if a file is damaged."""
    if path.parent.name == "state":
        load_checkpoint(path, None)
    elif path.suffix == ".safetensors":
        load_file(path)
    elif path.name == "result.json":
        read_result(path.parent)
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".toml":
        tomllib.loads(path.read_text())
    elif path.suffix == ".jsonl":
        for line in path.read_bytes().split(b"\n")[:-1]:
            json.loads(line)
    elif path.suffix == ".html" and not path.read_bytes().rstrip().endswith(b"</html>"):
        raise ValueError("its end is missing")


def identify_file(path: Path) -> tuple[int, int, str]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return the files of a command without their seconds. They must not depend on how often it was killed."""
    outcome: dict[str, Any] = {}
    for path in (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp"):
        name = str(path.relative_to(folder))
        if path.name == "rounds.jsonl":
            outcome[name] = [drop_seconds(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == "result.json":
            outcome[name] = drop_seconds(json.loads(path.read_text()))
        elif path.parent.name != "state" or path == list_checkpoints(path.parents[1])[0]:
            outcome[name] = path.read_bytes()  # an earlier checkpoint depends on the moment of saving
    return outcome


def drop_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


class Process(NamedTuple):
    """A process of a victim. After its end another process may get its number, but not with the same start."""

    pid: int
    start: str

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """Return the process that has this number, unless it has ended."""
        fields = read_status(pid)
        return cls(pid, fields[19]) if fields and fields[0] not in "ZX" else None

    def is_alive(self) -> bool:
        return Process.find(self.pid) == self

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)  # of whoever has the number now
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def read_status(pid: int) -> list[str]:
    """Return the fields of a process's status from its state on; an empty list if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def list_children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def list_session(pid: int) -> list[int]:
    """Return the other processes of the session that a process has begun, even if it has ended."""
    others = [int(path.name) for path in Path("/proc").glob("[0-9]*") if path.name != str(pid)]
    return [other for other in others if read_status(other)[3:4] == [str(pid)]]


class Victim:
    """A command in a process of its own. Its workers are the only processes of this script's fork server."""

    def __init__(self, command: list[str], log: Path, is_fresh: bool, fatal_operation: int | None) -> None:
        self.log, self.is_fresh, self.code = log, is_fresh, None
        forkserver.ensure_running()
        self.server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if is_fresh:
            with log.open("wb") as out:
                program = [sys.executable, "-m", "fedheal", *command]
                self.process = subprocess.Popen(program, stdout=out, stderr=out, start_new_session=True)
            self.pid = self.process.pid
        elif (pid := os.fork()) == 0:
            _become_command(command, log, fatal_operation)
        else:
            self.pid = pid
        self.first = Process(self.pid, read_status(self.pid)[19])

    def is_over(self) -> bool:
        """Return whether the first process has ended; its exit code is then `code`."""
        if self.code is None and self.is_fresh:
            self.code = self.process.poll()
        elif self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def list_workers(self) -> list[Process]:
        """Return the running processes except the first one and multiprocessing's resource tracker, which ends last."""
        pids = list_session(self.pid) if self.is_fresh else list_children(self.server)
        return [process for pid in pids if not is_tracker(pid) and (process := Process.find(pid)) is not None]

    def kill(self, generator: random.Random) -> str:
        """Kill the first process, a worker or all of them. Return which."""
        workers = self.list_workers()
        hit = generator.choice(["first", "worker", "all"]) if workers else "first"
        for process in {"first": [self.first], "worker": workers[-1:], "all": [self.first, *workers]}[hit]:
            process.kill()
        return hit

    def wait(self, seconds: float = PATIENCE) -> None:
        """Wait until all processes have ended. Raise Failure if they do not."""
        end = time.monotonic() + seconds
        while not self.is_over() or self.list_workers():
            if time.monotonic() > end:
                workers = self.list_workers()
                for process in [*workers, *([] if self.is_over() else [self.first])]:
                    process.kill()
                raise Failure(f"a process is left after {seconds:.0f} s: {self.first}, workers {workers}")
            time.sleep(0.002)


def is_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker."""
    with suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _become_command(command: list[str], log: Path, fatal_operation: int | None) -> None:
    """Run `fedheal ...` in this new process and end it. Kill it before the file operation with this number."""
    code, operations = 1, 0

    def kill_at_operation(operation: Operation) -> None:
        nonlocal operations
        if operations == fatal_operation:
            os.kill(os.getpid(), signal.SIGKILL)
        operations += 1

    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it runs already, as another process's child
        for module in (fedheal.campaign.pool, fedheal.engine.workers):
            module.get_context = lambda _: multiprocessing.get_context("forkserver")  # type: ignore[attr-defined]
        fedheal.campaign.pool.GRACE_SECONDS = GRACE_SECONDS
        sys.argv = ["fedheal", *command]
        with nullcontext() if fatal_operation is None else watch(log.parent, kill_at_operation):
            run_command_line()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
        log.with_suffix(".operations").write_text(str(operations))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Trial:
    """All kills: what they hit, and what they broke."""

    out: Path
    work: Path  # where the commands run
    generator: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)  # on files, of the commands that have one process

    def start(self, name: str, folder: Path, is_fresh: bool = False, fatal_operation: int | None = None) -> Victim:
        return Victim(COMMANDS[name](folder), self.work / "last.log", is_fresh, fatal_operation)

    def prepare(self, name: str, folder: Path) -> None:
        """Make the folder that a command starts in."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if name == "report":  # of the same comparison each time
            shutil.copytree(self.work / "whole" / "comparison" / "runs", folder / "runs")

    def measure_commands(self) -> None:
        """Run each command undisturbed, to know its outcome and its time."""
        for name in COMMANDS:
            folder = self.work / "whole" / name
            self.prepare(name, folder)
            start, victim = time.monotonic(), self.start(name, folder, fatal_operation=NEVER)
            victim.wait()
            self.seconds[name] = time.monotonic() - start
            print(f"{name}: {self.seconds[name]:.2f} s", flush=True)
            if victim.code != 0:
                raise Failure(f"{name} does not end well undisturbed: {victim.log.read_text()}")
            self.outcomes[name] = read_outcome(folder)
            is_alone = not name.endswith(("workers", "processes"))  # whose processes are not watched
            self.operations[name] = int(victim.log.with_suffix(".operations").read_text()) if is_alone else 0

    def kill_until_end(self, name: str, kills: int, end: float) -> None:
        """Kill one command again and again until it ends by itself. After the last kill let it end."""
        folder = self.work / "killed"
        self.prepare(name, folder)
        before = Snapshot.take(folder)
        for attempt in count():
            done = self.kills.total()
            may_kill = done < kills and attempt < MOST_KILLS and time.monotonic() < end
            is_fresh = may_kill and done % FRESH_EVERY == FRESH_EVERY - 1
            operations = self.operations[name] if may_kill and done % 2 == 0 else 0
            at_operation = self.generator.randrange(operations) if operations else None
            start, victim = time.monotonic(), self.start(name, folder, is_fresh, at_operation)
            hit = ""
            if at_operation is not None:
                victim.wait()
                hit = "before an operation" if victim.code == -signal.SIGKILL else ""
            elif may_kill:
                hit = self.kill_later(victim, self.draw_delay(name, is_fresh))
            victim.wait()
            if hit:
                self.kills[name] += 1
                self.hits[hit] += 1
            elif attempt == 0:  # the machine may be busier or less busy than before
                self.seconds[name] = time.monotonic() - start
            after = Snapshot.take(folder)
            after.check_follows(before)
            before = after
            if victim.code == 0:
                self.check_end(name, folder)
                return
            text = victim.log.read_text()
            if not hit or "Traceback" in text:
                raise Failure(f"exit code {victim.code}: {text[-2000:]}")

    def kill_later(self, victim: Victim, delay: float) -> str:
        """Kill after so many seconds. Return which processes, or "" if the command has ended before."""
        start = time.monotonic()
        while not victim.is_over() and time.monotonic() - start < delay:
            time.sleep(0.001)
        if victim.is_over():
            return ""
        return victim.kill(self.generator) + (" of a new interpreter" if victim.is_fresh else "")

    def draw_delay(self, name: str, is_fresh: bool) -> float:
        """Draw the seconds until a kill: within the time of the command. A new interpreter gets time to start."""
        seconds = self.generator.uniform(0, 0.7 * self.seconds[name])
        return seconds + (4.0 * self.generator.random() if is_fresh else 0.0)

    def check_end(self, name: str, folder: Path) -> None:
        """Raise Failure if a command has left other files than an undisturbed one."""
        outcome = read_outcome(folder)
        differences = [
            file for file in {**self.outcomes[name], **outcome} if outcome.get(file) != self.outcomes[name].get(file)
        ]
        if differences:
            raise Failure(f"these differ from an undisturbed command's: {sorted(differences)}")
        for run in (path.parent for path in folder.rglob("experiment.toml")):
            if leftovers := [path.name for path in run.rglob("*.tmp") if path.name != LOCK]:
                raise Failure(f"{run.name}: {leftovers} are left")
        self.ended[name] += 1

    def execute(self, kills: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.measure_commands()
        while self.kills.total() < kills and time.monotonic() < end:
            print(f"{self.kills.total()} kills, {len(self.failures)} failures", flush=True)
            name = min(COMMANDS, key=lambda name: (self.kills[name], self.generator.random()))  # all as often
            try:
                self.kill_until_end(name, kills, end)
            except Failure as failure:
                self.failures.append(f"{name}, kill {self.kills.total()}: {failure}")
                print(self.failures[-1], flush=True)
                failure_folder = self.out / f"failure{len(self.failures)}"
                shutil.copytree(self.work / "killed", failure_folder, dirs_exist_ok=True)
                shutil.copy(self.work / "last.log", failure_folder)

    def write_table(self, seed: int, seconds: float) -> str:
        """Write the table as Markdown and JSON. Return it."""
        lines = ["| command | kills | ended as undisturbed |", "|---|---|---|"]
        lines += [f"| {name} | {self.kills[name]} | {self.ended[name]} |" for name in COMMANDS]
        lines += [f"| all | {self.kills.total()} | {self.ended.total()} |", ""]
        hits = ", ".join(f"{hit} {number}" for hit, number in sorted(self.hits.items()))
        lines += [f"Seed {seed}, {seconds:.0f} s. Hit: {hits}. Failures: {len(self.failures)}."]
        lines += [f"- {failure}" for failure in self.failures]
        (self.out / "kills.md").write_text("\n".join(lines) + "\n")
        summary = {"seed": seed, "seconds": seconds, "kills": self.kills, "hits": self.hits, "ended": self.ended}
        (self.out / "kills.json").write_text(json.dumps(summary | {"failures": self.failures}, indent=1) + "\n")
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=parse_positive, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=parse_seconds, default=3600.0, help="stop after so many, with the kills so far"
    )
    parser.add_argument("--out", type=parse_folder, required=True)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_fedheal"])
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-", dir=MEMORY if MEMORY.is_dir() else out) as work:
        os.chdir(work)
        first = context.Process(target=int)  # starts the server, which then imports fedheal
        first.start()
        first.join()
        trial = Trial(out, Path(work), random.Random(options.seed))
        trial.execute(options.kills, options.seconds)
        os.chdir(out)
    print(trial.write_table(options.seed, time.monotonic() - start))
    return 1 if trial.failures or trial.kills.total() < options.kills else 0


if __name__ == "__main__":
    raise SystemExit(main())
