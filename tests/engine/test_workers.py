"""Several processes give the bits of one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedheal
from fedheal import Method
from fedheal.core.layout import Layout
from fedheal.engine import Engine, open_engine
from fedheal.engine.channel import Outbox
from fedheal.engine.pooled import make_sendable
from fedheal.engine.serial import Task
from fedheal.engine.workers import WorkerPool, _start_worker, _Worker
from fedheal.local.term import Context, Term
from fedheal.methods import get
from fedheal.simulate.build import build_federation
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_round
from tiny_data import load, quick, words

TESTS = Path(__file__).parents[1]


def test_one_worker_trains_here_and_in_the_order_asked_for() -> None:
    federation = build_federation(quick(), load(), torch.device("cpu"))
    tasks = [Task("plain-1", 1), Task("dark-0", 1)]
    with open_engine(federation.local_training) as engine:
        replies = [result.reply for result in engine.train(initial_state(federation).model, (), tasks)]
    assert [reply.client for reply in replies] == ["plain-1", "dark-0"]
    assert [reply.num_examples for reply in replies] == [24, 13]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_workers_give_the_bits_of_one_in_the_same_order_and_pass_errors_on(monkeypatch) -> None:
    """The models have running statistics and tied weights; the second process trains and evaluates a part."""
    keys = {"validation": 0.25} | {
        "model": "tiny_data:tied_weights",
        "participation": 0.8,
        "dropout": 0.2,
        "augment": "crop-flip",
    }
    federation = build_federation(quick(**keys), load(), torch.device("cpu"))
    module = nn.Sequential(nn.BatchNorm2d(3), federation.local_training.module)
    local_training = replace(federation.local_training, module=module, layout=Layout.of(module))
    federation = replace(federation, local_training=local_training)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    evaluated = [*federation.tests.values(), *federation.validation.values()]
    with open_engine(local_training, workers=2, evaluated=evaluated) as engine, monkeypatch.context() as patch:
        jobs = record_jobs(patch)
        state = initial_state(federation)
        tasks = [Task(client, 1) for client in ("dark-0", "plain-1", "noisy-0")]
        list(engine.train(state.model, (), tasks))  # the other process is still starting
        assert not jobs
        wait_until_ready(engine)
        next(engine.train(state.model, (), tasks))  # whose other results nobody waits for
        results = [list(engine.train(state.model, (), tasks))]
        module.load_state_dict(before)
        ends = [run_rounds(federation, engine)]
        assert {type(job[0]) for job in jobs} == {Task, tuple}  # of training and of evaluation
        with pytest.raises(ValueError, match="do not fit this layout"):
            list(engine.train(replace(state.model, params=torch.zeros(7)), (), tasks))
        longest = Task("plain-1", 1, ({},))  # which another process gets; it has the slot of a term too many
        with pytest.raises(ValueError, match="zip") as raised:
            list(engine.train(state.model, (), [longest, *tasks]))
        assert "In a worker process:" in raised.value.__notes__[0]
        with pytest.raises(KeyError, match="nobody"):
            list(engine.train(state.model, (), [Task("nobody", 1)]))
    with open_engine(local_training) as engine:
        results.append(list(engine.train(state.model, (), tasks)))
        module.load_state_dict(before)
        ends.append(run_rounds(federation, engine))
    assert [result.reply.client for result in results[0]] == [task.client for task in tasks]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.reply.delta, second.reply.delta)
        assert first.reply.metrics == second.reply.metrics
    (second, evaluated_by_two), (first, evaluated_by_one) = ends
    assert second.keys() == first.keys()
    assert all(torch.equal(array, first[name]) for name, array in second.items())
    assert evaluated_by_two == evaluated_by_one
    assert evaluated_by_one[-1][2].keys() == {"plain", "noisy", "dark"}


def record_jobs(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that gets every job which another process is sent."""
    jobs: list[Any] = []
    send = _Worker.send_job
    patch.setattr(
        _Worker, "send_job", lambda self, work, number, job: (jobs.append(job), send(self, work, number, job))
    )
    return jobs


