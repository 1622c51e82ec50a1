"""One run on several machines: actors of a Ray cluster train and evaluate, with the results of one process.

An actor has the module and the terms from the start. It gets a client's examples, or those of a test split, when it first
needs them, and keeps them. So a client goes to the actor that has its examples, unless another one is idle. A round sends the
model and the terms' shared values once to each actor, and a client's slots with its task. Updates, slots and messages come
back.

Nothing that a later round needs is with an actor alone: this process has the slots and the examples. If an actor is lost,
others train its clients again, with the same result, and a new actor is started.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from fedheal.core.errors import format_count, format_error
from fedheal.data.domains import Split
from fedheal.engine.channel import Parcel, pack_parcel, unpack_parcel
from fedheal.engine.pooled import PooledEngine, Prepare, prepare_training
from fedheal.engine.ray_trainer import Disconnected, Host, Trainer, describe_setup
from fedheal.engine.serial import LocalTraining
from fedheal.engine.workers import JOBS_AHEAD

log = logging.getLogger("fedheal")

MOST_LOSSES = 3  # of actors that do the same job, or that start one after another
START_SECONDS = 300  # that a run waits for its first actor


class ActorPool(PooledEngine):
    """An engine that trains and evaluates in actors of a Ray cluster."""

    def __init__(
        self, ray: Any, local_training: LocalTraining, workers: int, threads: int, evaluated: Sequence[Split] = ()
    ) -> None:
        """Take the connected module `ray`; `workers` is how many actors, 0 for as many as the cluster has room for."""
        self.ray, self.on_gpu = ray, local_training.device.type == "cuda"
        room = count_room(ray.nodes(), threads, self.on_gpu)
        if max(workers, 1) > room:
            unit = "GPU" if self.on_gpu else format_count(threads, "CPU")
            raise ValueError(
                f"workers = {workers}: the Ray cluster has room for {room} of {unit} each; use fewer, or add machines"
            )
        super().__init__(local_training, workers or room, threads, evaluated)
        self.setup = self._store(describe_setup(ray, local_training, threads))
        self.actors: list[_Actor] = []
        self.data: dict[Hashable, Any] = {}  # references to examples in the cluster's memory
        self.homes: dict[Hashable, _Actor] = {}  # which actor did a job with these examples first
        self.failed_starts = 0

    def __exit__(self, *error: object) -> None:
        for actor in self.actors:
            self._end(actor)

    def _group(self, order: Sequence[int]) -> list[list[int]]:
        """Return one job per client, or one per GPU, which trains several clients side by side."""
        number = min(self.number, len(order)) if self.on_gpu else len(order)
        return [list(order[start::number]) for start in range(number)]

    def _run(self, prepare: Prepare, common: tuple[Any, ...], jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        work = _Work(prepare, self._store(pack_parcel(common)), jobs)
        for number, job in enumerate(jobs):
            work.queues.setdefault(self.homes.get(_identify(job)), deque()).append(number)
        for actor in self.actors:
            actor.jobs.clear()  # results that are no longer needed
        while len(self.actors) < self.number:
            self.actors.append(self._start())
        for _ in range(len(jobs)):
            job, parcel = self._wait_for_result(work)
            with torch.cuda.device(self.local_training.device) if self.on_gpu else nullcontext():
                result = unpack_parcel(parcel)
            yield job, result

    def _wait_for_result(self, work: _Work) -> tuple[int, Parcel]:
        """Return the next result and its job's number; replace actors that are lost meanwhile."""
        while True:
            for ahead in range(JOBS_AHEAD):
                for actor in self.actors:
                    if actor.starting is None and len(actor.jobs) == ahead:
                        self._send_next(actor, work)
            actor, reference = self._wait()
            try:
                value = self.ray.get(reference)
                if isinstance(value, Exception):
                    raise value
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except (self.ray.exceptions.RayError, Disconnected) as error:
                self._replace(actor, work, error)
                continue
            if reference != actor.starting:
                return actor.jobs.pop(reference), value
            actor.starting, actor.host, self.failed_starts = None, value, 0
            _compare_cpus(value)

    def _wait(self) -> tuple[_Actor, Any]:
        """Return a reference that is ready, and its actor."""
        owners = {reference: actor for actor in self.actors for reference in actor.list_references()}
        is_busy = any(actor.jobs for actor in self.actors)
        ready, _ = self.ray.wait(list(owners), num_returns=1, timeout=None if is_busy else START_SECONDS)
        if not ready:
            raise ChildProcessError(
                f"no worker of the Ray cluster started in {START_SECONDS} s: `ray status` shows whether other jobs use its "
                "machines; resume with --resume"
            )
        return owners[ready[0]], ready[0]

    def _send_next(self, actor: _Actor, work: _Work) -> None:
        """Give an actor its next job, if there is one for it."""
        number = work.choose_job(actor)
        if number is None:
            return
        job = work.jobs[number]
        self.homes.setdefault(_identify(job), actor)
        keys = self._list_keys(job) if work.prepare is prepare_training else {split for _, split, _ in job}
        data = {key: self._place(key) for key in keys}
        # Ray would fetch references that are arguments themselves; the actor has most of them already.
        reference = actor.handle.work.remote(work.prepare, [work.common], data, pack_parcel(job))
        actor.jobs[reference] = number

    def _list_keys(self, tasks: Sequence[Any]) -> list[str]:
        """Return the clients whose examples a job needs: on a GPU all of them, since lanes have them on the device."""
        return list(self.local_training.examples) if self.on_gpu else [task.client for task in tasks]

    def _place(self, key: Hashable) -> Any:
        """Return the reference to a client's examples (by its name) or a split's (by its number)."""
        if key not in self.data:
            training = self.local_training
            examples = (
                (self.evaluated[key],)
                if isinstance(key, int)
                else (training.examples[str(key)], training.validation.get(str(key)))
            )
            self.data[key] = self._store(pack_parcel(examples))
        return self.data[key]

    def _store(self, value: object) -> Any:
        """Return a reference to a value in the cluster's memory."""
        try:
            return self.ray.put(value)
        except (self.ray.exceptions.ObjectStoreFullError, self.ray.exceptions.OutOfDiskError) as error:
            raise OSError(
                f"the Ray cluster has no room for the run's data ({format_error(error)}): start it with more, by `ray start "
                "--object-store-memory BYTES`"
            ) from None

    def _start(self) -> _Actor:
        resources = {"num_cpus": self.threads, "num_gpus": int(self.on_gpu)}
        handle = self.ray.remote(Trainer).options(**resources).remote()
        return _Actor(handle, handle.set_up.remote([self.setup]))

    def _end(self, actor: _Actor) -> None:
        with suppress(self.ray.exceptions.RayError):
            self.ray.kill(actor.handle)

    def _replace(self, actor: _Actor, work: _Work, error: Exception) -> None:
        """Start another actor in the place of one that was lost, and let others do its jobs."""
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        reason = lines[-1] if "creation task" in lines[0] else lines[0]
        self.actors.remove(actor)
        self._end(actor)
        self.homes = {key: home for key, home in self.homes.items() if home is not actor}
        unfinished = list(actor.jobs.values())
        if actor.starting is not None:
            self.failed_starts += 1
            losses, what = self.failed_starts, "starting"
            if losses >= MOST_LOSSES and any(other.starting is None for other in self.actors):
                self.number, self.failed_starts = self.number - 1, 0
                log.warning("a worker cannot be replaced (%s): going on with %d", reason, self.number)
                return
        else:
            work.losses.update(unfinished[:1])  # the others had not begun
            losses = work.losses[unfinished[0]]
            what = work.describe_job(unfinished[0])
        if losses >= MOST_LOSSES:
            raise ChildProcessError(
                f"{losses} workers of the Ray cluster were lost while {what}, perhaps for lack of memory, or because a machine "
                f"lacks fedheal ({reason}); saved rounds are not lost: resume with --resume"
            ) from None
        if actor.host is not None:
            log.warning("a worker on %s was lost while %s (%s): others take over", actor.host.address, what, reason)
        work.queues.setdefault(None, deque()).extendleft(reversed(unfinished))
        self.actors.append(self._start())


