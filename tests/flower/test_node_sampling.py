"""Who is asked, and how long the server waits."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp

import fedheal
from fedheal.flower import AFL, QFFL, FairStrategy, FedFV, FedHEAL, NotEnoughNodes, Uniform
from flower.local_grid import LocalGrid
from flower.sites import Sites


def test_too_few_nodes_end_the_run_after_the_stated_wait():
    sites = Sites()
    began = time.monotonic()
    with pytest.raises(NotEnoughNodes, match=r"only 5 of the 6 nodes .* wait_seconds = 0.5"):
        sites.run(min_available_nodes=6, wait_seconds=0.5)
    assert 0.5 <= time.monotonic() - began < 5


def test_the_error_for_too_few_nodes_says_what_is_saved(tmp_path):
    sites, few = Sites(), {"min_available_nodes": 6, "wait_seconds": 0.0}
    with pytest.raises(NotEnoughNodes, match=r"wait_seconds = 0; without a folder nothing is saved$"):
        sites.run(**few)
    with pytest.raises(NotEnoughNodes, match=r"; finished rounds are saved; resume=True continues from them$"):
        sites.run(**few, folder=tmp_path / "run")
    strategy = sites.strategy(**few, folder=tmp_path / "looped")
    with pytest.raises(NotEnoughNodes, match=r"; finished rounds are saved$"):  # Flower's own loop cannot be resumed
        strategy.configure_train(1, sites.initial, ConfigRecord(), sites.grid())


@pytest.mark.slow
def test_nodes_that_connect_during_the_wait_take_part():
    sites = Sites(rounds=1)
    grid = sites.grid()
    late, polls = grid.contexts.pop(104), [0]

    def get_node_ids():
        polls[0] += 1
        if polls[0] == 2:
            grid.contexts[104] = late
        return list(grid.contexts)

    grid.get_node_ids = get_node_ids
    strategy = sites.strategy(min_available_nodes=5, wait_seconds=30)
    strategy.start(grid, sites.initial, num_rounds=1)
    assert len(strategy.history[0].weights) == 5


@pytest.mark.slow
def test_a_late_joiner_and_a_leaver():
    sites = Sites(rounds=4)
    strategy, grid = sites.strategy(fraction_evaluate=0.0, min_available_nodes=2), sites.grid()
    late = grid.contexts.pop(100)
    gone = {}

    def spoil(node, reply):
        number = strategy.rounds.current.number
        if number == 1 and node == 104:
            grid.contexts[100] = late
        if number == 2 and node == 104:
            gone[101] = grid.contexts.pop(101)
        return [reply]

    grid.spoil = spoil
    strategy.start(grid, sites.initial, num_rounds=4)
    names = [{sites.names.index(c) for c in record.weights} for record in strategy.history]
    assert names == [{1, 2, 3, 4}, {0, 1, 2, 3, 4}, {0, 2, 3, 4}, {0, 2, 3, 4}]
    _, described = strategy.state.aggregator.to_arrays()
    assert f'"{sites.names[1]}"' in json.dumps(described)  # who left keeps its history


@pytest.mark.slow
def test_a_part_of_the_nodes_is_chosen_by_seed_and_round():
    def draw_cohorts(seed: int, first: int) -> list[list[int]]:
        sites = Sites(rounds=4)
        strategy, grid = sites.strategy(seed=seed, fraction_train=0.4, fraction_evaluate=0.0), sites.grid(first=first)
        strategy.start(grid, sites.initial, num_rounds=4)
        return [[node - first for node in nodes] for nodes in grid.asked]

    assert draw_cohorts(0, 100) == draw_cohorts(0, 100)
    assert draw_cohorts(0, 100) != draw_cohorts(1, 100)
    assert all(len(cohort) == 2 for cohort in draw_cohorts(0, 100))


@pytest.mark.slow
def test_evaluation_every_so_many_rounds_and_in_the_last():
    strategy = Sites(rounds=5).run(evaluate_every=2)
    assert [record.domains is not None for record in strategy.history] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"fraction_train": 1.5}, "fraction_train = 1.5: use a number from 0 to 1"),
        ({"min_available_nodes": -1}, "min_available_nodes = -1"),
        ({"wait_seconds": float("inf")}, "wait_seconds = inf"),
        ({"min_replies": 0}, "min_replies = 0: use a whole number of at least 1"),
        ({"evaluate_every": 0}, "evaluate_every = 0"),
        ({"max_examples": 0}, "max_examples = 0: use a finite number above 0"),
        ({"max_norm": -1.0}, "max_norm = -1.0"),
        ({"budget": -1}, "budget = -1"),
        ({"clients": 0}, "clients = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"roll_call": 1}, "roll_call = 1: use True or False"),
        ({"placement": "edge"}, "placement = 'edge': use one of"),
        ({"tau": 2}, "tau = 2"),
        ({"placement": "client", "variant": "released"}, "placement = 'client' is for variant = 'paper'"),
        ({"resume": "false"}, "resume = 'false': use True or False"),
        ({"folder": 3}, "folder = 3: use a path"),
        ({"resume": True}, "resume = True needs folder: give the folder of the run to continue"),
        ({"model": "x"}, "model = 'x': use the module or its Layout"),
        ({"max_norm": "3"}, "max_norm = '3': use a finite number above 0"),
        ({"max_examples": "3"}, "max_examples = '3': use a finite number above 0"),
    ],
)
def test_invalid_settings_are_rejected_by_name(keys, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        FedHEAL(**keys)


def test_an_invalid_number_of_rounds_is_rejected():
    for rounds in ("3", -1, 2.5, True):
        with pytest.raises(ValueError, match=f"num_rounds = {rounds!r}: use a whole number"):
            Sites(rounds=1).strategy().start(Sites(rounds=1).grid(), Sites(rounds=1).initial, num_rounds=rounds)


@pytest.mark.parametrize("method", ["fedfv", "fedheal", "fphl", "fedpw", "fedavg+fael:variant=released"])
def test_masks_on_clients_are_for_methods_without_a_mask_or_a_mean_of_their_own(method):
    with pytest.raises(ValueError, match=r"placement = 'client' with .*, which has a mask or a mean of its own"):
        FairStrategy(method, placement="client")
    FairStrategy("fedavg+uniform", placement="client")


def test_methods_that_cannot_run_in_a_federation_are_rejected():
    for method, words in (("scaffold:fair_controls=p", "fair_controls = 'p'"), ("fedce", "fedce sends each client")):
        with pytest.raises(ValueError, match=words):
            Sites(method="fedavg").strategy().__class__(method)


@pytest.mark.slow
def test_updates_beyond_the_budget_go_to_a_file_and_change_nothing():
    small, large = (Sites(method="fedheal", rounds=3).run(budget=budget) for budget in (0, None))
    assert torch.equal(small.state.model.params, large.state.model.params)


@pytest.mark.slow
def test_with_a_roll_call_the_same_sites_are_drawn_whatever_their_node_ids():
    def draw_cohorts(order: list[int]) -> list[list[str]]:
        sites = Sites(rounds=4)
        grid = LocalGrid(sites.app, {50 + i: {"partition-id": p} for i, p in enumerate(order)})
        strategy = sites.strategy(fraction_train=0.4, fraction_evaluate=0.0, roll_call=True)
        strategy.start(grid, sites.initial, num_rounds=4)
        assert grid.asked[0] == [50, 51, 52, 53, 54]  # once, before the first cohort
        assert len(grid.asked) == 5
        return [sorted(record.weights) for record in strategy.history]

    assert draw_cohorts([0, 1, 2, 3, 4]) == draw_cohorts([3, 1, 4, 0, 2])


@pytest.mark.slow
def test_the_cohort_by_names_matches_the_simulator():
    sites = Sites(rounds=4, participation=0.4)
    strategy = sites.run(fraction_train=0.4, fraction_evaluate=0.0, roll_call=True)
    expected = fedheal.run(sites.experiment)
    for ours, theirs in zip(strategy.history, expected.history, strict=True):
        assert ours.weights == pytest.approx(theirs.weights)
    actual = sites.federation.local_training.layout.unpack(strategy.state.model)
    assert all(torch.equal(actual[name], value) for name, value in expected.model.state_dict().items())


def test_a_stock_app_without_a_query_is_drawn_by_node_id():
    sites = Sites(rounds=2)
    sites.app = ClientApp()
    sites.app.train()(sites.train)
    strategy = sites.run(fraction_train=0.4, fraction_evaluate=0.0, roll_call=True)
    assert [len(record.weights) for record in strategy.history] == [2, 2]


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_cohorts(tmp_path):
    whole = Sites(rounds=4).run(fraction_train=0.4, fraction_evaluate=0.0)
    for rounds, resume in ((2, False), (4, True)):
        sites = Sites(rounds=4)
        part = sites.strategy(fraction_train=0.4, fraction_evaluate=0.0, folder=tmp_path / "run", resume=resume)
        part.start(sites.grid(), sites.initial, num_rounds=rounds)  # with node keys the ids are the same in both runs
    assert [r.weights for r in part.history] == [r.weights for r in whole.history]
    assert torch.equal(part.state.model.params, whole.state.model.params)


def test_no_node_evaluates_if_the_fraction_is_zero():
    sites = Sites(rounds=1)
    grid = sites.grid()
    sites.strategy(fraction_evaluate=0.0).start(grid, sites.initial, num_rounds=1)
    assert len(grid.asked) == 1


def test_no_node_trains_if_the_fraction_is_zero():
    sites = Sites(rounds=2)
    grid = sites.grid()
    strategy = sites.strategy(fraction_train=0.0)
    result = strategy.start(grid, sites.initial, num_rounds=2)
    assert grid.asked == [[], [100, 101, 102, 103, 104]] * 2  # judged all the same
    assert all(np.array_equal(array.numpy(), sites.initial[name].numpy()) for name, array in result.arrays.items())
    assert strategy.history[-1].domains


@pytest.mark.parametrize("preset", [AFL, QFFL, FedFV, FedHEAL, Uniform])
def test_a_preset_takes_no_argument_without_its_name(preset):
    """Flower's `FedAvg(0.5)` trains half of the nodes: a preset must not take that for tau or gamma."""
    with pytest.raises(TypeError, match=re.escape(f"{preset.__name__}(0.5): name each argument")):
        preset(0.5)


def test_an_unknown_setting_is_named_with_the_preset_and_the_nearest_one():
    with pytest.raises(TypeError, match=re.escape("FedHEAL has no parameter 'foo'") + "$"):
        FedHEAL(foo=3)
    with pytest.raises(TypeError, match=re.escape("Uniform has no parameter 'foldr' (did you mean 'folder'?)")):
        Uniform(foldr="runs/a")
    with pytest.raises(
        TypeError, match=re.escape("has no parameter 'min_fit_clients' (did you mean 'min_train_nodes'?)")
    ):
        FedHEAL(min_fit_clients=2)
    with pytest.raises(TypeError, match=re.escape("has no parameter 'fraction_fit' (did you mean 'fraction_train'?)")):
        FedHEAL(fraction_fit=0.5)


@pytest.mark.parametrize("method", [0.5, None, 2])
def test_a_strategy_says_what_its_first_argument_must_be(method):
    with pytest.raises(ValueError, match=re.escape(f"method = {method!r}: use a name such as")):
        FairStrategy(method)
