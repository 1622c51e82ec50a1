"""A run that is killed at any moment and resumed ends bit for bit like an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedheal
from fedheal.cli import app
from tiny_data import quick, words

TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(TESTS)}


def read_run(folder: Path) -> dict[str, Any]:
    """Return a run folder's contents without the seconds."""
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    for record in (*rounds, result):
        del record["seconds"]
    model = (folder / "model.safetensors").read_bytes()
    states = {path.name: path.read_bytes() for path in (folder / "state").glob("*.safetensors")}
    toml = (folder / "experiment.toml").read_text()
    return {"rounds": rounds, "result": result, "model": model, "newest": states[max(states)], "toml": toml}


def assert_same(folder: Path, reference: Path) -> None:
    ours, theirs = read_run(folder), read_run(reference)
    for name in theirs:
        assert ours[name] == theirs[name], name


def count_lines(folder: Path) -> int:
    try:
        return (folder / "rounds.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.mark.slow
def test_a_run_killed_many_times_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    rounds, kills_wanted = 60, 3
    keys: dict[str, Any] = {
        "rounds": rounds,
        "participation": 0.6,
        "server_momentum": 0.5,
        "model": "tiny_data:conv_batchnorm",
    }
    fedheal.run(quick(**keys), tmp_path / "whole", progress=False)
    command = [sys.executable, "-m", "fedheal", "run", *words(*(f"{k}={v}" for k, v in keys.items()))]
    command += ["save_seconds=0", "--out", str(tmp_path / "killed"), "--resume", "--quiet"]
    chance = random.Random(0)
    kills = 0
    while kills < kills_wanted:
        before, at_start = count_lines(tmp_path / "killed"), kills % 3 == 2
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        if at_start:  # before or while the run is taken up again
            time.sleep(chance.uniform(0, 4))
        else:
            while count_lines(tmp_path / "killed") <= before and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.1))
        assert process.poll() is None or at_start, (
            f"run_command by itself after {kills} kills: {process.communicate()[1]!r}"
        )
        process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate()
        assert stderr == b"", stderr.decode()
        assert process.returncode == -signal.SIGKILL, f"it finished after {kills} kills already: take more rounds"
        kills += 1
    assert count_lines(tmp_path / "killed") > 0
    assert not (tmp_path / "killed" / "result.json").exists()
    done = CliRunner().invoke(app, command[3:])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    toml = (tmp_path / "killed" / "experiment.toml").read_text()
    (tmp_path / "killed" / "experiment.toml").write_text(toml.replace("save_seconds = 0.0", "save_seconds = 60.0"))
    assert_same(tmp_path / "killed", tmp_path / "whole")


