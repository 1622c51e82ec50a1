"""FedProto by hand."""

from __future__ import annotations

import pytest

from fedheal.local.fedproto import FedProto
from local.prototype_inputs import AXES, make_batch, make_context


def test_fedproto_by_hand() -> None:
    """(1, 2) of class 0 is 0 and 2 off (1, 0); (3, 4) is of class 2, unknown: 4 / (2 x 2) = 1, times lam."""
    b = make_batch([[1.0, 2.0], [3.0, 4.0]], [0, 2])
    added = FedProto(lam=0.5).prototype_loss(b, b.features, make_context(AXES))
    assert added.item() == pytest.approx(0.5)
    added.backward()
    # d/dz of lam (z - c)^2 / 4: 0.5 * 2 * 2 / 4 on the one entry that is off
    assert b.features.grad.tolist() == [[0.0, 0.5], [0.0, 0.0]]


def test_fedproto_has_no_term_without_prototypes_or_weight() -> None:
    b = make_batch([[1.0, 2.0]], [0])
    assert FedProto().prototype_loss(b, b.features, make_context({})) is None
    assert FedProto(lam=0.0).prototype_loss(b, b.features, make_context(AXES)) is None
