"""Tables within domains: the class served worst, and calibration, on numbers that are checked by hand."""

from __future__ import annotations

import json

import pytest

from fedheal.report.class_table import build_domain_tables
from fedheal.report.html_page import render_page
from fedheal.report.tables import flatten_rows
from fedheal.report.text_report import format_report
from made_up import load_rows, run_folder

COUNTS = [[[8, 10], [1, 5]], [[9, 10], [3, 5]]]  # of two seeds: class 0 has 17 of 20 correct, class 1 has 4 of 10


@pytest.fixture
def folder(tmp_path):
    """A folder with FedAvg's runs that count classes, and one of FedHEAL as an earlier version wrote it."""
    for seed, counts in enumerate(COUNTS):
        path = run_folder(tmp_path / f"fedavg-{seed}", "fedavg", seed=seed) / "result.json"
        calibration = {"mnist": {"ece": 4.0 + 2 * seed, "brier": 0.5, "nll": None}}
        more = {"by_class": {"mnist": counts, "usps": [[0, 0], [2, 4]]}, "calibration": calibration}
        path.write_text(json.dumps(json.loads(path.read_text()) | more | {"classes": ["cat", "dog"]}))
    run_folder(tmp_path / "fedheal", "fedavg+fedheal")
    return tmp_path


def test_the_worst_class_is_over_all_seeds_and_errors_are_means(folder):
    classes, ece, brier = build_domain_tables(load_rows(folder))  # no seed has an NLL, and FedHEAL has no numbers
    assert [list(line) for line in classes.lines] == [
        ["method", "mnist", "usps", "svhn", "syn"],
        ["fedavg", "40.0 (dog)", "50.0 (dog)", "-", "-"],
    ]
    assert list(ece.lines[1]) == ["fedavg", "5.00 ± 1.41", "-", "-", "-"]
    assert list(brier.lines[1]) == ["fedavg", "0.50 ± 0.00", "-", "-", "-"]


def test_reports_show_them_and_records_have_the_numbers(folder):
    runs = load_rows(folder)
    for form in ("text", "markdown", "latex"):
        text = format_report(runs, form)
        assert "40.0 (dog)" in text
        assert "Expected calibration error" in text
        assert "%" not in [line.strip() for line in text.split("\n")]  # LaTeX has no comment without words
        assert "Brier" not in text  # on the page and in CSV
    narrow = format_report(runs, "text", width=30)
    assert "  mnist 40.0 (dog)" in narrow
    assert "Brier score" in render_page(runs)
    by_run = {(record["method"], record["seed"]): record for record in flatten_rows(runs)}
    assert by_run["fedavg", 1]["ece.mnist"] == 6.0
    assert "ece.mnist" not in by_run["fedavg+fedheal", 0]


def test_runs_of_earlier_versions_have_no_such_table(small_runs):
    assert build_domain_tables(load_rows(small_runs)) == []
