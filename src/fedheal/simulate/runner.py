"""Run an experiment, into a folder that a crash cannot spoil."""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import Any

import numba
import numpy
import torch
from torch import nn

from fedheal import methods
from fedheal.aggregate.masks.sign_agreement import bin_consistency
from fedheal.core.arrays import make_frame
from fedheal.core.checks import check_main_guard, check_type
from fedheal.core.rng import SEED_FIELDS
from fedheal.core.state import RunState
from fedheal.data.domains import Domains, fingerprint, fingerprint_used
from fedheal.engine import check_engine, describe_engine, open_engine
from fedheal.engine.precision import resolve_precision, use_precision
from fedheal.runs import folder as files
from fedheal.runs.lock import hold_lock
from fedheal.runs.resume import Checkpoint, load_newest_checkpoint
from fedheal.runs.schema import FREE, LATER_SETTINGS, RoundRecord
from fedheal.runs.summary import summarise_run
from fedheal.simulate.build import build_federation, build_module, load_domains, warn_of_idle_terms
from fedheal.simulate.callbacks import Callback
from fedheal.simulate.devices import describe_hardware, resolve_device
from fedheal.simulate.evaluation import evaluate_classes, select_evaluated_model
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.federation import Federation
from fedheal.simulate.interrupts import Interrupts
from fedheal.simulate.objects import DESCRIPTION, fingerprint_module
from fedheal.simulate.progress import Progress, is_interactive
from fedheal.simulate.round import initial_state, run_rounds
from fedheal.version import __version__

log = logging.getLogger("fedheal")

