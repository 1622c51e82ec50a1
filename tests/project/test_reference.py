"""The reference page is what the code says, and everything in the code is on it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedheal import methods
from fedheal.core.parameter import described
from fedheal.simulate.experiment import Experiment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_field_is_described_and_no_other(reference: ModuleType) -> None:
    assert reference.FIELDS.keys() == Experiment.model_fields.keys()


def test_the_page_is_current(reference: ModuleType) -> None:
    written = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert written == reference.page(), "run: python tools/reference.py > docs/reference.md"


def test_limits_are_shown_as_the_validation_has_them(reference: ModuleType) -> None:
    page = reference.page()
    assert "| `dropout` | `0.0` | number >= 0 < 1 |" in page
    assert "| `augment` | `none` | `none`, `crop`, `flip`, `crop-flip` |" in page
    assert "| `seed` | `0` | whole number >= 0 < 2^63 |" in page


@pytest.mark.parametrize("part", methods.PARTS)
def test_every_parameter_says_what_it_means_and_where_its_default_comes_from(part: str) -> None:
    for name, (default, said) in described(methods.PARTS[part]).items():
        assert said.about, name
        assert said.source, name
        assert methods.parameters(part)[name] == default


def test_a_parameter_that_says_nothing_is_refused() -> None:
    def silent(mu: float = 0.1) -> None: ...

    with pytest.raises(TypeError, match="silent's parameter 'mu' does not say what it means"):
        described(silent)


def test_the_command_shows_a_methods_parameters(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from fedheal import cli

    monkeypatch.setattr(sys, "argv", ["fedheal", "methods", "fedprox:mu=0.1+fedheal"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    out = capsys.readouterr().out
    for words in ("0.01 (here 0.1)", "Li et al. 2020 tune 0.001 to 1", "per_domain", "Chen et al. 2024 for Digits"):
        assert words in out
