"""Equal weights. Shares of examples, FedAvg's weights, need no stage."""

from dataclasses import replace

import numpy as np

from fedheal.aggregate.stage import Stage, stateless


def uniform_weights() -> Stage:
    """Give every client the same weight: the control that fairness methods must beat."""
    return stateless(lambda draft: replace(draft, weights=np.ones(len(draft.rows))))
