"""Flower's mods and differential-privacy wrappers around these strategies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

from fedheal.flower import FedHEAL, Uniform, client
from fedheal.runs import folder as records
from flower.local_grid import LocalGrid
from flower.test_bad_replies import reply_with_error

STEPS = {0: [3.0, 0, 0], 1: [0.0, 4, 0], 2: [0.0, 0, 5]}
START = ArrayRecord({"w": torch.zeros(3)})


def make_app(mods: list[Any], helped: bool) -> ClientApp:
    client_app = ClientApp(mods=mods)

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        model = {"w": client.read_model(message)["w"] + torch.tensor(STEPS[context.node_config["partition-id"]])}
        if helped:
            return client.reply(message, context, model, 10)
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=message)

    @client_app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return client.reply_evaluation(message, context, 10, {"accuracy": 0.5})

    return client_app


def make_grid(*mods: Any, helped: bool = True) -> LocalGrid:
    return LocalGrid(make_app(list(mods), helped), {7 + i: {"partition-id": i} for i in STEPS})


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize(
    ("wrapper", "mod"),
    [
        (lambda inner: DifferentialPrivacyClientSideFixedClipping(inner, 0.0, 1.5, 3), fixedclipping_mod),
        (
            lambda inner: DifferentialPrivacyClientSideAdaptiveClipping(
                inner, 0.1, 3, initial_clipping_norm=1.5, clipped_count_stddev=0.1
            ),
            adaptiveclipping_mod,
        ),
    ],
    ids=["fixed", "adaptive"],
)
def test_clipping_on_the_client_clips(wrapper, mod, helped):
    strategy = Uniform(fraction_evaluate=0.0)
    result = wrapper(strategy).start(make_grid(mod, helped=helped), START, num_rounds=1)
    assert strategy.history[0].report["skipped"] == {}
    assert np.allclose(result.arrays["w"].numpy(), 0.5, atol=0.3)  # a third of each client's clipped 1.5


@pytest.mark.parametrize("helped", [False, True])
def test_local_noise_goes_with_masks_on_the_server_and_is_refused_with_masks_on_the_client(helped):
    mod = LocalDpMod(clipping_norm=1.5, sensitivity=0.01, epsilon=1.0, delta=0.1)
    strategy = FedHEAL(fraction_evaluate=0.0)
    strategy.start(make_grid(mod, helped=helped), START, num_rounds=2)
    assert [record.report["skipped"] for record in strategy.history] == [{}, {}]
    assert float(strategy.state.model.params.norm()) < 3
    if helped:
        placed = FedHEAL(fraction_evaluate=0.0, placement="client")
        placed.start(make_grid(mod), START, num_rounds=1)  # the mask would go without noise
        assert "LocalDpMod expects exactly one" in str(placed.history[0].report["skipped"])
        assert placed.history[0].weights == {}


def run_wrapped(folder, noise: float, rounds: int, nodes: LocalGrid | None = None, **settings: Any):
    strategy = FedHEAL(folder=folder, **settings)
    wrapper = DifferentialPrivacyServerSideFixedClipping(strategy, noise, 1.5, 3)
    return strategy, wrapper.start(nodes or make_grid(), START, num_rounds=rounds)


def test_flowers_own_loop_leaves_a_whole_run_folder(tmp_path):
    strategy, result = run_wrapped(tmp_path / "run", 0.5, 3)
    assert [record.round for record in records.read_rounds(tmp_path / "run")] == [1, 2, 3]
    assert records.read_json(tmp_path / "run" / "result.json")["rounds"] == 3
    saved = records.load_tensors(tmp_path / "run" / "model.safetensors")["w"]
    assert np.array_equal(saved.numpy(), result.arrays["w"].numpy())  # with the wrapper's noise
    assert torch.equal(strategy.state.model.params, saved)
    assert sorted(path.name for path in (tmp_path / "run" / "state").iterdir()) == [
        "00000002.safetensors",
        "00000003.safetensors",
    ]


def test_flowers_own_loop_cannot_resume_from_a_folder(tmp_path):
    FedHEAL(folder=tmp_path / "run").start(make_grid(), START, num_rounds=2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    nodes = make_grid()
    with pytest.raises(ValueError, match="round 1 cannot follow round 2: Flower's own loop"):
        run_wrapped(tmp_path / "run", 0.5, 3, nodes, resume=True)
    assert nodes.asked == []
    assert {path: path.read_bytes() for path in before} == before


def test_a_round_whose_replies_a_wrapper_withholds_is_recorded_without_replies(tmp_path):
    nodes = make_grid()
    nodes.spoil = lambda node, reply: reply_with_error(reply) if node == 8 and len(nodes.asked) == 3 else [reply]
    strategy, result = run_wrapped(
        tmp_path / "run", 0.0, 3, nodes
    )  # of each round's two calls, the third trains for round 2
    assert [len(record.weights) for record in strategy.history] == [3, 0, 3]
    assert strategy.state.round == 3
    assert records.read_json(tmp_path / "run" / "result.json")["rounds"] == 3
    assert float(result.arrays["w"].numpy().sum()) > 0
