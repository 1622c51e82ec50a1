"""What commands show, where names are not as one would have them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fedheal.campaign.sweep import Search, Trial
from fedheal.cli import app
from fedheal.cli import data as cli_data
from fedheal.cli import display as cli_show
from fedheal.core import fonts
from fedheal.data import preview
from fedheal.data.domains import Domain, Domains, Split
from fedheal.data.partition import Client
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.progress import Progress

NAMES = ["[old]", "[/old]", "[red]x", "a\\"]
NUMBERS = {"avg": (1.0,), "std": (1.0,), "worst": (1.0,)}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_as_it_is_in_tables(name, capsys):
    cli_show.show_comparison([{"method": name, "domains": {name: 1.0, "b": 2.0}, "avg": 1.0, "std": 1.0, "worst": 1.0}])
    assert capsys.readouterr().out.count(name) == 2
    trial = Trial({"data": name}, NUMBERS)
    cli_show.show_search(Search({"data": [name]}, {}, [0], Path("there")), [trial], trial)
    output = capsys.readouterr().out
    assert output.partition("The runs are in")[0].count(name) == 2  # in the table, and where it says what was chosen


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_as_it_is_while_a_run_goes(name, live):
    file = io.StringIO()
    evenness = {"avg": 1.0, "std": 0.0}
    with Progress(Console(file=file, force_terminal=live, width=200, color_system=None)) as progress:
        progress.started({"method": f"mine{name}", "rounds": 2, "data": "x", "seed": 0}, [])
        seconds = {"train": 1.0}
        progress.round(
            RoundRecord(round=1, cohort=1, replied=1, seconds=seconds, domains={name: 51.5}, fairness=evenness)
        )
    assert f"mine{name}" in file.getvalue()
    assert live or "on x, seed 0: 2 rounds\n" in file.getvalue()
    assert f"{name} 51.5" in file.getvalue()


def test_a_domain_is_shown_as_it_is_called_where_data_are_shown(tmp_path, monkeypatch):
    for domain in ("[old]", "[red]x"):
        for number in range(10):
            path = tmp_path / "photos" / domain / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    monkeypatch.chdir(tmp_path)
    checked = CliRunner().invoke(app, ["data", "check", "folder:photos"])
    assert checked.output.count("[old]") > 1, checked.output  # in the table, and in the line below it
    result = CliRunner().invoke(app, ["data", "show", "folder:photos", "--clients", "clients_per_domain=1"])
    assert "[red]x" in result.output, result.output


def make_data(*classes: str, domain: str = "a") -> tuple[Domains, tuple[Client, ...]]:
    """A data set with two images of each class, and two clients that hold one each."""
    labels = torch.arange(2 * len(classes)) % len(classes)
    every = Split(torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8), labels)
    data = Domains("mine", classes, (Domain(domain, every, every),), (2,), (0,))
    halves = torch.arange(len(labels)).view(2, -1)
    return data, tuple(Client(f"{domain}-{k}", domain, half) for k, half in enumerate(halves))


@pytest.mark.parametrize("number", [2, 11, 20])
def test_classes_have_their_own_colours_and_are_all_in_the_legend(number):
    names = [f"_class{i}" for i in range(number)]  # a legend of matplotlib would leave these out
    (axes,) = preview.plot_clients(*make_data(*names)).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names
    assert len({to_hex(bars.patches[0].get_facecolor()) for bars in axes.containers}) == number


def test_many_classes_are_a_matrix_with_every_class_on_the_axis():
    names = [f"class{i}" for i in range(65)]
    axes, bar = preview.plot_clients(*make_data(*names)).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == names
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a-0", "a-1"]
    assert axes.images[0].get_array().tolist() == [[1] * 65] * 2
    assert bar.get_ylabel() == "training samples"


def test_thousands_of_classes_and_clients_can_still_be_drawn(monkeypatch):
    monkeypatch.setattr(preview, "MAX_LABELS", 9)
    data, clients = make_data(*(f"c{i}" for i in range(25)))
    figure = preview.plot_clients(data, clients * 1100)
    assert max(figure.get_size_inches() * 150) < 2**16  # the most that can be saved
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [f"c{i}" for i in range(0, 25, 3)]


@pytest.mark.parametrize("number", [2, 30])
def test_characters_that_no_font_has_are_escaped(number, monkeypatch):
    monkeypatch.setattr(fonts, "_find_fallback", lambda letters: [])
    data, clients = make_data("\u732b$x$", "\u72ac", *map(str, range(number - 2)), domain="\u7167\u7247")
    figure = preview.plot_clients(data, clients)
    figure.savefig(io.BytesIO())  # would warn of missing glyphs, or fail to read mathematics
    axes = figure.axes[0]
    labels = axes.get_xticklabels() if number > 20 else axes.get_legend().get_texts()
    assert [label.get_text() for label in labels][:2] == ["\\u732b$x$", "\\u72ac"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["\\u7167\\u7247-0", "\\u7167\\u7247-1"]
    cats, dogs = (preview.draw_contact_sheet(make_data(c, "x")[0].domains[0], (c, "x")) for c in ("\u732b", "\u72ac"))
    assert cats.tobytes() != dogs.tobytes()  # not a box for either


def test_a_font_that_has_the_characters_is_used(monkeypatch):
    monkeypatch.setattr(fonts, "_find_fallback", lambda letters: ["STIXGeneral"])
    rare = min(fonts.read_letters("STIXGeneral") - fonts.read_letters(fonts.USUAL))
    text, font = preview._choose_font(f"a{rare}")
    assert (text, font.path) == (f"a{rare}", fonts.find_font_file("STIXGeneral"))
    figure = preview.plot_clients(*make_data(rare, "x"))
    figure.savefig(io.BytesIO())
    assert figure.axes[0].get_legend().get_texts()[0].get_text() == rare


def test_a_sheet_says_how_many_classes_it_leaves_out(monkeypatch):
    drawn, choose_font = [], preview._choose_font
    monkeypatch.setattr(preview, "_choose_font", lambda text: drawn.append(text) or choose_font(text))
    data, _ = make_data(*(f"c{i}" for i in range(preview.MAX_CLASSES + 2)))
    preview.draw_contact_sheet(data.domains[0], data.classes)
    assert any("the first 40 of 42 classes" in text for text in drawn)


def test_the_table_of_clients_fits_the_terminal_and_files_of_two_data_sets_stay_apart(tmp_path, call, monkeypatch):
    classes = [f"kind-of-thing-{i}" for i in range(25)]
    for root in ("one", "two"):
        for name in classes:
            (tmp_path / root / "photographs" / name).mkdir(parents=True)
            for number in range(3):
                Image.new("L", (8, 8)).save(tmp_path / root / "photographs" / name / f"{number}.png")
    monkeypatch.setattr(cli_data, "make_console", lambda: Console(width=80, markup=False))
    for root in ("one", "two"):
        done = call("data", "show", f"folder:{root}", "--clients", "--out", "shown")
        assert done.code == 0, done
        assert max(map(len, done.out.splitlines())) <= 80
        assert "…" not in done.out
        assert all(f"photographs-{k} " in done.out for k in range(5))
        call("data", "show", f"folder:{root}", "--out", "shown")
    assert sorted(path.name for path in (tmp_path / "shown").iterdir()) == [
        f"folder_{root}-{part}" for root in ("one", "two") for part in ("clients.csv", "clients.png", "photographs.png")
    ]
    head, *rows = csv.reader((tmp_path / "shown" / "folder_one-clients.csv").read_text().splitlines())
    assert head == ["client", "domain", "samples", *sorted(classes)]
    assert {row[2] for row in rows} == {"12"}
    assert sum(int(n) for row in rows for n in row[3:]) == 60
