"""fedheal: fair federated learning under domain skew, for PyTorch."""

from fedheal import aggregate
from fedheal.layout import Layout, Packed
from fedheal.types import Reply, Updates

__version__ = "0.1.0"

__all__ = ["Layout", "Packed", "Reply", "Updates", "__version__", "aggregate"]
