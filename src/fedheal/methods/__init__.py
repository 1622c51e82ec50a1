"""Methods by name: a name stands for local training and server stages."""

from fedheal.methods.registry import LOCAL, PARTS, WHOLE, Local, Method, get, is_known, names, parse

__all__ = ["LOCAL", "PARTS", "WHOLE", "Local", "Method", "get", "is_known", "names", "parse"]
