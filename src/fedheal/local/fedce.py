"""FedCE: Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023.

A client reports how well the others do without it (`accuracy_without`). This is the accuracy of `(W - e w_prev) / (1 - e)` on
examples that it holds out of its own training data, averaged over its rounds. `w_prev` is the model that it sent last,
and `e` the weight that this model had. The client keeps the mean, as in the authors' code.

Deviation: W contains `e w_prev` only in the next round. Later the formula would subtract what is no longer there, running
variances would fall below zero, and the network would give NaN. So a client that was absent in the previous round, was alone
in it, or gets a loss that is not finite repeats its mean. It reports how many rounds that mean is of (`measured_rounds`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedheal.core.layout import Packed
from fedheal.local.term import Arrays, Context, ServerContext, Term


@dataclass(frozen=True)
class FedCE(Term):
    """The leave-one-out accuracy that FedCE's aggregation needs."""

    validates: ClassVar[bool] = True

    @property
    def needs_plain_server(self) -> str:
        return "fedce takes a client's model out of the average, which must be the global model itself"

    def broadcast(self, client: str, shared: Arrays) -> Arrays:
        return {name: shared[name] for name in (f"e.{client}",) if name in shared}

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        count, total = ctx.slot["accuracies"].tolist() if "accuracies" in ctx.slot else (0.0, 0.0)
        accuracy = self._evaluate_without_client(ctx)
        if accuracy is not None:
            count, total = count + 1, total + accuracy
        ctx.scratch["accuracies"] = [count, total]  # for `finish`, which follows
        return {"accuracy_without": total / count if count else 0.0, "measured_rounds": count}

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        device = local.params.device
        accuracies = torch.tensor(ctx.scratch["accuracies"], dtype=torch.float64, device=device)  # their number and sum
        last_round = torch.tensor(ctx.round, device=device)
        return {"params": local.params, "buffers": local.buffers, "accuracies": accuracies, "round": last_round}, {}

    def _evaluate_without_client(self, ctx: Context) -> float | None:
        """Return the accuracy of the received model without this client, or None if it cannot be computed."""
        weight = ctx.shared.get(f"e.{ctx.client}")
        was_present = "round" in ctx.slot and int(ctx.slot["round"]) == ctx.round - 1
        if weight is None or not was_present or not float(weight) < 1:
            return None
        e = float(weight)
        others = {f: (getattr(ctx.received, f) - e * ctx.slot[f]) / (1 - e) for f in ("params", "buffers")}
        loss, accuracy = ctx.validate(replace(ctx.received, **others))
        return accuracy if math.isfinite(loss) else None

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        weights = {f"e.{c}": weight.clone() for c, weight in zip(ctx.updates.clients, ctx.weights, strict=True)}
        return aggregated, dict(shared) | weights