# Training seeds torch's global generators, and a run sets torch's threads and precision: runs of one process must take turns.
ONE_RUN = threading.RLock()
# Settings that a result has from its experiment, beside the method and seeds of their own.
RESULT_SETTINGS = ("data", "seed", "rounds", "only", "without", "pool", "evaluate", "threads")
REQUIRED_FIELDS = ("method", "domains", "averaged", "classes", "avg", "std", "worst")  # to read a result back
UNDO = "restore what was changed, or name another folder"


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run. Accuracies are in percent, means over the last rounds (`summary["averaged"]`).

    Attributes:
        domains: The accuracy of each domain.
        avg: The mean over domains.
        std: The sample standard deviation over domains.
        worst: The lowest accuracy of a domain.
        history: The record of every round.
        model: The final model.
        summary: The contents of `result.json`.
        folder: The run folder, if there is one.
    """

    domains: Mapping[str, float]
    avg: float
    std: float
    worst: float
    history: tuple[RoundRecord, ...]
    model: nn.Module
    summary: Mapping[str, Any]
    folder: Path | None = None

    def __repr__(self) -> str:
        """Return one line: method, AVG, STD, worst, rounds and folder."""
        numbers = f"AVG {self.avg:.2f}, STD {self.std:.2f}, worst {self.worst:.2f}"
        where = "" if self.folder is None else f", {self.folder}"
        return f"<Result {self.summary['method']}: {numbers}, {self.summary['rounds']} rounds{where}>"

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each evaluated round: accuracy per domain, AVG, STD and worst.

        Raises:
            ValueError: pandas is not installed.
        """
        rounds = [record for record in self.history if record.domains is not None]
        fairness = ("avg", "std", "worst")
        return make_frame(
            {"round": r.round, **(r.domains or {}), **{key: (r.fairness or {})[key] for key in fairness}}
            for r in rounds
        )


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Run an experiment. Runs in several threads wait for each other, so a callback must not wait for another run.

    Args:
        experiment: The description of the run.
        out: The run folder; None writes nothing.
        resume: Whether to resume from the folder's newest checkpoint.
        callbacks: Called before the first round, after every round and at the end.
        progress: Whether to show a live display; None shows one on a terminal and in a notebook.

    Returns:
        The result; that of the folder if the run is finished already.

    Raises:
        ValueError: The experiment cannot be run, or the folder holds something else.
    """
    _check_arguments(experiment, out, resume, callbacks)
    device = resolve_device(experiment.device)
    folder = None if out is None else Path(out)
    check_engine(device, experiment.engine, experiment.workers, experiment.threads, experiment.ray_address)
    with ONE_RUN, ExitStack() as stack:
        domains = load_domains(experiment)  # a user's function may draw from torch's generators
        stack.enter_context(_use_threads(experiment.threads))
        precision = resolve_precision(experiment.precision, device)
        stack.enter_context(use_precision(precision, experiment.deterministic, device))
        federation = build_federation(experiment, domains, device)  # before the folder: a failure leaves no trace
        used = _identify_used(experiment, federation, domains)
        checkpoint, history = None, list[RoundRecord]()
        if folder is not None:
            _prepare_folder(folder, experiment)
            if not _is_finished(folder):
                stack.enter_context(hold_lock(folder))
            checkpoint, history = _open_folder(folder, experiment, resume, used)
            if _is_finished(folder):
                module = federation.local_training.module if experiment.model_object else None
                return _make_result(_read_finished(folder, REQUIRED_FIELDS), history, load(folder, module), folder)
        state = initial_state(federation) if checkpoint is None else RunState.from_arrays(*checkpoint, device)
        show_progress = is_interactive() if progress is None else progress
        watchers = [*callbacks, *([Progress()] if show_progress else [])]
        for callback in watchers:
            stack.enter_context(callback)
            callback.started(experiment.to_dict() | {"method": experiment.method_name}, history)
        saver = _Saver(folder, experiment, used, state)
        state, engine = _train_to_end(federation, state, history, saver, watchers)
        facts = _describe_run(experiment, state, federation, domains, used) | {"engine": engine}
        model = select_evaluated_model(federation, state.model, state.terms, sorted(federation.client_domains))
        federation.local_training.module.load_state_dict(federation.local_training.layout.unpack(model))
        result = _make_result(summarise_run(history, **facts), history, federation.local_training.module, folder)
        if folder is not None:
            files.save_tensors(folder / "model.safetensors", result.model.state_dict())
            files.write_result(folder, result.summary)
        for callback in watchers:
            callback.finished(result.summary)
    return result


def _check_arguments(
    experiment: Experiment, out: str | Path | None, resume: bool, callbacks: Sequence[Callback]
) -> None:
    check_type("experiment", experiment, Experiment, "give an Experiment, such as Experiment(method='fedheal')")
    if out is not None:
        check_type("out", out, str | PathLike, "give the path of the run folder")
    elif resume:
        raise ValueError("resume = True, but out is None: give the run folder as out, or leave out resume")
    if experiment.workers > 1 and experiment.engine != "ray":
        check_main_guard("workers", experiment.workers)
    check_type("callbacks", callbacks, Collection, "give a list of fedheal.Callback values")
    for i, callback in enumerate(callbacks):
        check_type(f"callbacks[{i}]", callback, Callback, "give an instance of a fedheal.Callback")
    warn_of_idle_terms(experiment.resolved_method)


def load(folder: str | Path, module: nn.Module | None = None) -> nn.Module:
    """Return the final model of a run, in evaluation mode.

    Args:
        folder: The run folder.
        module: The module to load the values into; needed only if the run's model was given as a Python object.

    Returns:
        The module.

    Raises:
        ValueError: The folder holds no finished run, or the model's class has changed since.
        TypeError: `module` is no `torch.nn.Module`.
    """
    if module is not None:
        check_type("module", module, nn.Module, "give the module itself, such as make_model(10), not its function")
    path = Path(folder)
    if not path.exists():
        raise ValueError(f"{path} does not exist: name the folder of a finished run")
    for name in ("experiment.toml", "model.safetensors", "result.json"):
        if not (path / name).exists():
            raise ValueError(f"{path} holds no finished run: there is no {name}; {files.NO_RESULT}")
    # The method and the initial values do not matter here, and the folder has only the name of a user's own method.
    experiment = Experiment.of(files.read_toml(path / "experiment.toml") | {"method": "fedavg", "weights": None})
    if module is None:
        if DESCRIPTION.fullmatch(experiment.model):
            raise ValueError(f"the model of {path} was a Python object, {experiment.model}: give load(folder, module)")
        classes = len(files.read_result(path, ["classes"])["classes"])
        try:
            module = build_module(experiment, classes)
        except ValueError as error:  # its function may need the shape of an image, which only the data tell
            raise ValueError(f"{error}; or give the module itself, load(folder, module)") from error
    values = files.load_tensors(path / "model.safetensors")
    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        reason = shorten(" ".join(str(error).split("\n")[1:2]).strip().rstrip("."), 120, placeholder=" ...")
        raise ValueError(
            f"{path / 'model.safetensors'} does not fit model '{experiment.model}', which must have changed since ({reason})"
        ) from error
    return module.eval()


def check_folder_owner(
    folder: Path,
    experiment: Experiment,
    remedy: str = "give another name or folder (--out), or remove it",
    given: Collection[str] = (),
) -> None:
    """Raise ValueError with the remedy if the folder holds a run of another experiment, naming the given fields first."""
    if not (folder / "experiment.toml").exists() or not _has_rounds(folder):
        return
    toml = folder / "experiment.toml"
    written = files.read_toml(toml)
    method = written.get("method")
    if method is None:
        raise ValueError(f"{toml} has no method, so it is not as a run wrote it: restore it, or name another folder")
    is_same_name = method == experiment.to_dict()["method"]
    if is_same_name:  # a user's own method is known by its name alone
        written["method"] = experiment.method
    if not (is_same_name or methods.is_known(str(method))):
        raise ValueError(f"{folder} belongs to another experiment, of method '{method}': {remedy}")
    try:
        pair = Experiment.of(written), experiment
    except ValueError as error:
        raise ValueError(f"{toml}: {error}") from None
    there, here = (described.to_dict() | {"method": described.method_name} for described in pair)
    differing = [key for key in {**there, **here} if key not in FREE and there.get(key) != here.get(key)]
    if differing:
        differing.sort(key=lambda key: (key not in given, key == "method"))
        listed = "; ".join(f"{key} is {there.get(key)} there and {here.get(key)} here" for key in differing[:3])
        more = f"; {len(differing) - 3} more differ" if len(differing) > 3 else ""
        raise ValueError(f"{folder} belongs to another experiment ({listed}{more}): {remedy}")


def _train_to_end(
    federation: Federation, state: RunState, history: list[RoundRecord], saver: _Saver, watchers: Sequence[Callback]
) -> tuple[RunState, str]:
    """Run the rounds that are left; append their records to `history`. Save the last whole state if anything goes wrong.

    Returns:
        The state after the last round, and which engine trained the clients.
    """
    e = saver.experiment
    evaluated = [*federation.tests.values(), *federation.validation.values()]
    opened = open_engine(federation.local_training, e.engine, e.workers, e.threads, e.lanes, evaluated, e.ray_address)
    with opened as engine, Interrupts() as interrupts:
        rounds = run_rounds(federation, state, engine, e.rounds, e.eval_every, interrupts.hold)
        try:
            for after, record in rounds:
                state = after
                history.append(record)
                if saver.folder is not None:
                    files.append_round(saver.folder, record)
                interrupts.release()
                saver.save_if_due(state)
                for callback in watchers:
                    callback.round(record)
        except BaseException as error:
            if not interrupts.is_holding:  # else the round in progress is using the state's memory
                with nullcontext() if isinstance(error, KeyboardInterrupt) else suppress(OSError):
                    saver.save(state)
            raise
        return state, describe_engine(engine)


class _Saver:
    """Save checkpoints every `save_seconds`, at the end of a run, and when asked."""

    def __init__(self, folder: Path | None, experiment: Experiment, used: Mapping[str, Any], state: RunState) -> None:
        self.folder, self.experiment, self.used = folder, experiment, used
        self.saved_round, self.saved_at = state.round, time.monotonic()

    def save_if_due(self, state: RunState) -> None:
        is_due = time.monotonic() - self.saved_at >= self.experiment.save_seconds
        if is_due or state.round == self.experiment.rounds:
            self.save(state)

    def save(self, state: RunState) -> None:
        if self.folder is not None and state.round > self.saved_round:
            arrays, described = state.to_arrays()
            settings = {key: value for key, value in self.experiment.to_dict().items() if key not in FREE}
            described = {**described, "used": self.used, "settings": settings}
            files.save_checkpoint(self.folder, state.round, arrays, described, self.experiment.identity)
            self.saved_round, self.saved_at = state.round, time.monotonic()


def _prepare_folder(folder: Path, experiment: Experiment) -> None:
    """Make the folder; refuse one that holds anything else, without leaving a trace there."""
    check_folder_owner(folder, experiment)
    contents = list(files.check_folder(folder).iterdir()) if folder.exists() else []
    others = [path for path in contents if path.suffix != ".tmp"]
    if others and folder / "experiment.toml" not in others:
        raise ValueError(f"{folder} is not empty and not a run folder: give another name or folder (--out)")
    files.make_folder(folder)


def _open_folder(
    folder: Path, experiment: Experiment, resume: bool, used: Mapping[str, Any]
) -> tuple[Checkpoint | None, list[RoundRecord]]:
    """Make the folder this experiment's, or resume in it; return the newest checkpoint, if any, and its rounds."""
    check_folder_owner(folder, experiment)  # again: another run may have held the folder until now
    if not _has_rounds(folder):
        (folder / "rounds.jsonl").unlink(missing_ok=True)  # it may hold half a line
        files.write_text(folder / "experiment.toml", experiment.to_toml())
        return None, []
    if not resume:
        finished = f"is finished: `fedheal report {folder}` shows it, and --resume (resume=True) returns its result"
        stopped = "holds this experiment already: resume it (--resume, or resume=True)"
        raise ValueError(f"{folder} {finished if _is_finished(folder) else stopped}")

    def check_used(before: Mapping[str, Any], keys: Iterable[str]) -> None:
        changed = {key for key in keys if before.get(key) != used.get(key)}
        if changed == {"model"}:
            raise ValueError(
                f"the model of {folder} has changed since it was begun: remove the folder, or give the same"
            )
        if changed:
            raise ValueError(f"the data of {folder} have changed since it was begun: remove it, or restore them")

    if _is_finished(folder):
        summary = _read_finished(folder)
        _check_result_settings(folder, experiment, summary)
        _check_checkpoint_settings(folder, experiment)
        check_used({"model": summary.get("model_fingerprint")}, ["model"])
        return None, files.read_rounds(folder)
    _check_checkpoint_settings(folder, experiment)
    _check_model_can_be_written(folder, experiment.rounds)
    checkpoint = load_newest_checkpoint(
        folder,
        experiment.identity,
        log,
        lambda described: check_used(described.get("used", {}), [*described.get("used", {}), *used]),
    )
    return checkpoint, files.read_rounds(folder) if checkpoint else []


