"""An argument of the wrong type is a sentence that says what to give instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedheal
from fedheal import Layout, Updates, aggregate, methods
from fedheal.aggregate import chain
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.weights.uniform import uniform_weights
from fedheal.local.term import Term
from fedheal.methods import Method

MODULE = nn.Linear(2, 1)
LAYOUT = Layout.of(MODULE)
MODEL = LAYOUT.pack(MODULE.state_dict())
FEDAVG = aggregate.fedavg()
STATE = FEDAVG.init(LAYOUT)

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "run": (lambda: fedheal.run("fedheal"), r"experiment is a str: give an Experiment"),
    "init": (lambda: FEDAVG.init(MODULE), r"layout is a Linear: .*Layout\.of\(module\)"),
    "apply": (lambda: FEDAVG.apply(MODEL, {"a": MODULE}, STATE), r"updates is a dict: give Updates\(.*from_modules"),
    "model": (lambda: FEDAVG.apply(MODULE, Updates([], [], []), STATE), r"model is a Linear: give a Packed"),
    "pack": (lambda: LAYOUT.pack(MODULE), r"state_dict is a Linear: give module\.state_dict\(\)"),
    "unpack": (lambda: LAYOUT.unpack(MODULE.state_dict()), r"packed is an OrderedDict: give what `pack`"),
    "of": (lambda: Layout.of(MODULE.state_dict()), r"module is an OrderedDict: give the module itself"),
    "from_modules": (lambda: Updates.from_modules(MODULE.state_dict(), {}), r"module is an OrderedDict"),
    "clients": (lambda: Updates.from_modules(MODULE, [MODULE]), r"clients is a list: give \{client: \(module, num_"),
    "stage": (lambda: aggregate.Aggregator("fedheal"), r"stage is a str: give a Stage, such as chain\(\.\.\.\)"),
    "stage in a chain": (
        lambda: chain(uniform_weights(), "fphl"),
        r"stages\[1\] is a str: give a Stage, such as what a func",
    ),
    "stage function in a chain": (
        lambda: chain(uniform_weights),
        r"stages\[0\] is a function: give the Stage that it returns, as in chain\(uniform_weights\(\)\)$",
    ),
    "lambda in a chain": (lambda: chain(lambda: 0), r"stages\[0\] is a function: give a Stage, such as what"),
    "number in a chain": (lambda: chain(3), r"stages\[0\] is an int: give a Stage"),
    "stages in a list": (
        lambda: chain([uniform_weights()]),
        r"stages\[0\] is a list: give the stages one by one, as in chain\(",
    ),
    "stage function": (lambda: aggregate.Aggregator(STAGES["uniform"]), r"stage is a function: .* function .* returns"),
    "reduce": (lambda: aggregate.Aggregator(FEDAVG.stage, 3), r"reduce = 3: give a function of \(draft, weights\)"),
    "local": (lambda: Method(Term(), FEDAVG), r"local is a Term: give a tuple of terms, such as \(term,\)"),
    "term class": (lambda: Method((Term,), FEDAVG), r"local\[0\] is the class Term: give an instance of it"),
    "term": (lambda: Method([Term(), 3], FEDAVG), r"local\[1\] is an int: give an instance of a Term"),
    "aggregator": (lambda: Method((), FEDAVG.stage), r"aggregator is a Stage: give an Aggregator, such as Agg"),
    "experiment": (lambda: fedheal.Experiment("fedheal"), r"takes its fields by name, such as Experiment\(method="),
    "methods": (lambda: fedheal.compare(3), r"methods is an int: give a list of names"),
    "one method": (lambda: fedheal.compare(["fedavg", FEDAVG]), r"methods\[1\] is an Aggregator: .*Method\("),
    "report": (lambda: fedheal.make_report(3), r"a folder is an int: give paths one by one"),
    "reports": (lambda: fedheal.make_report([]), r"a folder is a list: give paths one by one"),
    "parameter": (
        lambda: aggregate.fedheal(taw=1),
        r"fedheal has no parameter 'taw' \(did you mean 'tau'\?\); it has tau, ",
    ),
    "option": (lambda: aggregate.fedavg(tau=1), r"fedavg has no parameter 'tau'; it has on_bad_update, kernel"),
    "load": (lambda: type(STATE).load(3), r"path is an int: give the path of a file"),
    "save": (lambda: STATE.save(3), r"path is an int: give the path of a file"),
    "state_dict": (
        lambda: FEDAVG.apply(MODULE.state_dict(), Updates([], [], []), STATE),
        r"model is an OrderedDict: give a Packed, such as layout\.pack\(module\.state_dict\(\)\)",
    ),
    "deltas": (
        lambda: Updates(["a", "b"], [MODULE.state_dict()] * 2, [1, 1]),
        r"deltas: the row of client 'a' is an OrderedDict: give its flat parameters, .*Updates\.from_modules",
    ),
    "trained": (
        lambda: Updates.from_modules(MODULE, {"a": (MODULE.state_dict(), 3)}),
        r"client 'a' comes with an OrderedDict and an int: give \(module, num_examples\)",
    ),
    "get": (lambda: methods.get(None), r"name is a NoneType: give a method's name"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_wrong_type_is_a_sentence_with_what_to_give(case: str) -> None:
    call, sentence = CASES[case]
    with pytest.raises(TypeError, match=sentence) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"method": FEDAVG}, r"^method is an Aggregator: give a method's name, .*, or a Method, such as Method\(agg"),
        ({"method": FEDAVG.stage}, "^method is a Stage: give"),
        ({"method": 3}, "^method = 3: give"),
        (
            {"data": torch.zeros(3)},
            "^data is a Tensor: give a data set's name, a Domains, or a function that returns one$",
        ),
        ({"data": TensorDataset(torch.zeros(3))}, "^data is a TensorDataset: give"),
        (
            {"model": MODULE.state_dict()},
            r"^model is an OrderedDict: give a model's name, a torch\.nn\.Module, or a func",
        ),
    ],
)
def test_an_experiment_says_what_its_fields_may_hold(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fedheal.Experiment(**fields)


def test_wrong_values_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"^state is None: give what init\(layout\) returned"):
        FEDAVG.apply(MODEL, Updates([], [], []), None)
    with pytest.raises(ValueError, match=r"^client 'a': its num_examples = 'three' is not a number"):
        Updates.from_modules(MODULE, {"a": (copy.deepcopy(MODULE), "three")})
    with pytest.raises(ValueError, match=r"^give at least one run folder, such as make_report\('runs'\)"):
        fedheal.make_report()


def test_a_method_s_parts_have_defaults() -> None:
    assert Method(aggregator=FEDAVG).local == ()
    only_local = Method([Term()])
    assert isinstance(only_local.local, tuple)
    assert only_local.aggregator.stage.gives == FEDAVG.stage.gives


def test_the_right_types_still_work() -> None:
    out = FEDAVG.apply(MODEL, Updates(["a"], torch.ones(1, 3), [1]), STATE)
    torch.testing.assert_close(out.model.params, MODEL.params + 1)