def wait_until_ready(engine: Engine) -> None:
    assert isinstance(engine, WorkerPool)
    while not all(worker.is_ready for worker in engine.workers):
        assert list(engine._receive_results(timeout=None)) == []


def run_rounds(federation: Federation, engine: Engine) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return the state after three rounds, and what the evaluations gave."""
    state, evaluations = initial_state(federation), []
    for _ in range(3):
        state, record = run_round(federation, state, engine)
        evaluations.append((record.domains, record.clients, record.validation))
    return dict(state.to_arrays()[0]), evaluations


@pytest.mark.slow
def test_a_thousand_clients_need_few_open_files() -> None:
    """Torch would open two files for each client's examples."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        keys = {
            "data": "tiny_data:load_many_clients",
            "model": "tiny_data:wide",
            "method": "scaffold",
            "participation": 0.05,
        }
        result = fedheal.run(quick(workers=2, rounds=1, **keys), progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.history[-1].replied == 50


class NotUnpicklable(Exception):
    """Cannot be unpickled: it needs two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


@pytest.mark.parametrize(("error", "kind"), [(KeyError("a"), KeyError), (NotUnpicklable("a", "b"), RuntimeError)])
def test_an_error_that_cannot_be_sent_is_described(error: Exception, kind: type[Exception]) -> None:
    sendable = make_sendable(error)
    assert type(sendable) is kind
    assert "a" in str(sendable)
    assert sendable.__notes__[0].startswith("In a worker process:\n")


class Sendable(Term):
    """A term that only this process can import, as if it were defined in a notebook."""

    def grad(self, ctx: Context) -> None:
        pass


class Unsendable(Sendable):
    def __init__(self) -> None:
        self.kept = lambda: None


@pytest.mark.slow
@pytest.mark.parametrize(("term", "message"), [(Sendable, "its error is above"), (Unsendable, "pickle")])
def test_a_term_that_no_other_process_can_have_is_a_sentence(monkeypatch, term: type[Term], message: str) -> None:
    if term is Sendable:
        monkeypatch.setattr(Sendable, "__module__", "a_notebook")
        monkeypatch.setitem(sys.modules, "a_notebook", sys.modules[__name__])
    own = Method((term(),), get("fedavg").aggregator, "mine")
    with pytest.raises(
        ChildProcessError,
        match=rf"workers = 2: a worker process could not start .*\(.*{message}.*\)\. .*workers=1",
    ) as raised:
        fedheal.run(quick(method=own, workers=2, rounds=1_000_000), progress=False)  # ends when the worker has failed
    assert "--resume" not in str(raised.value)


@pytest.mark.slow
def test_a_worker_whose_run_is_killed_at_the_start_ends_without_a_traceback(capfd) -> None:
    worker = _start_worker(Outbox(), Outbox(), 1)
    worker.channel.connection.close()
    worker.process.join(120)
    assert worker.process.exitcode == 0
    assert capfd.readouterr().err == ""


def list_children(process: int) -> list[int]:
    """Return the living child processes of a process."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if int(parent) == process and state != "Z":
            pids.append(int(name.split()[0]))
    return pids


def is_ready(process: int) -> bool:
    """Return whether a worker has mapped the shared memory with the examples."""
    with suppress(OSError):
        return "memfd:fedheal" in Path(f"/proc/{process}/maps").read_text()
    return False


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedheal", "run", *words("rounds=100000", "workers=2"), "--quiet"]
    there = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(there)}
    process = subprocess.Popen([*command, "--out", str(tmp_path / "run")], env=environment)
    deadline = time.monotonic() + 90
    while not any(is_ready(worker) for worker in list_children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = list_children(process.pid)
    try:
        assert len(workers) >= 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [worker for worker in workers if is_alive(worker)] == []
    finally:
        process.kill()
        process.wait()
        for worker in workers:
            if is_alive(worker):
                os.kill(worker, signal.SIGKILL)
