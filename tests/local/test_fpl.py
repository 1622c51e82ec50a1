"""FPL by hand: the losses, and the clusters that the server makes."""

from __future__ import annotations

import math

import pytest
import torch

from fedheal.local.fpl import FPL
from local.prototype_inputs import absorb_messages, make_batch, make_context, make_message

CLUSTERS = {
    "clusters": torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]),
    "owner": torch.tensor([0, 0, 1]),
    "prototypes": torch.tensor([[0.5, 0.5], [-1.0, 0.0], [0.0, 0.0]]),
    "known": torch.tensor([1, 1, 0]),
}


def test_fpl_by_hand() -> None:
    """z = (1, 0) of class 0, T = 1: cosines 1, 0 and -1, the first two of its class.

    CPCL = log(e + 1 + 1/e) - log(e + 1) = 0.094348; UPCR = (0.5^2 + 0.5^2) / 2 = 0.25.
    """
    b = make_batch([[1.0, 0.0]], [0])
    added = FPL(temperature=1.0).prototype_loss(b, b.features, make_context(CLUSTERS, FPL()))
    contrast = math.log(math.e + 1 + 1 / math.e) - math.log(math.e + 1)
    assert added.item() == pytest.approx(contrast + 0.25, rel=1e-6)


def test_fpls_temperature_and_unknown_classes() -> None:
    """T = 0.5 doubles the cosines; the second sample's class is unknown and adds 0 to both means over two."""
    b = make_batch([[1.0, 0.0], [4.0, 4.0]], [0, 2])
    added = FPL(temperature=0.5).prototype_loss(b, b.features, make_context(CLUSTERS))
    contrast = math.log(math.exp(2) + 1 + math.exp(-2)) - math.log(math.exp(2) + 1)
    assert added.item() == pytest.approx(contrast / 2 + 0.25 / 2, rel=1e-6)
    added.backward()
    assert b.features.grad.isfinite().all()
    assert b.features.grad[1].tolist() == [0.0, 0.0]


def test_fpl_with_only_unknown_classes_adds_nothing() -> None:
    b = make_batch([[4.0, 4.0]], [2])
    added = FPL().prototype_loss(b, b.features, make_context(CLUSTERS))
    added.backward()
    assert added.item() == 0.0
    assert b.features.grad.tolist() == [[0.0, 0.0]]


def test_fpls_server_by_hand() -> None:
    """Class 0: three clients near (1, 0), two near (0, 1): two clusters with means (1, 0.1) and (0.1, 1), and the mean of
    these is (0.55, 0.55), not the mean of the five clients. Class 1: one client. Class 2: nobody.
    """
    none = ([0.0, 0.0], 0.0)
    messages = [
        make_message(([1.0, 0.0], 5), none, none),
        make_message(([1.0, 0.1], 1), none, none),
        make_message(([1.0, 0.2], 1), ([3.0, 4.0], 2), none),
        make_message(([0.0, 1.0], 9), none, none),
        make_message(([0.2, 1.0], 9), none, none),
    ]
    shared = absorb_messages(FPL(), messages, {}, [0.9, 0.025, 0.025, 0.025, 0.025])
    assert shared["owner"].tolist() == [0, 0, 1]
    assert shared["clusters"].flatten().tolist() == pytest.approx([1.0, 0.1, 0.1, 1.0, 3.0, 4.0], rel=1e-6)
    assert shared["prototypes"].flatten().tolist() == pytest.approx([0.55, 0.55, 3.0, 4.0, 0.0, 0.0], rel=1e-6)
    assert shared["known"].tolist() == [1, 1, 0]


def test_fpl_keeps_the_clusters_of_a_class_that_nobody_has_this_round() -> None:
    """Class 0 had two clusters and class 1 one; now one client comes, with classes 1 and 2."""
    none = ([0.0, 0.0], 0.0)
    message = make_message(none, ([5.0, 5.0], 3), ([7.0, 0.0], 1))
    shared = absorb_messages(FPL(), [message], CLUSTERS, [1.0])
    assert shared["owner"].tolist() == [0, 0, 1, 2]
    assert shared["clusters"].tolist() == [[1.0, 0.0], [0.0, 1.0], [5.0, 5.0], [7.0, 0.0]]
    assert shared["prototypes"].tolist() == [[0.5, 0.5], [5.0, 5.0], [7.0, 0.0]]
    assert shared["known"].tolist() == [1, 1, 1]
    assert CLUSTERS["owner"].tolist() == [0, 0, 1]
    nothing = absorb_messages(FPL(), [make_message(none, none, none)], CLUSTERS, [1.0])
    assert all(torch.equal(nothing[name], CLUSTERS[name]) for name in CLUSTERS)
