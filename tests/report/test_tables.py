"""Tables of results, on numbers small enough to check by hand."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedheal.core.metrics import fairness
from fedheal.report import conclusions, figures
from fedheal.report.comparability import list_cautions
from fedheal.report.html_page import render_page
from fedheal.report.rows import Row
from fedheal.report.tables import (
    build_tables,
    flatten_rows,
    format_csv,
    format_latex,
    format_markdown,
    format_text,
    write_parquet,
)
from fedheal.report.text_report import format_report
from made_up import load_rows, run_folder


def make_row(method, seed, a, b, folder="runs/x", data="toy"):
    domains = {"photo": a, "line_art": b}
    summary = {"data": data, "rounds": 5, "folder": folder, "test_sizes": {"photo": 30, "line_art": 1000}}
    return Row(method, seed, domains, fairness(domains), None, (summary,))


ROWS = [
    make_row("fedavg", 0, 80.0, 60.0),
    make_row("fedavg", 1, 84.0, 60.0),
    make_row("fedheal", 0, 80.0, 70.0),
    make_row("fedheal", 1, 80.0, 72.0),
    make_row("centralised", 0, 99.0, 99.0),
]


def test_mean_spread_and_best():
    (table,) = build_tables(ROWS)
    assert table.columns == ("photo", "line_art", "AVG", "STD", "worst")
    # fedavg photo: (80 + 84)/2 = 82, sd = |84 - 80| / sqrt 2 = 2.83;  fedheal line_art: 71, 1.41
    photo, art = table.cells["fedavg"]["photo"], table.cells["fedheal"]["line_art"]
    assert (photo.mean, round(photo.sd, 2), photo.best) == (82.0, 2.83, True)
    assert (art.mean, round(art.sd, 2), art.best) == (71.0, 1.41, True)
    # STD of a run: |80 - 60| / sqrt 2 and |84 - 60| / sqrt 2 for fedavg, mean 22 / sqrt 2; the lower is best, bounds never
    assert table.cells["fedavg"]["STD"].mean == pytest.approx(22 / 2**0.5)
    assert table.cells["fedheal"]["STD"].best
    assert not any(cell.best for cell in table.cells["centralised"].values())
    assert table.cells["centralised"]["photo"].sd is None
    assert list(table.cells) == ["fedavg", "fedheal", "centralised"]


def test_one_domain_has_no_best_std():
    rows = []
    for row in ROWS[:4]:
        domains = {"photo": row.domains["photo"]}
        summary = {**row.summaries[0], "test_sizes": {"photo": 30}}
        rows.append(replace(row, domains=domains, fairness=fairness(domains), summaries=(summary,)))
    note = "There is one domain, so STD and worst say nothing."
    (table,) = build_tables(rows)
    assert table.cells["fedavg"]["AVG"].best
    assert not any(cells["STD"].best for cells in table.cells.values())
    text = format_report(rows, "text")
    assert note in text
    assert "0.00*" not in text
    # A number that says nothing is not shown; AVG has one.
    assert [re.split(" {2,}", line)[3] for line in format_text(table).splitlines()[2:4]] == ["-", "-"]
    assert "| 82.00 ± 2.83 | - | 82.00 ± 2.83 | 2 |" in format_markdown(table).replace("**", "")
    assert r" & - & " in format_latex(table)
    assert re.findall(r'<td data-value="0.0">(.*?)</td>', render_page(rows)) == ["-", "-"]
    assert note not in format_report(ROWS, "text")
    assert "the lowest STD" in conclusions.write_headline(conclusions.analyse_rows(ROWS))
    found = conclusions.analyse_rows(rows)
    assert conclusions.write_headline(found).endswith("In these runs fedavg has the highest AVG (82.0 %).")
    assert [leader.column for leader in conclusions.find_leaders(found)] == ["AVG"]


def test_the_tests_on_one_domain_are_of_avg_alone():
    """Six seeds suffice for one comparison (p = 2/64). With STD in the family, which is always 0, they would not."""
    rows = []
    for method, gain in (("fedavg", 0.0), ("fedheal", 2.0)):
        for seed in range(6):
            domains = {"photo": 80.0 + seed + gain}
            summary = {**ROWS[0].summaries[0], "method": method, "seed": seed, "test_sizes": {"photo": 30}}
            row = replace(ROWS[0], method=method, seed=seed, domains=domains, fairness=fairness(domains))
            rows.append(replace(row, summaries=(summary,)))
    (comparison,) = conclusions.analyse_rows(rows, "fedavg").metrics
    assert (comparison.metric, comparison.comparisons, comparison.p_adjusted) == ("avg", 1, 2 / 64)
    assert "fedheal is better than fedavg in AVG by 2.00 points" in conclusions.conclude(rows, "fedavg")[0]


def test_markdown_latex_and_text():
    (table,) = build_tables(ROWS)
    assert "| fedavg | **82.00** ± 2.83 | 60.00 ± 0.00 |" in format_markdown(table)
    latex = format_latex(table)
    assert r"fedavg & \textbf{82.00} {\scriptsize$\pm$2.83} & 60.00 {\scriptsize$\pm$0.00}" in latex
    begin, _, head, *body = latex.splitlines()
    assert begin == r"\begin{tabular}{lrrrrrr}"
    assert head.endswith(r"& worst & seeds \\")
    assert [line.rsplit("&")[-1] for line in body if "&" in line] == [r" 2 \\", r" 2 \\", r" 1 \\"]
    assert r"line\_art" in latex
    assert latex.count(r"\midrule") == 2  # the bounds stand below a rule of their own
    *lines, legend = format_text(table).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert legend == "* best of its column (STD: the lowest)"
    assert "*" not in format_text(
        build_tables(ROWS[:2])[0]
    )  # one method alone is not the best of anything, and has no legend
    assert "82.00* ± 2.83" in lines[2]
    assert "*" not in format_text(build_tables([*ROWS[:2], ROWS[-1]])[0])  # nor is it beside a bound
    assert "**" not in format_markdown(build_tables([*ROWS[:2], ROWS[-1]])[0])


def test_names_do_not_become_markup():
    domains = {"a|b": 80.0, "c^d~e\\f{g}": 60.0}
    (table,) = build_tables([replace(make_row("x|y", 0, 0.0, 0.0), domains=domains, fairness=fairness(domains))])
    head, rule, line = format_markdown(table).splitlines()
    assert head == r"| method | a\|b | c^d~e\\f{g} | AVG | STD | worst | seeds |"
    assert rule.count("---") == 7
    assert line.startswith(r"| x\|y | 80.00 |")
    assert r"c\textasciicircum{}d\textasciitilde{}e\textbackslash{}f\{g\}" in format_latex(table)


def test_what_the_numbers_are_is_not_said_of_rounds_there_were_not():
    def describe_numbers(rounds, seeds=(0,)):
        rows = [make_row("fedavg", seed, 80.0, 60.0) for seed in seeds]
        for row in rows:
            row.summaries[0]["averaged"] = rounds
        return build_tables(rows)[0].about

    assert describe_numbers(5) == "accuracy in percent, mean of the last five rounds"
    assert (
        describe_numbers(2, (0, 1)) == "accuracy in percent, mean of the last 2 rounds, ± standard deviation over seeds"
    )
    assert describe_numbers(1) == "accuracy in percent, in the last round"
    earlier = make_row("fedavg", 0, 80.0, 60.0)  # a run of an earlier version, of five rounds
    assert build_tables([earlier])[0].about.endswith("last five rounds")


def describe_gains(rows):
    return conclusions.describe_gains(conclusions.analyse_rows(rows))


def test_few_seeds_state_no_gain_however_large():
    """Two seeds are too few for the paired tests, so sentences must not state a gain either."""
    (sentence,) = describe_gains(ROWS)
    assert sentence.startswith("fedheal against fedavg: no gain or loss can be concluded. Observed: line_art +11.0 (")
    assert "photo -2.0 (" in sentence
    assert " gains " not in sentence
    one_seed = [make_row("fedavg", 0, 80.0, 60.0), make_row("fedheal", 0, 80.0, 70.0)]
    assert "no gain or loss can be concluded" in describe_gains(one_seed)[0]
    # A seed that only one of them has is no part of it.
    unrelated = [
        make_row("fedavg", 0, 99.9, 99.9),
        make_row("fedavg", 1, 80.0, 60.0),
        make_row("fedheal", 1, 80.0, 70.0),
    ]
    assert describe_gains(unrelated) == describe_gains(one_seed)
    assert describe_gains([make_row("a", 0, 1.0, 2.0), make_row("b", 1, 1.0, 2.0)]) == []


def test_gains_are_stated_where_seeds_and_test_images_support_them():
    many = [make_row("fedavg", s, 80.0, 60.0 + s % 2) for s in range(8)]
    many += [make_row("fedheal", s, 77.0, 72.0 + s % 3) for s in range(8)]
    (sentence,) = describe_gains(many)
    # photo loses 3.0 in every seed, which 30 test images cannot tell from nothing.
    assert sentence.startswith("fedheal against fedavg: line_art gains 12.4 points (+")
    assert sentence.endswith("No change can be concluded in photo.")
    headline = conclusions.write_headline(conclusions.analyse_rows(many))
    assert headline.startswith(
        "fedheal is better than fedavg in AVG by 4.7 points; fedheal is better than fedavg in STD"
    )


def test_no_interval_stands_without_a_row():
    assert "interval" not in " ".join(conclusions.conclude(ROWS))


def test_the_headline_claims_no_more_than_the_tests():
    headline = conclusions.write_headline(conclusions.analyse_rows(ROWS))
    assert headline == (
        "2 seeds cannot show a difference between methods. In these runs fedheal has the lowest STD (6.4 points; fedavg: "
        "15.6) and the highest AVG (75.5 %; fedavg: 71.0)."
    )
    many = [make_row(m, s, 80.0 + (s * k) % 5, 60.0) for m, k in (("fedavg", 2), ("fedheal", 3)) for s in range(8)]
    assert conclusions.write_headline(conclusions.analyse_rows(many)).startswith(
        "No difference to fedavg can be concluded from 8 seeds. In these runs "
    )
    alone = conclusions.write_headline(conclusions.analyse_rows(ROWS[:2]))
    assert alone == "With fedavg, line_art has the lowest accuracy: 60.0 %, 11.0 points below the mean over domains."
    assert conclusions.write_headline(conclusions.analyse_rows(ROWS[-1:])) == ""  # a bound


def test_an_exact_tie_has_no_leader():
    rows = [make_row(method, seed, 80.0, 60.0) for method in ("fedavg", "fedprox", "fedheal") for seed in (0, 1)]
    found = conclusions.analyse_rows(rows)
    assert conclusions.find_leaders(found) == []
    start = "2 seeds cannot show a difference between methods."
    same = f"{start} All methods have the same AVG (70.0 %) and STD (14.1 points)."
    assert conclusions.write_headline(found) == same
    assert same in render_page(rows)
    # Each of two methods serves one domain better: AVG is the same, STD and worst are not.
    found = conclusions.analyse_rows([make_row("fedavg", 0, 80.0, 60.0), make_row("fedheal", 0, 72.0, 68.0)])
    assert [(x.column, x.method) for x in conclusions.find_leaders(found)] == [("STD", "fedheal"), ("worst", "fedheal")]
    assert conclusions.write_headline(found) == (
        "1 seed cannot show a difference between methods. In these runs fedheal has the lowest STD (2.8 points; fedavg: "
        "14.1). All methods have the same AVG (70.0 %)."
    )
    # One method alone ties with nobody.
    assert [x.column for x in conclusions.find_leaders(conclusions.analyse_rows(rows[:2]))] == ["AVG", "STD", "worst"]


def test_leaders_have_the_numbers_of_the_table():
    """Over two seeds the first method's domains even out; in each of its runs they do not."""
    rows = [make_row("fedavg", 0, 90.0, 50.0), make_row("fedavg", 1, 50.0, 90.0)]
    rows += [make_row("fedheal", seed, 79.0, 60.0) for seed in (0, 1)]
    leaders = conclusions.find_leaders(conclusions.analyse_rows(rows))
    # STD: 40 / sqrt 2 = 28.3 in both runs of fedavg, 19 / sqrt 2 = 13.4 in fedheal's; worst: 50 and 60.
    assert [(x.column, x.method, round(x.mean, 1), x.supported) for x in leaders] == [
        ("AVG", "fedavg", 70.0, False), ("STD", "fedheal", 13.4, False), ("worst", "fedheal", 60.0, False)
    ]  # fmt: skip
    (table,) = build_tables(rows)
    assert [m for m in table.cells if table.cells[m]["STD"].best] == ["fedheal"]
    assert [m for m in table.cells if table.cells[m]["worst"].best] == ["fedheal"]


