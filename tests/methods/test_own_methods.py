"""Methods of one's own by import path: what a function may return, how it is named, run and refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedheal
from command_line import Done
from fedheal import methods
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.stage import stateless
from fedheal.cli import app
from fedheal.core.errors import CustomPartError
from fedheal.core.state import Nothing
from fedheal.local.fedprox import FedProx
from fedheal.local.term import Term
from fedheal.runs.folder import read_rounds
from tiny_data import quick, words

MINE = """
from dataclasses import replace
import sys
import torch
from fedheal.aggregate import Aggregator, chain
from fedheal.aggregate.presets import get_reducer
from fedheal.aggregate.stage import Stage, stateless
from fedheal.aggregate.registry import STAGES
from fedheal.core.state import Nothing
from fedheal.local.fedprox import FedProx
from fedheal.local.term import Term
from fedheal.methods import Local, get

NUMBER = 3

def even():
    return STAGES["uniform"]()

def pull(mu: float = 0.1):
    return FedProx(mu)

def fixed_pull():
    return FedProx(0.1)

def average(fair: bool = False, variant: str = "paper"):
    return Aggregator(STAGES["uniform"]() if fair else chain(), get_reducer(variant))

def whole(mu: float = 0.01, times: int = 1):
    return get("fedprox+fedheal", mu=mu * times)

def plain(k: int = 1):
    if k > 2:
        raise ValueError(f"k = {k}: use 1 or 2")
    return Local()

def without_default(mu):
    return FedProx(mu)

def variadic(*mus):
    return FedProx(mus[0])

def comma_default(names: str = "a,b"):
    return Local()

def number():
    return NUMBER

def raising(k: int = 2):
    return {}[k]

def leaving():
    raise SystemExit(5)

def bad_reducer(what: str = "word"):
    # A reducer that makes something else of a round than a model and a report.
    choices = {
        "word": lambda draft: "hello",
        "tensor": lambda draft: (draft.model.params, {}),
        "shape": lambda draft: (replace(draft.model, params=torch.zeros(3)), {}),
        "not_json": lambda draft: (draft.model, {"inner": {"key": {1, 2}}}),
    }
    return Aggregator(chain(), lambda draft, weights: choices[what](draft))

def bad_draft(what: str = "mask"):
    choices = {
        "mask": lambda draft: {"mask": draft.updates.deltas > 0},
        "step": lambda draft: {"step": [0.0]},
        "report": lambda draft: {"report": [1]},
        "few": lambda draft: {"weights": torch.ones(2)},
        "nan": lambda draft: {"weights": draft.num_examples * float("nan")},
    }
    return stateless(lambda draft: replace(draft, **choices[what](draft)))

class BadLoss(Term):
    def __init__(self, what, finish):
        self.what, self.end = what, finish

    def loss(self, batch, ctx):
        choices = {
            "none": lambda: None,
            "vector": lambda: batch.logits.sum(1),
            "list": lambda: [batch.ce],
            "float": lambda: batch.ce.item(),
            "detached": lambda: batch.ce.detach(),
            "nan": lambda: batch.logits.sum() * float("nan"),
        }
        return choices[self.what]()

    def finish(self, ctx, local):
        return {} if self.end else ({}, {})

def bad_loss(what: str = "none", finish: str = ""):
    return BadLoss(what, finish)

def stage_without_state():
    return Stage(lambda layout: Nothing(), lambda draft, state: draft)

def custom_weights(how: str = "list"):
    choices = {
        "list": lambda draft: [2] * len(draft.rows),
        "tensor": lambda draft: torch.ones(len(draft.rows)),
        "words": lambda draft: ["much"] * len(draft.rows),
    }
    return stateless(lambda draft: replace(draft, weights=choices[how](draft)))

def root(first: int = 1):
    def apply(draft, state):
        if len(draft.updates.clients) < first:
            raise ValueError(f"too few of {first}")
        return draft, state
    return Stage(lambda layout: Nothing() if first else {}[0], apply)

def failing_reducer():
    return Aggregator(chain(), lambda draft, weights: 1 / 0)

class FailingLoss(Term):
    def loss(self, batch, ctx):
        return None if ctx.round < 2 else batch.nothing

def failing_loss():
    return FailingLoss()

def leaving_stage():
    return stateless(lambda draft: sys.exit())

def leaving_reducer():
    return Aggregator(chain(), lambda draft, weights: sys.exit("no model"))

