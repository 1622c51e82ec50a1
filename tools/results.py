"""Run the rows of the results, collect them into results/, and write results/README.md  (make results)

python tools/results.py run --data digits --seconds 540 data_root=digits.export
python tools/results.py run --recipe confirmation-scaffold --data digits --seeds 1,2,8-13
python tools/results.py collect --runs runs/results
python tools/results.py table

The rows are those of the recipe `headline`, with seed 0, in bf16 on a GPU, or those of another campaign (`results_plan.py`).
`run` resumes where it stopped.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fedheal
from fedheal.campaign.compare import parse_seeds
from fedheal.campaign.jobs import Job
from fedheal.report.rows import find_results
from fedheal.reproduce import Options, plan_recipe
from fedheal.reproduce.plans import RecipePlan
from fedheal.runs.folder import read_rounds, write_text
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.experiment import Experiment, parse_overrides
from fedheal.simulate.progress import format_accuracy
from results_confirmation import write_confirmations
from results_data import UNFINISHED, read_experiment, read_run
from results_page import write_page
from results_plan import CAMPAIGNS
from results_studies import write_studies
from results_table1 import write_table1

DATA_SETS = tuple(dict.fromkeys(data for campaign in CAMPAIGNS.values() for data in campaign.settings))
REPORT_EVERY = 20  # rounds
say = partial(print, flush=True)
INTERRUPTED = 130


class OutOfTime(KeyboardInterrupt):
    """Stop a run as Ctrl-C does: its checkpoint is saved on the way out."""


class Deadline(fedheal.Callback):
    """Report the progress of a run. Stop it between two rounds if the next round would end after the deadline."""

    def __init__(self, label: str, rounds: int, deadline: float) -> None:
        self.label, self.rounds, self.deadline = label, rounds, deadline
        self.before = 0.0

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        say(f"{self.label}: {f'resumes after round {len(done)}' if done else 'starts'}")
        self.before = time.monotonic()

    def round(self, record: RoundRecord) -> None:
        now = time.monotonic()
        seconds_taken, self.before = now - self.before, now
        if record.round % REPORT_EVERY == 0 and record.fairness:
            seconds = sum(record.seconds.values())
            say(f"{self.label}: round {record.round}/{self.rounds} ({seconds:.2f} s)  {format_accuracy(record)}")
        if record.round < self.rounds and now + seconds_taken > self.deadline:
            raise OutOfTime


def run(options: argparse.Namespace) -> int:
    """Run the open rows one after another in this process, so that they share compiled and tuned kernels.

    All rows of a seed come before those of the next seed. So all methods have the same seeds when time is up.
    """
    if not options.seconds > 0:
        raise ValueError(f"seconds = {options.seconds:g}: use a positive number, or leave it out for no limit")
    deadline = time.monotonic() + options.seconds
    rows = [(entry.label, job) for entry, jobs in plan_rows(options).rows for job in jobs]
    rows.sort(key=lambda row: row[1].experiment.seed)
    failed = 0
    try:
        for label, job in rows:
            if not job.is_finished and time.monotonic() < deadline:
                failed += not run_row(name_row(label, job), job, deadline)
    except OutOfTime:
        pass
    open_rows = []
    for label, job in [(label, job) for label, job in rows if not job.is_finished]:
        done = len(read_rounds(job.folder))
        open_rows.append(name_row(label, job) + (f" (at round {done} of {job.experiment.rounds})" if done else ""))
    say(f"open: {', '.join(open_rows)}" if open_rows else f"nothing is open: all {len(rows)} runs are finished")
    return 1 if failed else 0


def plan_rows(options: argparse.Namespace) -> RecipePlan:
    """Return the rows to run, all validated."""
    campaign = CAMPAIGNS[options.recipe]
    settings = campaign.get_settings(options.data)
    words = [f"{key}={value}" for key in ("rounds", "device") if (value := getattr(options, key)) is not None]
    overrides = parse_overrides([*words, *options.overrides])  # each field once, as an option or as key=value
    values = {**settings, "device": "cuda"} | overrides
    if str(values["device"]).startswith("cuda"):
        values = {"precision": "bf16"} | values
    patterns = [word.strip() for word in options.rows.split(",") if word.strip()]
    (part,) = plan_recipe(
        campaign.recipe, Options(parse_seeds(options.seeds), patterns, [options.data], values), options.runs
    )
    return part


def run_row(label: str, job: Job, deadline: float) -> bool:
    """Run or resume one row. Return False if an error ended it after its first round."""
    callback = Deadline(label, job.experiment.rounds, deadline)
    try:
        result = fedheal.run(job.experiment, job.folder, resume=True, callbacks=[callback], progress=False)
    except ValueError as error:
        if not read_rounds(job.folder):
            raise  # it never began, and the next row would not begin either
        say(f"{label}: ended by an error: {error}")
        return False
    accuracy = "  ".join(f"{name} {value:.2f}" for name, value in result.domains.items())
    seconds = sum(result.summary["seconds"].values()) / job.experiment.rounds
    say(f"{label}: finished  {accuracy}  AVG {result.avg:.2f} STD {result.std:.2f}  {seconds:.2f} s a round")
    return True


def name_row(label: str, job: Job) -> str:
    return f"{label}, seed {job.experiment.seed}" if job.experiment.seed else label


def collect(options: argparse.Namespace) -> int:
    """Copy the small files of finished runs into the results, and write the page."""
    folders = [Path(summary["folder"]) for summary in find_results([options.runs])]
    for folder in folders:
        try:
            experiment, *_ = read_run(folder)
            target, problem = find_place(experiment, options.results)
        except ValueError as error:
            target, problem = None, str(error)
        if target is None:
            say(f"{folder}: left, since {problem}")
        else:
            offer_run(folder, experiment, target, options.results)
    if not folders:
        say(f"{options.runs} holds no finished run")
    options.results.mkdir(parents=True, exist_ok=True)
    return write_table(options)


def offer_run(folder: Path, experiment: Experiment, target: Path, results: Path) -> None:
    """Copy a run, unless the results have one whose number of rounds is at least as near to the planned number.

    A run that makes room stays in the folder of another campaign, if one has planned it.
    """
    if not target.exists():
        copy_run(folder, experiment, target)
        say(f"{target}: taken")
        return
    former = read_experiment(target)
    rounds, present = experiment.rounds, former.rounds
    headline = CAMPAIGNS["headline"]
    planned = headline.count_rounds(experiment.data) if experiment.data in headline.settings else present
    if abs(rounds - planned) < abs(present - planned):
        for campaign in CAMPAIGNS.values():
            if campaign.folder and not campaign.find_departure(former):
                copy_run(target, former, results / campaign.folder / name_folder(former.data) / target.name)
        copy_run(folder, experiment, target)
        say(f"{target}: taken, with {rounds} rounds in place of {present}")
    elif rounds != present:
        say(f"{folder}: left, since it has {rounds} rounds, and {target} has {present}")
    else:
        is_same = (folder / "result.json").read_bytes() == (target / "result.json").read_bytes()
        say(f"{target}: exists already{'' if is_same else ', from another run: remove it to take this one'}")


def find_place(experiment: Experiment, results: Path) -> tuple[Path | None, str]:
    """Return where a run is kept, or None and why it is in no plan."""
    problems = []
    for campaign in CAMPAIGNS.values():
        problem = campaign.find_departure(experiment)
        if not problem:
            return results / campaign.folder / name_folder(experiment.data) / experiment.folder_name, ""
        problems.append(problem)
    return None, problems[0]


def name_folder(data: str) -> str:
    return data.replace(":", ".")


def copy_run(folder: Path, experiment: Experiment, target: Path) -> None:
    """Replace the target with the small files of a run, all or none, without the location of the data."""
    partial, former = (target.with_name(target.name + end + UNFINISHED) for end in ("", ".former"))
    for leftover in (partial, former):
        shutil.rmtree(leftover, ignore_errors=True)
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


def write_table(options: argparse.Namespace) -> int:
    """Write the page from the folders in the results alone."""
    if not options.results.is_dir():
        raise ValueError(f"results = {options.results}: there is no such folder; collect makes one")
    write_text(options.results / "README.md", make_page(options.results))
    say(str(options.results / "README.md"))
    return 0


def make_page(results: Path) -> str:
    """Return the page as Markdown."""
    parts = [*write_table1(results), *write_studies(results), *write_confirmations(results)]
    return write_page(CAMPAIGNS["headline"].recipe, list_data_sets(results)) + "".join(f"\n{part}\n" for part in parts)


def list_data_sets(results: Path) -> list[tuple[str, Path, int]]:
    """Return the data sets, the folders of their runs, and the planned rounds."""
    headline = CAMPAIGNS["headline"]
    return [(data, results / name_folder(data), headline.count_rounds(data)) for data in headline.settings]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="run the open rows of a data set, and stop in time")
    running.add_argument(
        "overrides", nargs="*", metavar="key=value", help="fields of the experiments, such as data_root"
    )
    running.add_argument("--recipe", choices=tuple(CAMPAIGNS), default="headline", help="which rows")
    running.add_argument("--data", required=True, help=f"one of {', '.join(DATA_SETS)}")
    running.add_argument("--rows", default="", help="only these: names or patterns, such as 'fedavg,*released*'")
    running.add_argument("--seeds", default="1", help="how many (3), a range (0-2) or a list (0,2,5-7)")
    running.add_argument("--rounds", type=int, help="other than the protocol's; the tables show it")
    running.add_argument("--device", help="default: cuda")
    running.add_argument("--seconds", type=float, default=math.inf, help="stop between two rounds after this many")
    running.set_defaults(do=run)
    collecting = commands.add_parser("collect", help="copy finished runs into the results")
    collecting.set_defaults(do=collect)
    writing = commands.add_parser("table", help="write the results' README.md")
    writing.set_defaults(do=write_table)
    for command in (running, collecting):
        command.add_argument("--runs", type=Path, default=Path("runs/results"), help="where the runs go")
    for command in (collecting, writing):
        command.add_argument("--results", type=Path, default=Path("results"), help="where the results are kept")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options, more = make_parser().parse_known_args(words)
    if [word for word in more if word.startswith("-")] or (more and options.do is not run):
        make_parser().error(f"unrecognized arguments: {' '.join(more)}")
    if options.do is run:
        options.overrides += more  # argparse takes only those before the first option
    try:
        return int(options.do(options))
    except ValueError as error:
        problem, code = str(error), 2
    except OSError as error:
        problem, code = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}", 2
    except KeyboardInterrupt:
        problem, code = "stopped; rerun the command to resume", INTERRUPTED
    print(f"results: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
