"""The same run twice, resumed, or saved less often: chance comes from the seed alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fedheal
from fedheal import methods
from tiny_data import quick
from tiny_runs import Stop, drop_seconds, get_model_bytes, run


@pytest.mark.parametrize(
    "model", ["tiny_data:linear", "tiny_data:conv_batchnorm", "tiny_data:dropout", "tiny_data:tied_weights"]
)
def test_two_runs_give_the_same_bits_and_another_seed_gives_others(model: str) -> None:
    keys: dict[str, Any] = {"model": model, "participation": 0.6, "dropout": 0.2, "augment": "crop-flip"}
    first = run(**keys)
    torch.rand(7)  # use of the global stream in between changes nothing
    second, other = run(**keys), run(seed=1, **keys)
    assert get_model_bytes(first.model) == get_model_bytes(second.model)
    assert drop_seconds(first.history) == drop_seconds(second.history)
    assert get_model_bytes(first.model) != get_model_bytes(other.model)


# Every part once, and two that keep state on both sides; the contract tests go over all combinations.
PARTS = [name for name in methods.names() if "+" not in name or name.startswith("fedavg+")]


def mark_slow(names: Sequence[str], *quick_ones: str) -> list[Any]:
    return [name if name in quick_ones else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mark_slow([*PARTS, "moon+fedheal", "feddyn+fael-exact"], "moon+fedheal", "scaffold"))
def test_every_method_runs_is_reproducible_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": name, "model": "tiny_data:feature_model", "participation": 0.6, "rounds": 3}
    if name in ("fedce", "fedga"):
        keys["validation"] = 0.25
    whole = run(**keys)
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(save_seconds=0, **keys), tmp_path / "run", callbacks=[Stop()], progress=False)
    resumed = fedheal.run(quick(**keys), tmp_path / "run", resume=True, progress=False)
    assert get_model_bytes(whole.model) == get_model_bytes(resumed.model)
    assert drop_seconds(resumed.history) == json.loads(json.dumps(drop_seconds(whole.history)))


def test_the_global_stream_the_threads_and_gradients_are_left_alone() -> None:
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    run(model="tiny_data:dropout", threads=threads + 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_threads_are_given_back_when_a_run_fails() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="resnet11"):
        run(model="resnet11", threads=threads + 1)
    assert torch.get_num_threads() == threads


def test_the_first_rounds_do_not_depend_on_how_many_there_will_be() -> None:
    keys: dict[str, Any] = {"participation": 0.6, "dropout": 0.3, "model": "tiny_data:dropout"}
    short, long = run(rounds=2, **keys), run(rounds=5, **keys)
    assert drop_seconds(long.history)[:2] == drop_seconds(short.history)


OPTIMISERS = [
    {"server_momentum": 0.9},
    {"server_optimizer": "adam", "server_momentum": 0.9, "server_lr": 0.1},
    {"method": "fedheal+fedyogi"},
    {"method": "fedheal+fedadagrad"},
    {"optimizer": "adamw", "lr_schedule": "cosine", "warmup_rounds": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("server", OPTIMISERS, ids=str)
def test_optimisers_and_schedules_change_the_run_and_resume_bit_for_bit(server: dict[str, Any], tmp_path: Path) -> None:
    keys = {"rounds": 4, "model": "tiny_data:conv_batchnorm"} | server
    whole = run(**keys)
    assert get_model_bytes(whole.model) != get_model_bytes(run(rounds=4, model="tiny_data:conv_batchnorm").model)
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(save_seconds=0, **keys), tmp_path / "run", callbacks=[Stop()], progress=False)
    assert get_model_bytes(
        fedheal.run(quick(**keys), tmp_path / "run", resume=True, progress=False).model
    ) == get_model_bytes(whole.model)


def test_saving_less_often_does_not_change_anything(tmp_path: Path) -> None:
    first = fedheal.run(quick(save_seconds=0), tmp_path / "one", progress=False)
    second = fedheal.run(quick(save_seconds=1e9), tmp_path / "two", progress=False)
    assert get_model_bytes(first.model) == get_model_bytes(second.model)
    saved = {name: sorted(p.name for p in (tmp_path / name / "state").iterdir()) for name in ("one", "two")}
    assert saved == {"one": ["00000002.safetensors", "00000003.safetensors"], "two": ["00000003.safetensors"]}


def test_runs_in_several_threads_give_what_they_give_alone() -> None:
    """Dropout draws from torch's global generators, which all threads share."""
    experiments = [quick(model="tiny_data:dropout", seed=seed) for seed in range(4)]

    def train(experiment: fedheal.Experiment) -> bytes:
        return get_model_bytes(fedheal.run(experiment, progress=False).model)

    alone = [train(experiment) for experiment in experiments]
    with ThreadPoolExecutor(len(experiments)) as pool:
        assert list(pool.map(train, experiments)) == alone


def test_neither_loading_data_nor_a_model_disturbs_a_run_in_another_thread(tmp_path: Path) -> None:
    experiment = quick(model="tiny_data:dropout", rounds=4)
    alone = get_model_bytes(fedheal.run(experiment, tmp_path / "run", progress=False).model)
    loading = quick(model="tiny_data:dropout", data="tiny_data:load_with_seed")
    with ThreadPoolExecutor(3) as pool:
        training = pool.submit(fedheal.run, experiment, progress=False)
        others = [pool.submit(fedheal.run, loading, progress=False) for _ in range(2)]
        while not training.done():
            fedheal.load(tmp_path / "run")
        assert [other.exception() for other in others] == [None, None]
    assert get_model_bytes(training.result().model) == alone