class LeavingLoss(Term):
    def loss(self, batch, ctx):
        sys.exit(7)

def leaving_loss():
    return LeavingLoss()
"""


@pytest.fixture(autouse=True)
def methods_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write and unload the module of methods for each test, since modules stay imported."""
    (tmp_path / "mine_of_tests.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_tests", raising=False)
    monkeypatch.chdir(tmp_path)


def qualify_name(text: str) -> str:
    return text.replace("mine:", "mine_of_tests:")


def run_method(name: str, **keys: Any) -> bytes:
    result = fedheal.run(quick(method=qualify_name(name), participation=0.8, **keys), progress=False)
    return torch.cat([value.flatten() for value in result.model.state_dict().values()]).numpy().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("mine:even", "fedavg+uniform"),
        ("scaffold+mine:even", "scaffold+uniform"),
        ("fphl+mine:even", "fphl+uniform"),
        ("mine:pull", "fedprox:mu=0.1"),
        ("mine:pull:mu=0.5+fedheal:tau=0.4", "fedprox:mu=0.5+fedheal:tau=0.4"),
        ("mine:pull+mine:even", "fedprox:mu=0.1+uniform"),
        ("mine:average", "fedavg"),
        ("mine:average:fair=true", "uniform"),
        ("mine:whole:mu=0.2,times=3", "fedprox:mu=0.6+fedheal"),
        ("mine:plain", "fedavg"),
        ("mine:custom_weights", "uniform"),
        ("mine:custom_weights:how=tensor", "uniform"),
    ],
)
def test_a_part_of_ones_own_does_what_the_table_s_does_to_the_bit(name: str, same: str) -> None:
    assert run_method(name) == run_method(same)


@pytest.mark.parametrize(
    ("name", "keys", "short", "full_name"),
    [
        ("mine:even", {}, "fedavg+mine:even", "fedavg+mine:even"),
        ("mine:pull", {}, "mine:pull", "mine:pull:mu=0.1"),
        ("mine:pull:mu=0.1", {}, "mine:pull", "mine:pull:mu=0.1"),
        ("mine:pull", {"mu": 0.5}, "mine:pull:mu=0.5", "mine:pull:mu=0.5"),
        ("mine:average:fair=true", {}, "mine:average:fair=true", "mine:average:fair=true,variant=paper"),
        ("mine:whole", {"times": "3"}, "mine:whole:times=3", "mine:whole:mu=0.01,times=3"),
    ],
)
def test_it_has_one_name_like_any_other(name: str, keys: dict[str, Any], short: str, full_name: str) -> None:
    method = methods.get(qualify_name(name), **keys)
    assert (method.name, method.full_name) == (qualify_name(short), qualify_name(full_name))
    assert methods.get(method.full_name).name == methods.get(method.name).name == method.name


