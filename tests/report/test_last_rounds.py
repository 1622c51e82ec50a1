"""Domains that were not evaluated with the last model are named wherever a result is shown."""

from __future__ import annotations

import csv
import html
import io
import json

import pytest

from fedheal.core.metrics import fairness, last_mean
from fedheal.report.diagnose import diagnose_run, explain_diagnosis
from fedheal.report.html_page import render_page
from fedheal.report.tables import format_csv
from fedheal.report.text_report import format_report
from made_up import load_rows, run_folder

EARLIER = "not evaluated in round 14, the last evaluated one: usps (last in round 8); the accuracy is that of an earlier model"
FEWER = "means of fewer than 3 rounds: usps (2), syn (1)"


def write_federation(folder, seed=0, present=None):
    """Write a federation of 14 rounds: usps leaves after round 8, and syn is there in the last round alone."""
    present = present or {"usps": range(1, 9), "syn": range(14, 15)}
    run = run_folder(folder, "fedavg", seed=seed, rounds=14)
    (run / "experiment.toml").unlink()
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for record in lines:
        for domain, rounds in present.items():
            if record["round"] not in rounds:
                del record["domains"][domain]
                record["clients"] = {c: x for c, x in record["clients"].items() if not c.startswith(domain)}
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    domains = last_mean([record["domains"] for record in lines])
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"domains": domains} | fairness(domains)))
    return run


def test_every_form_of_a_report_says_who_was_evaluated_last_when(tmp_path):
    rows = load_rows(write_federation(tmp_path / "run"))
    assert set(rows[0].domains) == {"mnist", "usps", "svhn", "syn"}  # nobody vanishes
    for form, bullet in (("text", ""), ("markdown", "- "), ("latex", "% ")):
        lines = format_report(rows, form).split("\n")
        assert f"{bullet}Note: {EARLIER}." in lines
        assert f"{bullet}Note: {FEWER}." in lines
    below = render_page(rows).partition("</table>")[2].partition('<div class="words"')[0]
    assert below.count(f"Note: {EARLIER}.") == below.count(f"Note: {FEWER}.") == 1
    assert next(csv.DictReader(io.StringIO(format_csv(rows))))["notes"] == f"{EARLIER}; {FEWER}"


def test_of_several_runs_each_is_named(tmp_path):
    for seed in (0, 1):
        write_federation(tmp_path / str(seed), seed)
    run_folder(tmp_path / "whole", "fedavg+uniform", rounds=14)
    notes = [line for line in format_report(load_rows(tmp_path), "text").split("\n") if "Note: fedavg" in line]
    whose = [f"Note: fedavg with seed {seed}: " for seed in (0, 1)]
    assert notes == [f"{words}{note}." for words in whose for note in (EARLIER, FEWER)]


@pytest.mark.parametrize("by", ["domain", "client"])
def test_a_diagnosis_says_it_too(tmp_path, by):
    last = explain_diagnosis(diagnose_run(write_federation(tmp_path / "run"), by))[-1]
    if by == "domain":
        assert last == f"N{EARLIER[1:]}."
    else:
        assert "usps-0 (last in round 8), " in last
        assert last.endswith("; the accuracies are those of earlier models.")


def test_long_lists_are_cut(tmp_path):
    run = run_folder(tmp_path / "run", "fedavg", rounds=4)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[-1]["clients"] = {"mnist-0": 80.0}
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    assert " (last in round 3) and 14 more; the" in explain_diagnosis(diagnose_run(run, "client"))[-1]


def cut_end(text):
    return "".join(text.splitlines(keepends=True)[:10])


def spoil_domains(text):
    return text.replace('"domains": {', '"domains": 3, "x": {')


@pytest.mark.parametrize("change", [cut_end, spoil_domains, lambda text: ""])
def test_nothing_is_said_without_all_rounds(tmp_path, change):
    path = write_federation(tmp_path / "run") / "rounds.jsonl"
    path.write_text(change(path.read_text()))
    assert "Note:" not in format_report(load_rows(tmp_path), "text")
    path.unlink()
    assert "Note:" not in format_report(load_rows(tmp_path), "text")


def test_nothing_is_said_where_all_were_evaluated_or_of_rounds_after_the_result(tmp_path):
    run_folder(tmp_path / "a", "fedavg", rounds=8)
    assert "Note:" not in format_report(load_rows(tmp_path), "text")
    run = write_federation(tmp_path / "b" / "run", present={"usps": range(1, 13)})
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"rounds": 12}))
    assert "Note:" not in format_report(load_rows(run), "text")


def set_calibration(run, **changes):
    """Give every domain of a run finite calibration numbers, and some of them others."""
    result = json.loads((run / "result.json").read_text())
    finite = {domain: {"ece": 1.0, "brier": 0.1, "nll": 0.5} for domain in result["domains"]}
    (run / "result.json").write_text(json.dumps(result | {"calibration": finite | changes}))


NOT_FINITE = dict.fromkeys(("ece", "brier", "nll"))
DIVERGED = (
    "the model's outputs are not finite on usps, syn, so training has diverged and the accuracy means nothing: "
    "use a smaller lr"
)


def test_every_form_of_a_report_says_that_a_model_has_diverged(tmp_path):
    run = run_folder(tmp_path / "run", "fedavg", rounds=4)
    set_calibration(run, usps=NOT_FINITE, syn=NOT_FINITE)
    rows = load_rows(run)
    for form, bullet in (("text", ""), ("markdown", "- "), ("latex", "% ")):
        assert f"{bullet}Note: {DIVERGED}." in format_report(rows, form).split("\n")
    assert f"Note: {DIVERGED}." in html.unescape(render_page(rows))
    assert next(csv.DictReader(io.StringIO(format_csv(rows))))["notes"] == DIVERGED
    (run / "rounds.jsonl").unlink()  # the result alone says it
    set_calibration(run_folder(tmp_path / "healthy", "fedavg+uniform", seed=1, rounds=4))
    notes = [line for line in format_report(load_rows(tmp_path), "text").split("\n") if "Note:" in line]
    assert notes == [f"Note: fedavg with seed 0: {DIVERGED}."]


def test_an_infinite_log_likelihood_alone_is_no_divergence(tmp_path):
    run = run_folder(tmp_path / "run", "fedavg", rounds=4)
    set_calibration(run, usps={"ece": 12.0, "brier": 0.3, "nll": None}, syn={})
    assert "Note:" not in format_report(load_rows(run), "text")


def test_rounds_without_an_update_are_counted(tmp_path):
    run = run_folder(tmp_path / "run", rounds=4)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[0]["weights"] = dict.fromkeys(lines[0]["weights"], 0.0)  # all were skipped
    lines[2] |= {"weights": {}, "replied": 0}  # nobody replied
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    note = "in 2 of 4 rounds no client's update was used, so the model did not change"
    assert f"Note: {note}." in format_report(load_rows(run), "text").split("\n")
