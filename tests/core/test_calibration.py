"""Calibration, on probabilities small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedheal.core.calibration import score_logits, summarise_scores


def summarise(probabilities: list[list[float]], labels: list[int]) -> dict[str, float | None]:
    return dict(summarise_scores(score_logits(torch.tensor(probabilities).double().log(), torch.tensor(labels))))


def test_one_bin_by_hand() -> None:
    scores = summarise([[0.8, 0.2], [0.8, 0.2]], [0, 1])
    # Confidence 0.8 in both, accuracy 1/2. Brier: 0.2^2 + 0.2^2 = 0.08 and 0.8^2 + 0.8^2 = 1.28.
    assert scores["ece"] == pytest.approx(30)
    assert scores["brier"] == pytest.approx((0.08 + 1.28) / 2)
    assert scores["nll"] == pytest.approx(-(math.log(0.8) + math.log(0.2)) / 2, abs=1e-6)


def test_gaps_of_several_bins_add_up_by_their_examples() -> None:
    # 0.95 right, twice: gap 0.05. 0.6 wrong: gap 0.6. 0.5 and 0.49 are on both sides of 7.5/15, in one bin: 1/2 - 0.495.
    p = [[0.95, 0.05], [0.95, 0.05], [0.6, 0.4], [0.5, 0.25, 0.25], [0.49, 0.26, 0.25]]
    scores = summarise([[*row, *[1e-300] * (3 - len(row))] for row in p], [0, 0, 1, 0, 1])
    assert scores["ece"] == pytest.approx(100 * (2 * 0.05 + 0.6 + abs(1 - 0.5 - 0.49)) / 5, abs=1e-4)


def test_a_bin_has_its_upper_edge() -> None:
    # 0.6 = 9/15 right is in the bin (8/15, 9/15], and 0.61 wrong is in the next: |1 - 0.6| + |0 - 0.61|, not |1 - 1.21|.
    assert summarise([[0.59, 0.41], [0.61, 0.39]], [0, 1])["ece"] == pytest.approx(100 * (0.41 + 0.61) / 2)
    scores = torch.tensor([[0.6, 1.0, 0.0, 0.0], [0.61, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert summarise_scores(scores)["ece"] == pytest.approx(100 * (0.4 + 0.61) / 2)


def test_a_perfect_model_and_extreme_logits() -> None:
    perfect = summarise_scores(score_logits(torch.tensor([[1e4, 0.0], [0.0, 1e4]]), torch.tensor([0, 1])))
    assert perfect == {"ece": 0.0, "brier": 0.0, "nll": 0.0}
    wrong = summarise_scores(score_logits(torch.tensor([[1e4, 0.0]]), torch.tensor([1])))
    assert wrong == {"ece": 100.0, "brier": 2.0, "nll": 1e4}


def test_what_is_not_finite_is_none() -> None:
    """JSON has no NaN, and a run must not fail because of its report."""
    broken = summarise_scores(score_logits(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0])))
    assert broken == {"ece": None, "brier": None, "nll": None}
