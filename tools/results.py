"""The results of this project: runs them, collects them into results/, and writes results/README.md  (make results)

python tools/results.py run --data digits --seconds 540 data_root=digits.export
python tools/results.py collect --runs runs/results
python tools/results.py table

The rows are those of the recipe `headline`, seed 0, in bf16 on a GPU. `run` goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedheal
import results_kept
from fedheal.campaign.compare import parse_seeds
from fedheal.campaign.jobs import Job
from fedheal.report.rows import find
from fedheal.reproduce import RECIPES, Options, planned
from fedheal.reproduce.plans import Planned
from fedheal.runs.folder import read_rounds, write_text
from fedheal.runs.schema import FREE, RoundRecord
from fedheal.simulate.experiment import Experiment, parse_overrides
from fedheal.simulate.progress import format_accuracy

RECIPE = RECIPES["headline"]
# What the plan says beside the protocol. Caltech, a domain of Office-Caltech, cannot be had everywhere.
PLAN: dict[str, dict[str, Any]] = {"digits": {}, "office-caltech": {"allow_missing": True}}
# Where a result may depart from the plan, since the tables say it; anything else makes it another experiment.
MAY_DIFFER = FREE | {"seed", "rounds", "device", "precision", "engine", "deterministic"}
SAID_EVERY = 20  # rounds
INTERRUPTED = 130


class OutOfTime(KeyboardInterrupt):
    """Stops a run as Ctrl-C does: its state is saved on the way out."""


class Watch(fedheal.Callback):
    """Says how a run goes, and stops it between two rounds where the next would end too late."""

    def __init__(self, label: str, rounds: int, deadline: float) -> None:
        self.label, self.rounds, self.deadline = label, rounds, deadline
        self.before = 0.0

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        say(f"{self.label}: {f'goes on after round {len(done)}' if done else 'starts'}")
        self.before = time.monotonic()

    def round(self, record: RoundRecord) -> None:
        now = time.monotonic()
        took, self.before = now - self.before, now
        if record.round % SAID_EVERY == 0 and record.fairness:
            seconds = sum(record.seconds.values())
            say(f"{self.label}: round {record.round}/{self.rounds} ({seconds:.2f} s)  {format_accuracy(record)}")
        if record.round < self.rounds and now + took > self.deadline:
            raise OutOfTime


def run(asked: argparse.Namespace) -> int:
    """Run the open rows one after another in this process, so that what one compiles or tunes serves the next."""
    if not asked.seconds > 0:
        raise ValueError(f"seconds = {asked.seconds:g}: use a positive number, or leave it out for no limit")
    deadline = time.monotonic() + asked.seconds
    rows = [(entry.label, job) for entry, jobs in plan(asked).rows for job in jobs]
    broken = 0
    try:
        for label, job in rows:
            if not job.is_finished and time.monotonic() < deadline:
                broken += not ran(named(label, job), job, deadline)
    except OutOfTime:
        pass
    left = [named(label, job) + reached(job) for label, job in rows if not job.is_finished]
    say(f"open: {', '.join(left)}" if left else f"nothing is open: all {len(rows)} runs are finished")
    return 1 if broken else 0


def plan(asked: argparse.Namespace) -> Planned:
    """The rows that were asked for, all validated."""
    if asked.data not in PLAN:
        raise ValueError(f"data = {asked.data}: there is no plan for it; use one of {', '.join(PLAN)}")
    options = [f"{key}={value}" for key in ("rounds", "device") if (value := getattr(asked, key)) is not None]
    values = PLAN[asked.data] | {"device": "cuda"} | parse_overrides([*options, *asked.words])  # either form, but once
    if str(values["device"]).startswith("cuda"):
        values = {"precision": "bf16"} | values
    patterns = [word.strip() for word in asked.rows.split(",") if word.strip()]
    (part,) = planned(RECIPE, Options(parse_seeds(asked.seeds), patterns, [asked.data], values), asked.runs)
    return part


def ran(label: str, job: Job, deadline: float) -> bool:
    """Run one row or go on with it. What ends it in the midst is said, and the others have their turn."""
    watch = Watch(label, job.experiment.rounds, deadline)
    try:
        result = fedheal.run(job.experiment, job.folder, resume=True, callbacks=[watch], progress=False)
    except ValueError as error:
        if not read_rounds(job.folder):
            raise  # it never began, and neither would the next
        say(f"{label}: ended by an error: {error}")
        return False
    accuracy = "  ".join(f"{name} {value:.2f}" for name, value in result.domains.items())
    seconds = sum(result.summary["seconds"].values()) / job.experiment.rounds
    say(f"{label}: finished  {accuracy}  AVG {result.avg:.2f} STD {result.std:.2f}  {seconds:.2f} s a round")
    return True


def named(label: str, job: Job) -> str:
    return f"{label}, seed {job.experiment.seed}" if job.experiment.seed else label


def reached(job: Job) -> str:
    """How far an open run has come. Its records may be ahead of the state that it goes on from."""
    done = len(read_rounds(job.folder))
    return f" (at round {done} of {job.experiment.rounds})" if done else ""


def collect(asked: argparse.Namespace) -> int:
    """Take the light files of finished runs into the results, leaving what is there."""
    found = [Path(summary["folder"]) for summary in find([asked.runs])]
    for folder in found:
        try:
            experiment, *_ = results_kept.read(folder)
            amiss = strange(experiment)
        except ValueError as error:
            amiss = str(error)
        if amiss:
            say(f"{folder}: left, since {amiss}")
            continue
        offer(folder, experiment, asked.results / folder_of(experiment.data) / experiment.folder_name)
    if not found:
        say(f"{asked.runs} holds no finished run")
    asked.results.mkdir(parents=True, exist_ok=True)
    return table(asked)


def offer(folder: Path, experiment: Experiment, target: Path) -> None:
    """Take a run, unless there is one already whose number of rounds is as near to the plan's."""
    if not target.exists():
        take(folder, experiment, target)
        say(f"{target}: taken")
        return
    ours, there = experiment.rounds, results_kept.described(target).rounds
    wanted = planned_rounds(experiment.data)
    if abs(ours - wanted) < abs(there - wanted):
        take(folder, experiment, target)
        say(f"{target}: taken, with {ours} rounds in place of {there}")
    elif ours != there:
        say(f"{folder}: left, since it has {ours} rounds, and {target} has {there}")
    else:
        same = (folder / "result.json").read_bytes() == (target / "result.json").read_bytes()
        say(f"{target}: is there already{'' if same else ', from another run: remove it to take this one'}")


