"""What FedGA and FedCE ask of a client: to judge models on examples that it holds out of its own training data.

FedGA (Zhang et al., CVPR 2023) needs the validation loss of the model received (`val_received`) and of the model sent
(`val_sent`). FedCE (Jiang et al., CVPR 2023) needs how well the others do without this client (`without_me`): the accuracy of
`(W - e w_prev) / (1 - e)`, with `w_prev` the model it sent last and `e` the weight that model had, averaged over its rounds.
The client keeps that mean, as in the authors' code.

Deviation: W holds `e w_prev` only in the round after. Further on the formula takes away what is no longer there, running
variances fall below zero, and the network gives NaN; so a client that was away, was alone, or finds a loss that is not finite
judges nothing in that round and repeats its mean. It says how many rounds that mean is of (`judged`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedheal.core.layout import Packed
from fedheal.local.term import Arrays, Context, ServerContext, Term


@dataclass(frozen=True)
class Gaps(Term):
    """FedGA's numbers."""

    validates: bool = True

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        progress = max(ctx.round - 2, 0) / ctx.rounds  # of the round before, whose gap it is: the first step is s0
        received, sent = ctx.validate(ctx.received)[0], ctx.validate(local)[0]
        return {"val_received": received, "val_sent": sent, "progress": progress}


@dataclass(frozen=True)
class LeaveOneOut(Term):
    """FedCE's numbers."""

    validates: bool = True

    @property
    def needs_plain_server(self) -> str:
        return "fedce takes a client's model out of the average, which must be the global model itself"

    def broadcast(self, client: str, shared: Arrays) -> Arrays:
        return {name: shared[name] for name in (f"e.{client}",) if name in shared}

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        number, total = ctx.slot["judged"].tolist() if "judged" in ctx.slot else (0.0, 0.0)
        accuracy = self._without_me(ctx)
        if accuracy is not None:
            number, total = number + 1, total + accuracy
        ctx.scratch["judged"] = [number, total]  # for `finish`, which follows
        return {"without_me": total / number if number else 0.0, "judged": number}

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        device = local.params.device
        judged = torch.tensor(ctx.scratch["judged"], dtype=torch.float64, device=device)  # how often, and the sum
        number = torch.tensor(ctx.round, device=device)
        return {"params": local.params, "buffers": local.buffers, "judged": judged, "round": number}, {}

    def _without_me(self, ctx: Context) -> float | None:
        """The accuracy of the model without this client, where it can be told from the model received."""
        told = ctx.shared.get(f"e.{ctx.client}")
        if told is None or "round" not in ctx.slot or int(ctx.slot["round"]) != ctx.round - 1 or not float(told) < 1:
            return None
        e = float(told)
        others = {f: (getattr(ctx.received, f) - e * ctx.slot[f]) / (1 - e) for f in ("params", "buffers")}
        loss, accuracy = ctx.validate(replace(ctx.received, **others))
        return accuracy if math.isfinite(loss) else None

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        # Each client is told the weight its model had.
        told = {f"e.{client}": weight.clone() for client, weight in zip(ctx.updates.clients, ctx.weights, strict=True)}
        return aggregated, dict(shared) | told
