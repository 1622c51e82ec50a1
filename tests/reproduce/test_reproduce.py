"""Recipes on data so small that all their runs take seconds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedheal.campaign.pool import run_all
from fedheal.report.html_page import render_page
from fedheal.report.tables import Cell
from fedheal.reproduce import RECIPES, Options, make_suffix, plan_recipe
from fedheal.reproduce.outputs import write_outputs
from fedheal.reproduce.paper_comparison import ComparisonRow, PaperComparison, _describe_misprints, compare_with_paper
from fedheal.reproduce.plans import RecipePlan, RecipeRow
from fedheal.simulate.runner import run
from tiny_data import QUICK

TINY = {key: value for key, value in QUICK.items() if key != "data"}


def make_options(**keys):
    return Options(**{"data": ["tiny_data:load"], "values": TINY, "seeds": (0,)} | keys)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder that all recipes share, so that no run is done twice."""
    return tmp_path_factory.mktemp("runs")


def run_recipe(result, out, **keys):
    plans = plan_recipe(RECIPES[result], make_options(**keys), out)
    for plan in plans:
        for job in plan.jobs:
            run(job.experiment, job.folder, resume=True, progress=False)
    return plans


@pytest.mark.slow
def test_ablation_from_plan_to_page(runs, tmp_path):
    plans = run_recipe("ablation", runs, seeds=(0, 1))
    outputs = write_outputs("ablation", RECIPES["ablation"], plans, tmp_path / "ablation")
    (text,) = outputs.texts
    for label in ("neither (FedAvg)", "FPHL + FAEL (FedHEAL)", "uniform weights", "FPHL + uniform weights"):
        assert label in text
    assert "last round, 2 seeds" in text
    assert "The paper has no results on tiny_data:load" in text
    assert "FAEL against uniform weights, without and with FPHL: AVG higher in" in text
    (tidy,) = json.loads((tmp_path / "ablation.json").read_text())
    assert len(tidy["rows"]) == 6
    assert tidy["rows"][0]["paper"] == {}
    assert (tmp_path / "ablation.md").read_text().count("| ours |") == 6
    page = render_page(outputs.rows, "x", sections=outputs.sections)
    assert "FPHL + FAEL (FedHEAL)" in page


def test_results_share_runs_and_finished_ones_are_not_run_again(runs, monkeypatch):
    plans = run_recipe("ablation", runs, rows=["FPHL + FAEL (FedHEAL)", "uniform weights", "FAEL"])
    other = plan_recipe(RECIPES["table2"], make_options(), runs)
    shared = {job.folder for job in plans[0].jobs} & {job.folder for job in other[0].jobs}
    assert len(shared) == 2  # FedHEAL and uniform weights
    monkeypatch.setattr("fedheal.campaign.pool.run_job", lambda job: pytest.fail(f"{job.folder} was run again"))
    assert len(list(run_all(plans[0].jobs))) == 3


def test_rows_that_are_the_same_by_definition_are_one_run(tmp_path):
    (plan,) = plan_recipe(RECIPES["table1"], make_options(), tmp_path)
    assert len(plan.rows) == 35
    assert len(plan.jobs) == 33  # SCAFFOLD and FedDyn weigh equally anyway


def test_smoke_is_on_embedded_data_beside_the_papers_digits(tmp_path):
    (plan,) = plan_recipe(RECIPES["table1"], Options(smoke=True), tmp_path)
    experiment = plan.jobs[0].experiment
    assert (experiment.data, experiment.model, experiment.rounds, experiment.epochs) == ("embedded", "small_cnn", 5, 1)
    assert plan.rows[0][0].published[4:] == (76.00, 23.82)


def test_rows_by_label_method_or_pattern(tmp_path):
    def list_methods(*patterns):
        (plan,) = plan_recipe(RECIPES["table1"], make_options(rows=patterns), tmp_path)
        return [row.method for row, _ in plan.rows]

    assert list_methods("fedavg", "MOON + AFL") == ["fedavg", "moon+afl"]
    assert list_methods("fedprox*") == ["fedprox", "fedprox+uniform", "fedprox+afl", "fedprox+qffl", "fedprox+fedheal"]
    with pytest.raises(
        ValueError, match="rows = fedavgg: no row has this label or method; the rows are 'FedAvg' "
    ) as caught:
        list_methods("fedavgg")
    assert "'MOON + AFL' (moon+afl)" in str(caught.value)


