"""A new method is one file, one line of a registry and one row of a contract table: try it in a copy of the tree.

The stage and the mask are those of docs/add-a-method.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOCAL_METHOD = '''"""Shrink, an example: pull the parameters towards zero."""

from dataclasses import dataclass

from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.term import Context, Term

RATE = Parameter("rate", description="pull towards zero", source="an example", default=0.01, ge=0, le=1)


@declare_parameters(RATE)
@dataclass(frozen=True)
class Shrink(Term):
    """An example: the parameters are pulled towards zero."""

    rate: float = RATE.default

    def grad(self, ctx: Context) -> None:
        for parameter in ctx.params:
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=self.rate)
'''

STAGE = '''"""Weights by a power of the number of examples, an example."""

from dataclasses import replace

from fedheal.aggregate.stage import Stage, stateless
from fedheal.core.parameter import Parameter, declare_parameters

POWER = Parameter("power", description="power of the number of examples", source="an example", default=0.5, ge=0, le=1)


@declare_parameters(POWER)
def power_weights(power: float = POWER.default) -> Stage:
    """An example: give weights in proportion to a power of the number of examples."""
    return stateless(lambda draft: replace(draft, weights=draft.num_examples**power))
'''

MASK = '''"""The largest entries of each client's update, an example."""

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.masks.entries import keep_entries
from fedheal.aggregate.stage import Stage
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import Nothing, State

SHARE = Parameter("share", 0.5, "share of the entries that a client keeps", "an example", gt=0, le=1)


@declare_parameters(SHARE)
def top_mask(share: float = SHARE.default) -> Stage:
    """An example: keep the largest entries of each client's update."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        sizes = draft.select_rows(draft.updates.deltas).abs()
        least = sizes.topk(max(1, round(share * sizes.shape[1])), dim=1).values[:, -1:]
        return keep_entries(draft, sizes >= least), state

    return Stage(lambda layout: Nothing(), apply, gives=frozenset({"mask"}))
'''

# Of the tests that cover all methods: those of the new ones, and those of the whole tables.
WANTED = "shrink or power or top or combined or test_methods"


def add_row(path: Path, table: str, row: str, import_line: str = "") -> None:
    """Add a first row to a table of a module, and the import that it needs."""
    text, count = re.subn(rf"^({table}\b.* = {{)\n", rf"\1\n    {row}\n", path.read_text("utf-8"), flags=re.M)
    assert count == 1, (path, table)
    path.write_text(text.replace("\nfrom fedheal", f"\n{import_line}\nfrom fedheal", 1), "utf-8")


def add_to_set(path: Path, name: str, entry: str) -> None:
    """Add an entry to a set of a module."""
    text, count = re.subn(rf"^{name} = {{", rf"{name} = {{{entry}, ", path.read_text("utf-8"), flags=re.M)
    assert count == 1, (path, name)
    path.write_text(text, "utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy what the tests of all methods need, with what numba has compiled."""
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for folder in ("contract", "cli", "methods"):
        shutil.copytree(ROOT / "tests" / folder, tmp_path / "tests" / folder)
    alone = [ROOT / name for name in ("pyproject.toml", "benchmarks/methods.py", "docs/methods.md")]
    for path in [*(ROOT / "tests").glob("*.py"), *alone]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


@pytest.mark.slow
def test_a_new_method_is_one_file_one_line_and_one_row(tree: Path) -> None:
    package, contract = tree / "src" / "fedheal", tree / "tests" / "contract"
    (package / "local" / "shrink.py").write_text(LOCAL_METHOD, "utf-8")
    add_row(package / "methods/registry.py", "LOCAL", '"shrink": Shrink,', "from fedheal.local.shrink import Shrink")
    add_row(contract / "test_terms.py", "ALONG", '"shrink": (0, 0, 0),')

    stages = ("power", "weights", "power_weights", STAGE), ("top", "masks", "top_mask", MASK)
    for name, folder, function, code in stages:
        (package / "aggregate" / folder / f"{name}.py").write_text(code, "utf-8")
        import_line = f"from fedheal.aggregate.{folder}.{name} import {function}"
        add_row(package / "aggregate/registry.py", "STAGES", f'"{name}": {function},', import_line)
        row = f'"{name}": lambda **k: Aggregator(STAGES["{name}"](), **k),'
        add_row(contract / "test_aggregators.py", "AGGREGATORS", row)
    add_to_set(contract / "test_aggregators.py", "NO_MEAN", '"top"')

    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not soak", "-k", WANTED]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command += ["-rA", "tests/contract/test_terms.py", "tests/contract/test_aggregators.py"]
    command += ["tests/cli/test_methods.py", "tests/methods/test_all_methods.py"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = set(re.findall(r"^PASSED .*::(\w+\[.*\])$", done.stdout, re.M))
    assert {
        "test_a_state_survives_saving_and_the_next_round_is_the_same_bit_for_bit[shrink]",
        "test_a_parameter_out_of_range_is_refused_with_one_sentence[shrink-rate]",
        "test_a_parameter_out_of_range_is_refused_with_one_sentence[power-power]",
        "test_bytes_are_those_of_the_model_and_what_goes_along[shrink]",
        "test_a_parameter_out_of_range_is_refused_with_one_sentence[top-share]",
        "test_order_of_clients_is_irrelevant[power]",
        "test_nothing_that_was_given_is_changed[top]",
        "test_every_named_stage_composes_with_a_mask[power]",
        "test_every_named_stage_composes_with_a_mask[top]",
        "test_stated_training_times_are_the_measured_ones[shrink]",
        "test_stated_training_times_are_the_measured_ones[top]",
        "test_it_learns[shrink+top]",
    } <= passed, done.stdout
