"""Who counts how much, from what is known before looking at the updates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedheal.aggregate.stage import Stage, stateless


def by_examples() -> Stage:
    """FedAvg's weights: each client's share of this round's examples."""
    return stateless(lambda draft: replace(draft, weights=draft.num_examples))


def uniform() -> Stage:
    """The same weight for every client: the control that fairness methods must beat."""
    return stateless(lambda draft: replace(draft, weights=np.ones(len(draft.rows))))
