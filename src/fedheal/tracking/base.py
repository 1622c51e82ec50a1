"""Runs in TensorBoard, MLflow or Weights & Biases: callbacks that write every round to one of them.

What is written is decided in one place, `numbers`; a writer only says how its library opens a run, takes numbers at a step
and ends the run. The libraries are imported when a writer is made, so that this module needs none of them. Nothing here
goes over the network unless a writer is told to.

A writer is never the reason that a run is lost: what cannot be opened is an error before the first round, what fails later
is a warning, and the run goes on without the writer. On a resume the same run is continued, without doubles: rounds that
are there already are not written again, and rounds that the writer missed are filled in from the records.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from fedheal.core.errors import suggest
from fedheal.runs.schema import FREE, RoundRecord
from fedheal.simulate.callbacks import Callback

EVERY = "clients/replied"  # in every round's numbers, and the last of them: where it is, the round was written whole
HEADLINE = ("fairness/avg", "fairness/std", "fairness/worst")
BATCH = 1000  # MLflow takes so many numbers at once


def numbers(record: RoundRecord) -> dict[str, float]:
    """A round as `group/name -> number`; a round that was not evaluated has no accuracies.

    >>> seconds = {"train": 2.0, "aggregate": 0.5, "evaluate": 0.0}
    >>> report = {"kept": {"a": 0.25}}
    >>> numbers(
    ...     RoundRecord(round=1, cohort=2, replied=1, weights={"a": 1.0}, train_loss=0.7, report=report, seconds=seconds)
    ... )
    {'train/loss': 0.7, 'kept/mean': 0.25, 'weight/a': 1.0, 'seconds/train': 2.0, 'seconds/aggregate': 0.5,
    'seconds/evaluate': 0.0, 'clients/asked': 2.0, 'clients/replied': 1.0}
    """
    kept = list((record.report.get("kept") or {}).values())
    return {
        **_group("accuracy", record.domains),
        **_group("fairness", record.fairness),
        **_group("client_fairness", record.client_fairness),
        **_group("train", None if record.train_loss is None else {"loss": record.train_loss}),
        **_group("kept", {"mean": sum(kept) / len(kept)} if kept else None),
        **_group("weight", record.weights),
        **_group("seconds", record.seconds),
        "clients/asked": float(record.cohort),
        EVERY: float(record.replied),
    }


def result_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result, those inside of its mappings included.

    >>> result_numbers({"avg": 50, "method": "fedavg", "domains": {"street": 50.0}})
    {'result/avg': 50.0, 'result/domains/street': 50.0}
    """
    found: dict[str, float] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            found |= _group(f"result/{key}", {k: v for k, v in value.items() if _is_number(v)})
        elif _is_number(value):
            found |= _group("result", {key: value})
    return found


def tracker(spec: str, folder: Path) -> Callback:
    """A writer by its name: `tensorboard`, `mlflow`, `mlflow:URI` or `wandb`; it keeps its files in the folder."""
    name, colon, where = spec.partition(":")
    if name not in _MAKERS:
        raise ValueError(
            f"unknown tracker '{name}'{suggest(name, list(_MAKERS))}; "
            "the trackers are: tensorboard, mlflow (or mlflow:URI), wandb"
        )
    if colon and (name != "mlflow" or not where):
        raise ValueError(f"tracker '{spec}': only mlflow takes a place after the colon, as in mlflow:sqlite:///runs.db")
    return _MAKERS[name](where, folder)


