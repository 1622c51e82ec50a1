"""Sweeps choose on validation data, never on the test set."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedheal.campaign import sweep
from fedheal.campaign.pool import run_all
from fedheal.campaign.sweep import (
    Search,
    Trial,
    ValidationData,
    choose_best,
    count_equals,
    measure_validation,
    parse_space,
    search_grid,
    search_randomly,
    search_with_optuna,
)
from fedheal.simulate.build import build_federation, load_domains
from fedheal.simulate.round import Diverged
from fedheal.simulate.runner import run
from tiny_data import QUICK


def run_jobs(jobs):
    for _ in run_all(jobs, 1):
        pass


def make_search(tmp_path, **more):
    fixed = QUICK | {"rounds": 2, "method": "fedheal"}
    return Search({"tau": [0.0, 0.9], "lr": [0.05, 0.0005]}, fixed, [0], tmp_path, **more)


def test_the_highest_mean_is_chosen():
    better, worse = Trial({"tau": 0.1}, {"avg": (60.0, 62.0)}), Trial({"tau": 0.9}, {"avg": (59.0, 61.0)})
    assert choose_best([worse, better], "avg") is better


def test_lower_is_better_for_std():
    even, uneven = Trial({}, {"std": (2.0,)}), Trial({}, {"std": (5.0,)})
    assert choose_best([uneven, even], "std") is even


def test_points_that_the_seeds_do_not_tell_apart_are_counted():
    best = Trial({"tau": 0.1}, {"avg": (60.0, 62.0, 64.0)})
    close = Trial({"tau": 0.2}, {"avg": (61.0, 60.0, 63.0)})  # behind by 2/3, with a standard error of 0.88
    behind = Trial({"tau": 0.3}, {"avg": (59.0, 61.0, 63.0)})  # behind by 1 with every seed
    same = Trial({"tau": 0.4}, {"avg": (60.0, 62.0, 64.0)})
    assert count_equals([best, close, behind, same], best, "avg") == 2
    first, other = Trial({}, {"avg": (60.0,)}), Trial({}, {"avg": (59.9,)})
    assert count_equals([first, other], first, "avg") == 0


@pytest.mark.parametrize(
    ("fixed", "point", "command"),
    [
        (
            {"method": "fedheal", "rounds": 5, "only": ["mnist", "usps"]},
            {"tau": 0.4, "lr": 0.02},
            "fedheal compare fedavg fedavg+fedheal:tau=0.4 --data embedded --seeds 3-10 rounds=5 only=mnist,usps lr=0.02",
        ),
        (
            {"data": "folder:/my photos", "clients_per_domain": {"a": 2, "b": 3}},
            {"method": "fedavg"},
            "fedheal compare fedavg --data 'folder:/my photos' --seeds 3-10 clients_per_domain=a=2,b=3",
        ),
    ],
)
def test_the_next_command_tests_the_choice_on_other_seeds(tmp_path, fixed, point, command):
    search = Search({key: [value, "other"] for key, value in point.items()}, fixed, [0, 2], tmp_path)
    assert search.format_next_command(Trial(point, {})) == command


@pytest.fixture(scope="module")
def finished_grid(tmp_path_factory):
    """The folder of a grid that has been searched, and its trials."""
    folder = tmp_path_factory.mktemp("grid")
    return folder, search_grid(make_search(folder), run_jobs)


def test_a_grid_runs_every_point_and_reads_its_validation(finished_grid):
    folder, trials = finished_grid
    search = make_search(folder)
    assert [t.point for t in trials] == [
        {"tau": 0.0, "lr": 0.05},
        {"tau": 0.0, "lr": 0.0005},
        {"tau": 0.9, "lr": 0.05},
        {"tau": 0.9, "lr": 0.0005},
    ]
    stored = json.loads((search.jobs(trials[0].point)[0].folder / "result.json").read_text())
    assert trials[0].validation["avg"] == (stored["validation"]["avg"],)
    assert choose_best(trials, "avg").point["lr"] == 0.05  # the other one hardly learns


def test_results_on_the_test_set_change_no_trial(tmp_path, finished_grid):
    folder, trials = finished_grid
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for number, path in enumerate(sorted(tmp_path.glob("*/result.json"))):
        stored = json.loads(path.read_text())
        stored |= {key: float(number) for key in ("avg", "std", "worst", "best", "gap", "jain")}
        stored["domains"] = dict.fromkeys(stored["domains"], float(number))
        path.write_text(json.dumps(stored))
    assert search_grid(make_search(tmp_path), run_jobs) == trials


def test_validation_examples_are_counted_as_a_run_holds_them_out(tmp_path):
    (job,) = make_search(tmp_path).jobs({"tau": 0.0, "lr": 0.05})
    data = measure_validation(job.experiment)
    assert data.sizes == {"plain": 10, "noisy": 6, "dark": 3}  # 20 % of 2 x 24, 2 x 16 and 13, rounded per client
    federation = build_federation(job.experiment, load_domains(job.experiment), torch.device("cpu"))
    labels = {d: [] for d in data.sizes}
    for client, split in federation.validation.items():
        labels[federation.client_domains[client]] += split.labels.tolist()
    constant = [np.mean([np.mean(np.equal(labels[d], c)) for d in labels]) for c in range(3)]
    assert data.chance == pytest.approx(100 * max(constant))
    (halved,) = Search({"lr": [1, 2]}, QUICK | {"method": "fedce"}, [0], tmp_path).jobs({"lr": 1})
    assert measure_validation(halved.experiment).sizes == {"plain": 4, "noisy": 2, "dark": 1}  # the rest sets weights


def test_a_point_is_at_chance_up_to_two_standard_errors_above_it():
    data = ValidationData({"a": 100, "b": 100}, chance=10.0)  # two errors of a mean over 200 examples: 4.24
    assert data.is_chance(Trial({}, {"avg": (14.2,)}))
    assert not data.is_chance(Trial({}, {"avg": (14.3,)}))
    assert not data.is_chance(Trial({}, {"avg": (14.2, 14.2)}))  # two seeds: 3.0


def test_random_search_tries_different_points_of_the_grid_and_repeats_itself(tmp_path):
    trials = search_randomly(make_search(tmp_path), run_jobs, 3)
    points = [tuple(t.point.items()) for t in trials]
    assert len(set(points)) == 3
    assert [tuple(t.point.items()) for t in search_randomly(make_search(tmp_path), run_jobs, 3)] == points
    assert len(search_randomly(make_search(tmp_path), run_jobs, 99)) == 4


def test_random_search_draws_from_a_grid_that_does_not_fit_into_memory(tmp_path):
    """Ten thousand values each of four fields; what is drawn is what a list of the grid's points would have given."""
    fields = ("lr", "tau", "beta", "momentum")
    huge = Search({field: [i / 10_000 for i in range(10_000)] for field in fields}, QUICK, [0], tmp_path)
    planned = []

    def refuse(jobs):
        planned.extend(jobs)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_randomly(
            Search(huge.space | {"lr": [0.1, 0.2]}, QUICK | {"method": "fedheal"}, [0], tmp_path), refuse, 5
        )
    assert len({job.folder for job in planned}) == 5
    with pytest.raises(
        ValueError, match="the grid has 10,000,000,000,000,000 points, more than 10,000: use --search random"
    ):
        search_grid(huge, run_jobs)
    larger = Search(huge.space | {"server_lr": huge.space["lr"]}, QUICK, [0], tmp_path)
    with pytest.raises(ValueError, match="too many to draw from"):
        search_randomly(larger, run_jobs, 1)
    small = make_search(tmp_path)
    listed = [{"tau": tau, "lr": lr} for tau in small.space["tau"] for lr in small.space["lr"]]
    assert [small.point(place) for place in range(small.size)] == listed
    assert list(small.point(2)) == ["tau", "lr"]


