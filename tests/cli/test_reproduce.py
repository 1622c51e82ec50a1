"""`fedheal reproduce`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import ENVIRONMENT, assert_sentence
from tiny_data import WORDS


def test_a_result_of_the_paper_beside_ours(call, tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith("data=")]
    command = ["reproduce", "table2", *words, "--data", "tiny_data:load", "--rows", "fedfv,uniform*", "--jobs", "1"]
    done = call(*command)
    assert (done.code, done.err) == (0, "")
    for message in ("2 runs into runs/reproduce", "FedFV", "uniform weights", "our control"):
        assert message in done.out
    page = tmp_path / done.out.splitlines()[-1]
    assert "compared with the paper" in page.read_text()
    models = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert len(models) == 2
    assert json.loads(call(*command, "--json").out)[0]["rows"][0]["label"] == "FedFV"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")} == models


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "there is no result 'table9': choose one of headline, table1"),
        (["table1", "--smoke", "--rows", "bogus"], "rows = bogus"),
        (["table1", "--smoke", "--rounds", "0"], "rounds = 0"),
        (["table1", "--smoke", "--seeds", "x"], "seeds = x"),
        (["table1", "--smoke", "method=fedavg"], "method is set by the recipe"),
        (["tau", "tau=0.4"], "tau is set by the recipe: leave out tau=0.4"),
        (["table1", "beta=0.4"], "beta is set by the recipe: leave out beta=0.4"),
        (["consistency", "--smoke", "clients_per_domain=2"], "clients_per_domain is set by the recipe"),
        (["table1", "--smoke", "--rounds", "1", "rounds=2"], "'rounds' is given twice: rounds=1 and rounds=2"),
        (
            ["table1", "--smoke", "--device", "cpu", "device=cuda:0"],
            "'device' is given twice: device=cpu and device=cuda:0",
        ),
        (["table1", "--smoke", "nonsense"], "'nonsense' should be key=value"),
        (["table1", "--smoke", "--jobs", "-1"], "jobs = -1"),
    ],
)
def test_what_cannot_be_reproduced_is_a_sentence(call, tmp_path: Path, words: list[str], message: str) -> None:
    assert_sentence(call("reproduce", *words), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_result_killed_half_way_goes_on_where_it_stopped(call, tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith(("data=", "rounds="))]
    command = [sys.executable, "-m", "fedheal", "reproduce", "ablation", *words, "rounds=40", "save_seconds=0"]
    command += ["--data", "tiny_data:load", "--out", "here", "--jobs", "1"]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while len(list(tmp_path.rglob("result.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait(timeout=60)
    done = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert 2 <= len(done) < 6
    again = call(*command[3:])
    assert (again.code, again.err) == (0, "")
    assert len(list(tmp_path.rglob("result.json"))) == 6
    assert all(path.stat().st_mtime_ns == written for path, written in done.items())
    assert len(list((tmp_path / "here").glob("ablation*.html"))) == 1
