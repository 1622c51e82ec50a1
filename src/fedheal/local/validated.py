"""What FedGA and FedCE ask of a client: to judge models on examples that it holds out of its own training data.

FedGA (Zhang et al., CVPR 2023) needs the validation loss of the model received (`val_received`) and of the model sent
(`val_sent`). FedCE (Jiang et al., CVPR 2023) needs how well the others do without this client: the accuracy of
`(W - e w_prev) / (1 - e)`, with `w_prev` the model it sent last and `e` the weight that model had (`without_me`; 0 in its first
round).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedheal.layout import Packed
from fedheal.local.term import Arrays, Context, ServerContext, Term


@dataclass(frozen=True)
class Gaps(Term):
    """FedGA's numbers."""

    validates: bool = True

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        progress = (ctx.round - 1) / ctx.rounds
        received, sent = ctx.validate(ctx.received)[0], ctx.validate(local)[0]
        return {"val_received": received, "val_sent": sent, "progress": progress}


@dataclass(frozen=True)
class LeaveOneOut(Term):
    """FedCE's number."""

    validates: bool = True

    def told(self, client: str, shared: Arrays) -> Arrays:
        return {name: shared[name] for name in (f"e.{client}",) if name in shared}

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        told = ctx.shared.get(f"e.{ctx.client}")
        if "params" not in ctx.slot or told is None or not float(told) < 1:
            return {"without_me": 0.0}
        e = float(told)
        others = {f: (getattr(ctx.received, f) - e * ctx.slot[f]) / (1 - e) for f in ("params", "buffers")}
        return {"without_me": ctx.validate(replace(ctx.received, **others))[1]}

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        return {"params": local.params, "buffers": local.buffers}, {}

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        # Each client is told the weight its model had.
        told = {f"e.{client}": weight.clone() for client, weight in zip(ctx.updates.clients, ctx.weights, strict=True)}
        return aggregated, dict(shared) | told