# Runs an experiment in forks of one process that has imported everything, each killed at the n-th step of saving. A step is
# the moment before an operation on a file, or the middle of one that writes.
SABOTEUR = """
import os, random, signal, sys
from pathlib import Path
import fedheal
from disk_hooks import watch
from tiny_data import quick

steps, fatal, real_open = 0, None, os.open

def step(data=b"", path=""):
    global steps
    if steps == fatal:
        if data:
            os.write(real_open(path, os.O_WRONLY | os.O_APPEND), data)
        os.kill(os.getpid(), signal.SIGKILL)
    steps += 1

def on_operation(operation):
    step()
    if operation.kind == "write":
        step(operation.data[: len(operation.data) // 2], operation.path)

def go(folder, at):
    global fatal, steps
    child = os.fork()
    if child == 0:
        steps, fatal = 0, at
        status = 1
        try:
            experiment = quick(rounds=2, save_seconds=0, server_optimizer="adam", server_lr=0.1)
            with watch(folder, on_operation):
                fedheal.run(experiment, folder, resume=True, progress=False)
            Path(str(folder) + ".steps").open("w").write(str(steps))
            status = 0
        except BaseException as error:
            print(f"{folder.name}: {type(error).__name__}: {error}", flush=True)
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

fedheal.run(quick(rounds=1), progress=False)  # compiles what there is to compile, once for all
root, stride = Path(sys.argv[1]), int(sys.argv[2])
go(root / "whole", 10_000)  # never reached: it counts the steps
number = int((root / "whole.steps").read_text())
chance = random.Random(1)
once = [[at] for at in range(0, number, stride)]
twice = [[chance.randrange(number // 2), chance.randrange(20)] for _ in range(6 // stride)]
for plan in once + twice:
    name = "-".join(str(at) for at in plan)
    for at in plan:
        code = go(root / name, at)
        if code != -signal.SIGKILL:
            break
    else:
        code = go(root / name, None)
    if code != 0:
        print(f"{name}: exit {code}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_kill_at_any_step_of_saving_loses_nothing(tmp_path: Path, stride: int) -> None:
    """At every fifth step, and in the long trials at every one."""
    reference = tmp_path / "reference"
    fedheal.run(quick(rounds=2, save_seconds=0, server_optimizer="adam", server_lr=0.1), reference, progress=False)
    root = tmp_path / "killed"
    root.mkdir()
    command = [sys.executable, "-c", SABOTEUR, str(root), str(stride)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    steps = int((root / "whole.steps").read_text())
    assert steps > 40
    folders = [path for path in root.iterdir() if path.is_dir()]
    assert {*map(str, range(0, steps, stride))} < {folder.name for folder in folders}
    for folder in folders:
        assert_same(folder, reference)


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def list_processes(word: str) -> list[str]:
    """Return the processes whose environment has this word."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word.encode() in (process / "environ").read_bytes():
                pids.append(process.name)
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_stopped_parallel_runs_save_their_state_and_leave_no_process(how: signal.Signals, tmp_path: Path) -> None:
    mark = f"FEDHEAL_TEST_{how.name}={tmp_path.name}"
    keys = words("rounds=100000", "model=tiny_data:conv_batchnorm", "save_seconds=1000")[1:]  # but for the data
    command = [sys.executable, "-m", "fedheal", "compare", "fedavg", "fedheal", "--seeds", "1", "--jobs", "2", *keys]
    command += ["--data", "tiny_data:load", "--out", str(tmp_path / "both"), "--quiet"]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT | dict([mark.split("=")]),
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (background jobs ignore it)
    )
    try:
        folders = [tmp_path / "both" / f"{name}-tiny_data_load-seed0" for name in ("fedavg", "fedavg+fedheal")]
        assert wait_until(lambda: all(count_lines(folder) > 3 for folder in folders)), list(tmp_path.rglob("*"))
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.send_signal(how)
        _, stderr = process.communicate(timeout=60)
        assert wait_until(lambda: not list_processes(mark), 30), list_processes(mark)
        if how == signal.SIGKILL:
            return
        assert process.returncode == 130
        assert b"Traceback" not in stderr
        for folder in folders:
            (state,) = (folder / "state").glob("*.safetensors")
            assert int(state.stem) >= 3
            assert int(state.stem) <= count_lines(folder) <= int(state.stem) + 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# Connects to a fork server that has imported `warm_fedheal`, and is gone before it asks for a process; then asks for one.
LOST_CLIENT = """
import multiprocessing, socket
from multiprocessing import forkserver
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["warm_fedheal"])
def start_process():
    process = context.Process(target=int)
    process.start()
    process.join()
    return process.exitcode
print(start_process())
before = forkserver._forkserver._forkserver_pid
with socket.socket(socket.AF_UNIX) as client:
    client.connect(forkserver._forkserver._forkserver_address)
print(start_process(), forkserver._forkserver._forkserver_pid == before)
"""


@pytest.mark.slow
def test_the_fork_server_of_the_long_trial_outlives_a_client_that_is_killed() -> None:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "benchmarks")])
    environment = ENVIRONMENT | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOST_CLIENT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n0 True\n", "")
