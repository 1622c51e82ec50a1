"""Crossed runs in reports: variance components instead of tests that take them for independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from fedheal.core.metrics import fairness
from fedheal.core.rng import SEED_FIELDS
from fedheal.report.comparability import list_cautions
from fedheal.report.conclusions import analyse_rows, conclude
from fedheal.report.html_page import _describe_components
from fedheal.report.rows import Row
from fedheal.report.seed_levels import count_independent, share_levels
from fedheal.report.tables import build_tables, flatten_rows, format_text
from fedheal.report.text_report import format_report
from fedheal.report.variance_table import decompose_rows, explain_components, flatten_components

TABLE = [[1, 2, 3], [3, 6, 6]]  # variances 13/3, 3/2 and 1/2, as in tests/analysis/test_variance.py


def make_row(method: str, photo: float, seed: int = 0, **own: int) -> Row:
    domains = {"photo": float(photo), "sketch": 50.0}
    summary = {"method": method, "data": "pictures", "seed": seed, "rounds": 20, "domains": domains, **own}
    summary |= {"test_sizes": dict.fromkeys(domains, 0), "folder": f"runs/{method}-{seed}"}
    return Row(method, seed, domains, fairness(domains), None, (summary,))


CELLS = list(product(range(2), range(3)))


def make_crossed(method: str, lift: float = 0.0, cells: Sequence[tuple[int, int]] = CELLS) -> list[Row]:
    return [make_row(method, TABLE[i][j] + lift + 2 * lift * i, split_seed=i, init_seed=j) for i, j in cells]


CROSSED = [*make_crossed("fedavg"), *make_crossed("fedheal", 1.0)]


def test_components_of_methods_and_of_their_difference() -> None:
    lines = {(line.title, line.column): line.found for line in decompose_rows(CROSSED[::-1])}
    assert len(lines) == 3 * 5
    photo = lines["fedavg", "photo"]
    assert [c.variance for c in photo.components] == pytest.approx([13 / 3, 3 / 2, 0.5])
    assert photo.levels == {"split": 2, "init": 3}
    # The methods differ by 1 in the first split and by 3 in the second, whatever the initial model.
    difference = lines["fedheal less fedavg", "photo"]
    assert (difference.mean, [c.variance for c in difference.components]) == (2.0, pytest.approx([2, 0, 0]))
    assert lines["fedavg", "sketch"].error == 0
    (first, *_), names = flatten_components(decompose_rows(CROSSED)), {"fedavg", "fedheal"}
    assert first["column"] == "AVG"
    assert {record["method"] for record in flatten_components(decompose_rows(CROSSED))} == names


def change_data(row: Row, fingerprint: str) -> Row:
    return replace(row, summaries=({**row.summaries[0], "used_fingerprint": fingerprint},))


def test_runs_on_other_data_are_not_subtracted() -> None:
    usual = [change_data(row, "usual") for row in CROSSED]
    moved = [change_data(row, "other") if row.method == "fedheal" else row for row in usual]
    assert {line.title for line in decompose_rows(usual)} == {"fedavg", "fedheal", "fedheal less fedavg"}
    assert {line.title for line in decompose_rows(moved)} == {"fedavg", "fedheal"}


def test_a_method_whose_own_runs_of_one_split_are_on_other_data_has_no_components() -> None:
    first, *rows = [change_data(row, "usual") for row in CROSSED]
    assert first.method == "fedavg"
    assert {line.title for line in decompose_rows([change_data(first, "other"), *rows])} == {"fedheal"}


def test_a_report_shows_them_and_tests_nothing() -> None:
    assert analyse_rows(CROSSED).metrics == []
    assert any("no difference between methods is tested" in sentence for sentence in conclude(CROSSED))
    assert any("same order of batches (batch seed 0)" in sentence for sentence in list_cautions(CROSSED))
    text = format_report(CROSSED, "text")
    assert "Variance components (2 split x 3 init)" in text
    assert "split: 2 levels, 1 degree of freedom" in text
    assert "Two levels say almost nothing" in text
    assert "init: 3 levels, 2 degrees of freedom. The true standard deviation may be 0.5 to 6.3 times" in text
    line = next(x for x in text.splitlines() if x.startswith("fedavg ") and " photo " in x)
    assert line.split() == [
        "fedavg",
        "photo",
        "3.50",
        "±",
        "1.66",
        "2.08",
        "(68",
        "%)",
        "1.22",
        "(24",
        "%)",
        "0.71",
        "(8",
        "%)",
    ]
    assert "| fedavg | photo | 3.50 ± 1.66 | 2.08 (68 %) |" in format_report(CROSSED, "markdown")
    assert all(x.startswith(("%", "\\")) or " & " in x or not x for x in format_report(CROSSED, "latex").splitlines())
    narrow = format_report(CROSSED, "text", width=60).split("\n\n")[-2]
    assert narrow.startswith("fedavg, AVG\n  mean 26.75 ± 0.83  split 1.04 (68 %)")
    assert max(map(len, narrow.splitlines())) <= 60
    components = _describe_components(CROSSED, "fedavg")
    assert [line[:2] for line in components["table"][1:3]] == [["fedavg", "AVG"], ["", "STD"]]


def test_the_table_counts_runs_and_its_errors_are_those_of_the_fewest_levels() -> None:
    (table,) = build_tables(CROSSED)
    assert format_text(table).splitlines()[0].split()[-1] == "runs"
    assert "over runs" in table.about
    assert count_independent(table.seeds["fedavg"]) == 2
    assert table.get_error("fedavg", "photo") == pytest.approx((table.cells["fedavg"]["photo"].sd or 0) / 2**0.5)
    assert [flatten_rows(CROSSED)[1][field] for field in SEED_FIELDS] == [0, 1, 0]


def test_ordinary_seeds_are_not_crossed() -> None:
    rows = [make_row(m, 60 + s + 9 * (m == "fedheal"), seed=s) for s in range(8) for m in ("fedavg", "fedheal")]
    assert not share_levels(rows)
    assert decompose_rows(rows) == []
    assert explain_components(rows, []) == []
    assert len(analyse_rows(rows).metrics) == 2
    assert "split_seed" not in flatten_rows(rows)[0]


def test_seeds_on_one_draw_are_independent_and_said_to_be_of_that_draw() -> None:
    rows = [make_row(m, 60 + s, seed=s, split_seed=4) for s in range(8) for m in ("fedavg", "fedheal")]
    assert not share_levels(rows)
    assert list_cautions(rows) == [
        "All runs have the same draw of the clients' examples (split seed 4): the numbers hold for that one alone."
    ]


def test_one_varied_source_is_tested_and_has_one_component() -> None:
    rows = [make_row(m, 60 + s + 9 * (m == "fedheal"), split_seed=s) for s in range(8) for m in ("fedavg", "fedheal")]
    assert [c.n for c in analyse_rows(rows).metrics] == [8, 8]
    assert {c.name for line in decompose_rows(rows) for c in line.found.components} == {"split"}
    assert len(list_cautions(rows)) == 2


def test_an_incomplete_design_has_no_components_and_says_so() -> None:
    rows = [*make_crossed("fedavg"), *make_crossed("fedheal", cells=CELLS[:5])]
    lines = decompose_rows(rows)
    assert {line.title for line in lines} == {"fedavg"}
    assert "fedheal has 5 of 6 combinations of its seeds" in explain_components(rows, lines)[-1]


def test_a_method_is_not_run_twice_with_the_same_seeds() -> None:
    with pytest.raises(ValueError, match="run twice"):
        build_tables([make_row("fedavg", 1, seed=3), make_row("fedavg", 2, split_seed=3, init_seed=3, batch_seed=3)])
