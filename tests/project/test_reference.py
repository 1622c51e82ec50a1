"""The reference page is what the code says, and everything in the code is on it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedheal import methods
from fedheal.core.parameter import Parameter, declare_parameters, get_parameters
from fedheal.simulate.experiment import Experiment

ROOT = Path(__file__).parents[2]
PUBLIC_MODULES = (
    "fedheal",
    "fedheal.aggregate",
    "fedheal.analysis.domain_changes",
    "fedheal.analysis.paired_tests",
    "fedheal.core.parameter",
    "fedheal.data",
    "fedheal.data.domains",
    "fedheal.flower",
    "fedheal.flower.client",
    "fedheal.local.term",
    "fedheal.methods",
    "fedheal.models",
    "fedheal.nvflare",
    "fedheal.nvflare.client",
    "fedheal.report.diagnose",
    "fedheal.tracking",
)


def list_public(module_name: str) -> dict[str, Any]:
    """Return the public functions and classes of a module by name."""
    module = importlib.import_module(module_name)
    values = {name: getattr(module, name) for name in module.__all__}
    return {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)}


def find_flaws(name: str, value: Any) -> list[str]:
    """Return what the docstring of a function or class lacks."""
    text = inspect.getdoc(value) or ""
    if not text:
        return [f"{name} has no docstring"]
    flaws = []
    if inspect.isclass(value):
        arguments = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        methods = [key for key, member in vars(value).items() if inspect.isfunction(member) and not key.startswith("_")]
        flaws = [f"{name}.{key} has no docstring" for key in methods if not inspect.getdoc(getattr(value, key))]
    else:
        signature = inspect.signature(value)
        arguments = list(signature.parameters)
        if signature.return_annotation not in (None, "None") and not re.search("^Return", text, re.M):
            flaws = [f"{name} does not say what it returns"]
    missing = [
        a for a in arguments if not a.startswith("_") and not re.search(rf"^    [\w, *]*\b{a}\b[\w, ]*:", text, re.M)
    ]
    return flaws + [f"{name} does not describe {argument}" for argument in missing]


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
    assert written == reference.make_page(), "run: python tools/reference.py > docs/reference.md"


def test_every_command_is_shown_with_its_options(reference: ModuleType) -> None:
    page = reference.make_page()
    assert "| `fedheal data list` | List the data sets" in page
    row = next(line for line in page.splitlines() if line.startswith("| `fedheal compare METHOD... [key=value ...]` |"))
    assert "`--seeds`" in row


def test_limits_are_shown_as_the_validation_has_them(reference: ModuleType) -> None:
    page = reference.make_page()
    assert "| `dropout` | `0.0` | number >= 0 < 1 |" in page
    assert "| `augment` | `none` | `none`, `crop`, `flip`, `crop-flip` |" in page
    assert "| `seed` | `0` | whole number >= 0 < 2^63 |" in page


def test_bounds_of_parameters_are_shown(reference: ModuleType) -> None:
    page = reference.make_page()
    assert "| `fedheal` | `tau` | `0.3` | number >= 0 <= 1 |" in page
    assert "| `fedheal` | `fael` | `momentum` | `momentum`, `exact`, `exact-reg`, `false` |" in page


@pytest.mark.parametrize("part", methods.PARTS)
def test_every_parameter_is_declared_with_its_meaning_and_the_source_of_its_default(part: str) -> None:
    constructor = methods.PARTS[part]
    declared = get_parameters(constructor)
    for name, parameter in declared.items():
        assert parameter.description, name
        assert parameter.source, name
    if not isinstance(constructor, type):  # a term has fields that are no parameters
        assert declared.keys() == inspect.signature(constructor).parameters.keys()


def test_a_declaration_without_its_argument_is_refused() -> None:
    with pytest.raises(TypeError, match=r"make needs an argument mu=0\.1"):

        @declare_parameters(Parameter("mu", default=0.1))
        def make(mu: float = 0.2) -> None: ...


def test_a_default_outside_its_own_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the default of a parameter of make is not allowed: mu = -0\.1: use a"):

        @declare_parameters(Parameter("mu", default=-0.1, ge=0))
        def make(mu: float = -0.1) -> None: ...


def test_the_command_shows_a_methods_parameters(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from fedheal import cli

    monkeypatch.setattr(sys, "argv", ["fedheal", "methods", "fedprox:mu=0.1+fedheal"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    out = capsys.readouterr().out
    for words in ("0.01 (here 0.1)", "Li et al. 2020 tune 0.001 to 1", "per_domain", "Chen et al. 2024 for Digits"):
        assert words in out


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_docstrings_of_public_names_are_complete(module_name: str) -> None:
    pytest.importorskip("flwr") if "flower" in module_name else None
    flaws = [flaw for name, value in list_public(module_name).items() for flaw in find_flaws(name, value)]
    assert flaws == []


def test_every_public_module_is_in_the_api_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    for module_name in PUBLIC_MODULES[1:]:
        assert f".. automodule:: {module_name}\n" in pages, module_name
    for name in list_public("fedheal"):
        assert re.search(rf":: (fedheal\.)?{name}\b", pages) or name == "Method", name