class Tracker(Callback):
    """What the writers have in common: what is written when, and what happens when that fails.

    Also a context manager, which lets go of a run that fails midway.
    """

    name = ""

    def __init__(self) -> None:
        self._live = False
        self._logged: set[int] = set()

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        self.close()
        self._live = True
        try:
            self._logged = self._open(experiment, done)
            for record in done:
                self._write(record)
        except Exception as error:
            self._drop()
            raise ValueError(f"{self.name} cannot record this run: {_first_line(error)}") from error

    def round(self, record: RoundRecord) -> None:
        self._attempt(lambda: self._write(record))

    def finished(self, result: Mapping[str, Any]) -> None:
        self._attempt(lambda: self._finish(result))
        self._live = False

    def close(self) -> None:
        """Let go of a run that did not finish; a resume goes on with it. Of a finished one there is nothing left to do."""
        self._attempt(self._abandon)
        self._live = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, record: RoundRecord) -> None:
        if record.round not in self._logged:
            self._log(record.round, numbers(record))
            self._logged.add(record.round)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do it, or say that it failed and stop writing: training goes on, and its records are complete without this."""
        if not self._live:
            return
        try:
            action()
        except Exception as error:
            self._drop()
            why = _first_line(error)
            warnings.warn(f"{self.name} no longer records this run: {why}", RuntimeWarning, stacklevel=3)

    def _drop(self) -> None:
        self._live = False
        with suppress(Exception):  # what went wrong first is what is reported
            self._abandon()

    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        """Begin the run or go on with it; the rounds that need not be written."""
        raise NotImplementedError

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a round so that a crash right after does not lose them."""
        raise NotImplementedError

    def _finish(self, result: Mapping[str, Any]) -> None:
        """Write the result and close everything."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Close everything, whatever state it is in."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files, in a subfolder a run: scalars, the experiment as hyperparameters and as text."""

    name = "tensorboard"

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._torch, self._summary, self._reader = _libraries(
            "torch.utils.tensorboard",
            "torch.utils.tensorboard.summary",
            "tensorboard.backend.event_processing.event_accumulator",
        )
        self._writer: Any = None

    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        folder = self._subfolder(experiment)
        known = self._steps(folder)
        # Readers leave out what stands at this step or later in older files: rounds that a crash took back.
        purged = None if known is None else len(done) + 1
        self._writer = self._torch.SummaryWriter(str(folder), purge_step=purged)
        if known is None:
            self._describe(experiment)
        return {step for step in known or () if step <= len(done)}

    def _subfolder(self, experiment: Mapping[str, Any]) -> Path:
        """By the experiment's identity, since its name may change between a run and its resumption."""
        identity = _identity(experiment)
        there = sorted(self._folder.glob(f"*-{identity}"))
        title = re.sub(r"[^\w.+=-]+", "_", _title(experiment))
        return there[0] if there else self._folder / f"{title}-{identity}"

    def _steps(self, folder: Path) -> set[int] | None:
        """The rounds that event files hold, or None where there are no such files."""
        if not list(folder.glob("events.out.tfevents.*")):
            return None
        found = self._reader.EventAccumulator(str(folder), size_guidance={self._reader.SCALARS: 0})
        found.Reload()
        return {event.step for event in found.Scalars(EVERY)} if EVERY in found.Tags()["scalars"] else set()

    def _describe(self, experiment: Mapping[str, Any]) -> None:
        plain = {
            key: value if isinstance(value, (int, float, str)) else str(value) for key, value in experiment.items()
        }
        start = self._summary.hparams(plain, dict.fromkeys(HEADLINE, 0.0))[:2]
        for part in start:  # not add_hparams, which would make another run of it
            self._writer.file_writer.add_summary(part)
        self._writer.add_text("experiment", _block(experiment), 0)
        self._writer.flush()

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _finish(self, result: Mapping[str, Any]) -> None:
        last = max(self._logged, default=0)
        for name, value in result_numbers(result).items():
            self._writer.add_scalar(name, value, last)
        self._writer.add_text("result", _block(result), last)
        self._writer.file_writer.add_summary(self._summary.hparams({}, {})[2])
        self._abandon()

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class MLflow(Tracker):
    """A run of an MLflow experiment, in an SQLite database in a folder or wherever a tracking URI points to.

    `folder`: where to remember the run while it is unfinished, so that a resume finds it; the store's own folder unless the
    store is a URI. A resume that finds nothing makes a new run and fills in the rounds done.
    """

    name = "mlflow"

    def __init__(
        self, uri_or_folder: str | Path, experiment_name: str = "fedheal", folder: str | Path | None = None
    ) -> None:
        super().__init__()
        self._uri, self._home = _store(uri_or_folder)
        self._experiment_name = experiment_name
        self._memory_folder = Path(folder) if folder is not None else self._home
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import
        database = ("sqlalchemy", "alembic") if self._uri.startswith("sqlite:") else ()
        self._mlflow, self._entities, *_ = _libraries("mlflow", "mlflow.entities", *database)
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # which tables it makes is no news
        self._client: Any = None
        self._run: str | None = None

    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        if self._home is not None:
            self._home.mkdir(parents=True, exist_ok=True)
        with _environment(MLFLOW_SQLALCHEMYSTORE_POOLCLASS="NullPool"):  # no open connection between two writes
            self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            parent = self._parent()
        self._memory = _Memory(self._memory_folder, self.name, experiment)
        self._run = self._known(self._memory.read())
        if self._run is None:
            self._run = self._new(parent, experiment)
            return set()
        self._client.update_run(self._run, status="RUNNING")
        return {point.step for point in self._client.get_metric_history(self._run, EVERY)}

    def _parent(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment_name)
        if found is not None:
            return str(found.experiment_id)
        place = None if self._home is None else (self._home.resolve() / "artifacts").as_uri()
        return str(self._client.create_experiment(self._experiment_name, artifact_location=place))

    def _known(self, run: str | None) -> str | None:
        """The run, if the store has it."""
        if run is None:
            return None
        try:
            stage = self._client.get_run(run).info.lifecycle_stage
        except self._mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if stage == "active" else None

    def _new(self, parent: str, experiment: Mapping[str, Any]) -> str:
        run = str(self._client.create_run(parent, run_name=_title(experiment)).info.run_id)
        parameters = [self._entities.Param(key, str(value)) for key, value in experiment.items()]
        self._client.log_batch(run, params=parameters)
        self._memory.write(run)
        return run

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        points = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self._run, metrics=points[start : start + BATCH])

    def _finish(self, result: Mapping[str, Any]) -> None:
        self._log(max(self._logged, default=0), result_numbers(result))
        words = {key: value for key, value in result.items() if isinstance(value, str)} | result.get("versions", {})
        tags = [self._entities.RunTag(f"fedheal.{key}", value) for key, value in words.items()]
        self._client.log_batch(self._run, tags=tags)
        self._client.set_terminated(self._run, "FINISHED")
        self._memory.forget()
        self._client, self._run = None, None

    def _abandon(self) -> None:
        client, run = self._client, self._run
        self._client, self._run = None, None
        if client is not None and run is not None:
            client.set_terminated(run, "FAILED")