@pytest.mark.parametrize("trials", [0, 10**10])
def test_so_many_trials_are_refused(tmp_path, trials):
    with pytest.raises(ValueError, match=f"trials = {trials}: use 1 to 10,000"):
        search_randomly(make_search(tmp_path), run_jobs, trials)


@pytest.mark.parametrize(
    ("own", "lacking"),
    [({"avg": 3.0}, "std"), ({"avg": 3.0, "std": 1.0, "worst": 2.0}, "gap")],
)
def test_a_result_that_lacks_what_the_choice_is_made_by_is_named(tmp_path, finished_grid, own, lacking):
    shutil.copytree(finished_grid[0], tmp_path, dirs_exist_ok=True)
    search = make_search(tmp_path)
    path = search.jobs(search.point(1))[0].folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"validation": own}))
    with pytest.raises(ValueError, match=rf"result\.json: there is no validation\.{lacking}"):
        search_grid(search, run_jobs)


SEARCHES = [("grid", 1), ("grid", 2), ("random", 1), ("optuna", 1)]


@pytest.mark.parametrize(("name", "processes"), SEARCHES)
def test_a_point_that_diverges_is_the_worst_and_the_search_goes_on(tmp_path, name, processes):
    if name == "optuna":
        pytest.importorskip("optuna")
    search = Search({"lr": [1e30, 0.05]}, QUICK | {"rounds": 1, "method": "fedavg"}, [0], tmp_path)

    def run(jobs):
        for _ in run_all(jobs, processes):
            pass

    trials = list(sweep.SEARCHES[name](search, run, 2))
    diverged, learnt = sorted(trials, key=lambda trial: -trial.point["lr"])
    assert diverged == Trial({"lr": 1e30}, None)
    assert learnt.validation is not None
    for metric in sweep.METRICS:
        assert choose_best(trials, metric) is learnt
        assert diverged.score(metric) < learnt.score(metric)
    assert count_equals(trials, learnt, "avg") == 0
    if name == "grid":
        assert search_grid(search, run) == trials  # a rerun


