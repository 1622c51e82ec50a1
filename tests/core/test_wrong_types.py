"""An argument of the wrong type is a sentence that says what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedheal
from fedheal import Layout, Updates, aggregate, methods

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
    "get": (lambda: methods.get(None), r"name is a NoneType: give a method's name"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_wrong_type_is_a_sentence_with_what_to_give(case: str) -> None:
    call, sentence = CASES[case]
    with pytest.raises(TypeError, match=sentence) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_the_right_types_still_work() -> None:
    out = FEDAVG.apply(MODEL, Updates(["a"], torch.ones(1, 3), [1]), STATE)
    torch.testing.assert_close(out.model.params, MODEL.params + 1)