class Wandb(Tracker):
    """A run of Weights & Biases, offline unless told otherwise: `wandb sync` sends it later, if ever.

    An offline run is made of local files, so a resume writes it anew from the rounds done, under the same id. One that was
    synced before it was resumed is left alone, and the resumed one becomes a run of its own.
    """

    name = "wandb"
    _runs: ClassVar[dict[str, Any]] = {}  # open in this process, by id: a second one of the same id would be refused

    def __init__(self, project: str, folder: str | Path, mode: str = "offline") -> None:
        super().__init__()
        self._project, self._folder, self._mode = project, Path(folder), mode
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it reports to its makers otherwise
        (self._wandb,) = _libraries("wandb")
        self._run: Any = None

    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        files = (self._folder / "wandb").resolve()
        files.mkdir(parents=True, exist_ok=True)
        self._memory = _Memory(files, self.name, experiment)
        known = self._anew(files, self._memory.read()) or secrets.token_hex(4)
        self._memory.write(known)
        with _environment(WANDB_CACHE_DIR=str(files / "cache")):  # its service, which starts here, logs there
            self._run = self._wandb.init(
                project=self._project,
                id=known,
                name=_title(experiment),
                dir=str(files.parent),
                config=dict(experiment),
                mode=self._mode,
                resume="allow" if self._mode == "online" else None,
                reinit="create_new",  # a run that the caller has open stays open
                settings=self._settings(),
            )
        self._runs[known] = self._run
        return set(range(self._run.starting_step))  # 0 unless a server has it

    def _anew(self, files: Path, run: str | None) -> str | None:
        """The id to go on with, its offline files out of the way."""
        if run in self._runs:  # left open by a run that failed in this process
            self._runs.pop(run).finish(exit_code=1)
        parts = sorted(files.glob(f"offline-run-*-{run}")) if run else []
        if any(list(part.glob("*.synced")) for part in parts):
            return None
        for part in parts:
            shutil.rmtree(part)
        return run

    def _settings(self) -> Any:
        """Only what the callbacks say is recorded, and that at once; names that this version does not know are left out."""
        wanted = {
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "silent": True,
            "x_disable_meta": True,
            "x_disable_stats": True,
            "x_transaction_log_flush_interval": 0.2,  # seconds; 15 unless said otherwise
        }
        known = self._wandb.Settings.model_fields
        return self._wandb.Settings(**{key: value for key, value in wanted.items() if key in known})

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def _finish(self, result: Mapping[str, Any]) -> None:
        words = {f"result/{key}": value for key, value in result.items() if isinstance(value, str)}
        self._run.summary.update(result_numbers(result) | words)
        self._end(0)
        self._memory.forget()

    def _abandon(self) -> None:
        if self._run is not None:
            self._end(1)

    def _end(self, code: int) -> None:
        run, self._run = self._run, None
        self._runs.pop(run.id, None)
        run.finish(exit_code=code)


