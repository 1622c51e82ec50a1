"""Run an experiment, into a folder that a crash cannot spoil."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numba
import numpy
import torch
from torch import Tensor, nn

from fedheal import methods
from fedheal.aggregate.masks.directions import spread
from fedheal.core.metrics import LAST, fairness, last_mean
from fedheal.core.state import RunState, restored_state
from fedheal.data.domains import Domains, fingerprint, fingerprint_of_used
from fedheal.engine import check_engine, trainer
from fedheal.engine.precision import numerics, precision_of
from fedheal.runs import folder as records
from fedheal.runs.folder import read_toml
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.experiment import Experiment, build, domains_of, module_of
from fedheal.simulate.interrupts import Interrupts
from fedheal.simulate.progress import Progress, is_interactive
from fedheal.simulate.round import Callback, Federation, initial_state, judged_model, rounds
from fedheal.version import __version__

log = logging.getLogger("fedheal")

Kept = tuple[dict[str, Tensor], dict[str, Any]]  # a saved state
Used = Mapping[str, Any]  # what tells the data that a run uses from others
# What is read of a result again.
NEEDED = records.fields("method", "domains", "averaged", "classes", "avg", "std", "worst")


@dataclass(frozen=True)
class Result:
    """What a run found. Accuracies in percent, means of the last five evaluated rounds."""

    domains: Mapping[str, float]
    avg: float
    std: float
    worst: float
    history: tuple[RoundRecord, ...]
    model: nn.Module
    summary: Mapping[str, Any]  # what result.json holds


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Run an experiment, into the folder `out` if one is given.

    `resume=True` goes on from the folder's newest whole state. `progress`: a live display; `None` shows one on a terminal
    and in a notebook.
    """
    device = device_of(experiment.device)
    domains = domains_of(experiment)
    folder = None if out is None else Path(out)
    check_engine(device, experiment.engine, experiment.workers)
    with ExitStack() as stack:
        stack.enter_context(_threads(experiment.threads))
        precision = precision_of(experiment.precision, device)
        stack.enter_context(numerics(precision, experiment.deterministic, device))
        federation = build(experiment, domains, device)  # before the folder: what cannot be built leaves no trace
        used = {
            "fingerprint": fingerprint_of_used(federation.local_training.examples, federation.tests),
            "classes": list(domains.classes),
        }
        kept, history = None, list[RoundRecord]()
        if folder is not None:
            _make(folder, experiment)
            if not (folder / "result.json").exists():  # a finished run is only read
                stack.enter_context(records.alone(folder))
            kept, history = _open(folder, experiment, resume, used)
            if (folder / "result.json").exists():
                return _finished(folder, history)
        state = initial_state(federation) if kept is None else restored_state(*kept, device)
        shown = is_interactive() if progress is None else progress
        watchers = [stack.enter_context(callback) for callback in [*callbacks, *([Progress()] if shown else [])]]
        for callback in watchers:
            callback.started(experiment.to_dict() | {"method": experiment.method_name}, history)
        ways = experiment.engine, experiment.workers, experiment.threads, experiment.lanes
        train = stack.enter_context(trainer(federation.local_training, *ways))
        interrupts = stack.enter_context(Interrupts())
        saver = _Saver(folder, experiment, {"used": used}, state)
        try:
            for after, record in rounds(
                federation, state, interrupts.around(train), experiment.rounds, experiment.eval_every
            ):
                state = after
                history.append(record)
                if folder is not None:
                    records.append_round(folder, asdict(record))
                interrupts.release()
                saver.due(state)
                for callback in watchers:
                    callback.round(record)
        except BaseException as stopped:
            if not interrupts.held:  # else the state's memory is in use by the round that was under way
                with nullcontext() if isinstance(stopped, KeyboardInterrupt) else suppress(OSError):
                    saver.save(state)
            raise
        module = federation.local_training.module
        final = judged_model(federation, state.model, state.terms, sorted(federation.client_domains))
        module.load_state_dict(federation.local_training.layout.unpack(final))
        result = _result(experiment, history, state, federation, domains, used)
        if folder is not None:
            records.save_tensors(folder / "model.safetensors", module.state_dict())
            records.write_text(folder / "result.json", json.dumps(result.summary, indent=2, allow_nan=False) + "\n")
        for callback in watchers:
            callback.finished(result.summary)
    return result