def test_a_point_diverges_if_one_of_its_seeds_does(tmp_path, monkeypatch, caplog):
    search = Search({"lr": [0.05, 0.1]}, QUICK | {"rounds": 1, "method": "fedavg"}, [0, 1], tmp_path)

    def run_or_diverge(experiment, *args, **keys):
        if (experiment.seed, experiment.lr) == (1, 0.05):
            raise Diverged("client 'a': its update holds NaN")
        return run(experiment, *args, **keys)

    monkeypatch.setattr("fedheal.campaign.jobs.run", run_or_diverge)
    first, second = search.evaluate([{"lr": 0.05}, {"lr": 0.1}], run_jobs)
    assert first.validation is None
    assert second.validation is not None
    assert "lr=0.05-seed1: client 'a': its update holds NaN" in caplog.text  # the table says "diverged" only


def test_only_training_that_diverges_is_passed_over(tmp_path):
    search = Search({"lr": [0.05, 0.1]}, QUICK | {"data": "tiny_data:failing"}, [0], tmp_path)
    with pytest.raises(ValueError, match="raised KeyError"):
        search_grid(search, run_jobs)
    with pytest.raises(ValueError, match="training has diverged"):  # in a comparison, say
        run_jobs([replace(job, may_diverge=False) for job in search_of_huge_rates(tmp_path).jobs({"lr": 1e30})])


def search_of_huge_rates(tmp_path):
    return Search({"lr": [1e30, 1e29]}, QUICK | {"rounds": 1, "method": "fedavg"}, [0], tmp_path)


def test_a_search_whose_points_all_diverge_chooses_none(tmp_path):
    trials = search_grid(search_of_huge_rates(tmp_path), run_jobs)
    with pytest.raises(ValueError, match="training diverges at every point of the search: choose smaller values"):
        choose_best(trials, "avg")


def test_optuna_proposes_points_and_a_restart_repeats_them(tmp_path):
    pytest.importorskip("optuna")
    points = [t.point for t in search_with_optuna(make_search(tmp_path), run_jobs, 4)]
    assert len(points) == 4
    assert all(set(p) == {"tau", "lr"} for p in points)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert [t.point for t in search_with_optuna(make_search(tmp_path), run_jobs, 4)] == points
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == before


