"""tools/results_studies.py compares methods on the embedded digits, and the guides have its numbers."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from fedheal import Experiment
from made_up import make_run

ROOT = Path(__file__).parents[2]
HALF = {"handwritten": 200, "print": 200, "street": 150, "display": 40}  # examples of a client
ACCURACY = {"handwritten": 90.0, "print": 98.0, "street": 92.0, "display": 60.0}


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    importlib.import_module("results")
    return importlib.import_module("results_studies")


@pytest.fixture
def study(studies):
    """The first study with three rows and three seeds."""
    kept = [row for row in studies.STUDIES[0].rows if row.label in ("FedAvg", "uniform weights", "AFL")]
    return replace(studies.STUDIES[0], rows=kept, seeds=range(8, 11), tested=("FedAvg", "uniform weights"))


def add_to_display(points):
    return ACCURACY | {"display": ACCURACY["display"] + points}


def test_rows_are_averaged_over_seeds_and_subtracted_by_seed(studies, study, tmp_path):
    for seed, points in ((8, 0.0), (9, 2.0), (10, 4.0), (11, 30.0)):  # 11 is not in the plan
        make_run(tmp_path / "embedded", "embedded", "fedavg", add_to_display(points), 20, seed=seed)
        make_run(tmp_path / "confirmation" / "embedded", "embedded", "fedavg+uniform", add_to_display(8), 20, seed=seed)
    page = "\n".join(studies.write_study(study, tmp_path))
    assert "| FedAvg | `fedavg` | 90.00 ± 0.00 | 98.00 ± 0.00 | 92.00 ± 0.00 | 62.00 ± 2.00 | 85.50 ± 0.50 | " in page
    assert "| FedAvg | +0.00 ± 0.00 | +0.00 ± 0.00 | +0.00 ± 0.00 | -6.00 ± 2.00 | -1.50 ± 0.50 | " in page
    assert "| FedAvg | AVG | -1.50 | -2.74 to -0.26 | 0 of 3 | 0.500 | 0.500 |" in page
    assert "Holm's correction over 2 comparisons" in page
    (missing,) = (line for line in page.splitlines() if line.startswith("Some runs are open"))
    assert missing.endswith("--recipe embedded --data embedded --device cpu --seeds 8-10 --rows AFL`, then `collect`).")


def test_a_row_outside_the_family_is_shown_but_not_tested(studies, study, tmp_path):
    for seed in study.seeds:
        for method, points in (("fedavg", 0.0), ("fedavg+uniform", 8.0), ("fedavg+afl", 9.0)):
            make_run(tmp_path / "embedded", "embedded", method, add_to_display(points), 20, seed=seed)
    page = "\n".join(studies.write_study(study, tmp_path))
    assert "| AFL | `fedavg+afl` | 90.00 ± 0.00 |" in page
    assert "| AFL | AVG |" not in page
    assert "| FedAvg | AVG |" in page
    assert "open runs" not in page


def test_a_row_with_a_server_optimiser_is_subtracted_and_one_with_another_rate_is_not(studies, study, tmp_path):
    for method, points in (("fedavg+uniform", 8.0), ("fedavg+uniform+fedadam", 12.0)):
        make_run(tmp_path / "embedded", "embedded", method, add_to_display(points), 20, seed=8)
    make_run(tmp_path / "embedded", "embedded", "fedavg", add_to_display(0), 20, seed=8, lr=0.02)
    rows = [
        row
        for row in studies.STUDIES[0].rows
        if row.label in ("FedAvg", "uniform weights", "uniform weights with FedAdam")
    ]
    page = "\n".join(studies.write_study(replace(study, rows=rows), tmp_path))
    assert "| uniform weights with FedAdam | +0.00 | +0.00 | +0.00 | +4.00 | +1.00 |" in page
    assert "| FedAvg | +" not in page
    assert "| FedAvg | -" not in page


def test_nothing_is_written_without_runs(studies, tmp_path):
    assert studies.write_studies(tmp_path) == []


@pytest.mark.parametrize(
    ("method", "fields", "folder"),
    [
        ("fedavg+afl+fphl", {"seed": 8}, "embedded"),
        ("fedavg+uniform", {"seed": 8}, "confirmation/embedded"),
        ("fedavg+uniform", {"seed": 7}, "tutorial/embedded"),
        ("feddg", {"clients_per_domain": 1, "rounds": 10, "epochs": 1, "lr": 0.005}, "local-methods/embedded"),
        ("fedheal+fedadam:eta=0.03", {"clients_per_domain": 1, "eval_every": 5}, "server-optimisers/embedded"),
        ("fccl", {"samples_per_client": HALF, "rounds": 10, "eval_every": 5}, "public-images/embedded"),
    ],
)
def test_collecting_knows_the_folder_of_a_study(studies, tmp_path, method, fields, folder):
    run = Experiment.of({"data": "embedded", "method": method, **fields})
    target, _ = importlib.import_module("results").find_place(run, tmp_path)
    assert target == tmp_path / folder / run.folder_name


def test_a_run_with_another_seed_or_other_settings_has_no_place(studies, tmp_path):
    find_place = importlib.import_module("results").find_place
    for fields in ({"seed": 16}, {"seed": 8, "rounds": 19}, {"seed": 8, "lr": 0.02}):
        target, _ = find_place(Experiment.of({"data": "embedded", "method": "fedavg", **fields}), tmp_path)
        assert target is None


def test_pictures_have_the_methods_in_their_order(studies, tmp_path):
    for folder, method, seed in (
        ("a", "fedavg+afl", 9),
        ("a", "fedavg", 9),
        ("b", "fedavg+uniform", 8),
        ("a", "fedavg", 8),
    ):
        make_run(tmp_path / folder, "embedded", method, ACCURACY, 20, seed=seed)
    methods = ["fedavg", "fedavg+uniform"]
    rows = importlib.import_module("pictures").read_rows([tmp_path / "a", tmp_path / "b"], methods)
    assert [(row.method, row.seed) for row in rows] == [("fedavg", 8), ("fedavg", 9), ("fedavg+uniform", 8)]


@pytest.mark.parametrize(
    ("name", "guide", "heading"),
    [
        ("embedded", "findings", "## The embedded digits\n"),
        ("drift-correction", "findings", "## SCAFFOLD on the embedded digits\n"),
        ("drift-correction-parts", "findings", "## FedHEAL's parts with SCAFFOLD\n"),
        ("local-methods", "findings", "## FedDG, FedSAM, FedLESAM and FedISM\n"),
        ("server-optimisers", "findings", "## Server optimisers\n"),
        ("public-images", "methods", "### `fcclplus`\n"),
    ],
)
def test_the_tables_of_the_guides_are_those_of_the_results(studies, name, guide, heading):
    study = next(study for study in studies.STUDIES if study.name == name)
    title, level = f"## {study.title}\n", heading.split()[0]
    page, text = ((ROOT / name).read_text(encoding="utf-8") for name in ("results/README.md", f"docs/{guide}.md"))
    written = page.partition(title)[2].partition("\n## ")[0].splitlines()
    section = text.partition(heading)[2].partition(f"\n{level} ")[0].splitlines()
    rows = [line for line in section if " ± " in line]
    assert len(rows) >= len(study.rows)
    assert [row for row in rows if row not in written] == []


def test_the_guides_table_of_learning_rates_is_that_of_the_results(studies):
    page, text = ((ROOT / name).read_text(encoding="utf-8") for name in ("results/README.md", "docs/findings.md"))
    head, _, *rows = text.partition("| AVG with `lr` = ")[2].partition("\n\n")[0].splitlines()
    rates = [cell.strip() for cell in head.strip(" |").split("|")]
    titles = {study.settings.get("lr"): study.title for study in studies.STUDIES}
    for row, method in zip(rows, ("fedavg", "fedavg+fedheal", "feddg"), strict=True):
        for rate, mean in zip(rates, row.strip(" |").split(" | ")[1:], strict=True):
            section = page.partition(f"## {titles[float(rate)]}\n")[2].partition("\n## ")[0]
            (cells,) = (line.split(" | ") for line in section.splitlines() if f"| `{method}` |" in line)
            assert cells[6].split(" ± ")[0] == mean, (method, rate)
