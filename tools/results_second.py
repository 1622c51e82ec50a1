"""What tools/second_version.py found, beside the same rounds of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedheal.core.metrics import LAST, last_mean
from fedheal.runs.folder import read_json
from results_kept import Run, _numbers

FOLDER = "second-version"
DATA = "digits"  # its only protocol
ROWS = {"size": "FedAvg", "uniform": "uniform weights"}
EVERY = 20  # rounds
NEEDED = {"weights": str, "seed": int, "split": int, "width": int, "epochs": int, "hardware": str, "rounds": list}
SOURCE = (
    "`tools/second_version.py` is the same protocol written once more from its description alone: it shares no code with the "
    "package, reads the files itself and has its own split, network, training loop and average. Its records are in "
    f"`{FOLDER}/`. "
)


@dataclass(frozen=True)
class Second:
    """A run of the second version: which row it is one of, its seed, and the accuracies of its rounds."""

    row: str
    seed: int
    hardware: str
    judged: Sequence[Mapping[str, float]]


def read_all(results: Path) -> list[Second]:
    """The runs that are kept, in the order of the rows."""
    found = [_read(path) for path in sorted((results / FOLDER).glob("*.json"))]
    return sorted(found, key=lambda second: (list(ROWS.values()).index(second.row), second.seed))


def _read(path: Path) -> Second:
    record = read_json(path)
    for key, kind in NEEDED.items():
        if key not in record:
            raise ValueError(f"{path}: there is no {key}")
        if type(record[key]) is not kind:
            raise ValueError(f"{path}: {key} = {record[key]!r} is of the wrong kind")
    if record["weights"] not in ROWS:
        raise ValueError(f"{path}: weights = {record['weights']}: use one of {', '.join(ROWS)}")
    protocol = {"width": 64, "epochs": 10}
    for key, value in protocol.items():
        if record[key] != value:
            raise ValueError(f"{path}: {key} = {record[key]}, but the protocol has {value}")
    judged = record["rounds"]
    if len(judged) < LAST or not all(_numbers(line) and set(line) == set(judged[0]) for line in judged):
        raise ValueError(f"{path}: rounds are not {LAST} or more accuracies by domain")
    return Second(ROWS[record["weights"]], record["seed"], record["hardware"], judged)


def lines(seconds: Sequence[Second], runs: Sequence[Run], columns: Sequence[str]) -> list[list[str]]:
    """Its accuracies every twenty rounds and at its end, each followed by ours after as many rounds."""
    table = []
    for second in seconds:
        ours = [run for run in runs if run.entry.label == second.row and run.full]
        for end in sorted({*range(EVERY, len(second.judged) + 1, EVERY), len(second.judged)}):
            theirs = last_mean(second.judged[:end])
            table.append([second.row, str(end), f"second version, seed {second.seed}", *_cells(theirs, columns)])
            upto = {run.experiment.seed: _until(run, end) for run in ours}
            table += [["", "", f"ours, seed {seed}", *_cells(values, columns)] for seed, values in upto.items()]
            if upto:
                mean = {c: float(np.mean([values[c] for values in upto.values()])) for c in columns}
                apart = [f"{theirs[c] - mean[c]:+.1f}" for c in columns]
                table.append(["", "", "second version less the mean of ours", *apart])
    return table


def _until(run: Run, end: int) -> dict[str, float]:
    return last_mean([record["domains"] for record in run.records[:end] if record["domains"] is not None])


def _cells(values: Mapping[str, float], columns: Sequence[str]) -> list[str]:
    return [f"{values[c]:.1f}" for c in columns]