def planned_rounds(data: str) -> int:
    return Experiment.of(PLAN[data] | {"data": data}).rounds


def strange(experiment: Experiment) -> str:
    """Why a run is none of the plan's; empty if it is one."""
    if experiment.data not in PLAN:
        return f"there is no plan for {experiment.data}"
    if experiment.method_name not in {method_name(e.method, experiment.data) for e in RECIPE.entries(experiment.data)}:
        return f"{experiment.method_name} is no row of the plan"
    ours = Experiment.of(PLAN[experiment.data] | {"data": experiment.data, "method": experiment.method}).to_dict()
    theirs = experiment.to_dict()
    differ = sorted(key for key in {*ours, *theirs} - MAY_DIFFER if ours.get(key) != theirs.get(key))
    return f"it departs from the plan in {', '.join(differ)}" if differ else ""


def method_name(method: str, data: str) -> str:
    """As results have it: with what the data set's protocol says of the method's parameters."""
    return Experiment.of({"method": method, "data": data}).method_name


def folder_of(data: str) -> str:
    return data.replace(":", ".")


def take(folder: Path, experiment: Experiment, target: Path) -> None:
    """Copy what is light, whole or not at all, in place of what is there.

    Where the data lay on the machine of the run concerns no one else.
    """
    partial, former = (target.with_name(target.name + end + results_kept.PARTIAL) for end in ("", ".former"))
    for left in (partial, former):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_text(partial / "experiment.toml", experiment.model_copy(update={"data_root": None}).to_toml())
        for name in ("rounds.jsonl", "result.json"):
            shutil.copyfile(folder / name, partial / name)
        if target.exists():
            target.replace(former)
        partial.replace(target)
    except BaseException:
        if former.exists() and not target.exists():
            former.replace(target)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(former, ignore_errors=True)


def table(asked: argparse.Namespace) -> int:
    """Write the page from the folders in the results, and from nothing else."""
    from results_table import page  # statistics and tables, which running needs none of

    if not asked.results.is_dir():
        raise ValueError(f"results = {asked.results}: there is no such folder; collect makes one")
    write_text(asked.results / "README.md", page(RECIPE, parts(asked.results)))
    say(str(asked.results / "README.md"))
    return 0


def parts(results: Path) -> list[tuple[str, Path, int]]:
    """The data sets, where the runs of each are kept, and how many rounds they should have."""
    return [(data, results / folder_of(data), planned_rounds(data)) for data in PLAN]


def say(line: str) -> None:
    print(line, flush=True)


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = words.add_subparsers(required=True, metavar="COMMAND")
    runs: dict[str, Any] = {"type": Path, "default": Path("runs/results"), "help": "where the runs go"}
    results: dict[str, Any] = {"type": Path, "default": Path("results"), "help": "where the results are kept"}

    running = commands.add_parser("run", help="run the open rows of a data set, and stop in time")
    running.add_argument("words", nargs="*", metavar="key=value", help="fields of the experiments, such as data_root")
    running.add_argument("--data", required=True, help=f"one of {', '.join(PLAN)}")
    running.add_argument("--rows", default="", help="only these: names or patterns, such as 'fedavg,*released*'")
    running.add_argument("--seeds", default="1", help="how many (3), a range (0-2) or a list (0,2)")
    running.add_argument("--rounds", type=int, help="fewer than the protocol's; the tables say so")
    running.add_argument("--device", help="cuda unless it is said")
    running.add_argument("--seconds", type=float, default=math.inf, help="stop between rounds after so many")
    running.add_argument("--runs", **runs)
    running.set_defaults(do=run)

    collecting = commands.add_parser("collect", help="take finished runs into the results")
    collecting.add_argument("--runs", **runs)
    collecting.add_argument("--results", **results)
    collecting.set_defaults(do=collect)

    writing = commands.add_parser("table", help="write the results' README.md")
    writing.add_argument("--results", **results)
    writing.set_defaults(do=table)
    return words


def main(words: Sequence[str] | None = None) -> int:
    asked, more = parser().parse_known_args(words)
    if [word for word in more if word.startswith("-")] or (more and asked.do is not run):
        parser().error(f"unrecognized arguments: {' '.join(more)}")
    if asked.do is run:
        asked.words += more  # argparse takes only those before the first option
    try:
        done: int = asked.do(asked)
    except ValueError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"results: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("results: stopped; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return done


if __name__ == "__main__":
    sys.exit(main())
