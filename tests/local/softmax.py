"""Softmax regression written in numpy, with the gradients of FedSAM, FedISM and FedDG, and the same steps by the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedheal.core.layout import Layout, Packed
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.serial import LocalTraining, Task, Training
from fedheal.local.term import Arrays, Context, Term

Array = NDArray[np.float64]


def compute_gradient(w: Array, x: Array, y: NDArray[np.int64]) -> Array:
    """Return the gradient of the mean cross-entropy of the logits `x w^T`."""
    logits = x @ w.T
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y)


def compute_sam_gradient(w: Array, x: Array, y: NDArray[np.int64], rho: float) -> Array:
    """Return SAM's gradient."""
    g = compute_gradient(w, x, y)
    return compute_gradient(w + rho * g / np.sqrt((g**2).sum()), x, y)


def compute_gsam_gradient(w: Array, x: Array, y: NDArray[np.int64], rho: float, alpha: float) -> Array:
    """Return GSAM's gradient."""
    g, h = compute_gradient(w, x, y), compute_sam_gradient(w, x, y, rho)
    return h - alpha * (g - (g * h).sum() / (h * h).sum() * h)


def compute_feddg_gradient(
    w: Array, x: Array, other: Array, y: NDArray[np.int64], meta_lr: float, outer: float
) -> Array:
    """Return FedDG's first-order gradient."""
    g = compute_gradient(w, x, y)
    return g + outer * compute_gradient(w - meta_lr * g, other, y)


def make_linear(w: Array) -> nn.Module:
    """Return a module with the logits `x w^T` of flattened images or rows, in float64."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(w.shape[1], w.shape[0], bias=False)).double()
    module[1].weight.data.copy_(torch.from_numpy(w))
    return module


def train(
    term: Term, module: nn.Module, x: Tensor, y: Tensor, steps: int = 1, shared: Arrays | None = None, **keys: Any
) -> tuple[Packed, Context]:
    """Take some steps of the engine on one batch with learning rate 0.1; return what the client sends, and its context."""
    layout = Layout.of(module)
    received = layout.pack(module.state_dict())
    training = Training(keys.get("lr", 0.1), len(y), momentum=keys.get("momentum", 0.0), weight_decay=0.0)
    examples = {"a": Split(x, y)}
    local = LocalTraining(module, layout, training, 0, torch.device("cpu"), examples, int(y.max()) + 1, 1, (term,))
    (ctx,) = serial.make_contexts(local, received, (shared or {},), Task("a", 1, (keys.get("slot", {}),)), None)  # type: ignore[arg-type]
    local.load_model(serial.prepare_start(local, [ctx], received), training=True)
    optimiser = serial.make_optimiser(local)
    for _ in range(steps):
        serial.train_step(local, optimiser, [ctx], x, y, last=False)
    return term.upload(ctx, layout.pack(module.state_dict())), ctx
