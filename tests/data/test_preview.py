"""What commands show, where names are not as one would have them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fedheal.campaign.sweep import Search, Trial
from fedheal.cli import app
from fedheal.cli import display as cli_show
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
    shown = capsys.readouterr().out
    assert shown.partition("The runs are in")[0].count(name) == 2  # in the table, and where it says what was chosen


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
    shown = CliRunner().invoke(app, ["data", "show", "folder:photos", "--clients", "clients_per_domain=1"])
    assert "[red]x" in shown.output, shown.output
