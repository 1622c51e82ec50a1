"""A federation's run folder: the project's own format, so that a report shows it like a simulation.

    federation.toml     how the strategy was set up (a simulation has experiment.toml here)
    rounds.jsonl        as in `fedheal.runs.folder`; each line also has the domains of the round's clients
    state/, model.safetensors, result.json        as in `fedheal.runs.folder`

A round's checkpoint is written after its line, in the background while clients train; the next server step waits for it. With
`save_seconds` rounds in between have none, and a resume repeats them. The checkpoint decides: later and damaged lines are cut,
and the run continues from the state.
Only the owner may read what is written here; a folder that exists keeps its own permissions. There is a model and a result
only while they belong to all the rounds in `rounds.jsonl`.
"""

import hashlib
import json
import logging
import math
import platform
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli_w
import torch
from filelock import BaseFileLock

from fedheal.aggregate.masks.sign_agreement import bin_consistency
from fedheal.core.checks import check_switch
from fedheal.core.layout import Layout
from fedheal.core.state import RunState
from fedheal.federation.file_modes import keep_private
from fedheal.runs import folder as files
from fedheal.runs.lock import acquire_lock
from fedheal.runs.resume import Checkpoint, drop_result, load_newest_checkpoint
from fedheal.runs.schema import RoundRecord
from fedheal.runs.summary import summarise_run
from fedheal.version import __version__

# Settings that the later rounds of a folder must share with the earlier ones; so must the model's shapes.
DECISIVE_SETTINGS = ("method", "algorithm", "terms", "seed", "server", "masked", "tau")

TENSORS = "tensors"  # the model's, by name: dtype and shape

_locks: dict[Path, BaseFileLock] = {}  # held by this process


def check_folder_settings(folder: object, resume: bool) -> None:
    """Raise ValueError if the folder is no path, or if there is none to resume from."""
    is_path = isinstance(folder, str | PathLike) and str(folder) and "\0" not in str(folder)
    if folder is not None and not is_path:
        raise ValueError(f"folder = {folder!r}: use a path such as 'runs/hospitals', or leave it out")
    try:
        if folder is not None:
            Path(folder).expanduser().exists()  # type: ignore[arg-type]
    except (OSError, RuntimeError) as error:  # a name that is too long, or a home that nobody has
        shown = f"folder = {str(folder)[:80]!r}{'...' * (len(str(folder)) > 80)}"
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{shown} cannot be used ({reason}): name another folder") from None
    check_switch("resume", resume)
    if resume and folder is None:
        raise ValueError("resume = True needs folder: give the folder of the run to continue, or leave out resume")


def _describe_tensor(name: str, tensors: Mapping[str, str]) -> str:
    return f"'{name}' of {tensors[name]}" if name in tensors else f"no '{name}'"


@dataclass
class KnownClients:
    """What the server remembers about its clients: JSON in the checkpoint."""

    accepted: dict[str, int] = field(default_factory=dict)  # client -> the last round that counted
    client_domains: dict[str, str] = field(default_factory=dict)
    test_examples: dict[str, float] = field(default_factory=dict)  # that it last evaluated with


K = TypeVar("K", bound=KnownClients)


@dataclass(frozen=True)
class Framework(Generic[K]):
    """The framework that carries the messages; `key` is where a checkpoint has what the server knows about clients."""

    key: str
    versions: Mapping[str, str]
    restore_clients: Callable[..., K]  # from what a checkpoint holds
    log: logging.Logger


