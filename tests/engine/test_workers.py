"""Several processes give the bits of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedheal
from fedheal import Method
from fedheal.engine.serial import Task
from fedheal.engine.workers import trainer
from fedheal.local.term import Term
from fedheal.methods import get
from fedheal.simulate.build import build_federation
from fedheal.simulate.round import initial_state
from tiny_data import load, quick, words

TESTS = Path(__file__).parents[1]


def bits(**keys: Any) -> dict[str, bytes]:
    model = fedheal.run(quick(**keys), progress=False).model
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def test_one_worker_trains_here_and_in_the_order_asked_for() -> None:
    local_training = build_federation(quick(), load(), torch.device("cpu"))
    with trainer(local_training.local_training, 1, 1) as train:
        replies = [
            t.reply for t in train(initial_state(local_training).model, (), [Task("plain-1", 1), Task("dark-0", 1)])
        ]
    assert [reply.client for reply in replies] == ["plain-1", "dark-0"]
    assert [reply.num_examples for reply in replies] == [24, 13]


@pytest.mark.slow
def test_two_workers_give_the_bits_of_one() -> None:
    keys = {"model": "tiny_data:normed", "participation": 0.8, "dropout": 0.2, "rounds": 6, "augment": "crop-flip"}
    assert bits(workers=2, **keys) == bits(workers=1, **keys)


@pytest.mark.slow
def test_workers_answer_in_the_order_asked_for_pass_errors_on_and_end() -> None:
    """Tied weights too; and the module of this process is not touched by theirs."""
    federation = build_federation(quick(model="tiny_data:tied", epochs=20), load(), torch.device("cpu"))
    model = initial_state(federation).model
    asked = ["dark-0", "plain-1", "noisy-0"]
    before = {name: value.clone() for name, value in federation.local_training.module.state_dict().items()}
    with trainer(federation.local_training, 2, 1) as train:
        there = [t.reply for t in train(model, (), [Task(client, 1) for client in asked])]
        with pytest.raises(KeyError, match="nobody"):
            list(train(model, (), [Task("nobody", 1)]))
    assert all(
        torch.equal(value, before[name]) for name, value in federation.local_training.module.state_dict().items()
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as theirs: a run sets it, the trainer for one worker takes what there is
    try:
        with trainer(federation.local_training, 1, 1) as train:
            here = [t.reply for t in train(model, (), [Task(client, 1) for client in asked])]
    finally:
        torch.set_num_threads(threads)
    assert [reply.client for reply in there] == asked
    for one, two in zip(here, there, strict=True):
        assert torch.equal(one.delta, two.delta)
        assert one.metrics == two.metrics


class Sendable(Term):
    """As one that is defined in a notebook: this process knows it, and no other can import it."""


class Unsendable(Term):
    def __init__(self) -> None:
        self.kept = lambda: None


@pytest.mark.slow
@pytest.mark.parametrize(("term", "said"), [(Sendable, "its error is above"), (Unsendable, "pickle")])
def test_a_term_that_no_other_process_can_have_is_a_sentence(monkeypatch, term: type[Term], said: str) -> None:
    if term is Sendable:
        monkeypatch.setattr(Sendable, "__module__", "a_notebook")
        monkeypatch.setitem(sys.modules, "a_notebook", sys.modules[__name__])
    own = Method((term(),), get("fedavg").aggregator, "mine")
    with pytest.raises(
        ChildProcessError, match=rf"workers = 2: no process could start .*\(.*{said}.*\): .*workers=1"
    ) as raised:
        fedheal.run(quick(method=own, workers=2), progress=False)
    assert "--resume" not in str(raised.value)


def children(process: int) -> list[int]:
    """Living processes whose parent is this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if int(parent) == process and state != "Z":
            found.append(int(name.split()[0]))
    return found


def alive(process: int) -> bool:
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
    while not (tmp_path / "run" / "rounds.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = children(process.pid)
    try:
        assert len(workers) >= 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [worker for worker in workers if alive(worker)] == []
    finally:
        process.kill()
        process.wait()
        for worker in workers:
            if alive(worker):
                os.kill(worker, signal.SIGKILL)