class _Saver:
    """Saves a run's state every so often, at its end, and when asked."""

    def __init__(self, folder: Path | None, experiment: Experiment, told: Mapping[str, Any], state: RunState) -> None:
        self.folder, self.experiment, self.told = folder, experiment, told
        self.round, self.at = state.round, time.monotonic()

    def due(self, state: RunState) -> None:
        if time.monotonic() - self.at >= self.experiment.save_seconds or state.round == self.experiment.rounds:
            self.save(state)

    def save(self, state: RunState) -> None:
        if self.folder is not None and state.round > self.round:
            arrays, described = state.to_arrays()
            records.save_state(self.folder, state.round, arrays, {**described, **self.told}, self.experiment.identity)
            self.round, self.at = state.round, time.monotonic()


def load(folder: str | Path) -> nn.Module:
    """The final model of a run, in evaluation mode."""
    path = Path(folder)
    for name in ("experiment.toml", "model.safetensors", "result.json"):
        if not (path / name).exists():
            raise ValueError(f"{path} holds no finished run: there is no {name}")
    # Whichever method trained it: one of somebody's own has only its name there.
    experiment = Experiment.of(read_toml(path / "experiment.toml") | {"method": "fedavg"})
    module = module_of(experiment, len(records.read_result(path, records.fields("classes"))["classes"]))
    values = records.load_tensors(path / "model.safetensors")
    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n")[1:2]).strip().rstrip(".")
        raise ValueError(
            f"{path / 'model.safetensors'} does not fit model '{experiment.model}', which must have changed since ({reason})"
        ) from error
    return module.eval()


def _make(folder: Path, experiment: Experiment) -> None:
    """Refuse what holds other things, and leave no trace there."""
    check_owner(folder, experiment)
    there = list(records.check_folder(folder).iterdir()) if folder.exists() else []
    others = [path for path in there if path.suffix != ".tmp"]
    if others and folder / "experiment.toml" not in others:
        raise ValueError(f"{folder} is not empty and not a run folder: give another name or --out")
    records.make_folder(folder)


def _open(folder: Path, experiment: Experiment, resume: bool, used: Used) -> tuple[Kept | None, list[RoundRecord]]:
    """Make the folder this experiment's, or go on in it: the newest whole state (or None) and its rounds."""
    check_owner(folder, experiment)  # again: another run may have had the folder until now
    if not _begun(folder):
        (folder / "rounds.jsonl").unlink(missing_ok=True)  # it may hold half a line
        records.write_text(folder / "experiment.toml", experiment.to_toml())
        return None, []
    if not resume:
        raise ValueError(f"{folder} holds this experiment already: --resume goes on with it")
    if (folder / "result.json").exists():
        return None, _history(folder)
    return _resumed(folder, experiment, used)


def _begun(folder: Path) -> bool:
    """Whether a run has left anything to go on from: what ended before its first round has not."""
    there = (folder / "result.json").exists() or any((folder / "state").glob("*.safetensors"))
    return there or bool(records.read_rounds(folder))


def check_owner(folder: Path, experiment: Experiment) -> None:
    """Refuse the folder of another experiment: its results are not this one's."""
    if not (folder / "experiment.toml").exists() or not _begun(folder):
        return
    there = read_toml(folder / "experiment.toml")
    method = there.get("method")  # it may be of somebody's own, of which the folder has only the name
    own = method == experiment.to_dict()["method"]
    if own:
        there["method"] = experiment.method
    if not (own or methods.known(str(method))) or Experiment.of(there).identity != experiment.identity:
        raise ValueError(f"{folder} belongs to another experiment: give another name or --out, or remove it")