def _check_result_settings(folder: Path, experiment: Experiment, summary: Mapping[str, Any]) -> None:
    """Raise ValueError if the settings that a result has are not those of the experiment, which is that of experiment.toml."""
    settings = experiment.to_dict() | {"method": experiment.method_name}
    keys = [*(key for key in ("method", *RESULT_SETTINGS) if key in summary), *SEED_FIELDS]
    _check_same(folder, settings, summary, keys, "result.json is")


def _check_checkpoint_settings(folder: Path, experiment: Experiment) -> None:
    """Raise ValueError if there are checkpoints and all are of another experiment than experiment.toml."""
    headers = []
    for path in files.list_checkpoints(folder):
        with suppress(files.CheckpointError):  # a damaged one says nothing
            headers.append(files.read_checkpoint_header(path))
    if not headers or experiment.identity in [header.get("owner") for header in headers]:
        return
    state = headers[0].get("state")
    written = state.get("settings") if isinstance(state, dict) else None
    if isinstance(written, dict):
        settings = experiment.to_dict()
        keys = [key for key in {**settings, **written} if key not in FREE]
        _check_same(folder, settings, LATER_SETTINGS | written, keys, "the checkpoints in state/ are")
    raise ValueError(
        f"{folder / 'experiment.toml'} differs from the experiment that the checkpoints in state/ are of: {UNDO}"
    )