class RunFolder(Generic[K]):
    """One federation's run folder."""

    def __init__(self, path: Path, resume: bool, framework: Framework[K], save_seconds: float = 0.0) -> None:
        self.path, self.resume, self.framework, self.save_seconds = path.expanduser(), resume, framework, save_seconds
        self.settings: dict[str, Any] = {}
        self.owner = ""
        self.is_resumed = False  # whether the folder held a federation, if only one that finished no round
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._write_unsaved: Callable[[], None] | None = None  # of the last round, if it was not due
        self._saved_at = -math.inf

    def open(self, settings: Mapping[str, Any], layout: Layout) -> tuple[RunState, K, list[RoundRecord]] | None:
        """Create the folder, or resume from it. Raise ValueError if it cannot be used.

        Returns:
            The newest state, what the server knew about clients, and the rounds; None if the folder holds no round.
        """
        tensors = {e.name: f"{str(e.dtype).removeprefix('torch.')} {list(e.shape)}" for e in layout.entries}
        self.settings = {**settings, TENSORS: tensors}
        self.settle()
        shapes = [(e.name, e.kind, e.shape, str(e.dtype)) for e in layout.entries]
        decisive = [self.settings.get(key) for key in DECISIVE_SETTINGS]
        self.owner = hashlib.sha256(json.dumps([decisive, shapes]).encode()).hexdigest()
        files.make_folder(files.check_folder(self.path).parent)
        with keep_private():
            return self._open()

    def _open(self) -> tuple[RunState, K, list[RoundRecord]] | None:
        toml = self.path / "federation.toml"
        files.make_folder(self.path)
        is_used = any(path.suffix != ".tmp" for path in self.path.iterdir())
        if is_used:
            if not toml.exists():
                raise ValueError(f"{self.path} is not empty and not a federation's run folder: give another folder")
            if not self.resume:
                raise ValueError(f"{self.path} already holds a federation: set resume=True to continue it")
            self._check_settings(toml)
        self.is_resumed = is_used
        self.release()  # an earlier lock of this process is replaced
        try:  # against a ServerApp that was thought dead, for example
            _locks[self.path.resolve()] = acquire_lock(self.path)
        except OSError as error:  # the disk is read-only, for example
            remedy = "restore access, or name another folder"
            raise ValueError(f"{self.path} cannot be written ({error.strerror}): {remedy}") from error
        checkpoint = self._load_checkpoint() if is_used else None
        files.write_text(toml, tomli_w.dumps(self.settings))
        if checkpoint is None:
            return None
        arrays, described = checkpoint
        state = RunState.from_arrays(arrays, described, torch.device("cpu"))
        history = files.read_rounds(self.path)
        lost = sorted(set(range(1, state.round + 1)) - {record.round for record in history})
        if lost:
            numbers = ", ".join(map(str, lost[:20])) + (", ..." if len(lost) > 20 else "")
            advice = "the state has all rounds, so the run continues; reports lack these"
            self.framework.log.warning(
                "%s: damaged or missing records were cut, of rounds %s: %s", self.path / "rounds.jsonl", numbers, advice
            )
        return state, self.framework.restore_clients(**described[self.framework.key]), history

    def _load_checkpoint(self) -> Checkpoint | None:
        # The second round's record is written after the first round's checkpoint, whatever `save_seconds` is.
        return load_newest_checkpoint(self.path, self.owner, self.framework.log, allow_gaps=True, max_unsaved=1)

    def _check_settings(self, toml: Path) -> None:
        """Raise ValueError that names a changed setting or tensor. The owner of checkpoints is checked too, without names."""
        before = files.read_toml(toml)
        now = tomllib.loads(tomli_w.dumps(self.settings))
        for key in ("framework", *DECISIVE_SETTINGS):
            if before.get(key) != now.get(key):
                problem = f"{self.path} holds a federation with {key} = {before.get(key)!r}, not {now.get(key)!r}"
                raise ValueError(f"{problem}: restore that setting, or give another folder")
        old, new = before.get(TENSORS), now[TENSORS]
        if not isinstance(old, dict):  # an older folder lacks them
            return
        for name in [*new, *(old.keys() - new.keys())]:
            if old.get(name) != new.get(name):
                problem = (
                    f"whose model has {_describe_tensor(name, old)}, and this one has {_describe_tensor(name, new)}"
                )
                raise ValueError(
                    f"{self.path} holds a federation {problem}: start from that model, or give another folder"
                )

    def count_rounds(self) -> int:
        return max((int(path.stem) for path in files.list_checkpoints(self.path) if path.stem.isdecimal()), default=0)

    def release(self) -> None:
        if (lock := _locks.pop(self.path.resolve(), None)) is not None:
            lock.release()

    @keep_private()
    def save_round(self, state: RunState, record: RoundRecord, clients: K, is_due: bool = False) -> None:
        """Write a round's line, and start to write its checkpoint if `save_seconds` have passed since the last, or `is_due`.

        The checkpoint is written from the state's own memory: call `settle` before that is used again.
        """
        self.settle()
        with self._explain_failure(f"round {record.round} was not saved"):
            drop_result(self.path)
            files.append_round(self.path, record)
            (self.path / "state").mkdir(exist_ok=True)
        arrays, described = state.to_arrays()
        described |= {self.framework.key: asdict(clients)}  # a copy
        self._write_unsaved = partial(
            files.save_checkpoint, self.path, state.round, arrays, described, self.owner, mode=0o600
        )
        if is_due or time.monotonic() - self._saved_at >= self.save_seconds:
            self._start_writing()

    def _start_writing(self) -> None:
        assert self._write_unsaved is not None
        self._writing, self._write_unsaved = self._pool.submit(self._write_unsaved), None
        self._saved_at = time.monotonic()

    def settle(self) -> None:
        """Wait for the checkpoint under way, and give up one that was not due. Raise OSError if it could not be written."""
        writing, self._writing, self._write_unsaved = self._writing, None, None
        if writing is not None:
            with self._explain_failure("a checkpoint was not written"):
                writing.result()

    @contextmanager
    def _explain_failure(self, problem: str) -> Iterator[None]:
        """Raise an OSError of this block again, with the problem and the remedy."""
        try:
            yield
        except OSError as error:
            is_saved = bool(files.list_checkpoints(self.path))
            state = "the last checkpoint is whole" if is_saved else "no checkpoint exists yet"
            remedy = f"make room or restore access, then resume: {state}"
            raise OSError(error.errno, f"{self.path}: {problem} ({error}); {remedy}") from error

    def flush(self) -> None:
        """Write the last round's checkpoint even if it is not due, and wait for it."""
        if self._write_unsaved is not None:
            self._start_writing()
        self.settle()

    @keep_private()
    def replace_last_round(self, record: RoundRecord) -> None:
        """Write the last round's line again: its model was evaluated after it was saved."""
        with self._explain_failure(f"round {record.round} was not saved with its evaluation"):
            files.replace_last_round(self.path, record)

    @keep_private()
    def write_result(self, layout: Layout, state: RunState, history: Sequence[RoundRecord], clients: K) -> None:
        """Write the final model, and the result if clients evaluated a model."""
        with self._explain_failure("the result was not written"):
            files.save_tensors(self.path / "model.safetensors", layout.unpack(state.model))
            if any(record.domains for record in history):
                summary = _summarise(self.settings, state, history, clients, self.framework.versions)
                files.write_result(self.path, summary)


