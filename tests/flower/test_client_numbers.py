"""Numbers in a client's answers: those of numpy and torch become Python's."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

import flower.local_grid  # noqa: F401  (a message needs the task that this module sets)
from fedheal.flower.client import reply, reply_evaluation

NUMBERS = [
    (np.int64(5), 5), (np.float32(0.5), 0.5), (torch.tensor(5), 5), (torch.tensor(0.5, requires_grad=True), 0.5),
    (torch.tensor([[0.5]], dtype=torch.bfloat16), 0.5), (np.array(5), 5), (Fraction(1, 2), 0.5), (5, 5), (0.5, 0.5),
]  # fmt: skip
LISTS = [
    (np.array([1, 2]), [1, 2]),
    (torch.tensor([0.5, 1.0]), [0.5, 1.0]),
    ([np.float64(0.5), 1], [0.5, 1.0]),
    ((torch.tensor(1), 2), [1, 2]),
    ([], []),
]


def make_request(kind: str) -> tuple[Message, Context]:
    return Message(RecordDict(), dst_node_id=1, message_type=kind), Context(1, 1, {"name": "a"}, RecordDict(), {})


def answer(num_examples: Any = 1, metrics: Any = ()) -> list[dict[str, Any]]:
    """Return the metrics of both kinds of replies."""
    trained = reply(*make_request("train"), {"w": torch.zeros(1)}, num_examples, dict(metrics))
    evaluated = reply_evaluation(*make_request("evaluate"), num_examples, dict(metrics))
    return [dict(message.content["metrics"]) for message in (trained, evaluated)]


@pytest.mark.parametrize(("value", "number"), NUMBERS)
def test_numbers_of_numpy_and_torch_are_sent_as_pythons(value, number):
    for sent in answer(num_examples=value, metrics={"loss": value}):
        assert sent == {"num-examples": number, "loss": number}
        assert [type(item) for item in sent.values()] == [type(number)] * 2


@pytest.mark.parametrize(("value", "numbers"), LISTS)
def test_lists_of_numbers_are_sent_as_pythons(value, numbers):
    for sent in answer(metrics={"recall": value}):
        assert sent["recall"] == numbers
        assert list(map(type, sent["recall"])) == list(map(type, numbers))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_examples": "5"}, "num_examples is a str: send a number"),
        ({"num_examples": torch.ones(2)}, "num_examples is a list: send a number"),
        ({"metrics": {"loss": "low"}}, "metrics['loss'] is a str: send a number or a list of numbers"),
        ({"metrics": {"loss": None}}, "metrics['loss'] is a NoneType: send a number or a list of numbers"),
        ({"metrics": {"loss": True}}, "metrics['loss'] is a bool: send a number or a list of numbers"),
        ({"metrics": {"loss": np.complex64(1j)}}, "metrics['loss'] is a complex: send a number or a list of numbers"),
        ({"metrics": {"loss": np.ones((2, 2))}}, "an item of metrics['loss'] is a list: send numbers"),
    ],
)
def test_a_metric_that_is_no_number_is_named(wrong, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        answer(**wrong)
