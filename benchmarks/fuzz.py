"""Try ten thousand wrong inputs. Each must end with a result or one sentence, within its limits of time and memory.

    python benchmarks/fuzz.py --inputs 10000 --seed 0 --out FOLDER

hypothesis draws the inputs: command lines, experiment files, names of methods, run folders, data files of every reader,
Flower replies, and updates for the aggregator. Most are valid inputs with a few edits, so that they pass the first check.
For every input these must hold:

- no traceback: a command ends with exit code 0, 1, 2 or 130, and with one sentence for 2; a function returns or raises
  ValueError (TypeError for a wrong type, OSError for a file that cannot be opened);
- no more than 10 s of processor time; a command that trains is interrupted as by Ctrl-C after half a second, and must end;
- no more memory than the target's limit, even for bombs;
- no file is written outside the run folder, the cache and the named folder;
- the model is finite.

Each target runs in a process of its own, with its own home and temporary folder. FOLDER gets `fuzz.md`, `fuzz.json` and the
inputs that failed. `--target NAME` runs one target.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from arguments import parse_folder, parse_positive

HERE = Path(__file__).parent
# Leave out this script's folder: its flower.py would hide the package of the tests.
sys.path[:] = [str(HERE.parent / "tests"), str(HERE / "fuzz_inputs"), *(p for p in sys.path if Path(p) != HERE)]

# Name -> module, class, and share of the inputs. Only the process of a target imports its module.
TARGETS = {
    "command lines": ("commands", "CommandLines", 0.15),
    "experiment files": ("commands", "ExperimentFiles", 0.15),
    "method names": ("commands", "MethodNames", 0.15),
    "run folders": ("commands", "RunFolders", 0.15),
    "data files": ("data_files", "DataFiles", 0.2),
    "Flower replies": ("replies", "FlowerReplies", 0.1),
    "updates": ("replies", "CohortUpdates", 0.1),
}
SPARE_BYTES = 12 << 30  # of address space for a process: a bomb must not harm other processes


@dataclass
class Outcome:
    """What became of a target's inputs."""

    target: str
    inputs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    most_seconds: float = 0.0  # of one input
    most_megabytes: int = 0
    limit_megabytes: int = 0