@dataclass(eq=False)
class _Actor:
    """An actor, as the process of the run sees it."""

    handle: Any
    starting: Any  # the reference to its start, None once that has ended
    jobs: dict[Any, int] = field(default_factory=dict)  # references to results -> the numbers of the jobs
    host: Host | None = None

    def list_references(self) -> list[Any]:
        return list(self.jobs) if self.starting is None else [self.starting]


@dataclass
class _Work:
    """The jobs of one phase of a round, and what all of them have in common."""

    prepare: Prepare
    common: Any  # a reference
    jobs: Sequence[Any]
    queues: dict[_Actor | None, deque[int]] = field(default_factory=dict)  # open jobs, by the actor with the examples
    losses: Counter[int] = field(default_factory=Counter)  # how many actors were lost while they did a job

    def choose_job(self, actor: _Actor) -> int | None:
        """Return a job whose examples the actor has, or that no actor has; an idle actor takes one of another."""
        for queue in (self.queues.get(actor), self.queues.get(None)):
            if queue:
                return queue.popleft()
        others = max(self.queues.values(), key=len, default=None)
        return others.pop() if others and not actor.jobs else None

    def describe_job(self, number: int) -> str:
        if self.prepare is not prepare_training:
            return "evaluating"
        clients = [task.client for task in self.jobs[number]]
        return f"training client '{clients[0]}'" + (f" and {len(clients) - 1} more" if clients[1:] else "")


def count_room(nodes: Sequence[dict[str, Any]], threads: int, on_gpu: bool) -> int:
    """Return how many actors a cluster's machines can hold, of so many threads each, or with a GPU each.

    >>> nodes = [{"Alive": True, "Resources": {"CPU": 5.0}}, {"Alive": True, "Resources": {"CPU": 1.0, "GPU": 4.0}}]
    >>> count_room(nodes, 2, on_gpu=False), count_room(nodes, 1, on_gpu=True)
    (2, 1)
    """
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    by_cpu = [int(machine.get("CPU", 0)) // threads for machine in machines]
    by_gpu = [int(machine.get("GPU", 0)) if on_gpu else room for machine, room in zip(machines, by_cpu, strict=True)]
    return sum(map(min, by_cpu, by_gpu))


def _compare_cpus(host: Host) -> None:
    here = torch.backends.cpu.get_cpu_capability()
    if host.instructions != here:
        said = "the CPU of %s uses %s, this one %s: results may differ in the last bits"
        log.warning(said, host.address, host.instructions, here)


def _identify(job: Sequence[Any]) -> Hashable:
    """Return what stays the same of a job from round to round: its first client, or where its first batch is."""
    first = job[0]
    return first[1:] if isinstance(first, tuple) else first.client