def _resumed(folder: Path, experiment: Experiment, used: Used) -> tuple[Kept | None, list[RoundRecord]]:
    troubles: list[str] = []
    for path in records.states(folder):
        try:
            arrays, described = records.load_state(path, experiment.identity)
            if described["used"] != used:
                raise ValueError(f"the data of {folder} have changed since it was begun: remove it, or restore them")
            records.cut_rounds(folder, described["round"])
            for trouble in troubles:
                log.warning("%s; going on from %s", trouble, path.name)
            return (arrays, described), _history(folder)
        except records.BadState as trouble:
            troubles.append(str(trouble))
    if troubles:
        raise ValueError(f"no state in {folder} can be used: {'; '.join(troubles)}")
    records.cut_rounds(folder, 0)
    return None, []


def _history(folder: Path) -> list[RoundRecord]:
    try:
        return [RoundRecord(**record) for record in records.read_rounds(folder)]
    except TypeError as error:
        reason = str(error).removeprefix("RoundRecord.__init__() ")
        raise ValueError(f"{folder / 'rounds.jsonl'} is not what a run writes there ({reason})") from error


def _result(
    experiment: Experiment,
    history: list[RoundRecord],
    state: RunState,
    federation: Federation,
    domains: Domains,
    used: Used,
) -> Result:
    judged = [record for record in history if record.domains is not None]
    accuracy = last_mean([record.domains or {} for record in judged])
    clients = last_mean([record.clients or {} for record in judged])
    evenness = fairness(accuracy)
    phases = ("train", "aggregate", "evaluate")
    trained = {client: federation.client_domains.get(client, "") for client in federation.clients}
    summary = {
        "method": experiment.method_name,
        "data": experiment.data,
        "seed": experiment.seed,
        "rounds": experiment.rounds,
        "averaged": min(LAST, len(judged)),  # rounds that the accuracies are means of
        "domains": accuracy,
        **evenness,
        "clients": clients,
        "client_fairness": fairness(clients) if clients else {},
        "validation": _validation(judged),
        "trained": trained,
        **{key: value for key, value in experiment.to_dict().items() if key in ("only", "without", "pool")},
        "classes": list(domains.classes),
        "test_sizes": {d.name: len(d.test) for d in domains.domains},
        "device": str(state.model.params.device),
        "hardware": hardware_of(state.model.params.device),
        "precision": federation.local_training.precision,
        "threads": experiment.threads,
        "data_fingerprint": fingerprint(domains),
        "used_fingerprint": used["fingerprint"],
        "data_notes": list(domains.notes),
        "bytes_sent": state.sent,
        "bytes_received": state.received,
        "consistency": spread(state.aggregator),
        "seconds": {phase: sum(record.seconds[phase] for record in history) for phase in phases},
        "versions": _versions(),
    }
    return Result(
        accuracy,
        evenness["avg"],
        evenness["std"],
        evenness["worst"],
        tuple(history),
        federation.local_training.module,
        summary,
    )


def _validation(judged: list[RoundRecord]) -> dict[str, Any] | None:
    accuracy = last_mean([record.validation for record in judged if record.validation])
    return {"domains": accuracy, **fairness(accuracy)} if accuracy else None


def _finished(folder: Path, history: list[RoundRecord]) -> Result:
    """A run that needs no more running, read back."""
    summary = records.read_result(folder, NEEDED)
    found = {key: summary[key] for key in ("domains", "avg", "std", "worst")}
    return Result(**found, history=tuple(history), model=load(folder), summary=summary)


def _versions() -> dict[str, str]:
    """Asked of the modules themselves, which need not be installed to run."""
    libraries = {"torch": torch.__version__, "numpy": numpy.__version__, "numba": numba.__version__}
    return {"fedheal": __version__, "python": platform.python_version(), **libraries}


def device_of(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # Of a GPU torch knows why: no driver, no such number, in use. Of anything else it lists what no run can use.
        reason = f" ({str(error).splitlines()[0].rstrip('.')})" if name.startswith("cuda") else ""
        raise ValueError(f"device = {name!r} cannot be used here{reason}: use {_usable()}") from error
    return device


def _usable() -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return "auto or cpu (cuda and cuda:N need a GPU that torch can use, and here is none)"
    return f"auto, cpu, cuda or {'cuda:0' if gpus == 1 else f'cuda:0 to cuda:{gpus - 1}'}"


def hardware_of(device: torch.device) -> str:
    """What a device is, in words: seconds mean nothing without it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """The number of threads is a part of the experiment, since it changes sums; the process gets its own back."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
