"""The runs that are kept, read so that what stands on the page stands in their records too.

A folder can be damaged, copied or edited by hand. Whatever contradicts itself is refused in one sentence that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedheal.core.metrics import LAST, fairness, last_mean
from fedheal.report.rows import EVENNESS, load_summary
from fedheal.reproduce.plans import Entry
from fedheal.runs.schema import FREE
from fedheal.simulate.experiment import Experiment

PARTIAL = ".tmp"  # ends the name of a folder that was never finished
TOLERANCE = 1e-6  # points: sums may be taken in another order, and nothing else
NEEDED = ("averaged", *EVENNESS.values(), "precision", "hardware", "data_fingerprint", "data_notes", "versions")


@dataclass(frozen=True)
class Run:
    """One finished run of a row. `usual`: the plan's number of rounds."""

    entry: Entry
    folder: Path
    experiment: Experiment
    summary: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    usual: int

    @property
    def full(self) -> bool:
        return self.experiment.rounds == self.usual

    @property
    def label(self) -> str:
        """The row's, which a run of another length is no result of."""
        return self.entry.label if self.full else f"{self.entry.label}, {self.experiment.rounds} rounds"

    @property
    def numbers(self) -> dict[str, float]:
        """Accuracy per domain, then AVG, STD and worst."""
        return dict(self.summary["domains"]) | {name: self.summary[key] for name, key in EVENNESS.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for two runs to differ by their methods alone."""
        varied = FREE | {"method"}
        fixed = {key: value for key, value in self.experiment.to_dict().items() if key not in varied}
        return fixed | {"data_fingerprint": self.summary["data_fingerprint"]}


def found(entries: Sequence[Entry], data: str, folder: Path, usual: int) -> list[Run]:
    """The runs in a folder, in the order of the rows and their seeds. One that is no row's is refused."""
    names = [Experiment.of({"method": entry.method, "data": data}).method_name for entry in entries]
    runs = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir() or path.name.startswith(".") or path.name.endswith(PARTIAL):
            continue
        experiment, summary, records = read(path)
        if experiment.method_name not in names:
            rows = ", ".join(names)
            raise ValueError(f"{path}: no row of the plan is {experiment.method_name}; the rows are {rows}")
        if experiment.data != data:
            raise ValueError(f"{path / 'experiment.toml'}: data = {experiment.data}, in the folder of {data}")
        if experiment.folder_name != path.name:  # or a copy would be a row of its own
            raise ValueError(f"{path}: its run belongs into a folder called {experiment.folder_name}")
        entry = entries[names.index(experiment.method_name)]
        runs.append(Run(entry, path, experiment, summary, records, usual))
    return sorted(runs, key=lambda run: (entries.index(run.entry), run.experiment.seed))


def read(folder: Path) -> tuple[Experiment, dict[str, Any], list[dict[str, Any]]]:
    """A finished run: its description, its result and its rounds, which must agree with each other."""
    experiment = described(folder)
    path = folder / "result.json"
    summary = load_summary(folder, NEEDED)
    said = {"method": experiment.method_name, "data": experiment.data, "seed": experiment.seed}
    for key, value in (said | {"rounds": experiment.rounds}).items():
        if summary[key] != value:
            raise ValueError(f"{path}: {key} = {summary[key]}, but experiment.toml says {value}")
    records = _records(folder / "rounds.jsonl", experiment.rounds, set(summary["domains"]))
    judged = [record["domains"] for record in records if record["domains"] is not None]
    if not judged or summary["averaged"] != min(LAST, len(judged)):
        averaged = summary["averaged"]
        raise ValueError(f"{path}: averaged = {averaged}, but rounds.jsonl has {len(judged)} evaluated rounds")
    accuracy = last_mean(judged, summary["averaged"])
    evenness = fairness(accuracy)
    kept = summary["domains"] | {key: summary[key] for key in EVENNESS.values()}
    for key, value in (accuracy | {key: evenness[key] for key in EVENNESS.values()}).items():
        if not abs(kept[key] - value) <= TOLERANCE:  # which a NaN is not either
            raise ValueError(f"{path}: {key} = {kept[key]}, but the last rounds of rounds.jsonl give {value}")
    return experiment, summary, records


def described(folder: Path) -> Experiment:
    path = folder / "experiment.toml"
    try:
        return Experiment.read(path)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _records(path: Path, rounds: int, domains: set[str]) -> list[dict[str, Any]]:
    """A record a round. A last line cut short by a crash is no part of a finished run, and is refused too."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error
    records = [_record(path, line, number, domains) for number, line in enumerate(lines, 1)]
    if len(records) != rounds:
        raise ValueError(f"{path}: it holds {len(records)} rounds, but experiment.toml says {rounds}")
    return records


def _record(path: Path, line: str, number: int, domains: set[str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("round") != number:
        raise ValueError(f"{path}: line {number} is no record of round {number}")
    if not _numbers(record.get("seconds")):
        raise ValueError(f"{path}: line {number} has no seconds")
    judged = record.get("domains")
    if "domains" not in record or (judged is not None and not (_numbers(judged) and set(judged) == domains)):
        raise ValueError(f"{path}: line {number} has not the accuracies of {', '.join(sorted(domains))}")
    return record


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(number, (int, float)) for number in value.values())
