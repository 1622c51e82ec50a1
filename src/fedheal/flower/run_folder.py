"""A federation's run folder: the project's own format, so that a report shows it as it shows a simulation.

    federation.toml     how the strategy was set up (a simulation has experiment.toml here)
    rounds.jsonl        as in `fedheal.runs.folder`, and in each line the domains of the round's clients as `client_domains`
    state/, model.safetensors, result.json        as in `fedheal.runs.folder`

The state is saved after every round, before its line in `rounds.jsonl` can be missed: a resume repeats at most the round that
was under way. A model and a result are there only while they are of all the rounds in `rounds.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flwr
import tomli_w
import torch
from filelock import BaseFileLock

from fedheal.aggregate.masks.directions import spread
from fedheal.core.layout import Layout
from fedheal.core.state import RunState, restored_state
from fedheal.runs import folder as records
from fedheal.runs.lock import acquire_lock
from fedheal.runs.schema import RoundRecord
from fedheal.runs.summary import summarise_run
from fedheal.version import __version__

log = logging.getLogger("flwr.fedheal")

Saved = tuple[RunState, dict[str, Any], list[RoundRecord]]


def describe_round(record: RoundRecord) -> str:
    """Return a round in one line, with the worst-served client by name."""
    line = f"{record.replied} of {record.cohort} nodes replied, {len(record.report['skipped'])} left out"
    line += "" if record.train_loss is None else f", training loss {record.train_loss:.3f}"
    if record.domains and record.clients:
        mean = sum(record.domains.values()) / len(record.domains)
        worst, accuracy = min(record.clients.items(), key=lambda pair: pair[1])
        line += f", accuracy {mean:.1f} %, worst served: '{worst}' with {accuracy:.1f} %"
    return line


# What a folder's rounds were made with, and those that follow must be: the model's shapes, and of the settings these.
DECISIVE = ("method", "algorithm", "terms", "seed", "server", "masked", "tau")

_held: dict[Path, BaseFileLock] = {}  # this process's locks


class Folder:
    """One federation's run folder."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.resume = path, resume
        self.described: dict[str, Any] = {}
        self.owner = ""

    def open(self, described: Mapping[str, Any], layout: Layout) -> Saved | None:
        """Make the folder this federation's, or read what it holds; `None` where it holds no round."""
        self.described = dict(described)
        shapes = [(e.name, e.kind, e.shape, str(e.dtype)) for e in layout.entries]
        decisive = [self.described.get(key) for key in DECISIVE]
        self.owner = hashlib.sha256(json.dumps([decisive, shapes]).encode()).hexdigest()
        toml = self.path / "federation.toml"
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"folder = {str(self.path)!r} is a file: give another folder")
        saved = None
        if self.path.exists() and any(path.suffix != ".tmp" for path in self.path.iterdir()):
            if not toml.exists():
                raise ValueError(f"{self.path} is not empty and not a federation's run folder: give another folder")
            if not self.resume:
                raise ValueError(f"{self.path} holds a federation already: resume=True goes on with it")
            self._check_same(toml)
            self._lock()
            saved = self._newest()
        else:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"folder = {str(self.path)!r} cannot be made: {error}") from None
            self._lock()
        records.write_text(toml, tomli_w.dumps(self.described))
        return saved

    def _check_same(self, toml: Path) -> None:
        """Whose a state is its own header says; here one can also read what is different."""
        try:
            before = tomllib.loads(toml.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{toml} is not TOML: {error}") from None
        now = tomllib.loads(tomli_w.dumps(self.described))
        for key in DECISIVE:
            if before.get(key) != now.get(key):
                raise ValueError(
                    f"{self.path} holds a federation with {key} = {before.get(key)!r}, not {now.get(key)!r}: go on as it "
                    "began, or give another folder"
                )

    def done(self) -> int:
        """How many rounds the folder holds."""
        return max((int(path.stem) for path in records.list_checkpoints(self.path) if path.stem.isdigit()), default=0)

    def _lock(self) -> None:
        """A ServerApp that was thought dead must not write into the run that goes on; one of this process, let go of, may."""
        self.release()
        _held[self.path.resolve()] = acquire_lock(self.path)

    def _newest(self) -> Saved | None:
        troubles: list[str] = []
        for path in records.list_checkpoints(self.path):
            try:
                arrays, described = records.load_checkpoint(path, self.owner)
                self._cut(described["round"])
            except records.CheckpointError as trouble:
                troubles.append(str(trouble))
                continue
            for said in troubles:
                log.warning("%s; going on from %s", said, path.name)
            state = restored_state(arrays, described, torch.device("cpu"))
            return state, described["flower"], records.read_rounds(self.path)
        if troubles:
            raise ValueError(f"no state in {self.path} can be used: {'; '.join(troubles)}")
        self._cut(0)
        return None

    def _cut(self, rounds: int) -> None:
        if len(records.read_rounds(self.path)) > rounds:
            self._drop_result()
        records.truncate_rounds(self.path, rounds)

    def _drop_result(self) -> None:
        """What an earlier end left behind is of other rounds than the folder is about to hold."""
        for name in ("result.json", "model.safetensors"):
            (self.path / name).unlink(missing_ok=True)

    def save(self, state: RunState, record: RoundRecord, told: Mapping[str, Any]) -> None:
        """A round's line, then the state that counts it: a crash in between costs that round, no more."""
        self._drop_result()
        records.append_round(self.path, record)
        arrays, described = state.to_arrays()
        records.save_checkpoint(self.path, state.round, arrays, described | {"flower": dict(told)}, self.owner)

    def conclude(
        self,
        layout: Layout,
        state: RunState,
        history: Sequence[RoundRecord],
        client_domains: Mapping[str, str],
        tests: Mapping[str, float],
    ) -> None:
        """The final model, and the result where the clients judged it."""
        records.save_tensors(self.path / "model.safetensors", layout.unpack(state.model))
        if any(record.domains for record in history):
            records.write_result(self.path, summary(self.described, state, history, client_domains, tests))

    def release(self) -> None:
        """Let other processes in."""
        lock = _held.pop(self.path.resolve(), None)
        if lock is not None:
            lock.release()


def summary(
    described: Mapping[str, Any],
    state: RunState,
    history: Sequence[RoundRecord],
    client_domains: Mapping[str, str],
    tests: Mapping[str, float],
) -> dict[str, Any]:
    """What `result.json` holds: a simulation's fields, drop-outs and clients left out."""
    evaluated = sorted({domain for record in history for domain in record.domains or {}})
    return summarise_run(
        history,
        sort_names=True,
        **{key: described[key] for key in ("method", "algorithm", "data", "seed")},
        rounds=state.round,
        trained=dict(sorted(client_domains.items())),
        only=[],
        without=[],
        pool=False,
        classes=[],
        test_sizes={d: round(sum(n for c, n in tests.items() if client_domains.get(c) == d)) for d in evaluated},
        dropouts=sum(record.cohort - record.replied for record in history),
        skipped=sum(len(record.report.get("skipped", {})) for record in history),
        device="clients'",
        hardware="clients'",
        precision="fp32",
        threads=torch.get_num_threads(),
        data_fingerprint="",
        used_fingerprint="",
        data_notes=[],
        consistency=spread(state.aggregator),
        bytes_sent=state.sent,
        bytes_received=state.received,
        versions={
            "fedheal": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "flwr": flwr.__version__,
        },
    )