def test_values_are_what_the_function_returned() -> None:
    method = methods.get(qualify_name("mine:pull:mu=0.5+mine:even"))
    assert method.local == (FedProx(0.5),)
    assert method.aggregator.stage.gives == STAGES["uniform"]().gives
    assert methods.get(qualify_name("mine:whole")).parameters == {"mu": 0.01, "times": 1}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mine:without_default", "give its parameter 'mu' a default"),
        ("mine:variadic", "give its parameter 'mus' a default"),
        ("mine:comma_default", "give its parameter 'names' a default"),
        ("mine:number", "returned an int, not a Stage"),
        ("mine:NUMBER", "'NUMBER' is an int, not a function"),
        ("mine:absent", "has no function 'absent'"),
        ("mine:raising", "raised KeyError: 2"),
        ("mine:leaving", "the method's function 'mine_of_tests:leaving' raised SystemExit: 5"),
        ("mine:plain:k=3", "the method's function 'mine_of_tests:plain' raised ValueError: k = 3: use 1 or 2"),
        ("mine:plain:k=1.5", "k = 1.5: use a whole number"),
        ("mine:whole:time=1", "no parameter 'time'.*did you mean 'times'"),
        ("mine:pull:mu", "should be key=value"),
        ("mine:average+uniform", "is a whole method and takes no stage"),
        ("fedprox+mine:pull", "is not a stage"),
        ("mine:even+uniform", "two of these stages give weights"),
        ("no_such_module_here:method", "cannot be imported: ModuleNotFoundError"),
        ("fedpro:mu", "cannot be imported"),
        (
            "mine:pull(0.5)",
            "no method part 'mine_of_tests:pull.0.5.': write it without parentheses, as 'mine_of_tests:pull:mu=0.5'$",
        ),
        (
            "mine:pull()+uniform",
            "no method part 'mine_of_tests:pull..': write it without parentheses, as 'mine_of_tests:pull'$",
        ),
        ("mine:whole(0.1, times=2)", "without parentheses, as 'mine_of_tests:whole:mu=0.1,times=2'$"),
        ("fedheal(0.4)", "no method part 'fedheal.0.4.': write it without parentheses, as 'fedheal:tau=0.4'$"),
        ("no_such_module_here:method(1)", "cannot be imported: ModuleNotFoundError"),
        ("my-module:part", "no method part 'my-module:part'; .* one of your own is named by import path"),
        ("fedpro:mu=1", "no method part 'fedpro'.*did you mean 'fedprox'"),
    ],
)
def test_what_is_wrong_with_one_is_a_sentence(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        methods.get(qualify_name(name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "mine:bad_reducer:what=word",
            r"round 1: your reducer `mine:bad_reducer.<locals>.<lambda>` must return a Packed and a Mapping, got a str",
        ),
        ("mine:bad_reducer:what=tensor", "must return a Packed and a Mapping, got a Tensor and a dict"),
        (
            "mine:stage_without_state",
            "round 1: your stage `mine:stage_without_state` must return a Draft and a State, got a Draft",
        ),
        (
            "mine:bad_reducer:what=not_json",
            r"round 1 cannot be recorded: report.inner.key = \{1, 2\} is not JSON-serialisable",
        ),
    ],
)
def test_what_a_round_of_it_gives_is_asked_for_and_nothing_is_in_the_way_after(
    tmp_path: Path, name: str, why: str
) -> None:
    with pytest.raises(ValueError, match=qualify_name(why)):
        fedheal.run(quick(method=qualify_name(name)), tmp_path / "one", progress=False)
    assert read_rounds(tmp_path / "one") == []
    (tmp_path / "one" / "rounds.jsonl").write_text('{"round": 1, "coh')  # as a kill within the first line leaves it
    fedheal.run(quick(), tmp_path / "one", progress=False)  # another experiment: the first has left nothing
    assert fedheal.Experiment.read(tmp_path / "one" / "experiment.toml").identity == quick().identity
    assert [record.round for record in read_rounds(tmp_path / "one")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mine:bad_reducer:what=shape", r"must return params of shape \(\d+,\), got \(3,\)"),
        ("mine:bad_draft:what=mask", "round 1: your stage `mine:bad_draft` gave a Tensor as mask: use keep_entries"),
        (
            "mine:bad_draft:what=step",
            r"your stage `mine:bad_draft` must give a tensor of shape \(\d+,\) as step, got a list",
        ),
        ("mine:bad_draft:what=report", "your stage `mine:bad_draft` must give a dictionary as report, got a list"),
        (
            "mine:bad_draft:what=few",
            "round 1: your stage `mine:bad_draft` must give 5 finite, non-negative weights, got .1. 1",
        ),
        ("fphl+mine:bad_draft:what=nan", r"stage `mine:bad_draft` must give 5 finite.* got \[nan nan nan nan nan\]$"),
        (
            "mine:bad_loss:what=vector",
            r"round 1: your term `mine:BadLoss`: loss must return a scalar.* got shape \(\d+,\)$",
        ),
        (
            "mine:bad_loss:what=list",
            r"your term `mine:BadLoss`: loss must return a scalar tensor.* or None, got a list",
        ),
        ("mine:bad_loss:what=float", r"your term `mine:BadLoss`: loss must return a scalar tensor.* got a float"),
        (
            "mine:bad_loss:what=detached",
            "your term `mine:BadLoss`.* returned a tensor without a gradient: it changes no step",
        ),
        (
            "mine:bad_loss:what=nan",
            "client '.*': its update holds NaN.*; in round 1 it trained with your term `mine:BadLoss`: check that its loss",
        ),
        (
            "mine:bad_loss:finish=single",
            "your term `mine:BadLoss`: finish must return a Mapping and a Mapping, got a dict",
        ),
    ],
)
def test_what_a_part_of_ones_own_returns_wrongly_is_named(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=qualify_name(why)) as error:
        fedheal.run(quick(method=qualify_name(name)), progress=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "cause", "why"),
    [
        ("mine:root:first=9", ValueError, r"round 1: your stage `mine:root` raised ValueError: too few of 9 \(mine_"),
        ("mine:root:first=0", KeyError, r"your stage `mine:root` raised KeyError: 0 \("),
        ("fphl+mine:root:first=9", ValueError, r"round 1: your stage `mine:root` raised ValueError"),
        (
            "mine:failing_reducer",
            ZeroDivisionError,
            r"your reducer `mine:failing_reducer.<locals>.<lambda>` raised ZeroDivisionError",
        ),
        (
            "mine:failing_loss",
            AttributeError,
            r"round 2: your term `mine:FailingLoss` raised AttributeError: .*'nothing'",
        ),
        (
            "mine:leaving_stage",
            SystemExit,
            r"^round 1: your stage `mine:leaving_stage` raised SystemExit \(mine_of_tests.py, line \d+\)$",
        ),
        ("mine:leaving_reducer", SystemExit, r"your reducer `mine:.*` raised SystemExit: no model \(mine_of_tests.py"),
        (
            "mine:leaving_loss",
            SystemExit,
            r"^round 1: your term `mine:LeavingLoss` raised SystemExit: 7 \(mine_of_tests.py, line \d+\)$",
        ),
    ],
)
def test_what_a_part_of_ones_own_raises_is_named_and_is_the_cause(name: str, cause: type, why: str) -> None:
    with pytest.raises(CustomPartError, match=qualify_name(why)) as error:
        fedheal.run(quick(method=qualify_name(name)), progress=False)
    assert "\n" not in str(error.value)
    assert type(error.value.__cause__) is cause


