"""Whether a model can be trained on a data set, asked before anything is written or trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedheal.layout import Layout


def check_fits(module: nn.Module, name: str, image: Tensor, classes: int, smallest: Mapping[str, int]) -> None:
    """One image through the model. `smallest` has the size of each client's smallest batch."""
    if any(is_lazy(p) for p in module.parameters()):
        raise ValueError(f"model '{name}' has layers whose sizes are not said (lazy ones): first values need them")
    try:
        Layout.of(module)
    except TypeError as error:
        raise ValueError(f"model '{name}' cannot be averaged: {error}") from error
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"model '{name}' has no parameter to train")
    was = module.training
    try:
        logits = _applied(module.eval(), name, image)
    finally:
        module.train(was)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        given = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(f"model '{name}' gives {given} for one image, not a tensor of shape (1, {classes})")
    if logits.shape[1] < classes:
        raise ValueError(f"model '{name}' tells {logits.shape[1]} classes apart, and the data have {classes}")
    single = [client for client, size in smallest.items() if size == 1]
    if single:
        try:
            _applied(copy.deepcopy(module).train(), name, image)  # a copy, since normalisation takes notice
        except ValueError as error:
            raise ValueError(
                f"{error}; the last batch of client '{single[0]}' is a single image: another batch_size would help"
            ) from error


def _applied(module: nn.Module, name: str, image: Tensor) -> object:
    try:
        with torch.no_grad():
            return module(image)
    except Exception as error:  # whatever somebody's model may raise
        shape, reason = tuple(image.shape[1:]), str(error).split("\n")[0]
        raise ValueError(f"model '{name}' does not fit images of shape {shape} ({reason})") from error
