"""The HTML page as text; `test_browser.py` opens it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedheal.report.html_page import Section, render_page
from fedheal.runs.folder import read_rounds
from made_up import load_rows, run_folder


def numbers(text):
    return json.loads(re.search(r'<script type="application/json" id="numbers">(.*?)</script>', text).group(1))


def test_the_page_refers_to_nothing_outside_itself(few):
    text = render_page(load_rows(few))
    without = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text, flags=re.S)
    assert "http" not in without
    assert set(re.findall(r'(?:src|href)="([^"]*)"', without)) <= {"data:,", "#top", "#set-0"}


def test_the_same_runs_give_the_same_page(few):
    assert render_page(load_rows(few)) == render_page(load_rows(few))


def test_words_tables_and_settings_are_there(few):
    text = render_page(load_rows(few), "Three methods")
    for words in (
        "<h1>Three methods</h1>",
        "Gains and losses by domain",
        "<h3>Conclusions</h3>",
        "2 seeds cannot show a difference",
        r"\begin{tabular}",
        "| method |",
        "0123abcd",
        "torch 2.13.0",
        "<dt>lr</dt><dd>0.001</dd>",
    ):
        assert words in text, words


def test_what_is_special_about_the_data_stands_below_the_table(tmp_path):
    folder = run_folder(tmp_path / "a", "fedavg")
    summary = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(summary | {"data_notes": ["syn_standin stands in for syn"]}))
    text = render_page(load_rows(tmp_path))
    below = text.partition("</table>")[2].partition('<div class="figures"')[0]
    assert below.count("Note: syn_standin stands in for syn.") == 1


def test_curves_are_means_over_seeds(few):
    (drawn,) = numbers(render_page(load_rows(few)))["sets"]
    rows = [row for row in load_rows(few) if row.method == "fedavg"]
    records = [read_rounds(Path(row.summaries[0]["folder"])) for row in rows]
    one = next(method for method in drawn["methods"] if method["name"] == "fedavg")
    for t in (0, 7, 19):
        both = [run[t].domains["mnist"] for run in records]
        assert abs(one["curves"]["mnist"][0][t] - sum(both) / 2) < 0.006
        assert abs(one["curves"]["mnist"][1][t] - abs(both[0] - both[1]) / 2**0.5) < 0.006
        weights = [sum(w for c, w in run[t].weights.items() if c.startswith("syn-")) for run in records]
        assert abs(one["weights"]["syn"][t] - sum(weights) / 2) < 6e-5
    assert one["layers"]["names"] == []  # FedAvg masks nothing
    masked = next(method for method in drawn["methods"] if method["name"] == "fedavg+fedheal")
    assert len(masked["layers"]["kept"]) == 8
    assert set(masked["consistency"]) == {"mnist", "usps", "svhn", "syn"}


def test_layers_are_those_of_all_rounds(tmp_path):
    """In a first round to which nobody replied nothing was masked, and nothing reported."""
    folder = run_folder(tmp_path / "a", "fedavg+fedheal")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines[0]["report"], lines[0]["weights"] = {}, {}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    (drawn,) = numbers(render_page(load_rows(tmp_path)))["sets"]
    layers = drawn["methods"][0]["layers"]
    assert len(layers["names"]) == 8
    assert [row[0] for row in layers["kept"]] == [None] * 8
    assert layers["kept"][0][1] == round(lines[1]["report"]["kept_by_tensor"]["layer0.weight"], 3)


def test_names_cannot_become_markup(tmp_path):
    run_folder(tmp_path / "a", "<script>alert(1)</script>", data="</script><b>x")
    text = render_page(
        load_rows(tmp_path), "<i>t</i>", sections=[Section("<u>", ["<u>"], [["<u>", "<u>"], ["<u>", "<u>"]])]
    )
    assert "<script>alert" not in text
    assert "</script><b>" not in text
    assert "<i>t" not in text
    assert "<u>" not in text


def test_a_run_that_recorded_little_still_has_a_page(tmp_path):
    folder = run_folder(tmp_path / "a", "fedavg")
    (folder / "experiment.toml").unlink()
    summary = json.loads((folder / "result.json").read_text())
    for key in ("averaged", "consistency", "seconds", "versions", "data_fingerprint"):
        del summary[key]
    (folder / "result.json").write_text(json.dumps(summary))
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    (folder / "rounds.jsonl").write_text(
        "".join(json.dumps({k: r[k] for k in ("round", "weights", "domains")}) + "\n" for r in lines)
    )
    assert "mean of the last five rounds" in render_page(load_rows(tmp_path))


def test_bounds_are_rows_and_bars_but_have_no_curves(tmp_path):
    folder = run_folder(tmp_path / "pooled", "fedavg")
    summary = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(summary | {"pool": True}))
    (alone,) = numbers(render_page(load_rows(tmp_path)))["sets"]
    assert (alone["methods"], alone["front"]) == ([], [])
    run_folder(tmp_path / "fedavg", "fedavg")
    text = render_page(load_rows(tmp_path))
    (both,) = numbers(text)["sets"]
    assert [one["name"] for one in both["methods"]] == ["fedavg"]
    assert [bar["method"] for bar in both["bars"]] == ["fedavg", "centralised"]
    assert 'title="one model trained on the pooled data' in text


def test_domains_may_come_and_go(tmp_path):
    folder = run_folder(tmp_path / "a", "fedavg+fedheal")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in lines[::2]:
        del record["domains"]["usps"]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    (drawn,) = numbers(render_page(load_rows(tmp_path)))["sets"]
    usps = drawn["methods"][0]["curves"]["usps"][0]
    assert [x is None for x in usps[:4]] == [True, False, True, False]
    assert None not in drawn["methods"][0]["curves"]["AVG"][0]


@pytest.mark.slow
def test_the_page_of_56_runs_is_under_6_megabytes(table1_page):
    text = table1_page.read_text(encoding="utf-8")
    assert len(text.encode()) < 6_000_000
    assert sum(len(one["methods"]) for one in numbers(text)["sets"]) == 56
