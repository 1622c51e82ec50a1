"""The clients' optimiser, and its learning rate over the rounds of a run."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

BETA2, EPS = 0.999, 1e-8  # of Adam and AdamW: Kingma and Ba 2015
# Each takes the rounds since the warm-up, the rounds left after it, the factor of a decay, and the rounds between decays.
SCHEDULES: dict[str, Callable[[int, int, float, int], float]] = {
    "constant": lambda done, rounds, decay, every: 1.0,
    "cosine": lambda done, rounds, decay, every: (1 + math.cos(math.pi * done / rounds)) / 2,
    "step": lambda done, rounds, decay, every: decay ** (done // every),
    "exponential": lambda done, rounds, decay, every: decay**done,
}
DECAYS = {"step": 0.1, "exponential": 0.99}  # defaults of the factor


def compute_lr(
    lr: float,
    number: int,
    rounds: int,
    schedule: str = "constant",
    decay: float | None = None,
    every: int | None = None,
    warmup: int = 0,
) -> float:
    """Return the learning rate of a round, counted from 1; `lr` is that of the first round after the warm-up.

    >>> [round(compute_lr(1.0, r, 4, "cosine"), 2) for r in (1, 2, 3, 4)]
    [1.0, 0.85, 0.5, 0.15]
    >>> [compute_lr(1.0, r, 6, "step", decay=0.5, every=2, warmup=1) for r in range(1, 7)]
    [0.5, 1.0, 1.0, 0.5, 0.5, 0.25]
    """
    if number <= warmup:
        return lr * number / (warmup + 1)
    decay = DECAYS.get(schedule, 1.0) if decay is None else decay
    return lr * SCHEDULES[schedule](number - 1 - warmup, max(rounds - warmup, 1), decay, every or 1)


class LeanSGD:
    """`torch.optim.SGD`, bit for bit, without its bookkeeping: a step of a small network takes half as long as that."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        self.params, self.lr, self.momentum, self.weight_decay = list(params), lr, momentum, weight_decay
        self.velocities: dict[Tensor, Tensor] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take a step with the gradients of all parameters that have one."""
        params = [param for param in self.params if param.grad is not None]
        steps = [param.grad for param in params if param.grad is not None]
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, params, alpha=self.weight_decay))
        if self.momentum:
            for param, step in zip(params, steps, strict=True):
                if (velocity := self.velocities.get(param)) is None:
                    self.velocities[param] = step if self.weight_decay else step.clone()
                else:
                    velocity.mul_(self.momentum).add_(step)
            steps = [self.velocities[param] for param in params]
        torch._foreach_add_(params, steps, alpha=-self.lr)


def build_optimizer(
    optimizer: str, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float, fused: bool
) -> torch.optim.Optimizer | LeanSGD:
    """Return a fresh optimiser: `sgd`, or `adam` or `adamw` with `momentum` as their b1."""
    if optimizer == "sgd" and not fused:
        return LeanSGD(params, lr, momentum, weight_decay)
    if optimizer == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
    kind: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    return kind(params, lr=lr, betas=(momentum, BETA2), eps=EPS, weight_decay=weight_decay, fused=fused)
