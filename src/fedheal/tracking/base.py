"""What trackers have in common: what is written, when, and what happens if that fails.

`round_metrics` and `result_metrics` decide what is written; a tracker only knows how its library opens a run, takes metrics and
ends the run. The libraries are imported when a tracker is made, and nothing goes over the network unless the user asks for it.

A tracker never ends a run. What cannot be opened is an error before the first round. A later failure is a warning, and
training continues without the tracker. A resume continues the same run of the tracking system without duplicates.
Rounds that are there are not written again, and missing rounds are filled in.
"""

import hashlib
import json
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from fedheal.core.errors import explain_install
from fedheal.core.rng import SOURCES
from fedheal.runs.folder import write_text
from fedheal.runs.schema import FREE, RoundRecord
from fedheal.simulate.callbacks import Callback

LAST_METRIC = "clients/replied"  # every round has it and it is written last: a round that has it is complete


def round_metrics(record: RoundRecord) -> dict[str, float]:
    """Return a round's metrics as `group/name -> number`. A round without evaluation has no accuracies.

    >>> record = RoundRecord(round=1, cohort=2, replied=1, weights={"a": 1}, train_loss=0.7, report={"kept": {"a": 0.25}})
    >>> round_metrics(record)
    {'train/loss': 0.7, 'kept/mean': 0.25, 'weight/a': 1.0, 'clients/asked': 2.0, 'clients/replied': 1.0}
    """
    kept = list((record.report.get("kept") or {}).values())
    return {
        **_add_group("accuracy", record.domains),
        **_add_group("fairness", record.fairness),
        **_add_group("client_fairness", record.client_fairness),
        **_add_group("train", None if record.train_loss is None else {"loss": record.train_loss}),
        **_add_group("kept", {"mean": sum(kept) / len(kept)} if kept else None),
        **_add_group("weight", record.weights),
        **_add_group("seconds", record.seconds),
        "clients/asked": float(record.cohort),
        LAST_METRIC: float(record.replied),
    }


def result_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result, including those in its mappings.

    >>> result_metrics({"avg": 50, "method": "fedavg", "domains": {"street": 50.0}})
    {'result/avg': 50.0, 'result/domains/street': 50.0}
    """
    metrics: dict[str, float] = {}
    for key, value in result.items():
        group, values = (f"result/{key}", value) if isinstance(value, Mapping) else ("result", {key: value})
        metrics |= _add_group(group, {k: v for k, v in values.items() if type(v) in (int, float)})
    return metrics


class Tracker(Callback, ABC):
    """A callback that writes every round to a tracking system. As a context manager it also closes a run that fails midway."""

    name = ""

    def __init__(self) -> None:
        self._is_open = False
        self._logged: set[int] = set()

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        self.close()
        self._is_open = True
        try:
            self._logged = self._open(experiment, done)
            for record in done:
                self._write(record)
        except Exception as error:
            self._abandon_quietly()
            raise ValueError(f"{self.name} cannot record this run: {_first_line(error)}") from error

    def round(self, record: RoundRecord) -> None:
        self._attempt(lambda: self._write(record))

    def finished(self, result: Mapping[str, Any]) -> None:
        self._attempt(lambda: self._finish(result))
        self._is_open = False

    def close(self) -> None:
        """Close a run that did not finish; a resume continues it."""
        self._attempt(self._abandon)
        self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, record: RoundRecord) -> None:
        if record.round not in self._logged:
            self._log(record.round, round_metrics(record))
            self._logged.add(record.round)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run the action. If it fails, warn and stop tracking: training continues, and the run folder is complete."""
        try:
            if self._is_open:
                action()
        except Exception as error:
            self._abandon_quietly()
            message = f"{self.name} no longer records this run, which continues: {_first_line(error)}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _abandon_quietly(self) -> None:
        self._is_open = False
        with suppress(Exception):  # the first error is the one to report
            self._abandon()

    @abstractmethod
    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        """Start the run or continue it. Return the rounds that need not be written."""

    @abstractmethod
    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a round's metrics so that a crash right after does not lose them."""

    @abstractmethod
    def _finish(self, result: Mapping[str, Any]) -> None:
        """Write the result and close everything."""

    @abstractmethod
    def _abandon(self) -> None:
        """Close everything, whatever its state."""


class RunIdFile:
    """A file with the id that an unfinished experiment has in a tracking system; deleted when the run finishes."""

    def __init__(self, folder: Path | None, name: str, experiment: Mapping[str, Any]) -> None:
        self._path = None if folder is None else folder / f"{name}-{hash_experiment(experiment)}.unfinished"

    def read(self) -> str | None:
        if self._path is None or not self._path.exists():
            return None
        return self._path.read_text(encoding="utf-8").strip() or None

    def write(self, run_id: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, run_id + "\n")

    def delete(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def hash_experiment(experiment: Mapping[str, Any]) -> str:
    """Return a short hash that is the same for a run and its resumption."""
    decisive = {key: value for key, value in experiment.items() if key not in FREE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:12]


def make_title(experiment: Mapping[str, Any]) -> str:
    """Return the experiment's name, or one made of its method, data and seeds."""
    defaults = {"method": "", "data": "", "seed": 0}
    title = "{method}-{data}-seed{seed}".format_map(defaults | dict(experiment))
    own = [f"-{source}{experiment[f'{source}_seed']}" for source in SOURCES if f"{source}_seed" in experiment]
    return str(experiment.get("name") or title + "".join(own))


def import_libraries(*names: str) -> list[ModuleType]:
    """Import modules of optional libraries. Raise ValueError with the remedy if one is missing."""
    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        raise ValueError(f"this tracker cannot be used ({error}): {explain_install('track')}") from error


@contextmanager
def set_environment(**values: str) -> Iterator[None]:
    """Set environment variables for a moment; variables that the user has set stay."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _add_group(group: str, values: Mapping[str, float] | None) -> dict[str, float]:
    """Return the values under names that all three libraries accept: MLflow's rules, and a slash after the group.

    >>> _add_group("weight", {"street/7": 1, "..": 0})
    {'weight/street_2f_7': 1.0, 'weight/_2e__2e_': 0.0}
    """

    def escape(text: str) -> str:
        forbidden = r"[^\w .-]" if text.strip(".") else r"[^\w -]"
        return re.sub(forbidden, lambda match: f"_{ord(match[0]):x}_", text)

    return {f"{group}/{escape(key)}": float(value) for key, value in (values or {}).items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