def test_a_row_need_not_be_on_every_data_set(tmp_path):
    (plan,) = plan_recipe(RECIPES["headline"], Options(rows=["AFL"]), tmp_path)
    assert (plan.data, [row.label for row, _ in plan.rows]) == ("digits", ["AFL"])
    both = plan_recipe(RECIPES["headline"], Options(rows=["AFL", "FedAvg"]), tmp_path)
    assert {plan.data: len(plan.rows) for plan in both} == {"digits": 2, "office-caltech": 1}
    with pytest.raises(
        ValueError, match=r"rows = AFL: no row has this label or method; the rows are .* on office-caltech$"
    ):
        plan_recipe(RECIPES["headline"], Options(rows=["AFL"], data=["office-caltech"]), tmp_path)
    with pytest.raises(ValueError, match=r"rows = x: .*'Ditto' \(ditto\) on digits; 'FedAvg' .* on office-caltech$"):
        plan_recipe(RECIPES["headline"], Options(rows=["AFL", "x"]), tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"seeds": ()}, "at least one seed"),
        ({"values": TINY | {"method": "fedavg"}}, "method is set by the recipe"),
        ({"values": TINY | {"rounds": 0}}, "rounds = 0"),
        ({"values": TINY | {"bogus": 1}}, "bogus"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_before_anything_runs(tmp_path, keys, words):
    with pytest.raises(ValueError, match=words):
        plan_recipe(RECIPES["ablation"], make_options(**keys), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_settings_go_to_another_folder():
    assert make_suffix(Options()) == ""
    assert make_suffix(Options(values={"rounds": 3, "device": "cpu"}, smoke=True)) == "-smoke-device=cpu-rounds=3"


def test_steps_replace_the_epochs_of_a_smoke_test(tmp_path):
    (plan,) = plan_recipe(RECIPES["table1"], Options(values={"steps": 2}, smoke=True), tmp_path)
    assert {job.experiment.steps for job in plan.jobs} == {2}


def test_what_changes_no_result_names_no_folder(tmp_path):
    values = TINY | {"data_root": "elsewhere", "workers": 2}
    assert make_suffix(Options(values=values)) == make_suffix(Options(values=TINY))
    (here,), (there,) = (plan_recipe(RECIPES["ablation"], make_options(values=v), tmp_path) for v in (TINY, values))
    assert [job.folder for job in here.jobs] == [job.folder for job in there.jobs]


def test_headline_from_plan_to_claims(runs, tmp_path):
    rows = ("fedavg", "uniform weights", "fedavg+fedheal")
    plans = run_recipe("headline", runs, rows=rows)
    outputs = write_outputs("headline", RECIPES["headline"], plans, tmp_path / "headline")
    (text,) = outputs.texts
    for variant in ("released", "paper"):
        assert f"FedHEAL ({variant}) against FedAvg and uniform weights: AVG higher in" in text
    smoke = [replace(plan, smoke=True) for plan in plans]
    (outputs,) = write_outputs("headline", RECIPES["headline"], smoke, tmp_path / "smoke").texts
    assert "its numbers mean nothing" in outputs
    assert "AVG higher in" not in outputs


def test_rows_with_different_numbers_of_seeds_say_so(runs):
    (few,), (many,) = (
        run_recipe("ablation", runs, rows=[row], seeds=s) for row, s in (("fedavg", (0,)), ("FAEL", (0, 1)))
    )
    both = RecipePlan(few.data, [*few.rows, *many.rows])
    assert "1 to 2 seeds, ± standard deviation over them" in compare_with_paper(RECIPES["ablation"], both).to_text()


@pytest.mark.slow
def test_consistency_has_windows_clients_and_layers(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("fedheal.report.figures.FORMATS", {"svg": {"Date": None}})
    plans = run_recipe("consistency", runs, values=TINY | {"rounds": 6})
    assert plans[0].jobs[0].experiment.clients_per_domain == 1
    outputs = write_outputs("consistency", RECIPES["consistency"], plans, tmp_path / "consistency")
    text = "\n".join(outputs.texts)
    for words in ("first 3 rounds", "first 6 rounds", "rounds 4 to 6", "plain-0", "dark-0", "all layers"):
        assert words in text
    assert len(list(tmp_path.glob("consistency-*.svg"))) == 2
    shares = [
        float(word.rstrip("%"))
        for line in outputs.records[0]["directions"]["fedavg+directions"][1:]
        for word in line[2:]
    ]
    assert all(0 <= share <= 100 for share in shares)
    assert any(0 < share < 100 for share in shares)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "rows"),
    [("beta", ("beta = 0.0", "beta = 0.4", "uniform weights")), ("convergence", ("fedavg", "fedavg+fedheal"))],
)
def test_results_that_are_figures_are_drawn(runs, tmp_path, monkeypatch, result, rows):
    monkeypatch.setattr("fedheal.report.figures.FORMATS", {"png": {}})
    plans = run_recipe(result, runs, rows=rows)
    outputs = write_outputs(result, RECIPES[result], plans, tmp_path / result)
    assert [path.suffix for path in outputs.files] == [".png", ".md", ".json"]
    assert outputs.files[0].stat().st_size > 5000
    # The paper's numbers are of other data, also where it prints no more than AVG and STD.
    assert any("no differences are given" in note for note in outputs.records[0]["notes"])
    assert all(row["difference"] == {} for row in outputs.records[0]["rows"])
    assert not any(line.split()[:1] == ["difference"] for line in outputs.texts[0].splitlines())


def make_comparison_row(ours, paper, domains=("mnist", "syn"), is_meaningful=True):
    cells = {column: Cell(value, None) for column, value in ours.items()}
    return ComparisonRow(RecipeRow("x", "fedavg"), cells, paper, domains, is_meaningful)


def test_differences_are_taken_only_of_what_is_the_same():
    ours = {"mnist": 90.0, "syn": 50.0, "AVG": 70.0, "STD": 28.3, "worst": 50.0}
    paper = {"mnist": 89.0, "syn": 40.0, "AVG": 64.5, "STD": 34.6}
    assert make_comparison_row(ours, paper, is_meaningful=False).difference == {}  # a smoke run
    assert make_comparison_row(ours, paper).difference == pytest.approx(
        {"mnist": 1.0, "syn": 10.0, "AVG": 5.5, "STD": -6.3}
    )
    # A stand-in for one domain: that domain, AVG and STD are not comparable.
    standin = {"syn_standin" if c == "syn" else c: v for c, v in ours.items()}
    assert make_comparison_row(standin, paper).difference == {"mnist": 1.0}
    # Where the paper prints AVG and STD alone they are compared, if they are over the same domains.
    alone = {"AVG": 64.5, "STD": 34.6}
    assert make_comparison_row(ours, alone).difference == pytest.approx({"AVG": 5.5, "STD": -6.3})
    assert make_comparison_row(standin, alone).difference == {}


def test_misprints_are_marked_and_explained():
    (row,) = (r for r in RECIPES["table1"].list_rows("digits") if r.method == "fedproc+qffl")
    domains = ("mnist", "usps", "svhn", "syn")
    ours = dict.fromkeys((*domains, "AVG", "STD", "worst"), Cell(50.0, None))
    published = dict(zip((*domains, "AVG", "STD"), row.published, strict=True))
    compared = ComparisonRow(row, ours, published, domains, is_meaningful=True)
    notes = tuple(_describe_misprints([compared]))
    text = PaperComparison("t", "digits", tuple(ours), (compared,), notes, has_same_data=True).to_text()
    assert text.count("92.09†") == 2
    assert "† FedProc + q-FFL: 92.09 is printed twice" in text
    assert "74.97 " in text
    assert "-42.09" in text
