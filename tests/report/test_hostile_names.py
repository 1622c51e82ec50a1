"""Names come from the clients of a federation: none breaks a report, or becomes a part of its markup."""

from __future__ import annotations

import csv
import io
import re

import pytest

from fedheal.report.diagnose import diagnose_run, explain_diagnosis, format_diagnosis
from fedheal.report.html_page import render_page
from fedheal.report.plain_text import escape_controls
from fedheal.report.series import build_series
from fedheal.report.tables import format_csv
from fedheal.report.text_report import format_report
from made_up import DOMAINS, load_rows, run_folder

NAMES = ("AVG", "worst", "std", "two\nlines\x1b[2J", "<script>alert(1)</script>", "a|b\\|c", "=cmd()", "%{x}$&_")
NAMES += ("\u202eright",)  # turns the direction of writing


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setitem(DOMAINS, "odd", NAMES)
    for method in ("fedavg", "fedavg+fedheal"):
        run_folder(tmp_path / "runs" / method, method, "odd", rounds=4, per_domain=1)
    return tmp_path / "runs" / "fedavg+fedheal"


@pytest.mark.parametrize(("form", "width"), [("text", None), ("text", 60), ("markdown", None), ("latex", None)])
def test_reports_keep_their_lines(run, form, width):
    text = format_report(load_rows(run.parent), form, width=width)
    assert not [line for line in text.split("\n") if escape_controls(line) != line]
    assert "worst (domain)" in text
    if form == "markdown":
        table = [line for line in text.split("\n") if line.startswith("| ")]
        assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table[:3]} == {len(NAMES) + 6}
        assert not re.search(r"(?<!\\)<script", text)
    if form == "latex":
        body, is_inside = [], False
        for line in text.split("\n"):
            is_inside = (is_inside or line.startswith(r"\begin")) and line != r"\end{tabular}"
            body += [] if is_inside or line == r"\end{tabular}" else [line]
        assert {line[:1] for line in body} <= {"", "%"}
        assert r"a|b\textbackslash{}|c" in text
        assert r"\%\{x\}\$\&\_" in text


def test_a_domain_called_like_a_column_is_told_apart(run):
    row, _ = rows = load_rows(run.parent)
    assert [*row.domains][:3] == ["AVG (domain)", "worst (domain)", "std"]
    assert row.get_value("worst") == min(row.domains.values())
    series = build_series(rows)[0]
    assert series.curves["AVG (domain)"].mean[-1] != series.curves["AVG"].mean[-1]
    assert {"AVG (domain)", "worst (domain)"} <= series.weights.keys()


def test_no_cell_of_csv_begins_a_formula(run):
    for line in csv.reader(io.StringIO(format_csv(load_rows(run.parent)))):
        assert not [cell for cell in line if cell.startswith(("=", "+", "@"))]


def test_the_page_has_names_as_text(run):
    assert "<script>alert" not in render_page(load_rows(run.parent))


@pytest.mark.parametrize("by", ["domain", "client"])
def test_a_diagnosis_keeps_its_lines(run, by):
    diagnosis = diagnose_run(run, by)
    words = [*explain_diagnosis(diagnosis), *(word for line in format_diagnosis(diagnosis) for word in line)]
    assert [word for word in words if escape_controls(word) != word] == []
    assert len(format_diagnosis(diagnosis)) == len(NAMES) + 1