class _Memory:
    """Which run of a tracking system an unfinished experiment is: a file with the run's id, gone when the run is done."""

    def __init__(self, folder: Path | None, name: str, experiment: Mapping[str, Any]) -> None:
        self._path = None if folder is None else folder / f"{name}-{_identity(experiment)}.unfinished"

    def read(self) -> str | None:
        if self._path is None or not self._path.exists():
            return None
        return self._path.read_text(encoding="utf-8").strip() or None

    def write(self, run: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(run + "\n", encoding="utf-8")

    def forget(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _group(name: str, values: Mapping[str, float] | None) -> dict[str, float]:
    """Names that all three libraries take: MLflow is the strictest, and a slash begins a group in all of them.

    >>> _group("weight", {"street/7": 1, "..": 0})
    {'weight/street_2f_7': 1.0, 'weight/_2e__2e_': 0.0}
    """

    def escaped(text: str) -> str:
        allowed = r"[^\w .-]" if text.strip(".") else r"[^\w -]"
        return re.sub(allowed, lambda found: f"_{ord(found[0]):x}_", text)

    return {f"{name}/{escaped(key)}": float(value) for key, value in (values or {}).items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _identity(experiment: Mapping[str, Any]) -> str:
    """The same for a run and its resumption."""
    decisive = {key: value for key, value in experiment.items() if key not in FREE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _title(experiment: Mapping[str, Any]) -> str:
    said = str(experiment.get("name") or "")
    return said or "{method}-{data}-seed{seed}".format_map({"method": "", "data": "", "seed": 0} | dict(experiment))


def _block(values: Mapping[str, Any]) -> str:
    """As text that TensorBoard, which reads Markdown, shows as it is."""
    return "".join(f"    {line}\n" for line in json.dumps(dict(values), indent=2, default=str).splitlines())


def _store(uri_or_folder: str | Path) -> tuple[str, Path | None]:
    """A tracking URI, and the folder if it is one in a folder."""
    text = str(uri_or_folder)
    if "://" in text or text.startswith(("databricks", "file:")):
        return text, None
    folder = Path(text)
    return f"sqlite:///{(folder.resolve() / 'mlflow.db').as_posix()}", folder


def _libraries(*names: str) -> list[ModuleType]:
    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        raise ValueError(f"this tracker cannot be used ({error}): pip install 'fedheal[track]'") from error


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for a moment; what the user has set stays."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_MAKERS: dict[str, Callable[[str, Path], Callback]] = {
    "tensorboard": lambda _, folder: TensorBoard(folder / "tensorboard"),
    "mlflow": lambda where, folder: MLflow(where or folder / "mlflow", folder=folder / "mlflow"),
    "wandb": lambda _, folder: Wandb("fedheal", folder),
}
