"""Runs that differ in more than method and seed: it is said, and what was on other data is not subtracted."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from fedheal.report.comparability import compare_settings, list_cautions, list_seed_cautions
from fedheal.report.conclusions import analyse_rows, conclude, describe_gains, find_leaders
from fedheal.report.html_page import render_page
from fedheal.report.rows import build_rows, find_results, find_rows
from fedheal.report.series import build_series
from fedheal.report.tables import flatten_rows
from fedheal.report.text_report import format_report
from made_up import load_rows, run_folder


def edit_result(folder, **values):
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_experiment(folder, **values):
    path = folder / "experiment.toml"
    lines = [line for line in path.read_text().splitlines() if line.partition(" ")[0] not in values]
    path.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in values.items())]) + "\n")


@pytest.fixture
def runs(tmp_path):
    """A folder with comparable runs of FedAvg and FedHEAL with two seeds."""
    for method in ("fedavg", "fedavg+fedheal"):
        for seed in (0, 1):
            edit_result(run_folder(tmp_path / f"{method}-{seed}", method, seed=seed), used_fingerprint=f"used{seed}")
    return tmp_path


def test_runs_that_differ_by_method_and_seed_alone_need_no_caution(runs):
    assert list_cautions(load_rows(runs)) == []
    assert "differ between runs" not in render_page(load_rows(runs))


def test_runs_on_other_data_are_named_and_not_subtracted(runs):
    before = conclude(load_rows(runs))
    edit_result(runs / "fedavg+fedheal-1", used_fingerprint="other")
    changed = load_rows(runs)
    (caution,) = list_cautions(changed)
    assert caution == (
        "Not on the same data as the run of fedavg with the same seed, and therefore not compared with it: "
        f"fedavg+fedheal with seed 1 ({runs / 'fedavg+fedheal-1'})."
    )
    assert caution in render_page(changed).replace("&#39;", "'")
    after = conclude(changed)
    assert before[0].startswith("2 seeds cannot")
    assert after[0].startswith("1 seed cannot")
    alone = [row for row in changed if row.seed == 0]
    assert describe_gains(analyse_rows(changed)) == describe_gains(analyse_rows(alone))
    # Where no seed is left, nothing is said of the method at all.
    edit_result(runs / "fedavg+fedheal-0", used_fingerprint="other")
    analysis = analyse_rows(load_rows(runs))
    assert describe_gains(analysis) == []
    assert {leader.method for leader in find_leaders(analysis)} == {"fedavg"}
    assert not any("fedavg+fedheal" in s for s in conclude(load_rows(runs)))


def test_a_reference_whose_own_runs_are_on_other_data_is_compared_with_nothing(runs):
    # Both have the draw of seed 0, with other initial models, but not the same images.
    edit_result(runs / "fedavg-1", seed=0, split_seed=0, init_seed=1)
    rows = load_rows(runs)
    analysis = analyse_rows(rows)
    assert (analysis.reference, analysis.methods, analysis.metrics) == ("fedavg", {}, [])
    assert list_cautions(rows)[0].startswith("Not on the same data as the run of fedavg with the same seed")
    assert "Not on the same data" in render_page(rows)


def test_what_a_run_does_not_say_of_its_data_is_no_difference(runs):
    edit_result(runs / "fedavg-0", used_fingerprint="")  # of an earlier version: only the whole data set's
    assert list_cautions(load_rows(runs)) == []
    edit_result(runs / "fedavg-0", data_fingerprint="another")
    assert len(list_cautions(load_rows(runs))) == 1
    edit_result(runs / "fedavg-0", data_fingerprint="")  # of a federation: none
    assert list_cautions(load_rows(runs)) == []


def test_settings_that_differ_are_named_with_every_table(runs):
    edit_experiment(runs / "fedavg-0", lr=0.5, workers=3)
    edit_experiment(runs / "fedavg+fedheal-1", dirichlet=0.1)
    (caution,) = list_cautions(load_rows(runs))
    assert caution.startswith(
        "Settings that differ between runs: lr (0.5, 0.001), dirichlet (not set, 0.1). Differences between rows"
    )
    assert caution in render_page(load_rows(runs))
    assert compare_settings(load_rows(runs)).differing["workers"] == [
        "3",
        "not set",
    ]  # on the page, though it changes nothing


def test_a_federation_does_not_differ_in_what_it_does_not_say(runs):
    edit_experiment(runs / "fedavg-0", rounds=30)
    (runs / "fedavg-0" / "experiment.toml").rename(runs / "fedavg-0" / "federation.toml")
    text = (runs / "fedavg-0" / "federation.toml").read_text()
    (runs / "fedavg-0" / "federation.toml").write_text(text.replace("lr = 0.001\n", ""))
    (caution,) = list_cautions(load_rows(runs))
    assert "rounds (30, 20)." in caution
    assert "lr" not in caution


def test_the_parts_of_a_bound_are_no_difference(runs):
    folder = run_folder(runs / "centralised", "fedavg", seed=0)
    edit_experiment(folder, pool="true")
    edit_result(folder, pool=True, used_fingerprint="pooled")
    changed = load_rows(runs)
    assert "centralised" in {row.method for row in changed}
    assert list_cautions(changed) == []


def test_runs_that_are_not_finished_are_named(runs):
    (runs / "fedavg+fedheal-1" / "result.json").unlink()
    cautions = list_cautions(load_rows(runs)) + list_seed_cautions(load_rows(runs))
    assert cautions == [
        "1 run is unfinished: fedavg+fedheal-1.",
        "Methods have different seeds (fedavg has 2, fedavg+fedheal has 1), so their means are not comparable; tests use the "
        "seeds that both have.",
    ]
    for caution in cautions:
        assert caution in format_report(load_rows(runs), "text")
        assert caution in render_page(load_rows(runs))
    run_folder(runs / "fedavg-2", "fedavg", seed=2, finished=False)
    (runs / "fedavg-1" / "result.json").unlink()
    assert list_cautions(load_rows(runs)) == ["3 runs are unfinished: fedavg+fedheal-1, fedavg-1, fedavg-2."]
    # Runs elsewhere say nothing about these.
    run_folder(runs / "other" / "fedavg-0", "fedavg", data="office-caltech")
    assert list_cautions([row for row in load_rows(runs) if row.data == "office-caltech"]) == []
    assert list_cautions(find_rows([runs / "fedavg-0"])) == []


def test_methods_with_other_seeds_are_named_though_all_runs_are_finished(runs):
    for seed in (2, 3):
        edit_result(run_folder(runs / f"fedavg-{seed}", "fedavg", seed=seed), used_fingerprint=f"used{seed}")
    sentence = (
        "Methods have different seeds (fedavg has 4, fedavg+fedheal has 2), so their means are not comparable; tests use the "
        "seeds that both have."
    )
    assert list_seed_cautions(load_rows(runs)) == [sentence]
    assert sentence in render_page(load_rows(runs))
    assert sentence in format_report(load_rows(runs), "markdown")


def test_as_many_seeds_need_not_be_the_same(runs):
    assert list_seed_cautions(load_rows(runs)) == []
    edit_result(runs / "fedavg+fedheal-1", seed=5)
    (caution,) = list_seed_cautions(load_rows(runs))
    assert caution.startswith("Methods have different seeds, so their means are not comparable")


def test_a_bound_may_have_other_seeds(runs):
    folder = run_folder(runs / "centralised", "fedavg", seed=0)
    edit_experiment(folder, pool="true")
    edit_result(folder, pool=True, used_fingerprint="pooled")
    assert {row.method: row.seeds for row in load_rows(runs)}["centralised"] == (0, 0, 0)
    assert list_seed_cautions(load_rows(runs)) == []


def test_a_damaged_description_is_named(runs):
    path = runs / "fedavg-1" / "experiment.toml"
    path.write_text("what\n")
    with pytest.raises(ValueError, match=f"{path} is not TOML"):
        render_page(load_rows(runs))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "there is no method"),
        ("[]", "does not hold a JSON object"),
        ("{", "is not JSON"),
        (None, "domains must not be empty"),
    ],
)
def test_a_result_that_lacks_what_a_report_needs_is_refused_by_name(runs, text, sentence):
    path = runs / "fedavg-1" / "result.json"
    path.write_text(text or json.dumps(json.loads(path.read_text()) | {"domains": {}, "test_sizes": {}}))
    with pytest.raises(ValueError, match=f"{path}.*{sentence}"):
        find_results([runs])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"avg": "x"}, "avg must be a number, got 'x'"),
        ({"averaged": "five"}, "averaged must be a whole number, got 'five'"),
        ({"seconds": {"train": "long"}}, "seconds.train must be a number, got 'long'"),
        ({"trained": {"a": []}}, "trained.a must be a string, got []"),
        ({"only": [["a"]]}, "only.0 must be a string, got ['a']"),
        ({"data_notes": [{}]}, "data_notes.0 must be a string, got {}"),
        (
            {"consistency": {"a": [0.5, 0.5], "b": [1.0]}},
            "consistency must have lists of one length, got {'a': [0.5",
        ),
        ({"consistency": {"a": "even"}}, "consistency.a must be a list, got 'even'"),
        ({"validation": {"avg": 80.0}}, "there is no validation.std"),
        ({"domains": {"a": 100.1}}, "domains must have accuracies from 0 to 100, got {'a': 100.1}"),
        ({"domains": {"a": 50.0, "b": -1.0}}, "domains must have accuracies from 0 to 100, got {'a': 50.0, 'b': -1.0}"),
        ({"clients": {"a-0": 250.0}}, "clients must have accuracies from 0 to 100, got {'a-0': 250.0}"),
        ({"versions": ["1"]}, "versions must be a dictionary, got ['1']"),
    ],
)
def test_a_result_that_is_not_what_a_run_writes_is_refused_by_name(runs, values, sentence):
    """This also holds for numbers that a report takes from elsewhere."""
    edit_result(runs / "fedavg-1", **values)
    with pytest.raises(ValueError, match=re.escape(f"{runs / 'fedavg-1' / 'result.json'}: {sentence}")):
        find_results([runs])


def test_the_device_that_a_run_had_is_compared(runs):
    edit_experiment(runs / "fedavg-0", device='"auto"', precision='"auto"')
    edit_experiment(runs / "fedavg-1", device='"cpu"', precision='"fp32"')
    for seed in (0, 1):
        edit_result(runs / f"fedavg-{seed}", device="cpu", precision="fp32")
    rows = [row for row in load_rows(runs) if row.method == "fedavg"]
    assert list_cautions(rows) == []
    edit_result(runs / "fedavg-1", device="cuda:0")
    rows = [row for row in load_rows(runs) if row.method == "fedavg"]
    assert "Settings that differ between runs: device (cpu, cuda)." in list_cautions(rows)[0]


def test_a_mean_of_accuracies_of_100_may_be_a_little_more(runs):
    edit_result(runs / "fedavg-1", domains=dict.fromkeys(("mnist", "usps", "svhn", "syn"), 100.00000000000001))
    assert find_results([runs / "fedavg-1"])[0]["domains"]["usps"] > 100


def test_every_record_for_programs_says_what_sets_it_apart(runs):
    assert [record["notes"] for record in flatten_rows(load_rows(runs))] == ["", "", "", ""]
    edit_experiment(runs / "fedavg-0", lr=0.5, workers=3)
    edit_result(runs / "fedavg+fedheal-1", used_fingerprint="other", data_notes=["syn_standin stands in for syn"])
    edit_result(runs / "fedavg-1", used_fingerprint="one")
    for method in ("fedavg", "fedavg+fedheal"):
        run_folder(runs / f"{method}-elsewhere", method, "own", seed=7)  # alike in itself
    notes = {(record["method"], record["seed"]): record["notes"] for record in flatten_rows(load_rows(runs))}
    usual = "lr = 0.001, which is not the same in all runs"
    assert notes == {
        ("fedavg", 0): "lr = 0.5, which is not the same in all runs",  # the number of workers changes no result
        ("fedavg", 1): usual,
        ("fedavg", 7): "",
        ("fedavg+fedheal", 0): usual,
        (
            "fedavg+fedheal",
            1,
        ): f"syn_standin stands in for syn; {usual}; not on the same data as the run of fedavg with the same seed",
        ("fedavg+fedheal", 7): "",
    }


def test_curves_are_means_of_the_same_rounds(runs):
    """One seed was evaluated in rounds 2, 4, 6, the other in 3 and 6: only round 6 has a mean over both."""
    for seed, every in ((0, 2), (1, 3)):
        path = runs / f"fedavg-{seed}" / "rounds.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()][:6]
        for record in records:
            record["domains"] = {"mnist": 10.0 * record["round"] + seed} if record["round"] % every == 0 else None
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        result = path.with_name("result.json")
        result.write_text(json.dumps(json.loads(result.read_text()) | {"rounds": 6}))
    fedavg = next(s for s in build_series(load_rows(runs)) if s.method == "fedavg")
    assert fedavg.rounds.tolist() == [6.0]
    assert fedavg.curves["mnist"].mean.tolist() == [60.5]
    assert np.array_equal(fedavg.all_rounds, np.arange(1, 7))
    assert len(build_rows(find_results([runs]))) == 4


def test_one_name_that_stands_for_two_methods_is_a_caution(runs):
    for seed in (0, 1):
        edit_experiment(runs / f"fedavg+fedheal-{seed}", method=f'"fedavg+fedheal:tau=0.{seed + 3}"')
    (caution,) = list_cautions(load_rows(runs))
    assert caution == (
        "The runs of fedavg+fedheal are not all of the same method: fedavg+fedheal:tau=0.3, fedavg+fedheal:tau=0.4. "
        "They are not seeds of one experiment."
    )
    assert [bool(record["notes"]) for record in flatten_rows(load_rows(runs))] == [False, False, True, True]


def test_code_of_ones_own_that_changed_under_its_name_is_a_caution(runs):
    for seed in (0, 1):
        edit_result(runs / f"fedavg+fedheal-{seed}", own=[["Proximal", {"mu": "0.1"}]])
    assert list_cautions(load_rows(runs)) == []
    edit_result(runs / "fedavg+fedheal-1", own=[["Proximal", {"mu": "0.2"}]])
    (caution,) = list_cautions(load_rows(runs))
    assert "are not all of the same method, although the parameters in its name are equal" in caution