def test_optuna_tries_no_point_twice(tmp_path):
    pytest.importorskip("optuna")
    points = [t.point for t in search_with_optuna(make_search(tmp_path), run_jobs, 20)]
    assert len(points) == make_search(tmp_path).size
    assert sorted(points, key=str) == sorted(map(make_search(tmp_path).point, range(len(points))), key=str)


def test_ranges_are_added_as_decimals():
    space, fixed = parse_space(["tau=0:0.9:0.1", "beta=0,0.4,1", "rounds=5", "method=fedavg,fedheal"])
    assert space["tau"] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert space["beta"] == [0, 0.4, 1]
    assert space["method"] == ["fedavg", "fedheal"]
    assert fixed == {"rounds": 5}
    assert parse_space(["method=fedheal:tau=0.1,beta=0.2"]) == ({}, {"method": "fedheal:tau=0.1,beta=0.2"})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("only=plain,noisy", "plain,noisy"),
        ("without=plain,noisy", "plain,noisy"),
        ('only=["plain", "noisy"]', ["plain", "noisy"]),
        ("clients_per_domain=plain=1,noisy=1", "plain=1,noisy=1"),
        ("fraction={plain=0.1, noisy=0.2}", {"plain": 0.1, "noisy": 0.2}),
        ('data="folder:a,b"', "folder:a,b"),
        ("ray_address=127.0.0.1:6379", "127.0.0.1:6379"),
    ],
)
def test_a_value_that_has_commas_itself_is_one_value(word, value):
    assert parse_space([word]) == ({}, {word.partition("=")[0]: value})


def test_numbers_of_clients_can_be_searched():
    assert parse_space(["clients_per_domain=1,2", "fraction=0.1:0.2:0.1"]) == (
        {"clients_per_domain": [1, 2], "fraction": [0.1, 0.2]},
        {},
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tau=0.9:0:0.1"], "first:last:step"),
        (["tau=0:1:0"], "first:last:step"),
        (["tau=0.3,0.30"], "has a value twice"),
        (["tau=0:1:1e-12"], "has 1,000,000,000,001 values: use at most 10,000"),
        (["tau=1e:2:3"], "should be first:last:step, three numbers"),
        (["tau=0:1"], "should be first:last:step, three numbers"),
        (["tau=0:1:0.1:2"], "should be first:last:step, three numbers"),
        (["tau=0,1", "tau=0.5"], "given twice"),
        (["tau"], "should be key=value"),
        (["tau=0,"], "'tau=0,' has an empty value"),
        (["tau=0,,1"], "'tau=0,,1' has an empty value"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse_space(words)


def test_nothing_to_search_or_to_judge_by_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to search"):
        Search({}, QUICK, [0], tmp_path)
    with pytest.raises(ValueError, match="metric = bogus"):
        make_search(tmp_path, metric="bogus")
    with pytest.raises(ValueError, match=r"epochs = 1 and steps = \[3, 5\] exclude each other: give one of them"):
        Search({"steps": [3, 5]}, QUICK, [0], tmp_path)
    for share in (0, 1, "abc"):
        with pytest.raises(ValueError, match=f"validation = {share}: a sweep needs a share"):
            Search({"tau": [0, 1]}, QUICK | {"validation": share}, [0], tmp_path)


@pytest.mark.parametrize("field", ["seed", "split_seed", "name", "validation"])
def test_what_a_sweep_has_ways_of_its_own_for_is_not_searched(tmp_path, field):
    with pytest.raises(ValueError, match=f"{field} cannot be searched"):
        Search({"tau": [0, 1], field: [0, 1]}, QUICK, [0], tmp_path)
    if field in ("seed", "name"):
        with pytest.raises(ValueError, match=f"{field}=5 cannot be set in a sweep"):
            Search({"tau": [0, 1]}, QUICK | {field: 5}, [0], tmp_path)


def test_every_metric_says_which_way_is_better():
    assert set(sweep.METRICS) == {"avg", "worst", "std", "gap", "jain"}
    assert sweep.METRICS["worst"]
    assert not sweep.METRICS["gap"]