def _summarise(
    settings: Mapping[str, Any],
    state: RunState,
    history: Sequence[RoundRecord],
    clients: KnownClients,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return what `result.json` holds: a simulation's fields, drop-outs and skipped clients."""
    client_domains = clients.client_domains
    test_sizes = dict.fromkeys(sorted({domain for record in history for domain in record.domains or {}}), 0.0)
    for client, num_examples in clients.test_examples.items():
        if client_domains.get(client) in test_sizes:
            test_sizes[client_domains[client]] += num_examples
    # A simulation's choices that a federation does not have, and what only its clients know.
    without_choices = {"only": [], "without": [], "pool": False, "classes": [], "data_notes": [], "precision": "fp32"}
    with_clients = {"device": "clients'", "hardware": "clients'", "data_fingerprint": "", "used_fingerprint": ""}
    return summarise_run(
        history,
        sort_names=True,
        **{key: settings[key] for key in ("method", "algorithm", "data", "seed")},
        rounds=state.round,
        trained=dict(sorted(client_domains.items())),
        test_sizes={domain: round(size) for domain, size in test_sizes.items()},
        dropouts=sum(record.cohort - record.replied for record in history),
        skipped=sum(len(record.report.get("skipped", {})) for record in history),
        threads=torch.get_num_threads(),
        consistency=bin_consistency(state.aggregator),
        bytes_sent=state.sent,
        bytes_received=state.received,
        versions={"fedheal": __version__, "python": platform.python_version(), "torch": torch.__version__, **versions},
        **without_choices,
        **with_clients,
    )
