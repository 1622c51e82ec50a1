"""Read the runs in results/. Reject a run whose files contradict each other: a folder can be damaged, copied or edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedheal import methods
from fedheal.core.metrics import LAST, count_averaged, fairness, last_mean
from fedheal.report.rows import FAIRNESS_COLUMNS, load_summary
from fedheal.reproduce.plans import RecipeRow
from fedheal.runs.folder import read_json, read_rounds
from fedheal.runs.schema import FREE, RoundRecord, parse_model
from fedheal.simulate.experiment import SERVER_FIELDS, Experiment

UNFINISHED = ".tmp"  # ends the name of a folder whose copy was interrupted
TOLERANCE = 1e-6  # points: only the order of sums may differ
REQUIRED = (
    "averaged",
    "precision",
    "hardware",
    "data_fingerprint",
    "data_notes",
    "versions",
    *FAIRNESS_COLUMNS.values(),
)
SECOND_FOLDER = "second-version"
SECOND_ROWS = {"size": "FedAvg", "uniform": "uniform weights"}


@dataclass(frozen=True)
class Run:
    """One finished run of a row."""

    entry: RecipeRow
    folder: Path
    experiment: Experiment
    summary: Mapping[str, Any]
    records: Sequence[RoundRecord]
    planned_rounds: int

    @property
    def is_full(self) -> bool:
        return self.experiment.rounds == self.planned_rounds

    @property
    def label(self) -> str:
        """The row's name, with the number of rounds if it is not the planned one."""
        return self.entry.label if self.is_full else f"{self.entry.label}, {self.experiment.rounds} rounds"

    @property
    def numbers(self) -> dict[str, float]:
        """Accuracy per domain, then AVG, STD and worst."""
        return dict(self.summary["domains"]) | {name: self.summary[key] for name, key in FAIRNESS_COLUMNS.items()}

    @property
    def accuracies(self) -> list[dict[str, float]]:
        """Accuracy per domain of every evaluated round."""
        return [record.domains for record in self.records if record.domains]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that two runs must share to differ by their methods alone."""
        fixed = {key: value for key, value in self.experiment.to_dict().items() if key not in FREE | {"method"}}
        if methods.get(self.experiment.method).server is not None:  # its settings are the method's
            fixed |= {key: Experiment.model_fields[key].default for key in SERVER_FIELDS}
        used = {"device": self.summary["hardware"]}  # the experiment may say "auto"
        return fixed | used | {"data_fingerprint": self.summary["data_fingerprint"]}


def read_runs(
    entries: Sequence[RecipeRow], data: str, folder: Path, planned_rounds: int, skips_others: bool = False
) -> list[Run]:
    """Return the runs in a folder, in the order of the rows and their seeds.

    A run that belongs to no row is skipped if `skips_others`, else it raises ValueError.
    """
    names = [Experiment.of({"method": entry.method, "data": data}).method_name for entry in entries]
    runs = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir() or path.name.startswith(".") or path.name.endswith(UNFINISHED):
            continue
        experiment, summary, records = read_run(path)
        if experiment.method_name not in names and skips_others:
            continue
        if experiment.method_name not in names:
            raise ValueError(f"{path}: {experiment.method_name} is not in the plan; the rows are {', '.join(names)}")
        if experiment.data != data:
            raise ValueError(f"{path / 'experiment.toml'}: data = {experiment.data}, in the folder of {data}")
        if experiment.folder_name != path.name:  # or a copy would become another row
            raise ValueError(f"{path}: the folder of this run must be called {experiment.folder_name}")
        entry = entries[names.index(experiment.method_name)]
        runs.append(Run(entry, path, experiment, summary, records, planned_rounds))
    return sorted(runs, key=lambda run: (entries.index(run.entry), run.experiment.seed))


def read_run(folder: Path) -> tuple[Experiment, dict[str, Any], list[RoundRecord]]:
    """Return a finished run's description, result and rounds. Raise ValueError if they contradict each other."""
    experiment = read_experiment(folder)
    path = folder / "result.json"
    summary = load_summary(folder, REQUIRED)
    settings = {key: getattr(experiment, key) for key in ("data", "seed", "rounds")}
    for key, value in ({"method": experiment.method_name} | settings).items():
        if summary[key] != value:
            raise ValueError(f"{path}: {key} = {summary[key]}, but experiment.toml has {value}")
    records = _read_all_rounds(folder, experiment.rounds, set(summary["domains"]))
    accuracies = [record.domains for record in records if record.domains]
    if summary["averaged"] != count_averaged(len(accuracies)):
        averaged = summary["averaged"]
        raise ValueError(f"{path}: averaged = {averaged}, but rounds.jsonl has {len(accuracies)} evaluated rounds")
    accuracy = last_mean(accuracies)
    stated, evenness = summary | summary["domains"], fairness(accuracy)
    for key, value in (accuracy | {key: evenness[key] for key in FAIRNESS_COLUMNS.values()}).items():
        if not abs(stated[key] - value) <= TOLERANCE:  # false for NaN, too
            raise ValueError(f"{path}: {key} = {stated[key]}, but the last rounds of rounds.jsonl give {value}")
    return experiment, summary, records


def read_experiment(folder: Path) -> Experiment:
    """Return the description of a run. Raise ValueError that names the file if it is not one."""
    path = folder / "experiment.toml"
    try:
        return Experiment.read(path)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _read_all_rounds(folder: Path, rounds: int, domains: set[str]) -> list[RoundRecord]:
    """Return the records of all rounds. A line that is cut short is an error, unlike in a run that may be resumed."""
    path = folder / "rounds.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    records = read_rounds(folder)
    lines = len(path.read_bytes().splitlines())
    if lines != rounds or [record.round for record in records] != list(range(1, rounds + 1)):
        raise ValueError(f"{path}: its {lines} lines are not the records of the {rounds} rounds in experiment.toml")
    for record in records:
        if not record.seconds:
            raise ValueError(f"{path}: round {record.round} has no seconds")
        if record.domains is not None and set(record.domains) != domains:
            raise ValueError(f"{path}: round {record.round} lacks the accuracies of {', '.join(sorted(domains))}")
    return records


class SecondRun(BaseModel):
    """A run of tools/second_version.py."""

    model_config = ConfigDict(strict=True)
    weights: Literal["size", "uniform"]
    seed: int
    split: int
    width: Literal[64]  # the protocol's
    epochs: Literal[10]
    hardware: str
    rounds: list[dict[str, float]] = Field(min_length=LAST)  # accuracy per domain

    @field_validator("rounds")
    @classmethod
    def _check_domains(cls, rounds: list[dict[str, float]]) -> list[dict[str, float]]:
        if any(accuracy.keys() != rounds[0].keys() for accuracy in rounds):
            raise ValueError("rounds must all have the same domains")
        return rounds

    @property
    def row(self) -> str:
        return SECOND_ROWS[self.weights]


def read_second_runs(results: Path) -> list[SecondRun]:
    """Return the runs of the second version, in the order of the rows and their seeds."""
    runs = []
    for path in sorted((results / SECOND_FOLDER).glob("*.json")):
        try:
            runs.append(parse_model(SecondRun, read_json(path)))
        except ValueError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return sorted(runs, key=lambda run: (list(SECOND_ROWS).index(run.weights), run.seed))
