"""Break a federation of four sites every other round. Its parts are real processes in a network namespace of their own.

    python benchmarks/chaos.py --rounds 60 --seed 0 --seconds 3600 --out FOLDER

SuperLink with TLS, SuperNodes with keys and ServerApp run on 127.0.0.1. The run folder is on a disk of one megabyte. A seed
draws the faults: kill -9 of a node, of the ServerApp or of the SuperLink; a site that hangs, sends NaN or sends 40 MB; a full
disk. A supervisor restarts processes that ended, as systemd would, and resumes the run. At the end three things are checked:

- `rounds.jsonl` has every round once;
- `rounds.jsonl` shows every fault;
- the model is, bit for bit, the one that the aggregator alone computes from the clients that counted in each round.

FOLDER gets the table as `chaos.md` and `chaos.json`, the run folder and the logs. The benchmark needs root, for the namespace
and a tmpfs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from arguments import parse_folder, parse_positive, parse_seconds, require_flower

require_flower()

HERE = Path(__file__).parent
# Leave out this script's folder: its flower.py would hide the package of the tests.
sys.path[:] = [str(HERE.parent / "tests"), str(HERE / "chaos_app"), *(p for p in sys.path if Path(p) != HERE)]

from chaos_app.site_training import SITES, Model, make_model, train_site  # noqa: E402

from fedheal import Updates  # noqa: E402
from fedheal.core.layout import Layout, Packed  # noqa: E402
from fedheal.flower import FedHEAL  # noqa: E402
from flower.deployment import Deployment, start_secure_deployment, wait_for  # noqa: E402
from loopback import loopback  # noqa: E402

AT_SERVER = ("kill ServerApp", "kill SuperLink", "full disk")
BAD_REPLIES = ("hang", "NaN reply", "oversized reply")
AT_SITE = ("kill node", *BAD_REPLIES)
NAMES = list(SITES)
TIMEOUT = 40.0  # seconds that a round waits for replies
PATIENCE = 120.0  # seconds until a run is restarted if its ServerApp does not start

Record = dict[str, Any]


@dataclass
class Fault:
    """One fault; times are in seconds since the start."""

    kind: str
    due: int  # the round it is meant for
    delay: float  # seconds into that round
    site: str = ""
    round: int = 0  # the current round when it struck
    struck: float = 0.0
    recorded: str = ""  # what the records say about it
    recovery: float | None = None  # until the site counts again; for a fault at the server, until a round is recorded


def plan_faults(rounds: int, seed: int) -> list[Fault]:
    """Draw a fault for every other round. No kind repeats before all kinds have come."""
    generator = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < rounds // 2:
        kinds += generator.sample([*AT_SERVER, *AT_SITE], len(AT_SERVER) + len(AT_SITE))
    due = range(2, rounds, 2)
    return [Fault(kind, number, generator.uniform(0, 6)) for kind, number in zip(kinds, due, strict=False)]


class Trial:
    """The federation, its supervisor, and the faults."""

    def __init__(self, deployment: Deployment, disk: Path, faults: list[Fault], rounds: int, seed: int) -> None:
        self.deployment, self.disk, self.faults, self.rounds = deployment, disk, faults, rounds
        self.folder, self.orders = disk / "run", deployment.folder / "orders"
        self.orders.mkdir()
        self.generator, self.began = random.Random(seed), time.monotonic()
        self.records: dict[int, Record] = {}
        self.seen: dict[int, float] = {}  # round -> when its record came
        self.waiting, self.open = list(faults), list[Fault]()  # not yet struck; struck, but not yet recovered
        self.order: Fault | None = None  # a fault that its site has not read yet
        self.run: subprocess.Popen[bytes] | None = None
        self.server_app, self.run_began = 0, 0.0
        self.node_ended: dict[int, float] = {}

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def execute(self, seconds: float) -> None:
        """Run to the last round. Raise TimeoutError after so many seconds."""
        self.start_run(resume=False)
        while not (self.folder / "model.safetensors").exists():
            if self.now > seconds:
                raise TimeoutError(f"{len(self.records)} of {self.rounds} rounds after {seconds:g} s")
            self.read_records()
            self.supervise()
            self.strike()
            self.follow_up()
            time.sleep(0.3)
        self.read_records()
        self.follow_up()

    def read_records(self) -> None:
        with suppress(FileNotFoundError):
            for line in (self.folder / "rounds.jsonl").read_text().splitlines():
                with suppress(json.JSONDecodeError):  # half a line of a round that is being written
                    record = json.loads(line)
                    number = record["round"]
                    if record != self.records.get(number):  # a resumed run may have cut and repeated the round
                        self.records[number], self.seen[number] = record, self.now

    # The supervisor does what systemd and an operator do.

    def supervise(self) -> None:
        link = self.deployment.link
        if link is None or link.poll() is not None:
            self.deployment.start_link()
            self.end_server_app()  # it may not notice for minutes, and would keep the folder locked
        for number, node in self.deployment.nodes.items():
            if node.poll() is not None and self.now > self.node_ended.setdefault(number, self.now) + 5:
                del self.node_ended[number]
                self.deployment.start_node(number)
        if self.server_app and not is_running(self.server_app):
            time.sleep(1)
            if not (self.folder / "model.safetensors").exists():
                (self.disk / "ballast").unlink(missing_ok=True)  # the operator makes room
                self.start_run(resume=True)
        elif not self.server_app:
            self.server_app = next(iter(self.deployment.processes("flwr-serverapp")), 0)
            if not self.server_app and self.now > self.run_began + PATIENCE:
                self.start_run(resume=True)

    def stop_node(self, number: int) -> None:
        """Stop a node as systemd does. `supervise` restarts it."""
        try:
            self.deployment.kill(self.deployment.nodes[number], signal.SIGTERM)
        except subprocess.TimeoutExpired:
            self.deployment.kill(self.deployment.nodes[number])

    def start_run(self, resume: bool) -> None:
        if self.run is not None:
            self.deployment.kill(self.run, signal.SIGTERM)  # this is `flwr run`, which only shows the log
        self.end_server_app()
        settings = {"rounds": self.rounds, "timeout": TIMEOUT, "orders": str(self.orders), "resume": resume}
        self.run = self.deployment.run(self.folder, **settings)
        self.server_app, self.run_began = 0, self.now

    def end_server_app(self) -> None:
        for pid in self.deployment.processes("flwr-serverapp"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self.deployment.processes("flwr-serverapp"), 30)

    # The faults.

    def strike(self) -> None:
        """Strike with the next fault if its round has begun."""
        last = max(self.records, default=0)
        if not self.waiting or self.order or last + 1 < self.waiting[0].due:
            return
        fault = self.waiting[0]
        # Order a bad reply at the start of the round: later the site may have its message already.
        delay = 0.0 if fault.kind in BAD_REPLIES else fault.delay
        if self.now < self.seen[last] + delay or (fault.kind in AT_SERVER and not self.server_app):
            return
        if fault.kind in AT_SITE:
            participants = list_counted_clients(self.records[last])
            fault.site = self.generator.choice(participants or NAMES)
        fault.round, fault.struck = last + 1, self.now
        if fault.kind == "kill ServerApp":
            os.kill(self.server_app, signal.SIGKILL)
        elif fault.kind == "kill SuperLink":
            assert self.deployment.link is not None
            os.kill(self.deployment.link.pid, signal.SIGKILL)
            self.deployment.link.wait(30)
        elif fault.kind == "full disk":
            fill_disk(self.disk)
        elif fault.kind == "kill node":
            self.deployment.kill(self.deployment.nodes[NAMES.index(fault.site)])
        else:
            (self.orders / fault.site).write_text(fault.kind)
            self.order = fault
        self.waiting.pop(0)
        self.open.append(fault)
        print(f"{self.now:6.0f} s  round {fault.round}: {fault.kind} {fault.site}", flush=True)

    def follow_up(self) -> None:
        """Look for traces of the faults and for recoveries. Stop the node of a site that hangs."""
        if self.order is not None:
            receipt = self.orders / f"{self.order.site}.taken"  # written by the site
            if receipt.exists() and receipt.read_text():
                self.order.round = int(receipt.read_text())
                receipt.unlink()
                self.order = None
        for fault in list(self.open):
            if fault is self.order:
                continue
            if not fault.recorded:
                fault.recorded = find_trace(fault, self.records)
                if fault.recorded and fault.kind == "hang":
                    self.stop_node(NAMES.index(fault.site))
            later = [number for number, seconds in self.seen.items() if seconds > fault.struck]
            if fault.site:
                counted = {number: list_counted_clients(self.records[number]) for number in later}
                later = [number for number in later if number > fault.round and fault.site in counted[number]]
            if fault.recorded and later:
                fault.recovery = self.seen[min(later)] - fault.struck
                self.open.remove(fault)


def is_running(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # that of a zombie is empty
    except OSError:
        return False


def find_trace(fault: Fault, records: dict[int, Record]) -> str:
    """Return what the records say about the fault, or ""."""
    for number in range(fault.round, fault.round + 3):
        report = records.get(number, {}).get("report", {})
        if fault.kind in AT_SERVER and report.get("resumed"):
            return f"round {number}: resumed"
        if fault.site and fault.site in report.get("skipped", {}):
            return f"round {number}: skipped, {report['skipped'][fault.site]}"
        for word in ("missing", "absent") if fault.kind in ("kill node", "hang") else ():
            if fault.site in report.get(word, ()):
                return f"round {number}: {word}"
    return ""


def list_counted_clients(record: Record) -> list[str]:
    """Return the clients that counted in a round. A client that sent NaN is in the record, but did not count."""
    return sorted(record["weights"].keys() - record["report"]["skipped"].keys())


def replay_cohorts(cohorts: list[list[str]]) -> dict[str, torch.Tensor]:
    """Return the model that the core aggregator alone computes from these clients in each round."""
    module = torch.nn.Linear(16, 64)  # its names and shapes are those of the sites' model
    layout, aggregator = Layout.of(module), FedHEAL().method.aggregator
    model, state = layout.pack(to_tensors(make_model())), aggregator.init(layout)
    for number, cohort in enumerate(cohorts, start=1):
        if cohort:
            trained = [train_site(site, number, to_arrays(layout.unpack(model))) for site in cohort]
            deltas = [layout.pack(to_tensors(local)).params - model.params for local in trained]
            updates = Updates(cohort, torch.stack(deltas), [SITES[site] for site in cohort])
            outcome = aggregator.apply(model, updates, state)
            assert isinstance(outcome.model, Packed)
            model, state = outcome.model, outcome.state
    return layout.unpack(model)


def to_tensors(model: Model) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value.copy()) for name, value in model.items()}


def to_arrays(model: dict[str, torch.Tensor]) -> Model:
    return {name: value.numpy() for name, value in model.items()}


def check_outcome(folder: Path, faults: list[Fault], rounds: int) -> dict[str, bool]:
    """Check the run folder against a replay of its cohorts, and against the faults."""
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    expected = replay_cohorts([list_counted_clients(record) for record in records])
    model = load_file(folder / "model.safetensors")
    return {
        "every round is recorded once": [record["round"] for record in records] == list(range(1, rounds + 1)),
        "every fault struck and is recorded": all(fault.recorded for fault in faults),
        "the model is that of the same cohorts without faults, bit for bit": model.keys() == expected.keys()
        and all(np.array_equal(model[key].numpy(), expected[key].numpy()) for key in expected),
    }


def write_table(out: Path, faults: list[Fault], checks: dict[str, bool], seconds: float, rounds: int) -> str:
    """Write the table to the folder, and return it."""
    lines = ["| round | fault | site | the record says | recovery, s |", "|---|---|---|---|---|"]
    for fault in faults:
        recovery = "not within the run" if fault.recovery is None else f"{fault.recovery:.0f}"
        lines.append(f"| {fault.round} | {fault.kind} | {fault.site} | {fault.recorded or 'NOTHING'} | {recovery} |")
    lines += ["", f"{rounds} rounds, {len(faults)} faults, {seconds:.0f} s", ""]
    lines += [f"- {'yes' if passed else 'NO'}: {check}" for check, passed in checks.items()]
    out.mkdir(parents=True, exist_ok=True)
    (out / "chaos.md").write_text("\n".join(lines) + "\n")
    summary = {"rounds": rounds, "seconds": seconds, "checks": checks, "faults": [asdict(fault) for fault in faults]}
    (out / "chaos.json").write_text(json.dumps(summary, indent=1) + "\n")
    return "\n".join(lines)


@contextmanager
def mount_disk(place: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def make_node_config(number: int) -> str:
    """Return the config of a SuperNode."""
    return f'name="{NAMES[number]}"'


def fill_disk(disk: Path) -> None:
    status = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(status.f_bavail * status.f_frsize))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=parse_positive, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=parse_seconds, default=3600.0, help="give up after so many")
    parser.add_argument("--out", type=parse_folder, required=True)
    options = parser.parse_args()
    work, faults = Path(tempfile.mkdtemp(prefix="chaos-")), plan_faults(options.rounds, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    checks: dict[str, bool] = {}
    with mount_disk(work / "disk") as disk:
        with loopback() as inside:
            app = HERE / "chaos_app"
            deployment = start_secure_deployment(work, inside, len(NAMES), app=app, node_config=make_node_config)
            trial = Trial(deployment, disk, faults, options.rounds, options.seed)
            try:
                trial.execute(options.seconds)
            except TimeoutError as error:
                checks[f"finished in time ({error})"] = False
            finally:
                deployment.close()
                shutil.copytree(trial.folder, options.out / "run", dirs_exist_ok=True)
                for path in deployment.folder.glob("*.log"):
                    shutil.copy(path, options.out)
            seconds = trial.now
        if not checks:
            checks = check_outcome(trial.folder, faults, options.rounds)
    print(write_table(options.out, faults, checks, seconds, options.rounds))
    shutil.rmtree(work)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