def test_an_interrupt_in_a_part_of_ones_own_is_still_one() -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    stage = stateless(interrupt)
    term = type("Interrupted", (Term,), {"__module__": "mine", "finish": interrupt})()
    assert "interrupt" in stage.name  # a user's own
    with pytest.raises(KeyboardInterrupt):
        stage.run(None, Nothing())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        term.finish(None, None)  # type: ignore[arg-type]


def test_weights_that_are_no_numbers_are_a_sentence() -> None:
    with pytest.raises(
        ValueError, match=r"your stage `mine.*:custom_weights` gave a list as weights: give a numpy array of floats"
    ):
        run_method("mine:custom_weights:how=words")


def test_a_description_makes_the_same_run_again(tmp_path: Path) -> None:
    fedheal.run(quick(method=qualify_name("mine:pull:mu=0.5+fedheal")), tmp_path / "one", progress=False)
    again = fedheal.Experiment.read(tmp_path / "one" / "experiment.toml")
    assert again.method_name == qualify_name("mine:pull:mu=0.5+fedheal")
    assert again.identity == quick(method=qualify_name("mine:pull+fedheal"), mu=0.5).identity


def compare_in_two_processes(call: Callable[..., Done], *names: str) -> Done:
    """Compare methods for one seed and one round by processes of their own."""
    fields = words("rounds=1")
    data = next(word for word in fields if word.startswith("data="))
    line = ["compare", *map(qualify_name, names), "--out", "runs", "--jobs", "2", "--seeds", "1"]
    return call(*line, "--data", data.removeprefix("data="), *(word for word in fields if word != data))


@pytest.mark.slow
def test_it_is_compared_from_the_command_line_by_processes_of_their_own(call) -> None:
    done = compare_in_two_processes(call, "fedavg", "mine:even", "mine:pull:mu=0.5")
    assert done.code == 0, done
    assert qualify_name("fedavg+mine:even") in done.out
    names = {folder.name for folder in Path("runs").iterdir() if folder.is_dir()}
    assert {"mine_of_tests_pull_mu=0.5-tiny_data_load-seed0", "fedavg+mine_of_tests_even-tiny_data_load-seed0"} <= names


@pytest.mark.slow
def test_one_that_exits_ends_a_comparison_with_a_sentence_and_code_2(call) -> None:
    done = compare_in_two_processes(call, "fedavg", "mine:leaving_stage")
    assert done.code == 2, done
    message = "fedheal: round 1: your stage `mine:leaving_stage` raised SystemExit (mine_of_tests.py, line "
    assert qualify_name(message) in done.err


def test_the_command_that_explains_methods_takes_it() -> None:
    done = CliRunner().invoke(app, ["methods", qualify_name("mine:whole")])
    assert done.exit_code == 0, done.output
    assert "times" in done.output
