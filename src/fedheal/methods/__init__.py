"""Methods by name: a name is local training and server stages, put together."""

from fedheal.methods.registry import (
    LOCAL,
    PARTS,
    WHOLE,
    Local,
    Method,
    explained,
    get,
    known,
    names,
    parameters,
)

__all__ = ["LOCAL", "PARTS", "WHOLE", "Local", "Method", "explained", "get", "known", "names", "parameters"]
