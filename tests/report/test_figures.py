"""Figures as files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from fedheal.core import fonts
from fedheal.report import figures
from fedheal.report.series import find_pareto_front, pick_evenly
from made_up import DOMAINS, load_rows, run_folder

EVERY = {"domains", "spread", "rounds", "curves", "weights", "kept", "consistency", "time"}


@pytest.fixture(scope="module")
def written(few, tmp_path_factory):
    return figures.write_figures(load_rows(few), tmp_path_factory.mktemp("figures"))


@pytest.mark.slow
def test_every_figure_in_three_formats(written):
    assert {path.name for path in written} == {f"{name}.{form}" for name in EVERY for form in ("svg", "pdf", "png")}
    for path in written:
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
def test_the_same_runs_give_the_same_files(written, few, tmp_path, monkeypatch):
    """Two figures stand for all: dates and names of parts, which could differ, are those of a format."""
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("spread", "kept")})
    again = {path.name: path.read_bytes() for path in figures.write_figures(load_rows(few), tmp_path)}
    assert len(again) == 6
    assert again == {path.name: path.read_bytes() for path in written if path.name in again}


@pytest.fixture
def one_format(monkeypatch):
    monkeypatch.setattr(figures, "FORMATS", {"svg": {"Date": None}})


def test_what_was_not_recorded_is_not_drawn(tmp_path, one_format):
    run_folder(tmp_path / "run", "fedavg")
    written = figures.write_figures(load_rows(tmp_path / "run"), tmp_path / "figures")
    assert {path.stem for path in written} == EVERY - {"spread", "kept", "consistency"}


@pytest.mark.parametrize("installed", [True, False])
def test_names_in_any_script_are_letters_or_escaped_and_never_boxes(tmp_path, one_format, monkeypatch, installed):
    """Warnings, such as of a letter that the font lacks, are errors here."""
    monkeypatch.setitem(DOMAINS, "drawn", ("写真", "sketch"))
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("domains", "time")})
    if not installed:
        monkeypatch.setattr(fonts, "_find_fallback", lambda letters: [])
    run_folder(tmp_path / "runs", "fedavg", "drawn", rounds=3)
    domains, _ = figures.write_figures(load_rows(tmp_path / "runs"), tmp_path / "figures")
    text = "".join(ElementTree.parse(domains).getroot().itertext())
    assert "sketch" in text
    assert r"\u5199\u771f" in text or (installed and "写真" in text)


@pytest.mark.slow
def test_several_data_sets_have_files_of_their_own(tmp_path, one_format):
    for data in ("digits", "office-caltech"):
        run_folder(tmp_path / "runs" / data, "fedavg", data, rounds=3)
    names = {path.name for path in figures.write_figures(load_rows(tmp_path / "runs"), tmp_path / "figures")}
    assert {"digits-domains.svg", "office-caltech-domains.svg"} <= names


@pytest.mark.slow
def test_many_methods_fit(tmp_path, one_format):
    """More methods than colours, and than fit into full rows of panels."""
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
