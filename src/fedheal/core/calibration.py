"""Whether a classifier's confidence is right: expected calibration error, Brier score and negative log-likelihood.

The expected calibration error (Guo et al. 2017) sorts examples into bins by confidence, the largest probability. It is the
mean over examples of their bin's gap between accuracy and mean confidence.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

BINS = 15  # Guo et al. 2017


def score_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return confidence, correctness, Brier score and negative log-likelihood of each example, float64 `[N, 4]`."""
    log_p = logits.double().log_softmax(dim=1)
    p, rows = log_p.exp(), torch.arange(len(labels), device=labels.device)
    brier = p.square().sum(dim=1) - 2 * p[rows, labels] + 1  # the sum over classes of (p - [is the label])^2
    is_correct = (logits.argmax(dim=1) == labels).double()
    return torch.stack([p.amax(dim=1), is_correct, brier, -log_p[rows, labels]], dim=1)


def summarise_scores(scores: Tensor) -> Mapping[str, float | None]:
    """Return `ece` in percent, `brier` (0 to 2) and `nll`, rounded to 6 digits; None for what is not finite.

    >>> sure_but_half_right = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 2.0, 30.0]])
    >>> summarise_scores(sure_but_half_right)
    {'ece': 50.0, 'brier': 1.0, 'nll': 15.0}
    """
    confidence, is_correct, brier, nll = scores.double().cpu().unbind(dim=1)
    if not confidence.isfinite().all():
        return {"ece": None, "brier": None, "nll": None}
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # bin b holds (b/15, (b+1)/15]
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, is_correct - confidence)
    numbers = {"ece": 100 * gaps.abs().sum() / len(scores), "brier": brier.mean(), "nll": nll.mean()}
    return {name: round(float(x), 6) if math.isfinite(x) else None for name, x in numbers.items()}
