"""fedheal: fair federated learning under domain skew, for PyTorch."""

from fedheal import aggregate, methods
from fedheal.execute import Result, load, run
from fedheal.experiment import Experiment
from fedheal.layout import Layout, Packed
from fedheal.methods import Method
from fedheal.run import Callback
from fedheal.types import Reply, Updates
from fedheal.version import __version__

__all__ = [
    "Callback",
    "Experiment",
    "Layout",
    "Method",
    "Packed",
    "Reply",
    "Result",
    "Updates",
    "__version__",
    "aggregate",
    "load",
    "methods",
    "run",
]