def run_target(
    name: str, inputs: int, seed: int, work: Path, last: Path | None = None, tries_bombs: bool = True
) -> Outcome:
    """Try the inputs of a target: valid inputs, which must be accepted, then bombs if `tries_bombs`, then drawn inputs.

    `last` is a file that always holds the current input, in case the process dies.
    """
    from importlib import import_module

    from guard import Guard, Hang, WriteWatch
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as set_seed

    module, kind, _ = TARGETS[name]
    for folder in ("play", "home", "tmp", "cache", "settings"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    target = getattr(import_module(module), kind)(work)
    watch = WriteWatch([work / "play", work / "tmp", work / "cache", work / "settings"])
    guard = Guard(target.limits, watch, [work / "home", work / "tmp"])
    outcome, began = Outcome(name, limit_megabytes=target.limits.megabytes), time.monotonic()
    for case in target.valid:  # also imports and compiles for later inputs
        if (end := target.attempt(case)) != "accepted":
            raise AssertionError(f"{name}: a valid input is {end}: {case!r:.500}")

    def attempt(case: Any) -> None:
        outcome.inputs += 1
        if last is not None:
            last.write_text(repr(case), errors="backslashreplace")
        prepare = getattr(target, "prepare", None)
        if prepare is not None:
            prepare(case)
        try:
            end = guard.run(lambda: target.attempt(case))
        except (Exception, Hang, KeyboardInterrupt) as error:
            end = "failed"
            place = traceback.format_exc().splitlines()
            outcome.failures.append({
                "error": f"{type(error).__name__}: {error}"[:2000],
                "input": repr(case)[:20_000],
                "traceback": "\n".join(place[:1] + place[-30:]),
            })  # fmt: skip
        outcome.ends[end] += 1

    for case in getattr(target, "bombs", ()) if tries_bombs else ():
        attempt(case)
    checks = settings(
        max_examples=inputs,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    set_seed(seed)(checks(given(target.cases)(attempt)))()
    outcome.seconds = time.monotonic() - began
    outcome.most_seconds, outcome.most_megabytes = guard.most_seconds, guard.most_megabytes
    return outcome


def run_child(name: str, inputs: int, seed: int, work: Path) -> None:
    """Run one target in this process, which has no other task."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background processes ignore it
    cores = sorted(os.sched_getaffinity(0))  # with one core a comparison runs in this process, where it is watched
    os.sched_setaffinity(0, {cores[list(TARGETS).index(name) % len(cores)]})
    faulthandler.dump_traceback_later(inputs * 10 + 600, exit=True)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, resource.RLIM_INFINITY))
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    outcome = run_target(name, inputs, seed, work, work / "last")
    (work / "outcome.json").write_text(json.dumps(asdict(outcome) | {"ends": outcome.ends}))


def start_child(name: str, inputs: int, seed: int, out: Path) -> dict[str, Any]:
    """Run one target in another process, and return its outcome."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        work = Path(folder)
        for part in ("home", "tmp", "cache", "settings"):
            (work / part).mkdir()
        environment = os.environ | {
            "HOME": str(work / "home"), "TMPDIR": str(work / "tmp"), "FEDHEAL_CACHE": str(work / "cache"),
            "MPLCONFIGDIR": str(work / "settings"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120",
        }  # fmt: skip
        environment.pop("FEDHEAL_DATA", None)
        settings = ["--inputs", str(inputs), "--seed", str(seed), "--out", folder]
        command = [sys.executable, __file__, "--child", name, *settings]
        with (out / f"{name.replace(' ', '_')}.log").open("wb") as log:
            code = subprocess.run(command, env=environment, stdout=log, stderr=log, cwd=work, check=False).returncode
        if (work / "outcome.json").exists():
            outcome: dict[str, Any] = json.loads((work / "outcome.json").read_text())
            return outcome
        last = (work / "last").read_text() if (work / "last").exists() else ""
        failure = {"error": f"the process ended with {code}", "input": last, "traceback": "see the log"}
        return asdict(Outcome(name, failures=[failure]))


def write_page(outcomes: list[dict[str, Any]], seed: int, out: Path) -> str:
    """Write the table and the failures, and return the table."""
    lines = [
        "| inputs | number | accepted | rejected | failures | slowest, s | most memory, MB | limit, MB | time, s |",
        "|---|" + "---|" * 8,
    ]
    for outcome in outcomes:
        accepted, rejected = (outcome["ends"].get(end, 0) for end in ("accepted", "rejected"))
        counts = f"{outcome['inputs']:,} | {accepted:,} | {rejected:,} | {len(outcome['failures'])}"
        memory = f"{outcome['most_megabytes']} | {outcome['limit_megabytes']}"
        times = f"{outcome['most_seconds']:.1f} | {memory} | {outcome['seconds']:.0f}"
        lines.append(f"| {outcome['target']} | {counts} | {times} |")
    failures = [(outcome["target"], failure["error"]) for outcome in outcomes for failure in outcome["failures"]]
    total = sum(outcome["inputs"] for outcome in outcomes)
    lines += ["", f"{total:,} inputs, seed {seed}, {len(failures)} failures"]
    kinds = Counter(f"{target}: {error[:150]}" for target, error in failures)
    lines += ["", *(f"- {count} x {kind!r}" for kind, count in kinds.most_common(40))]
    (out / "fuzz.md").write_text("\n".join(lines) + "\n")
    (out / "fuzz.json").write_text(json.dumps({"seed": seed, "outcomes": outcomes}, indent=1) + "\n")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=parse_positive, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--jobs", type=parse_positive, default=2, help="targets at a time")
    parser.add_argument("--out", type=parse_folder, required=True)
    parser.add_argument("--child", choices=sorted(TARGETS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.inputs, options.seed, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    targets = options.target or list(TARGETS)
    total_share = sum(TARGETS[name][2] for name in targets)

    def report_target(name: str) -> dict[str, Any]:
        inputs = max(1, round(options.inputs * TARGETS[name][2] / total_share))
        outcome = start_child(name, inputs, options.seed, options.out)
        print(f"{name}: {outcome['inputs']} inputs, {len(outcome['failures'])} failures", flush=True)
        (options.out / f"{name.replace(' ', '_')}.json").write_text(json.dumps(outcome, indent=1) + "\n")
        return outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(report_target, targets))
    print(write_page(outcomes, options.seed, options.out))
    return 1 if any(outcome["failures"] for outcome in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
