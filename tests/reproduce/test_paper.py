"""The paper's numbers must hang together: AVG and STD follow from the domains, but for the misprints we know."""

from __future__ import annotations

import pytest

from fedheal import methods
from fedheal.core.metrics import fairness
from fedheal.reproduce import RECIPES, paper
from fedheal.reproduce.plans import SMOKE_DATA

PRINTED = [
    (data, name, numbers)
    for table in (paper.TABLE1, paper.TABLE2, paper.ABLATION)
    for data, by_method in table.items()
    for name, numbers in by_method.items()
]


@pytest.mark.parametrize(("data", "name", "numbers"), PRINTED)
def test_avg_and_std_follow_from_the_domains(data, name, numbers):
    scores = fairness(dict(zip(paper.DOMAINS[data], numbers[:4], strict=True)))
    follows = abs(scores["avg"] - numbers[4]) < 0.011 and abs(scores["std"] - numbers[5]) < 0.011
    assert follows != ((data, name) == ("digits", "fedproc+qffl"))


@pytest.mark.parametrize("name", paper.TABLE1["office-caltech"])
def test_office_numbers_are_means_of_five_rounds_of_whole_images(name):
    """Each is k / (5 * test images), printed with two digits; the one that is not is noted."""
    sizes = {"amazon": 190, "dslr": 30, "caltech": 224, "webcam": 58}
    columns, _ = paper.MISPRINTS.get(("office-caltech", name), ((), ""))
    for domain, printed in zip(paper.DOMAINS["office-caltech"], paper.TABLE1["office-caltech"][name][:4], strict=True):
        step = 100 / (5 * sizes[domain])
        # Rounds were rounded to two digits before their mean was taken, which may move it by almost 0.01.
        whole = abs(printed - round(printed / step) * step) < 0.0151
        assert whole != (domain in columns), (domain, printed)


def test_the_tables_agree_where_they_repeat_each_other():
    for data in paper.DOMAINS:
        for table in (paper.TABLE2, paper.ABLATION):
            assert table[data]["fedavg+fedheal"] == paper.TABLE1[data]["fedavg+fedheal"]
        assert paper.ABLATION[data]["fedavg"] == paper.TABLE1[data]["fedavg"]
    assert paper.BETA["digits"][0.0] == paper.TABLE1["digits"]["fedavg"][4:]
    assert paper.BETA["digits"][0.4] == paper.ABLATION["digits"]["fedavg+fael"][4:]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("data", ["digits", "office-caltech", SMOKE_DATA, "mine:load"])
def test_every_recipe_has_uniform_weights_and_methods_that_exist(recipe, data):
    rows = RECIPES[recipe].list_rows(data)
    assert any("uniform" in row.method for row in rows)
    labels = [row.label for row in rows]
    assert len(set(labels)) == len(labels)
    for row in rows:
        assert methods.get(row.method)
        assert len(row.published) in (0, 2, 6)
        assert not (row.published and data == "mine:load")
    for claim in RECIPES[recipe].list_claims():
        assert {label for pair in claim.pairs for label in pair} <= set(labels)


def test_the_headline_has_what_matters_most_first_and_the_papers_numbers_where_it_has_them():
    digits = {row.method: row.published for row in RECIPES["headline"].list_rows("digits")}
    assert list(digits) == [
        "fedavg", "fedavg+uniform", "fedavg+fedheal:variant=released", "fedavg+fedheal", "fedavg+fael", "fedavg+fphl",
        "fedavg+fael-exact", "fedavg+afl", "fedavg+qffl", "fedavg+qffl:q=0.5", "fedavg+qffl:mode=reweight",
        "fedfv:tau=1", "ditto",
    ]  # fmt: skip
    for method in ("fedavg+fedheal:variant=released", "fedavg+fedheal"):
        assert digits[method] == paper.TABLE1["digits"]["fedavg+fedheal"]
    assert digits["fedavg+fphl"] == paper.ABLATION["digits"]["fedavg+fphl"]
    assert digits["ditto"] == paper.TABLE2["digits"]["ditto"]
    ours = ["fedavg+uniform", "fedavg+fael-exact", "fedavg+qffl:q=0.5", "fedavg+qffl:mode=reweight"]
    assert [method for method, numbers in digits.items() if not numbers] == ours
    office = [row.method for row in RECIPES["headline"].list_rows("office-caltech")]
    assert office == [
        "fedavg", "fedavg+uniform", "fedavg+fedheal:tau=0.4,variant=released", "fedavg+fedheal:tau=0.4",
        "fedavg+fael", "fedavg+fphl:tau=0.4", "fedavg+fedheal:tau=0.4,per_step=true",
    ]  # fmt: skip


def test_table1_is_seven_by_five_and_the_office_tau_is_the_papers():
    rows = RECIPES["table1"].list_rows("office-caltech")
    assert len(rows) == 35
    assert sum(bool(row.published) for row in rows) == 28
    assert {e.method for e in rows if "fedheal" in e.method} == {
        f"{local}+fedheal:tau=0.4"
        for local in ("fedavg", "fedprox", "scaffold", "moon", "feddyn", "fedproc", "fedproto")
    }