def _check_same(
    folder: Path, here: Mapping[str, Any], there: Mapping[str, Any], keys: Iterable[str], others: str
) -> None:
    """Raise ValueError that names the first of the keys that differs."""
    for key in keys:
        if here.get(key) != there.get(key):
            mine, other = (
                f"no {key}" if fields.get(key) is None else f"{key} = {fields[key]!r}" for fields in (here, there)
            )
            raise ValueError(f"{folder / 'experiment.toml'} says {mine}, but {others} of {other}: {UNDO}")


def _is_finished(folder: Path) -> bool:
    """Return whether a run has left all it ends with. One without its model is resumed: the last checkpoint has it."""
    return (folder / "result.json").exists() and (folder / "model.safetensors").exists()


def _check_model_can_be_written(folder: Path, rounds: int) -> None:
    """Raise ValueError if there is a result without its model, and no checkpoint of the last round: a resume would drop it."""
    if (folder / "result.json").exists() and f"{rounds:08d}" not in [p.stem for p in files.list_checkpoints(folder)]:
        missing = f"model.safetensors is missing in {folder}, and state/ holds no checkpoint of round {rounds} to write it from"
        raise ValueError(f"{missing}: restore either, or remove {folder / 'result.json'} and resume to train again")


def _read_finished(folder: Path, required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the result of a finished run. Raise ValueError with a remedy if it is damaged."""
    try:
        return files.read_result(folder, required)
    except ValueError as error:
        if isinstance(error.__cause__, OSError):
            raise
        remedy = "remove it and resume (--resume, or resume=True), which writes it from the last checkpoint"
        has_checkpoint = bool(files.list_checkpoints(folder))
        raise ValueError(f"{error}; {remedy if has_checkpoint else 'remove the folder to run again'}") from error


def _has_rounds(folder: Path) -> bool:
    """Return whether a run has left anything to resume from."""
    if (folder / "result.json").exists() or files.list_checkpoints(folder):
        return True
    return bool(files.read_rounds(folder)) or files.find_last_round(folder) > 0  # the last also behind a damaged line


def _make_result(
    summary: Mapping[str, Any], history: list[RoundRecord], model: nn.Module, folder: Path | None
) -> Result:
    accuracies = {key: summary[key] for key in ("domains", "avg", "std", "worst")}
    return Result(**accuracies, history=tuple(history), model=model, summary=summary, folder=folder)


def _identify_used(experiment: Experiment, federation: Federation, domains: Domains) -> dict[str, Any]:
    """Return fingerprints of what a resumed run must find again: the examples and the model, if it is an object or a file's."""
    examples = fingerprint_used(federation.local_training.examples, federation.tests)
    used = {"fingerprint": examples, "classes": list(domains.classes)}
    if experiment.model_object is None and experiment.weights is None:
        return used
    return used | {"model": fingerprint_module(federation.local_training.module)}


def _describe_run(
    experiment: Experiment, state: RunState, federation: Federation, domains: Domains, used: Mapping[str, Any]
) -> dict[str, Any]:
    device, settings = state.model.params.device, experiment.to_dict()
    libraries = {"torch": torch.__version__, "numpy": numpy.__version__, "numba": numba.__version__}
    return {
        **{key: settings[key] for key in RESULT_SETTINGS},
        **{key: settings[key] for key in SEED_FIELDS if key in settings},
        "method": experiment.method_name,
        "trained": {client: federation.client_domains.get(client, "") for client in federation.clients},
        "classes": list(domains.classes),
        "test_sizes": {d.name: len(d.test) for d in domains.domains},
        "device": str(device),
        "hardware": describe_hardware(device),
        "precision": federation.local_training.precision,
        "data_fingerprint": fingerprint(domains),
        "data_notes": list(domains.notes),
        "bytes_sent": state.sent,
        "bytes_received": state.received,
        "consistency": bin_consistency(state.aggregator),
        **evaluate_classes(federation, state.model, state.terms),
        "versions": {"fedheal": __version__, "python": platform.python_version(), **libraries},
        "used_fingerprint": used["fingerprint"],
        **({"model_fingerprint": used["model"]} if "model" in used else {}),
    }


@contextmanager
def _use_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads, which changes the order of sums, and restore it at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
