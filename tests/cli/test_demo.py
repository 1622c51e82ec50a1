"""`fedheal demo`: the same bits twice, and a table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import fedheal
import tiny_data
from command_line import CONTROL, assert_sentence, read_files
from fedheal.cli.campaigns import DEMO_METHODS
from fedheal.data.domains import Domain, Domains, Split


@pytest.mark.parametrize("words", [["demo", "--rounds", "0"], ["demo", "--seed", "-1"]])
def test_wrong_options_of_the_demo_are_a_sentence(call, tmp_path: Path, words: list[str]) -> None:
    assert_sentence(call(*words), words[1].strip("-"), words[2])
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_the_readme_has_the_methods_of_the_demo() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.partition("<!-- demo table: fedheal demo -->\n")[2].partition("\n\n")[0].splitlines()
    shown = [line.split(" | ")[0].removeprefix("| ") for line in table[2:]]
    assert shown == [fedheal.methods.get(name).name for name in DEMO_METHODS]


def load_small() -> Domains:
    """Return the tiny data in the size of the embedded digits."""
    tiny = tiny_data.load()
    enlarged = [
        [Split(part.images.repeat(1, 1, 4, 4), part.labels) for part in (d.train, d.test)] for d in tiny.domains
    ]
    domains = [Domain(d.name, *parts) for d, parts in zip(tiny.domains, enlarged, strict=True)]
    return replace(tiny, domains=tuple(domains))


@pytest.mark.slow
def test_the_demo_gives_a_table_and_the_bits_of_a_single_run(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedheal.data.datasets._load_embedded_once", load_small)
    done = call("demo", "--rounds", "1", "--jobs", "1", "--out", "one")
    assert (done.code, done.err) == (0, "")
    assert CONTROL.search(done.out) is None
    one = read_files(tmp_path / "one")
    assert "one/report.html (open it in a browser)" in done.out
    assert b"Accuracy by domain" in one["report.html"]
    assert "in the last round" in done.out
    models = [name for name in one if name.endswith("model.safetensors")]
    assert len(models) == 4
    assert len({one[name] for name in models}) == 4  # four different methods
    fedheal.run(fedheal.Experiment(method="fedheal", data="embedded", rounds=1), tmp_path / "two", progress=False)
    again = (tmp_path / "two" / "model.safetensors").read_bytes()
    assert one["fedavg+fedheal-embedded-seed0/model.safetensors"] == again
    header = next(line for line in done.out.splitlines() if "method" in line and "AVG" in line)
    assert re.findall(r"\w+", header) == ["method", "plain", "noisy", "dark", "AVG", "STD", "worst"]
    table = done.out[done.out.index(header) :].splitlines()
    rows = [line for line in table if len(re.findall(r"\d+\.\d", line)) == 6]
    methods = [re.findall(r"fed[\w+]*", row)[0] for row in rows]
    assert methods == ["fedavg", "fedavg+uniform", "fedavg+afl", "fedavg+fedheal"]
    for row, method in zip(rows, methods, strict=True):
        folder = tmp_path / "one" / f"{method}-embedded-seed0"
        result = json.loads((folder / "result.json").read_text())
        shown = [f"{x:.1f}" for x in (*result["domains"].values(), result["avg"], result["std"], result["worst"])]
        assert re.findall(r"\d+\.\d", row) == shown
