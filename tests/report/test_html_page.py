"""The HTML page as text; `test_browser.py` opens it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedheal.report.html_page import Section, render_page
from fedheal.runs.folder import read_rounds
from made_up import load_rows, run_folder


def read_numbers(text):
    return json.loads(re.search(r'<script type="application/json" id="numbers">(.*?)</script>', text).group(1))


def test_the_page_refers_to_nothing_outside_itself(small_runs):
    text = render_page(load_rows(small_runs))
    without = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text, flags=re.S)
    assert "http" not in without
    assert set(re.findall(r'(?:src|href)="([^"]*)"', without)) <= {"data:,", "#top", "#set-0"}


def test_the_same_runs_give_the_same_page(small_runs):
    assert render_page(load_rows(small_runs)) == render_page(load_rows(small_runs))


def test_words_tables_and_settings_are_there(small_runs):
    text = render_page(load_rows(small_runs), "Three methods")
    for words in (
        "<h1>Three methods</h1>",
        "Who gains, who pays",
        "<h3>Conclusions</h3>",
        "2 seeds cannot show a difference",
        r"\begin{tabular}",
        "| method |",
        "0123abcd",
        "torch 2.13.0",
        "<dt>lr</dt><dd>0.001</dd>",
    ):
        assert words in text, words


def test_the_page_opens_with_the_answer(small_runs):
    text = render_page(load_rows(small_runs))
    order = ['class="verdict"', 'class="tiles"', 'data-plot="domains"', '<table class="numbers sortable"',
             'data-plot="differences"', "Who gains, who pays", "<h3>Conclusions</h3>", 'data-plot="scatter"']  # fmt: skip
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert re.search(r'class="verdict">2 seeds cannot show a difference between methods\.', text)
    assert "Observed against" not in text  # the figure shows it
    heads = re.findall(r"<th><button[^>]*>([^<]*)<", text)
    assert heads[:4] == ["method", "AVG", "STD", "worst"]
    assert text.count('class="tile"') == 3


def test_the_two_numbers_of_seeds_that_tests_need_are_told_apart(small_runs):
    page = render_page(load_rows(small_runs))
    assert "corrected for 4 comparisons, whatever the data (smallest possible p = 1); 8 or more can." in page
    needs = "with 8 differences tested together, that takes 9 or more seeds (a difference in AVG or STD takes 8)."
    assert needs in page


def test_differences_have_intervals_and_nothing_is_marked_that_no_test_supports(small_runs):
    (numbers,) = read_numbers(render_page(load_rows(small_runs)))["sets"]
    assert {d["row"] for d in numbers["differences"]} == {"AVG", "STD", "mnist", "usps", "svhn", "syn"}
    assert all(d["low"] <= d["mean"] <= d["high"] for d in numbers["differences"])
    assert not any(d["supported"] for d in numbers["differences"])


def test_captions_are_only_of_what_is_drawn(tmp_path):
    run_folder(tmp_path / "a", "fedavg", rounds=3)
    text = render_page(load_rows(tmp_path))
    plots = re.findall(r'data-plot="(\w+)"', text)
    assert plots == ["domains", "measure", "curves", "weights", "seconds"]
    assert len(plots) == text.count("<figcaption>")
    assert "spread over seeds" not in text  # one seed
    for words in ("Click a name", "Click a heading", "One method in detail", "Differences to", "in these runs"):
        assert words not in text, words


def test_results_by_class_are_summed_over_seeds(tmp_path):
    for seed, correct in ((0, [8, 2]), (1, [9, 1])):
        path = run_folder(tmp_path / str(seed), "fedavg", seed=seed, rounds=3) / "result.json"
        counts = {"mnist": [[x, 10] for x in correct]}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"by_class": counts}))
    text = render_page(load_rows(tmp_path))
    (numbers,) = read_numbers(text)["sets"]
    assert numbers["methods"][0]["classes"] == {"mnist": [[17, 20], [3, 20]]}
    assert numbers["classes"][:2] == ["0", "1"]
    assert 'data-plot="classes"' in text


def test_a_method_looks_the_same_on_every_page(small_runs, tmp_path):
    run_folder(tmp_path / "a", "fedavg+fedheal", rounds=3)
    run_folder(tmp_path / "b", "moon+fedheal", rounds=3)
    (here,), (there,) = (read_numbers(render_page(load_rows(folder)))["sets"] for folder in (small_runs, tmp_path))
    assert here["looks"]["fedavg+fedheal"] == there["looks"]["fedavg+fedheal"]
    looks = [tuple(look.values()) for look in (*here["looks"].values(), there["looks"]["moon+fedheal"])]
    assert len(set(looks)) == 4


def test_what_is_special_about_the_data_stands_below_the_table(tmp_path):
    folder = run_folder(tmp_path / "a", "fedavg")
    summary = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(summary | {"data_notes": ["syn_standin stands in for syn"]}))
    text = render_page(load_rows(tmp_path))
    below = text.partition("</table>")[2].partition('<div class="words"')[0]
    assert below.count("Note: syn_standin stands in for syn.") == 1


def test_curves_are_means_over_seeds(small_runs):
    (numbers,) = read_numbers(render_page(load_rows(small_runs)))["sets"]
    rows = [row for row in load_rows(small_runs) if row.method == "fedavg"]
    records = [read_rounds(Path(row.summaries[0]["folder"])) for row in rows]
    fedavg = next(method for method in numbers["methods"] if method["name"] == "fedavg")
    for t in (0, 7, 19):
        both = [run[t].domains["mnist"] for run in records]
        assert abs(fedavg["curves"]["mnist"][0][t] - sum(both) / 2) < 0.006
        seeds, mean = abs(both[0] - both[1]) / 2, sum(both) / 2  # the seeds' standard error: sd / sqrt 2
        assert (
            fedavg["curves"]["mnist"][1][t] ** 2 >= seeds**2 + mean * (100 - mean) / 500 - 0.02
        )  # and the 500 images'
        weights = [sum(w for c, w in run[t].weights.items() if c.startswith("syn-")) for run in records]
        assert abs(fedavg["weights"]["syn"][t] - sum(weights) / 2) < 6e-5
    assert fedavg["layers"]["names"] == []  # FedAvg masks nothing
    masked = next(method for method in numbers["methods"] if method["name"] == "fedavg+fedheal")
    assert len(masked["layers"]["kept"]) == 8
    assert set(masked["consistency"]) == {"mnist", "usps", "svhn", "syn"}


def test_layers_are_those_of_all_rounds(tmp_path):
    """Nobody replied in the first round, so it reports no layers."""
    folder = run_folder(tmp_path / "a", "fedavg+fedheal")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines[0]["report"], lines[0]["weights"] = {}, {}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    (numbers,) = read_numbers(render_page(load_rows(tmp_path)))["sets"]
    layers = numbers["methods"][0]["layers"]
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
    (alone,) = read_numbers(render_page(load_rows(tmp_path)))["sets"]
    assert (alone["methods"], alone["front"]) == ([], [])
    run_folder(tmp_path / "fedavg", "fedavg")
    text = render_page(load_rows(tmp_path))
    (both,) = read_numbers(text)["sets"]
    assert [method["name"] for method in both["methods"]] == ["fedavg"]
    assert [row["method"] for row in both["rows"]] == ["fedavg", "centralised"]
    assert 'title="one model trained on the pooled data' in text


def test_domains_may_come_and_go(tmp_path):
    folder = run_folder(tmp_path / "a", "fedavg+fedheal")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in lines[::2]:
        del record["domains"]["usps"]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    (numbers,) = read_numbers(render_page(load_rows(tmp_path)))["sets"]
    usps = numbers["methods"][0]["curves"]["usps"][0]
    assert [x is None for x in usps[:4]] == [True, False, True, False]
    assert None not in numbers["methods"][0]["curves"]["AVG"][0]


@pytest.mark.slow
def test_the_page_of_56_runs_is_under_6_megabytes(table1_page):
    text = table1_page.read_text(encoding="utf-8")
    assert len(text.encode()) < 6_000_000
    assert sum(len(data_set["methods"]) for data_set in read_numbers(text)["sets"]) == 56
