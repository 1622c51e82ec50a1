"""Fair aggregation in a Flower federation: a drop-in strategy, and a helper for clients.

Give the strategy in place of Flower's own::

    from fedheal.flower import FedHEAL
    strategy = FedHEAL(tau=0.3, beta=0.4, folder="runs/hospitals")  # in place of FedAvg(...)

The server side is `strategy.py`, the client side `client.py`; `messages.py` has what travels between them.
"""

from fedheal.core.errors import explain_install

try:
    import flwr.serverapp  # noqa: F401
except ImportError as error:
    message = f"fedheal.flower needs Flower ({error}): {explain_install('flower')}"
    raise ImportError(message, name=error.name) from None

from fedheal.aggregate.server_optimizer import Server
from fedheal.federation.node_sampling import NotEnoughNodes, TooManyEmptyRounds
from fedheal.flower.presets import AFL, QFFL, FedFV, FedHEAL, Uniform
from fedheal.flower.strategy import FairStrategy

__all__ = [
    "AFL",
    "QFFL",
    "FairStrategy",
    "FedFV",
    "FedHEAL",
    "NotEnoughNodes",
    "Server",
    "TooManyEmptyRounds",
    "Uniform",
]
