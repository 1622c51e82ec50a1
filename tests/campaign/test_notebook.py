"""Comparisons and reports in Python."""

from __future__ import annotations

import html
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import fedheal
import tiny_data
from fedheal import Method, aggregate
from fedheal.report.rows import find_results
from fedheal.report.text_report import format_report

FIELDS: dict[str, Any] = {key: value for key, value in tiny_data.QUICK.items() if key != "data"} | {"rounds": 1}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[fedheal.Report, Path]:
    """A comparison of two named methods and a custom one, on data given as an object, with two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    own = Method(local=(), aggregator=aggregate.fedheal(tau=0.5), name="mine")
    methods = ["fedavg", "fedavg+uniform", own]
    return fedheal.compare(methods, data=tiny_data.load, seeds=2, out=folder, **FIELDS), folder


def test_a_comparison_has_a_row_for_each_method_and_seed(comparison: tuple[fedheal.Report, Path]) -> None:
    report, folder = comparison
    rows = [(row.method, row.seed) for row in report.rows]
    assert rows == [(m, s) for s in (0, 1) for m in ("fedavg", "fedavg+uniform")] + [("mine", 0), ("mine", 1)]
    assert len(find_results([folder])) == 6
    alone = fedheal.run(tiny_data.quick(method="fedavg", rounds=1, seed=1), progress=False)
    assert report.rows[2].domains == alone.domains


def test_it_is_shown_as_a_table_and_sentences(comparison: tuple[fedheal.Report, Path]) -> None:
    report, _ = comparison
    text = repr(report)
    assert text.startswith("tiny@")
    for word in ("fedavg+uniform", "mine", "plain", "AVG", "seeds"):
        assert word in text
    assert report._repr_html_() == f"<pre>{html.escape(text)}</pre>"


def test_it_is_also_a_table_in_latex(comparison: tuple[fedheal.Report, Path]) -> None:
    report, _ = comparison
    text = report.to_latex()
    assert text == format_report(report.rows, "latex")
    assert r"\begin{tabular}" in text
    assert replace(report, reference="mine").to_latex() == format_report(report.rows, "latex", "mine") != text


def test_notes_on_the_data_are_shown(comparison: tuple[fedheal.Report, Path]) -> None:
    first, *_ = comparison[0].rows
    noted = replace(first, summaries=({**first.summaries[0], "data_notes": ["plain stands in for another domain"]},))
    assert "plain stands in for another domain" in str(replace(comparison[0], rows=(noted,)))


def test_repeating_it_runs_nothing_again(comparison: tuple[fedheal.Report, Path], monkeypatch: Any) -> None:
    report, folder = comparison
    monkeypatch.setattr("fedheal.campaign.pool.run_job", None)
    assert [row.seed for row in fedheal.compare("fedavg", tiny_data.load(), "0-1", folder, **FIELDS).rows] == [0, 1]
    again = fedheal.compare(["fedavg", "fedavg+uniform"], tiny_data.load(), [0, 1], folder, **FIELDS)
    assert [row.domains for row in again.rows] == [row.domains for row in report.rows[:4]]


def test_a_report_reads_folders_and_writes_a_page(comparison: tuple[fedheal.Report, Path], tmp_path: Path) -> None:
    report, folder = comparison
    read = fedheal.make_report(str(folder), reference="fedavg+uniform")
    assert {(row.method, row.seed) for row in read.rows} == {(row.method, row.seed) for row in report.rows}
    assert "fedavg+uniform" in str(read)
    page = read.write_html(tmp_path / "new" / "page.html", "Mine")
    assert "<title>Mine" in page.read_text("utf-8")


def test_a_report_keeps_the_order_of_its_comparison(tmp_path: Path) -> None:
    methods = ["fedavg+uniform", "fedavg", "fedavg+fedheal"]
    compared = fedheal.compare(methods, tiny_data.load(), 1, tmp_path, **FIELDS)
    assert [row.method for row in compared.rows] == methods
    assert [row.method for row in fedheal.make_report(tmp_path).rows] == methods


def test_a_data_frame_has_a_record_a_row(comparison: tuple[fedheal.Report, Path], monkeypatch: Any) -> None:
    records: list[Any] = []
    frame = SimpleNamespace(from_records=records.append)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame))
    comparison[0].to_pandas()
    assert [(record["method"], record["seed"]) for record in records[0]][:2] == [("fedavg", 0), ("fedavg+uniform", 0)]


def test_what_cannot_be_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="jobs = 2: data, models and methods given as objects stay in this process"):
        fedheal.compare(["fedavg"], tiny_data.load, jobs=2, out=tmp_path)
    with pytest.raises(ValueError, match="name at least one method"):
        fedheal.compare([], tiny_data.load, out=tmp_path)
    unnamed = [Method((), aggregate.fedavg()), Method((), aggregate.uniform())]
    with pytest.raises(ValueError, match="two of the methods have the same name"):
        fedheal.compare(unnamed, tiny_data.load, out=tmp_path)
    with pytest.raises(ValueError, match="there is no finished run"):
        fedheal.make_report(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        fedheal.make_report(tmp_path / "absent")


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").touch()
    with pytest.raises(ValueError, match="is not empty and holds no runs: name another folder"):
        fedheal.compare(["fedavg"], data=tiny_data.load(), seeds=1, out=tmp_path, **FIELDS)
    assert [path.name for path in tmp_path.iterdir()] == ["cat.jpg"]


def test_a_finished_run_of_a_model_that_has_changed_is_not_reused(tmp_path: Path) -> None:
    sizes = {"middle": 16}

    def build_model(classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, sizes["middle"]), nn.Linear(sizes["middle"], classes))

    fields = FIELDS | {"model": build_model, "seeds": 1, "out": tmp_path / "runs", "data": tiny_data.load()}
    first = fedheal.compare(["fedavg"], **fields)
    assert fedheal.compare(["fedavg"], **fields).rows[0].domains == first.rows[0].domains
    sizes["middle"] = 17
    with pytest.raises(ValueError, match=r"the model of .* has changed since"):
        fedheal.compare(["fedavg", "fedavg+uniform"], **fields)


def test_other_fields_have_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for lr in (0.01, 0.02):
        fedheal.compare(["fedavg"], data=tiny_data.load(), seeds=1, **FIELDS | {"lr": lr})
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_crossed_seeds_give_variance_components(tmp_path: Path) -> None:
    report = fedheal.compare(
        ["fedavg", "fedavg+uniform"], tiny_data.load, out=tmp_path, vary={"split": 2, "init": 2}, **FIELDS
    )
    assert [row.seeds for row in report.rows if row.method == "fedavg"] == [(i, j, 0) for i in (0, 1) for j in (0, 1)]
    assert "Variance components (2 split x 2 init)" in str(report)
    assert "Variance components (2 split x 2 init)" in str(fedheal.make_report(tmp_path))
    page = report.write_html(tmp_path / "page.html").read_text()
    assert "<h3>Where the variance comes from</h3>" in page
    same_draw, other_draw = (
        report.rows[i].summaries[0]["used_fingerprint"] for i in (2, 4)
    )  # split 0, init 1; split 1
    assert same_draw == report.rows[0].summaries[0]["used_fingerprint"] != other_draw


def test_the_initial_model_cannot_vary_if_it_is_given() -> None:
    with pytest.raises(ValueError, match="give a function, or leave out init"):
        fedheal.compare("fedavg", tiny_data.load, vary="init=2", **FIELDS | {"model": tiny_data.linear(3)})
