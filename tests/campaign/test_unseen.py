"""`evaluate=unseen`: each domain with a model that was trained without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedheal
import tiny_data
from fedheal import Method, aggregate
from fedheal.campaign.compare import plan
from fedheal.data.domains import Domains
from fedheal.report.comparability import list_cautions
from fedheal.report.html_page import render_page
from fedheal.report.rows import build_rows, find_results, find_rows
from fedheal.report.series import build_series
from fedheal.report.tables import build_tables, flatten_rows

FIELDS: dict[str, Any] = {key: value for key, value in tiny_data.QUICK.items() if key != "data"} | {"rounds": 1}
DOMAINS = list(tiny_data.TEST)


def load_plain() -> Domains:
    """Load the first domain only."""
    data = tiny_data.load()
    return replace(data, domains=data.domains[:1], clients_per_domain=(2,), samples_per_client=(24,))


@pytest.fixture(scope="module")
def unseen_comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[fedheal.Report, Path]:
    """Leave-one-domain-out runs of two methods and a custom one, and an ordinary run of FedAvg, in one folder."""
    folder = tmp_path_factory.mktemp("unseen")
    own = Method(local=(), aggregator=aggregate.uniform(), name="mine")
    fields = FIELDS | {"data": tiny_data.load, "seeds": [0], "out": folder}
    report = fedheal.compare(["fedavg+fedadam", "fedavg", own], evaluate="unseen", **fields)
    fedheal.compare(["fedavg"], **fields)
    return report, folder


def test_each_domain_has_the_accuracy_of_the_run_that_left_it_out(
    unseen_comparison: tuple[fedheal.Report, Path],
) -> None:
    rows = {row.method: row for row in unseen_comparison[0].rows}
    assert list(rows) == ["fedavg+fedadam", "fedavg", "mine"]
    for domain in DOMAINS:
        keys: dict[str, Any] = {"method": "fedavg", "rounds": 1, "without": [domain]}
        alone = fedheal.run(tiny_data.quick(**keys), progress=False)
        assert rows["fedavg"].domains[domain] == alone.domains[domain]
        assert rows["fedavg"].collect("by_class")[domain] == alone.summary["by_class"][domain]
        assert rows["fedavg"].collect("calibration")[domain] == alone.summary["calibration"][domain]
    assert all(len(row.summaries) == 3 for row in rows.values())


def test_it_has_a_table_of_its_own(unseen_comparison: tuple[fedheal.Report, Path]) -> None:
    rows = find_rows([unseen_comparison[1]])
    seen, left_out = sorted(build_tables(rows), key=lambda table: table.is_unseen)
    assert (list(seen.cells), list(left_out.cells)) == (["fedavg"], ["fedavg", "fedavg+fedadam", "mine"])
    assert left_out.data == f"{seen.data}, unseen domains"
    assert left_out.about.startswith("accuracy of a model that was trained without the domain in percent")
    text = str(fedheal.make_report(unseen_comparison[1]))
    assert text.count("unseen domains: accuracy") == 1
    assert {record["evaluate"] for record in flatten_rows(rows)} == {"all", "unseen"}
    assert "unseen domains</h2>" in render_page(rows)
    group = [row for row in rows if row.evaluation == "unseen"]
    assert list_cautions(group) == []  # neither the domain left out nor FedAdam's own settings are a difference


def test_the_rounds_of_one_part_are_not_shown_as_curves(unseen_comparison: tuple[fedheal.Report, Path]) -> None:
    rows = find_rows([unseen_comparison[1]])
    assert [series.method for series in build_series(rows)] == ["fedavg"]  # that with all domains
    assert build_series([row for row in rows if row.evaluation == "unseen"]) == []


def test_incomplete_parts_are_rows_of_their_own(unseen_comparison: tuple[fedheal.Report, Path]) -> None:
    parts = [s for s in find_results([unseen_comparison[1]]) if s["evaluate"] == "unseen" and s["method"] == "fedavg"]
    assert {row.method for row in build_rows(parts[:2])} == {f"fedavg without={s['without'][0]}" for s in parts[:2]}
    assert [row.evaluation for row in build_rows(parts)] == ["unseen"]
    doubled = build_rows([*parts, parts[0]])
    assert {row.evaluation for row in doubled} == {"all"}


@pytest.mark.parametrize(
    ("methods", "keys", "words"),
    [
        (["fedavg", "centralised"], {}, "'centralised' cannot be compared with evaluate=unseen"),
        (["fedavg"], {"only": ["plain"]}, "only = .* cannot be combined with evaluate=unseen"),
        (["fedavg"], {"data": f"{__name__}:load_plain"}, "has only the domain 'plain', and needs two"),
    ],
)
def test_combinations_without_a_meaning_are_refused(
    methods: list[str], keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        plan(methods, [0], tiny_data.QUICK | {"evaluate": "unseen"} | keys, tmp_path)


def test_a_bound_that_leaves_domains_out_needs_two(tmp_path: Path) -> None:
    said = "leave-one-domain-out: data '.*:load_plain' has only the domain 'plain', and needs two; leave it out$"
    with pytest.raises(ValueError, match=said):
        plan(["fedavg", "leave-one-domain-out"], [0], tiny_data.QUICK | {"data": f"{__name__}:load_plain"}, tmp_path)


@pytest.mark.parametrize("without", [[], ["plain", "dark"], ["plain-0"]])
def test_a_single_run_leaves_out_one_domain(without: list[str]) -> None:
    with pytest.raises(ValueError, match=r"evaluate = 'unseen' with without = .*one run leaves out one domain"):
        fedheal.run(tiny_data.quick(evaluate="unseen", without=without), progress=False)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"without": "plain dark"},
            r"^without names 'plain dark' \(did you mean without=plain,dark\? Commas separate names\); ",
        ),
        ({"without": ["plian"]}, r"^without names 'plian' \(did you mean 'plain'\?\); the domains are"),
        ({"without": DOMAINS}, r"^without = \['plain', 'noisy', 'dark'\]: no client is left to train"),
        ({"only": ["dark"], "without": ["dark"]}, r"^only = \['dark'\] and without = \['dark'\]: no client is left"),
    ],
)
def test_fields_that_name_no_domain_or_leave_no_client(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fedheal.run(tiny_data.quick(**keys), progress=False)
