"""fedheal: fair federated learning under domain skew, for PyTorch."""

from fedheal import aggregate, methods
from fedheal.core import deprecated_paths
from fedheal.core.layout import Layout, Packed
from fedheal.core.updates import Reply, Updates
from fedheal.methods import Method
from fedheal.simulate.callbacks import Callback
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.runner import Result, load, run
from fedheal.version import __version__

deprecated_paths.install()

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
