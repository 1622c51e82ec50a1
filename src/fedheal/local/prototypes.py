"""Methods that exchange class prototypes: FedProc, FedProto (with a shared model) and FPL.

A client's prototype of a class is the mean feature vector of its samples of that class, collected while it trains its last
epoch; the server averages the clients' prototypes per class over the clients that have the class: all alike, by how many
samples of it each has (`count`), or by the weights of the model's average (`p`). A class that nobody has in a round keeps
what it had.

FedProc (Mu et al., FGCS 2023): `alpha_t L_con + (1 - alpha_t) CE`, `alpha_t = 1 - t/(T-1)`, `L_con` the cross-entropy of the
cosine similarities to the global prototypes. Without prototypes (the first round) the loss would be 0: `first_round_ce`
trains on CE.
FedProto (Tan et al., AAAI 2022): `CE + lam * MSE(z, c_y)`, the mean over batch and feature dimensions; here the model is
aggregated too and its classifier is used.
FPL (Huang et al., CVPR 2023): per class the prototypes are clustered (FINCH); `CE + CPCL + UPCR`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.local.finch import finch
from fedheal.local.term import Arrays, Batch, Context, ServerContext, Term

PROTO_WEIGHTS = Parameter(
    "proto_weights",
    description="what averages prototypes: uniform, count (samples of the class) or p (the average's weights)",
    source="released code of Tan et al. 2022, whose text says count; MarsFL",
    default="uniform",
    choices=("uniform", "count", "p"),
)


@dataclass(frozen=True)
class Prototypes(Term):
    """Collecting and averaging prototypes; what they are used for is a subclass's `pulled`."""

    proto_weights: str = PROTO_WEIGHTS.default
    features: bool = True
    sends: tuple[str, ...] = ("prototypes", "known", "clusters", "owner")

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if len(ctx.shared.get("known", ())) == ctx.classes:  # of other classes they are no help, nor a reason to fail
            ctx.scratch.update({name: ctx.shared[name] for name in self.sends if name in ctx.shared})
        return start

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        assert batch.features is not None
        if batch.last_epoch:
            _collect(batch.features.detach(), batch.y, ctx)
        return self.pulled(batch, batch.features, ctx)

    def pulled(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        return None

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        total, count = ctx.scratch["total"], ctx.scratch["count"]
        return ctx.slot, {"prototypes": total / count.clamp(min=1)[:, None], "count": count}

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        if not messages:
            return aggregated, shared
        kept = _usable(messages, shared, ctx.layout)
        return aggregated, _averaged(messages, kept, self.proto_weights, ctx)


FEDPROC_TEMPERATURE = Parameter(
    "temperature", description="of the contrast", source="MarsFL, which has none", default=1.0, gt=0
)
FIRST_ROUND_CE = Parameter(
    "first_round_ce",
    description="train on cross-entropy until there are prototypes",
    source="ours: published, nothing is learnt then",
    default=True,
)


@declare_parameters(FEDPROC_TEMPERATURE, FIRST_ROUND_CE, PROTO_WEIGHTS)
@dataclass(frozen=True)
class FedProc(Prototypes):
    """Mu et al. 2023: prototypical contrast that hands over to cross-entropy."""

    temperature: float = FEDPROC_TEMPERATURE.default
    first_round_ce: bool = FIRST_ROUND_CE.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        alpha = 1 - (ctx.round - 1) / max(ctx.rounds - 1, 1)
        ctx.scratch["alpha"] = torch.full((), alpha, device=ctx.received.params.device)
        return super().prepare(ctx, start)

    def pulled(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        alpha, known = ctx.scratch["alpha"], _known(ctx)
        if known is None:
            return None if self.first_round_ce else -alpha * batch.ce
        here = known[batch.y]
        similar = (_cosines(z, ctx.scratch["prototypes"]) / self.temperature).masked_fill(~known, -torch.inf)
        similar = similar.where(here[:, None], 0.0)  # a sample without a prototype of its class has no part in it
        contrast = functional.cross_entropy(similar, batch.y, reduction="none").where(here, 0.0).sum() / len(z)
        pull: Tensor = alpha * (contrast - batch.ce)
        return pull


FEDPROTO_LAM = Parameter(
    "lam",
    description="pull towards the prototypes",
    source="Tan et al. 2022 for MNIST and FEMNIST; CIFAR-10: 0.1; MarsFL: 2",
    default=1.0,
    ge=0,
)


@declare_parameters(FEDPROTO_LAM, PROTO_WEIGHTS)
@dataclass(frozen=True)
class FedProto(Prototypes):
    """Tan et al. 2022, with a shared model: features pulled to the global class prototypes."""

    lam: float = FEDPROTO_LAM.default

    def pulled(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        known = _known(ctx)
        if known is None or self.lam == 0:
            return None
        gap: Tensor = (z - ctx.scratch["prototypes"][batch.y]) * known[batch.y][:, None]
        return self.lam * (gap**2).mean()


FPL_TEMPERATURE = Parameter(
    "temperature",
    description="of the contrast",
    source="Huang et al. 2023, released code; MarsFL: 0.2",
    default=0.02,
    gt=0,
)


@declare_parameters(FPL_TEMPERATURE)
@dataclass(frozen=True)
class FPL(Prototypes):
    """Huang et al. 2023: cluster prototypes by FINCH for contrast, their mean for consistency."""

    temperature: float = FPL_TEMPERATURE.default

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        super().prepare(ctx, start)
        if (
            "clusters" in ctx.scratch
        ):  # filled up to a power of two: steps of few shapes can be captured once for many rounds
            owner, clusters = ctx.scratch["owner"], ctx.scratch["clusters"]
            more = (1 << (len(owner) - 1).bit_length()) - len(owner)
            ctx.scratch["owner"] = functional.pad(owner, (0, more), value=-1)
            ctx.scratch["clusters"] = functional.pad(clusters, (0, 0, 0, more))
        return start

    def pulled(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        known = _known(ctx)
        if known is None:
            return None
        owner = ctx.scratch["owner"]
        similar = (_cosines(z, ctx.scratch["clusters"]) / self.temperature).masked_fill(owner < 0, -torch.inf)
        here = known[batch.y]
        mine = (owner[None, :] == batch.y[:, None]) | ~here[:, None]  # without clusters: a contrast of 0
        own = similar.masked_fill(~mine, -torch.inf).logsumexp(dim=1)
        contrast = (similar.logsumexp(dim=1) - own).sum() / len(z)
        gap: Tensor = (z - ctx.scratch["prototypes"][batch.y]) * here[:, None]
        return contrast + (gap**2).mean()

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        if not messages:
            return aggregated, shared
        sets: dict[int, Tensor] = {}  # class -> its clusters' means
        kept = _usable(messages, shared, ctx.layout)
        if "owner" in kept:
            sets = {y: kept["clusters"][kept["owner"] == y] for y in set(kept["owner"].tolist())}
        for y in range(len(messages[0]["count"])):
            held = [message["prototypes"][y] for message in messages if message["count"][y] > 0]
            if held:
                sets[y] = _cluster_means(torch.stack(held))
        if not sets:
            return aggregated, shared
        unbiased = torch.zeros_like(messages[0]["prototypes"])
        known = torch.zeros(len(unbiased), dtype=torch.int64, device=unbiased.device)
        for y, means in sets.items():
            unbiased[y], known[y] = means.mean(dim=0), 1
        ordered = sorted(sets)
        owner = [y for y in ordered for _ in sets[y]]
        made = {"clusters": torch.cat([sets[y] for y in ordered]), "owner": torch.tensor(owner, device=unbiased.device)}
        return aggregated, {"prototypes": unbiased, "known": known, **made}


def _collect(z: Tensor, y: Tensor, ctx: Context) -> None:
    if "total" not in ctx.scratch:
        ctx.scratch["total"] = torch.zeros(ctx.classes, z.shape[1], device=z.device)
        ctx.scratch["count"] = torch.zeros(ctx.classes, device=z.device)
    ctx.scratch["total"].index_add_(0, y, z.to(torch.float32))
    ctx.scratch["count"].index_add_(0, y, torch.ones_like(y, dtype=torch.float32))


def _usable(messages: Sequence[Arrays], shared: Arrays, layout: Layout) -> Arrays:
    """Refuse messages that cannot be this model's prototypes; of what is shared, what they can be joined with.

    The first client to send would else set the shape for all others, though it is the one with another model or other classes.
    Where `head` is one linear layer the layout says how long features are, and how many classes there can be.
    """
    head = {e.name.removeprefix("head."): e.shape for e in layout.entries if e.name.startswith("head.")}
    weight = head.get("weight", ())
    linear = len(weight) == 2 and head.keys() == {"weight", "bias"} and head["bias"] == weight[:1]
    for message in messages:
        prototypes, count = message["prototypes"], message["count"]
        shape = tuple(prototypes.shape)
        if len(shape) != 2 or count.shape != shape[:1] or not prototypes.is_floating_point():
            raise ValueError(
                f"prototypes are {prototypes.dtype} of shape {shape} for {tuple(count.shape)} counts, not floats of shape "
                "(classes, features) for as many counts as classes"
            )
        if linear and (shape[0] > weight[0] or shape[1] != weight[1]):
            raise ValueError(
                f"prototypes have shape {shape}; the model's head takes {weight[1]} features and tells {weight[0]} classes "
                "apart"
            )
    same = "prototypes" in shared and all(shared["prototypes"].shape == m["prototypes"].shape for m in messages)
    return shared if same else {}


def _averaged(messages: Sequence[Arrays], shared: Arrays, by: str, ctx: ServerContext) -> Arrays:
    """Per class the mean over the clients that have it; a class nobody has now keeps its old prototype."""
    prototypes = torch.stack([message["prototypes"] for message in messages])
    count = torch.stack([message["count"] for message in messages])  # [k, classes]
    shares = (count > 0).to(prototypes)
    if by == "count":
        shares = count.to(prototypes)
    elif by == "p":
        shares = shares * ctx.weights.to(prototypes)[:, None]
    total = shares.sum(dim=0)
    known = total > 0
    mean = (shares[:, :, None] * prototypes).sum(dim=0) / total.where(known, 1.0)[:, None]
    if "prototypes" in shared:
        mean = torch.where(known[:, None], mean, shared["prototypes"].to(mean))
        known = known | shared["known"].to(known)
    return {"prototypes": mean, "known": known.to(torch.int64)}


def _known(ctx: Context) -> Tensor | None:
    return ctx.scratch["known"].bool() if "known" in ctx.scratch else None


def _cosines(z: Tensor, prototypes: Tensor) -> Tensor:
    return functional.normalize(z, dim=1) @ functional.normalize(prototypes, dim=1).T


def _cluster_means(vectors: Tensor) -> Tensor:
    labels = torch.from_numpy(finch(vectors.detach().cpu().numpy())).to(vectors.device)
    return torch.stack([vectors[labels == label].mean(dim=0) for label in range(int(labels.max()) + 1)])
