"""Server-side aggregation as pure functions of arrays: FedHEAL and the methods it is compared with.

An aggregator is a chain of stages and a reducer. The stages decide how much each client counts (`weights`) and which
entries count (a mask). The reducer averages accordingly. State is passed in and out.
"""

from fedheal.aggregate.aggregator import Aggregated, Aggregator, AggregatorState
from fedheal.aggregate.client_side import Share, client_share, combine
from fedheal.aggregate.presets import afl, fedavg, fedfv, fedheal, fedpw, qffl, uniform
from fedheal.aggregate.stage import Stage, chain
from fedheal.aggregate.validate import BadUpdate
from fedheal.core.state import State

__all__ = [
    "Aggregated",
    "Aggregator",
    "AggregatorState",
    "BadUpdate",
    "Share",
    "Stage",
    "State",
    "afl",
    "chain",
    "client_share",
    "combine",
    "fedavg",
    "fedfv",
    "fedheal",
    "fedpw",
    "qffl",
    "uniform",
]
