"""What commands print fits the terminal, whatever its width."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedheal import methods
from fedheal.runs.folder import read_result
from made_up import DOMAINS, run_folder

HEADINGS = {
    "report": ["mnist", "usps", "svhn", "syn", "AVG", "STD", "worst", "seeds"],
    "diagnose": ["accuracy", "to the mean", "under-served since", "x equal share", "distance", "rounds present"],
    "methods": ["what it does", "parameters", "tau=0.3, beta=0.4,"],
    "parameters": ["default", "what it is", "source of the default", "least consistency of an entry"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for method in ("fedavg", "fedheal:variant=released"):
        run_folder(folder / method, methods.get(method).name, rounds=2)
    return folder


@pytest.mark.parametrize("width", [112, 120])
def test_headings_are_wrapped_between_words(call, runs: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("fedheal.cli.display.save_figure", lambda *_: [])
    monkeypatch.setenv("COLUMNS", str(width))
    shown = call("report", runs / "fedavg", "--diagnose").out
    table = [line for line in shown.splitlines() if line[:1] in "┏┃┡│└"]
    assert table[0].startswith("┏")
    assert max(map(len, table)) <= width
    assert "…" not in shown
    assert "under-served" in "".join(table)


def test_nobody_needs_to_read_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has closed its output gets no traceback."""
    from fedheal.cli.display import show_parts

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", None)
    show_parts()


def test_a_run_tells_a_domain_called_avg_from_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedheal.cli.display import show_run

    monkeypatch.setitem(DOMAINS, "odd", ("AVG", "street"))
    folder = run_folder(tmp_path / "run", "fedavg", "odd", rounds=4)
    show_run(read_result(folder), folder)
    head = next(line for line in capsys.readouterr().out.splitlines() if "method" in line)
    assert re.findall(r"AVG(?: \(domain\))?|street|STD|worst", head) == [
        "AVG (domain)",
        "street",
        "AVG",
        "STD",
        "worst",
    ]


@pytest.mark.parametrize("width", [60, 80, None])
@pytest.mark.parametrize("shown", HEADINGS)
def test_tables_fit_and_keep_their_headings_and_numbers(
    call, runs: Path, monkeypatch: pytest.MonkeyPatch, shown: str, width: int | None
) -> None:
    commands = {
        "report": ["report", runs],
        "diagnose": ["report", runs / "fedavg", "--diagnose"],
        "methods": ["methods"],
        "parameters": ["methods", "fedheal"],
    }
    monkeypatch.setattr("fedheal.cli.display.save_figure", lambda *_: [])  # slow, and not what is tested
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = call(*commands[shown])
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    done = call(*commands[shown])
    assert (done.code, done.err) == (0, "")
    table = done.out.partition("\n\n2 seeds")[0].partition("\nOne seed")[0]
    lines = [line for line in table.splitlines() if not re.search(r"[.)]$|seeds$|png$|last 2 rounds", line)]
    assert max(map(len, lines)) <= (width or 200)
    assert "…" not in done.out
    text = " ".join(done.out.split())
    for heading in HEADINGS[shown]:
        assert heading in text
    assert sorted(re.findall(r"\d+\.\d+", done.out)) == sorted(re.findall(r"\d+\.\d+", wide.out))


@pytest.mark.parametrize("columns", ["60", "80"])
def test_a_run_with_many_domains_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    from fedheal.cli.display import show_comparison

    monkeypatch.setenv("COLUMNS", columns)
    domains = {f"domain-{number}": float(number) for number in range(12)}
    scores = {"domains": domains, "avg": 5.5, "std": 3.6, "worst": 0.0}
    show_comparison([{"method": method, **scores} for method in ("fedavg", "fedavg+fedheal:variant=released")])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    for name, accuracy in domains.items():
        assert out.count(f"{name} {accuracy:.1f}*") == 2  # equal numbers are both the best
