"""Methods by name: a name stands for local training, server stages and a server optimiser."""

from fedheal.aggregate.server_optimizer import SERVERS
from fedheal.methods.registry import LOCAL, PARTS, WHOLE, Local, Method, get, is_known, names, parse

__all__ = ["LOCAL", "PARTS", "SERVERS", "WHOLE", "Local", "Method", "get", "is_known", "names", "parse"]
