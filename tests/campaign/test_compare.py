"""Comparisons: paired, resumable, with bounds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import fedheal
from fedheal.campaign.compare import choose_seeds, parse_seeds, plan
from fedheal.campaign.jobs import Job
from fedheal.campaign.pool import run_all
from fedheal.report.rows import BOUNDS, build_rows, find_results
from fedheal.report.tables import flatten_rows
from fedheal.runs import folder as records
from fedheal.runs.lock import LOCK
from tiny_data import QUICK, quick

TESTS = Path(__file__).parents[1]


def run_jobs(planned: list[Job], processes: int = 1) -> list[dict[str, object]]:
    for _ in run_all(planned, processes):
        pass
    return [records.read_json(job.folder / "result.json") | {"folder": str(job.folder)} for job in planned]


def test_methods_are_paired_by_seed(tmp_path):
    """With tau and beta 0 FedHEAL is FedAvg: the same split, cohorts, batches and initial model must give the same numbers."""
    planned = plan(["fedavg", "fedheal:tau=0,beta=0"], [0, 1], QUICK | {"participation": 0.6}, tmp_path)
    first, twin, other, _ = run_jobs(planned)
    assert first["method"] == "fedavg"
    assert twin["method"] == "fedavg+fedheal:tau=0.0,beta=0.0"
    assert first["domains"] == twin["domains"]
    assert first["clients"] == twin["clients"]
    models = [records.load_tensors(job.folder / "model.safetensors") for job in planned]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    assert not all(models[0][name].equal(models[2][name]) for name in models[0])
    assert other["seed"] == 1


def test_finished_runs_are_not_run_again(tmp_path):
    planned = plan(["fedavg", "fedheal"], [0], QUICK, tmp_path)
    run_jobs(planned)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    run_jobs(planned)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_finished_runs_of_other_experiments_are_not_taken_for_these(tmp_path):
    run_jobs(plan(["fedavg"], [0], QUICK, tmp_path))
    with pytest.raises(ValueError, match=r"fedavg.* belongs to another experiment"):
        run_jobs(plan(["fedheal", "fedavg"], [0], QUICK | {"lr": 0.5}, tmp_path))
    assert not list(tmp_path.glob("fedheal*"))  # it was seen before anything ran
    freely = QUICK | {"save_seconds": 1.0}
    assert [job.is_finished for job in plan(["fedavg"], [0], freely, tmp_path)] == [True]


def test_an_error_in_one_run_stops_the_rest_and_keeps_what_is_done(tmp_path):
    good, bad = quick(name="good"), quick(name="bad", lr=1e9)
    planned = [Job(good, tmp_path / "good"), Job(bad, tmp_path / "bad")]
    with pytest.raises(ValueError, match="NaN"):
        run_jobs(planned)
    assert planned[0].is_finished
    assert not planned[1].is_finished


def wait_for_locks(folder: Path, seconds: float = 120) -> None:
    """Wait until killed processes have let go of every run folder, which they do when their last thread ends."""
    for path in folder.glob(f"*/{LOCK}"):
        with FileLock(path, timeout=seconds):
            pass


@pytest.mark.slow
def test_killed_in_the_middle_and_started_again_it_gives_the_same_table(tmp_path):
    values = QUICK | {"rounds": 12, "save_seconds": 0}
    words = [f"{key}={value}" for key, value in values.items() if key != "data"]
    command = [sys.executable, "-m", "fedheal", "compare", "fedavg", "fedheal", "--data", QUICK["data"], "--seeds", "2"]
    command += ["--jobs", "2", *words, "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    expected = build_rows(run_jobs(plan(["fedavg", "fedheal"], [0, 1], values, tmp_path / "whole")))
    deadline = time.monotonic() + 300
    while not list((tmp_path / "killed").glob("*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_locks(tmp_path / "killed")
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/result.json")}
    assert finished
    resumed = build_rows(run_jobs(plan(["fedavg", "fedheal"], [0, 1], values, tmp_path / "killed")))
    assert flatten_rows(resumed) == flatten_rows(expected)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_bounds_are_rows_like_others(tmp_path):
    planned = plan(["fedavg", *BOUNDS], [0], QUICK | {"rounds": 2}, tmp_path)
    rows = {row.method: row for row in build_rows(run_jobs(planned))}
    assert set(rows) == {"fedavg", *BOUNDS}
    summaries = find_results([tmp_path])
    by_name = {Path(s["folder"]).name: s for s in summaries}
    # standalone: each client's own model on its own domain, mean over the domain's clients
    plain = [by_name[f"standalone-plain-{i}-seed0"]["domains"]["plain"] for i in range(2)]
    assert rows["standalone"].domains["plain"] == pytest.approx(sum(plain) / 2)
    assert rows["standalone"].domains["dark"] == by_name["standalone-dark-0-seed0"]["domains"]["dark"]
    # leave one out: the domain's accuracy comes from the run without it
    assert rows["leave-one-domain-out"].domains["noisy"] == by_name["without-noisy-seed0"]["domains"]["noisy"]
    assert set(by_name["without-noisy-seed0"]["trained"]) == {"plain-0", "plain-1", "dark-0"}
    assert by_name["centralised-seed0"]["trained"] == {"pooled": ""}
    # a bound whose runs are not all there is no row yet
    some = [s for s in summaries if not s["folder"].endswith("without-noisy-seed0")]
    assert "leave-one-domain-out" not in {row.method for row in build_rows(some)}
    some = [s for s in summaries if not s["folder"].endswith("standalone-plain-1-seed0")]
    assert "standalone" not in {row.method for row in build_rows(some)}


def test_pooled_training_is_one_client_with_everything(tmp_path):
    """One machine with all data and one epoch of plain SGD: the same as a federation of that one client."""
    result = fedheal.run(quick(pool=True), tmp_path / "pooled")
    assert result.summary["trained"] == {"pooled": ""}
    assert result.history[0].weights == {"pooled": 1.0}
    steps = -(-(2 * 24 + 2 * 16 + 13) // 8)
    assert result.history[0].cohort == 1
    assert steps == 12  # 93 examples in batches of 8
    assert set(result.summary["clients"]) == {"plain-0", "plain-1", "noisy-0", "noisy-1", "dark-0"}


@pytest.mark.parametrize(
    ("methods", "seeds", "values", "words"),
    [
        ([], [0], {}, "at least one method"),
        (["fedavg"], [], {}, "at least one seed"),
        (["fedavg", "fedavg"], [0], {}, "'fedavg' is given twice: name each method once"),
        (["fedavg", "fedheal", "fedavg+fedheal"], [0], {}, r"'fedheal' and 'fedavg\+fedheal' are the same: name each"),
        (["fedavg"], [0], {"seed": 3}, "seed=3 cannot be set in a comparison, which sets seed itself: use --seeds 3-3"),
        (["fedavgg"], [0], {}, "did you mean 'fedavg'"),
        (["fedavg", "standalon"], [0], {}, r"did you mean 'standalone'\?"),
        (
            ["fedavg", "centralised+uniform"],
            [0],
            {},
            "'centralised' is a bound, which takes no parts .* fedavg centralised`$",
        ),
        (["fedavg", "leave-one-domain-out+fedheal"], [0], {}, "'leave-one-domain-out' is a bound"),
        (["fedheal+standalone"], [0], {}, "'standalone' is a bound"),
        (["standalone:tau=3"], [0], {}, "'standalone' is a bound"),
        (["centralized"], [0], {}, "did you mean 'centralised'"),
        (["fedavg"], [0], {"rounds": -1}, "rounds = -1"),
        (["fedavg", "fedce"], [0], {}, "method 'fedce' needs examples held out .*: give validation=0.2"),
        (["fedavg", "ditto:feedback=true"], [0], {"server_lr": 0.5}, "ditto:feedback=true"),
        (["fedavg", "fedbn"], [0], {"pool": True}, "method 'fedbn' keeps a part of the model with each client"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path, methods, seeds, values, words):
    with pytest.raises(ValueError, match=words):
        plan(methods, seeds, QUICK | values, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "x", "3-1", "1,1", "", "1-", "1,", ",", "0,-1", "0,3-1", "0,3--1", "0,1-2-3", "0,2-4,3", "0,x-3"],
)
def test_seeds_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError, match=f"seeds = {text}: "):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ("1,1", "seeds = 1,1: 1 is given twice; name each seed once"),
        ("0,2-4,3", "seeds = 0,2-4,3: 3 is given twice"),
        ([5, 5], "seeds = [5, 5]: 5 is given twice"),
        ("3-1", "seeds = 3-1: the range 3-1 ends before it starts; write the smaller seed first"),
        ("0, 3-1", "seeds = 0, 3-1: the range 3-1 ends before it starts"),
        ("x", "seeds = x: use a number of seeds such as 5"),
    ],
)
def test_repeated_seeds_and_reversed_ranges_are_named(seeds, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        choose_seeds(seeds, None)


def test_a_list_of_seeds_may_hold_ranges():
    assert parse_seeds("0,8-12") == [0, 8, 9, 10, 11, 12]
    assert parse_seeds("5-6, 3, 0-1") == [5, 6, 3, 0, 1]
    assert choose_seeds(None, "split=0,8-9,init=3-4")[-1] == {"split_seed": 9, "init_seed": 4}


def test_who_asks_for_no_seeds_learns_how_to_ask_for_seed_0():
    with pytest.raises(ValueError, match=r"seeds = 0: this is a number of seeds; use 1 \(or 0-0\) for seed 0 alone"):
        parse_seeds("0")
    assert parse_seeds("1") == parse_seeds("0-0") == [0]


@pytest.mark.parametrize(
    "text",
    ["10000000000", "3-9999999999999999999999", "1,3-9999999999999999999999", ",".join(map(str, range(10_001)))],
)
def test_more_seeds_than_anybody_waits_for_are_refused(text):
    with pytest.raises(ValueError, match="use at most 10,000 seeds"):
        parse_seeds(text)
    assert parse_seeds("10000") == list(range(10_000))


def test_validation_examples_are_held_out_of_training():
    from fedheal import data as datasets
    from fedheal.simulate.build import build_federation
    from fedheal.simulate.devices import resolve_device

    experiment = quick(validation=0.25)
    federation = build_federation(experiment, datasets.load_dataset(experiment.data), resolve_device("cpu"))
    whole = build_federation(quick(), datasets.load_dataset(experiment.data), resolve_device("cpu"))
    for client, split in federation.local_training.examples.items():
        held_out, everything = federation.validation[client], whole.local_training.examples[client]
        assert len(split) + len(held_out) == len(everything)
        assert len(held_out) == round(0.25 * len(everything))
        both = [*split.images.flatten(1).tolist(), *held_out.images.flatten(1).tolist()]
        assert sorted(both) == sorted(everything.images.flatten(1).tolist())
    result = fedheal.run(experiment, progress=False)
    assert set(result.summary["validation"]["domains"]) == {"plain", "noisy", "dark"}
    assert fedheal.run(quick(), progress=False).summary["validation"] is None
    with pytest.raises(ValueError, match="leaves 0 to validate"):
        fedheal.run(quick(validation=0.001), progress=False)


@pytest.mark.parametrize("method", ["fedga", "fedce"])
def test_examples_that_set_weights_do_not_score_the_model(method):
    """Otherwise a sweep would choose by the examples that the weights were fitted to."""
    from fedheal import data as datasets
    from fedheal.simulate.build import build_federation
    from fedheal.simulate.devices import resolve_device

    domains, device = datasets.load_dataset(quick().data), resolve_device("cpu")
    held_out = build_federation(quick(validation=0.25), domains, device).validation
    federation = build_federation(quick(method=method, validation=0.25), domains, device)
    for client, split in held_out.items():
        own, scored = federation.local_training.validation[client], federation.validation[client]
        assert 0 <= len(own) - len(scored) <= 1
        assert torch.equal(torch.cat([own.images, scored.images]), split.images)
        assert torch.equal(torch.cat([own.labels, scored.labels]), split.labels)
    with pytest.raises(ValueError, match=rf"validation = 0.05 leaves client .* method '{method}' needs two"):
        build_federation(quick(method=method, validation=0.05), domains, device)


@pytest.mark.parametrize(("field", "value"), [("only", "dark"), ("without", "dark"), ("pool", True)])
def test_what_bounds_vary_cannot_be_given_beside_them(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"{field} cannot be set in a comparison with bounds"):
        plan(["fedavg", "standalone"], [0], QUICK | {field: value}, tmp_path)
    assert plan(["fedavg"], [0], QUICK | {field: value}, tmp_path)


def test_a_crossed_comparison_has_a_run_for_every_combination(tmp_path):
    planned = plan(
        ["fedavg", "fedheal", "standalone"], choose_seeds(None, "split=2,batch=4-5"), QUICK | {"seed": 7}, tmp_path
    )
    fedavg = [job.experiment for job in planned if job.folder.name.startswith("fedavg-")]
    assert [(e.seed, e.split_seed, e.init_seed, e.batch_seed) for e in fedavg] == [
        (7, split, None, batch) for split in (0, 1) for batch in (4, 5)
    ]
    names = [job.folder.name for job in planned]
    assert "fedavg-tiny_data_load-seed7-split1-batch4" in names
    assert "standalone-dark-0-seed7-split0-batch5" in names
    assert len(set(names)) == 4 * (2 + 5)
    assert choose_seeds(None, {"init": [3, 5], "split": 2}) == choose_seeds(None, "split=2, init=3,5")


@pytest.mark.parametrize(
    ("vary", "problem"),
    [
        ("init=1", "init has one seed, but needs two or more"),
        ("init=0", "vary: init = 0: this is a number of seeds"),
        ("split=2,split=3", "a source is given twice"),
        ("images=3", "give each of split, init, batch"),
        (
            "split=2,nit=3",
            r"^vary = split=2,nit=3: there is no source 'nit' \(did you mean 'init'\?\); give each of split",
        ),
        ({"nit": 3}, "there is no source 'nit'"),
        ("split", "vary = split: split needs a number, as in split=5"),
        ("init=2,split", "split needs a number, as in split=5"),
        ("", "^vary = : give each of split, init, batch"),
        ("split=200,init=200", "at most 10,000 combinations"),
        (["split"], "vary"),
        ({"split": 2.5}, "vary: split"),
    ],
)
def test_what_cannot_be_varied_is_refused(vary, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        choose_seeds(None, vary)


def test_a_crossed_comparison_sets_its_seeds_itself(tmp_path):
    with pytest.raises(ValueError, match="seeds = 4: vary sets the seeds itself"):
        choose_seeds(4, "split=2")
    with pytest.raises(ValueError, match="split_seed=1 cannot be set in a comparison, which sets split_seed itself"):
        plan(["fedavg"], choose_seeds(None, "split=2"), QUICK | {"split_seed": 1}, tmp_path)
