"""Figures as files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from fedheal.core import fonts
from fedheal.report import figures
from fedheal.report.conclusions import analyse_rows
from fedheal.report.diagnose import diagnose_run, draw_diagnosis
from fedheal.report.figure_text import MAX_WIDTH, shorten_name
from fedheal.report.series import find_pareto_front, pick_evenly
from fedheal.report.tables import build_tables
from made_up import DOMAINS, load_rows, make_run, run_folder

EVERY = {"domains", "spread", "differences", "rounds", "curves", "weights", "kept", "consistency", "time"}


@pytest.fixture(scope="module")
def figure_files(small_runs, tmp_path_factory):
    return figures.write_figures(load_rows(small_runs), tmp_path_factory.mktemp("figures"))


@pytest.mark.slow
def test_every_figure_in_three_formats(figure_files):
    assert {path.name for path in figure_files} == {
        f"{name}.{form}" for name in EVERY for form in ("svg", "pdf", "png")
    }
    for path in figure_files:
        if path.suffix == ".svg":
            text = "".join(ElementTree.parse(path).getroot().itertext())
            assert "fedavg" in text or path.stem == "time", path  # words stay words
        elif path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF")
        else:
            with Image.open(path) as image:
                assert image.width in (
                    round(300 * figures.COLUMN),
                    round(300 * figures.PAGE),
                    round(600 * figures.COLUMN),
                )
                colours = np.asarray(image.convert("RGB"), np.int64) @ (65536, 256, 1)
                assert len(np.unique(colours)) > 20  # not blank


@pytest.mark.slow
def test_the_same_runs_give_the_same_files(figure_files, small_runs, tmp_path, monkeypatch):
    """Two figures are enough: the parts that could differ (dates, ids) depend on the format only."""
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("spread", "kept")})
    again = {path.name: path.read_bytes() for path in figures.write_figures(load_rows(small_runs), tmp_path)}
    assert len(again) == 6
    assert again == {path.name: path.read_bytes() for path in figure_files if path.name in again}


@pytest.fixture
def only_svg(monkeypatch):
    monkeypatch.setattr(figures, "FORMATS", {"svg": {"Date": None}})


def test_what_was_not_recorded_is_not_drawn(tmp_path, only_svg):
    run_folder(tmp_path / "run", "fedavg")
    written = figures.write_figures(load_rows(tmp_path / "run"), tmp_path / "figures")
    assert {path.stem for path in written} == EVERY - {"spread", "differences", "kept", "consistency"}


def test_differences_by_seed_are_filled_where_a_test_shows_them(tmp_path):
    for seed in range(8):
        even = {"mnist": 90.0 + seed, "usps": 80.0, "svhn": 70.0}
        gains = {"fedavg+uniform": 0.0, "fedavg": -2.0, "fedavg+afl": 1.0 if seed % 2 else -1.0}
        for method, gain in gains.items():
            make_run(tmp_path, "digits", method, {d: value + gain for d, value in even.items()}, 20, seed=seed)
    rows = load_rows(tmp_path)
    (table,) = build_tables(rows)
    analysis = analyse_rows(rows, "fedavg+uniform")
    data = figures.FigureData(table, tuple(rows[0].domains), (), "fedavg+uniform", analysis)
    average, _ = figures.draw_differences(data).axes
    assert [label.get_text() for label in average.get_yticklabels()] == ["fedavg", "fedavg+afl"]
    means = [container.lines[0] for container in average.containers]
    assert [line.get_xdata().tolist() for line in means] == [[-2.0], [0.0]]
    assert [line.get_markerfacecolor() != "white" for line in means] == [True, False]
    dots = {
        round(float(line.get_ydata()[0]), 2): line.get_xdata() for line in average.lines if line.get_marker() == "|"
    }
    assert list(dots[0.22]) == [-2.0] * 8
    assert sorted(dots[1.22]) == [-1.0] * 4 + [1.0] * 4


@pytest.mark.parametrize("installed", [True, False])
def test_names_in_any_script_are_letters_or_escaped_and_never_boxes(tmp_path, only_svg, monkeypatch, installed):
    """Warnings, such as for a letter that the font lacks, are errors in tests."""
    monkeypatch.setitem(DOMAINS, "drawn", ("写真", "sketch"))
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("domains", "time")})
    if not installed:
        monkeypatch.setattr(fonts, "_find_fallback", lambda letters: [])
    run_folder(tmp_path / "runs", "fedavg", "drawn", rounds=3)
    domains, _ = figures.write_figures(load_rows(tmp_path / "runs"), tmp_path / "figures")
    text = "".join(ElementTree.parse(domains).getroot().itertext())
    assert "sketch" in text
    assert r"\u5199\u771f" in text or (installed and "写真" in text)


HOSTILE = (r"$\frac{x$", "$x$", "a\\b_{c}^%&#", "_street", "<script>alert(1)</script>", "{}", "שלום", "two\nlines", "")


@pytest.mark.parametrize("by", ["domain", "client"])
def test_hostile_names_are_drawn_as_they_are(tmp_path, only_svg, monkeypatch, by):
    """Names come from the clients of a federation: none is mathematics, and none is left out of a legend."""
    monkeypatch.setitem(DOMAINS, "odd", HOSTILE[:8])
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("domains", "curves")})
    run = run_folder(tmp_path / "run", "fedavg", "odd", rounds=4, per_domain=1)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for record in lines:
        record["clients"] = {client: 10.0 if client != "_street-0" else 99.0 for client in record["clients"]}
        record["clients"]["$x$-0"] = 1.0
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    files = figures.save_figure(tmp_path / by, lambda: draw_diagnosis(diagnose_run(run, by)))
    if by == "domain":
        files += figures.write_figures(load_rows(run), tmp_path / "figures")
    for file in files:
        text = "".join(ElementTree.parse(file).getroot().itertext())
        expected = (*HOSTILE[:7], r"two\nlines") if by == "domain" else ("$x$-0",)
        assert [name for name in expected if name not in text] == [], file


def test_names_are_drawn_as_they_are_in_pdf(tmp_path, monkeypatch):
    monkeypatch.setitem(DOMAINS, "odd", HOSTILE[:3])
    monkeypatch.setattr(figures, "FIGURES", {"domains": figures.draw_domains})
    run_folder(tmp_path / "run", "fedavg", "odd", rounds=4, per_domain=1)
    assert len(figures.write_figures(load_rows(tmp_path), tmp_path / "figures")) == 3


@pytest.mark.parametrize("name", ["long " * 40, "写" * 200, "\ue000" * 200])
def test_long_names_leave_room_for_the_figure(tmp_path, only_svg, monkeypatch, name):
    """The server allows 200 letters. matplotlib warns, which is an error in tests, if nothing is left for the axes."""
    monkeypatch.setitem(DOMAINS, "odd", tuple(f"{name[:-1]}{k}" for k in range(8)))
    run_folder(tmp_path / "run", "fedavg", "odd", rounds=4, per_domain=1)
    files = figures.write_figures(load_rows(tmp_path), tmp_path / "figures")
    files += figures.save_figure(tmp_path / "d", lambda: draw_diagnosis(diagnose_run(tmp_path / "run")))
    for file in files:
        if file.stem in ("domains", "curves", "weights", "d"):
            text = "".join(ElementTree.parse(file).getroot().itertext())
            assert "…" in text, file
            assert "7" in text, file


def test_a_name_is_shortened_in_its_middle():
    assert shorten_name("street") == "street"
    short = shorten_name("a" * 100 + "b" * 100)
    assert len(short) == MAX_WIDTH
    assert short.strip("ab") == "…"
    assert len(shorten_name("写" * 200)) < len(short)


def test_many_under_served_clients_fit(tmp_path, only_svg, monkeypatch):
    run = run_folder(tmp_path / "run", "fedavg", rounds=4, per_domain=60)
    (file,) = figures.save_figure(tmp_path / "d", lambda: draw_diagnosis(diagnose_run(run, "client")))
    assert "syn-59 (under-served)" in "".join(ElementTree.parse(file).getroot().itertext())


@pytest.mark.slow
def test_several_data_sets_have_files_of_their_own(tmp_path, only_svg):
    for data in ("digits", "office-caltech"):
        run_folder(tmp_path / "runs" / data, "fedavg", data, rounds=3)
    names = {path.name for path in figures.write_figures(load_rows(tmp_path / "runs"), tmp_path / "figures")}
    assert {"digits-domains.svg", "office-caltech-domains.svg"} <= names


@pytest.mark.slow
def test_many_methods_fit(tmp_path, only_svg):
    """There are more methods than colours, and the last row of panels is not full."""
    for local in ("fedavg", "fedprox", "moon", "scaffold"):
        for stage in ("", "+afl", "+fedheal")[: 2 if local == "scaffold" else 3]:
            run_folder(tmp_path / "runs" / (local + stage), local + stage, rounds=3)
    written = figures.write_figures(load_rows(tmp_path / "runs"), tmp_path / "figures")
    assert {path.stem for path in written} == EVERY


def test_the_front_and_thinning():
    points = {"a": (80.0, 10.0), "b": (80.0, 10.0), "c": (70.0, 12.0), "d": (90.0, 20.0)}
    assert find_pareto_front(points) == ["a", "b", "d"]
    assert pick_evenly(1000, 5)[0] == 0
    assert pick_evenly(1000, 5)[-1] == 999
    assert pick_evenly(0, 5) == []
