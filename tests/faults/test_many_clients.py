"""A thousand clients: the server's state grows by a byte a parameter for each new client, and then no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
MB = 1 << 20

# Runs fedheal and prints, for every round, the memory in use and how many clients have been seen.
SCRIPT = """
import gc, json, sys
import fedheal
from tiny_data import quick

def memory():
    gc.collect()
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024

class Meter(fedheal.Callback):
    def __init__(self):
        self.seen, self.found = set(), []
    def round(self, record):
        self.seen |= set(record.weights)
        if record.round > 10 and record.round % 10 and record.cohort < 100:
            return  # collecting garbage takes longer than such a round
        self.found.append({"round": record.round, "cohort": record.cohort, "seen": len(self.seen), "memory": memory()})

keys = json.loads(sys.argv[1])
meter = Meter()
experiment = quick(**{"data": "tiny_data:load_many_clients", "model": "tiny_data:wide", "steps": 1} | keys)
model = fedheal.run(experiment, callbacks=[meter], progress=False).model
print(json.dumps({"rounds": meter.found, "parameters": sum(p.numel() for p in model.parameters())}))
"""


def measure_memory(**keys: Any) -> tuple[list[dict[str, int]], int]:
    # What is freed goes back to the system at once, so that the memory in use is what is held.
    exact = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = os.environ | {"PYTHONPATH": str(TESTS)} | exact
    command = [sys.executable, "-c", SCRIPT, json.dumps(keys)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    return summary["rounds"], summary["parameters"]


@pytest.mark.slow
def test_memory_grows_by_a_byte_a_parameter_for_each_new_client() -> None:
    """Ten of a thousand clients train each round; four bytes a parameter, or stored updates, would fail."""
    rounds, parameters = measure_memory(
        model="tiny_data:wide_batchnorm", participation=0.01, rounds=50, eval_every=1000
    )
    assert {r["cohort"] for r in rounds} == {10}
    start, end = rounds[9], rounds[-1]
    assert (start["round"], end["round"]) == (10, 50)
    new = end["seen"] - start["seen"]
    assert new > 270
    assert parameters > 90_000
    grown = end["memory"] - start["memory"]
    assert grown < 1.5 * new * parameters + 30 * MB
    assert grown > 0.5 * new * parameters  # else this measures nothing


@pytest.mark.slow
def test_memory_is_flat_once_everybody_has_been_seen() -> None:
    clients = 500
    keys = {"clients_per_domain": clients // 2, "width": 256, "participation": 1.0}
    rounds, parameters = measure_memory(**keys, rounds=6, eval_every=1000)
    assert all(r["seen"] == clients for r in rounds)
    memory = [r["memory"] for r in rounds[2:]]
    # One more byte a parameter and client each round would be at least twice this; the allocator's own moods are half of it.
    assert max(memory[-3:]) - min(memory[:3]) < 2 * clients * parameters
    assert (
        memory[-1] < clients * parameters * (4 + 4 + 1) + 700 * MB
    )  # the updates, twice while they are collected, and counts


@pytest.mark.soak
def test_a_small_network_with_statistics_and_a_thousand_clients() -> None:
    rounds, _ = measure_memory(model="small_cnn", width=2, participation=0.01, rounds=20, eval_every=1000)
    assert {r["cohort"] for r in rounds} == {10}
    assert rounds[-1]["memory"] - rounds[9]["memory"] < 30 * MB
