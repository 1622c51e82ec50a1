"""What an actor of `ray_actors` does: a process on some machine of a Ray cluster."""

from __future__ import annotations

import io
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedheal.core.errors import format_error
from fedheal.core.layout import Packed
from fedheal.data.domains import Split
from fedheal.engine.channel import Parcel, pack_parcel, unpack_parcel
from fedheal.engine.pooled import Prepare, Setup, make_sendable
from fedheal.engine.precision import use_precision
from fedheal.engine.serial import ClientResult, LocalTraining, Shared, Task
from fedheal.engine.workers import keep_freed_memory
from fedheal.version import __version__

if TYPE_CHECKING:
    from fedheal.engine import Engine


class Host(NamedTuple):
    """Where an actor runs."""

    address: str
    pid: int
    instructions: str  # of its CPU, such as AVX2: others may sum in another order


class Disconnected(Exception):
    """The machine of an actor has lost the cluster, and the actor will be lost, too."""


class Trainer:
    """An actor's own side: a process on some machine of the cluster."""

    def set_up(self, setup: list[Any]) -> Host | Exception:
        """Load the module and the terms; return where that was."""
        import ray

        try:
            versions, options, saved = _fetch(setup[0])
            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            if versions != (there := _list_versions()):
                raise ValueError(
                    f"machine {address} of the Ray cluster has {there}, and this run has {versions}: install the same versions"
                )
            keep_freed_memory()
            torch.set_num_threads(options["threads"])
            loaded = _load(saved, options["device"], address)
            self.local_training = replace(loaded, device=torch.device(options["device"]))
            self.stack = ExitStack()
            self.engine: Engine | None = None  # made with the first clients' examples
            self.stack.enter_context(
                use_precision(loaded.precision, options["deterministic"], self.local_training.device)
            )
            self.evaluated: dict[int, Split] = {}
            self.common: tuple[Any, Any] = (None, None)
            return Host(address, os.getpid(), torch.backends.cpu.get_cpu_capability())
        except ValueError as error:  # ours, a sentence
            return error
        except Exception as error:
            return make_sendable(error)

    def work(self, prepare: Prepare, common: list[Any], data: dict[Hashable, Any], job: Parcel) -> Parcel | Exception:
        """Do a job; fetch what this process does not have yet."""
        try:
            for key, reference in data.items():
                self._hold(key, reference)
            if self.common[0] != common[0]:
                setup = Setup(self.local_training, self.evaluated, self._train)
                self.common = common[0], prepare(setup, *unpack_parcel(_fetch(common[0])))
            return pack_parcel(self.common[1](unpack_parcel(job)))
        except Exception as error:
            return make_sendable(error)

    def _hold(self, key: Hashable, reference: Any) -> None:
        """Keep the examples of a client or a split in this process's memory."""
        training = self.local_training
        if isinstance(key, int) and key not in self.evaluated:
            (self.evaluated[key],) = unpack_parcel(_fetch(reference))
        elif isinstance(key, str) and key not in training.examples:
            training.examples[key], validation = unpack_parcel(_fetch(reference))
            if validation is not None:
                training.validation[key] = validation

    def _train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        """Train with the engine that this machine's device would have by itself."""
        from fedheal.engine import open_engine

        if self.engine is None:
            self.engine = self.stack.enter_context(open_engine(self.local_training))
        return self.engine.train(model, shared, tasks)


def _fetch(reference: Any) -> Any:
    """Return a value from the cluster's memory. Raise Disconnected if this machine's part of the cluster was killed."""
    import ray

    try:
        return ray.get(reference)
    except (OSError, ray.exceptions.RayError) as error:
        raise Disconnected(format_error(error)) from error


def _load(saved: bytes, device: str, address: str) -> LocalTraining:
    """Load the module and the terms. A process sees only the GPU that Ray gave it, as cuda:0."""
    try:
        loaded: LocalTraining = torch.load(io.BytesIO(saved), device, weights_only=False)
    except Exception as error:  # a user's class may raise anything
        raise ValueError(
            f"machine {address} of the Ray cluster cannot load this model and method ({format_error(error)}): install their "
            "modules there"
        ) from None
    return loaded


def _list_versions() -> str:
    return f"fedheal {__version__} and torch {torch.__version__}"


def describe_setup(ray: Any, local_training: LocalTraining, threads: int) -> tuple[str, dict[str, Any], bytes]:
    """Return what an actor starts with. Classes that are defined in a notebook or the main script travel with it."""
    saved = io.BytesIO()
    try:
        torch.save(replace(local_training, examples={}, validation={}), saved, pickle_module=ray.cloudpickle)
    except Exception as error:  # a user's class may raise anything when it is pickled
        raise ChildProcessError(
            f"engine = 'ray': this model and method cannot be sent to another process ({format_error(error)}); "
            "engine=serial needs not send them"
        ) from error
    device, deterministic = local_training.device.type, torch.are_deterministic_algorithms_enabled()
    return _list_versions(), {"threads": threads, "device": device, "deterministic": deterministic}, saved.getvalue()