def test_csv_can_be_read_back(tmp_path):
    records = list(csv.DictReader(io.StringIO(format_csv(ROWS))))
    assert len(records) == 5
    assert float(records[1]["accuracy.photo"]) == 84.0
    assert records[1]["method"] == "fedavg"
    assert float(records[0]["std"]) == pytest.approx(20 / 2**0.5)
    assert records[0]["notes"] == ""
    special = replace(ROWS[0], summaries=({**ROWS[0].summaries[0], "data_notes": ["over 3 of 4 domains", "small"]},))
    assert next(csv.DictReader(io.StringIO(format_csv([special]))))["notes"] == "over 3 of 4 domains; small"


def test_parquet_can_be_read_back(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(ROWS, tmp_path / "rows.parquet")
    records = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [r["seed"] for r in records] == [0, 1, 0, 1, 0]
    assert records[3]["accuracy.line_art"] == 72.0


def test_two_runs_of_one_method_and_seed_cannot_both_be_a_row():
    with pytest.raises(
        ValueError, match=r"fedavg with seed 0 was run twice \(runs/x and runs/y\): report them separately"
    ):
        build_tables([*ROWS, make_row("fedavg", 0, 1.0, 2.0, "runs/y")])


def test_rows_over_other_domains_are_refused_by_name():
    other = make_row("fedheal", 2, 80.0, 70.0, "runs/y")
    other = replace(other, domains={"photo": 80.0, "sketch": 70.0})
    with pytest.raises(
        ValueError, match=r"'toy' are not over the same .* runs/x has photo, line_art and runs/y has photo"
    ):
        build_tables([*ROWS, other])


def test_methods_that_share_no_seed_are_not_compared_and_the_others_are():
    conclusion = conclusions.conclude([*ROWS, make_row("fedavg+afl", 7, 80.0, 70.0)])
    assert conclusion[0] == "fedavg+afl and fedavg share no seed: they are not compared."
    assert conclusion[1:3] == conclusions.conclude(ROWS)[:2]


def test_data_sets_have_tables_of_their_own():
    assert [t.data for t in build_tables([*ROWS, make_row("fedavg", 0, 1.0, 2.0, data="other")])] == ["toy", "other"]


def test_a_folder_of_images_is_called_by_its_name_and_its_path_is_among_the_settings(tmp_path):
    for place in ("one", "two", "one/old"):
        run_folder(tmp_path / f"{place}-run", "fedavg", f"folder:/home/me/{place}/photos")
    alone = load_rows(tmp_path / "one-run")
    for form, start in (("text", "photos: "), ("markdown", "photos: "), ("latex", "% photos: ")):
        text = format_report(alone, form)
        assert text.startswith(f"{start}accuracy in percent")
        assert "/home/me" not in text
    page = render_page(alone)
    assert "<h2>photos</h2>" in page
    assert "<dt>data</dt><dd>folder:/home/me/one/photos</dd>" in page
    assert page.count("/home/me") == 1 + len(alone)  # and in the CSV to copy
    assert "There is no run of fedprox on photos: " in list_cautions(alone, "fedprox")[0]
    both = load_rows(tmp_path)
    assert [table.data for table in build_tables(both)] == ["old/photos", "one/photos", "two/photos"]
    assert {record["data"] for record in flatten_rows(both)} == {row.data for row in both}
    unseen = [replace(row, evaluation="unseen") for row in both if "two" in row.data]
    named = {table.data for table in build_tables([*both, *unseen])}
    assert named == {"old/photos", "one/photos", "two/photos", "two/photos, unseen domains"}


def test_too_few_seeds_are_said_once_and_small_test_sets_are_named():
    conclusion = conclusions.conclude(ROWS)
    assert conclusion[0].startswith("2 seeds cannot show a difference at 0.05")
    assert conclusion[1] == "Observed against fedavg, in points: fedheal +4.50 in AVG; fedheal -9.19 in STD."
    assert "photo (30 images" in conclusion[2]
    assert conclusion[2].endswith("; more seeds do not shrink it if all runs use the same test images.")
    assert len(conclusion) == 3


@pytest.mark.parametrize(("fingerprints", "are_shared"), [("aaaa", True), ("aaab", False), (["", "", "", ""], False)])
def test_test_images_are_called_the_same_only_where_fingerprints_show_it(fingerprints, are_shared):
    rows = [
        replace(row, summaries=({**row.summaries[0], "data_fingerprint": fingerprint},))
        for row, fingerprint in zip(ROWS, fingerprints, strict=False)
    ]
    said = "more seeds do not shrink it, since all runs use the same test images."
    assert conclusions.conclude(rows)[-1].endswith(said) == are_shared


def test_enough_seeds_may_conclude():
    many = [make_row("fedavg", s, 80.0 + s % 3, 60.0) for s in range(8)] + [
        make_row("fedheal", s, 80.0 + s % 3, 70.0 + s % 2) for s in range(8)
    ]
    conclusion = conclusions.conclude(many)
    assert any("fedheal" in s and "better" in s and "8 seeds" in s for s in conclusion)


def test_a_reference_need_not_be_run_on_every_data_set():
    other = [make_row("fedavg", 0, 80.0, 60.0, data="other"), make_row("scaffold", 0, 80.0, 70.0, data="other")]
    text = format_report([*ROWS, *other], "text", "fedheal")
    assert "There is no run of fedheal on other: fedavg is the reference there." in text
    assert "Observed against fedheal, in points: fedavg -4.50 in AVG" in text
    assert "Observed against fedavg, in points: scaffold +5.00 in AVG" in text
    assert text.count("There is no run of") == 1
    assert list_cautions(ROWS, "fedheal") == []
    for refused in (format_report, lambda *words: render_page(words[0], reference=words[2]), write_figures):
        with pytest.raises(ValueError, match="reference = bogus: use one of fedavg, fedheal, scaffold"):
            refused([*ROWS, *other], "text", "bogus")


def write_figures(rows, form, reference):
    return figures.write_figures(rows, Path("nowhere"), reference)
