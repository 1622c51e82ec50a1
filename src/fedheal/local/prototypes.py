"""What FedProc, FedProto and FPL share: collecting and averaging class prototypes.

A client's prototype of a class is the mean feature vector of its samples of that class in its last epoch. The server
averages prototypes per class over the clients that have the class. The clients count alike (`uniform`), by how many
samples each has (`count`), or by the weights of the model's average (`p`). A class that no client has in a round keeps
its previous prototype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter
from fedheal.local.term import Arrays, Batch, Context, ServerContext, Term

PROTO_WEIGHTS = Parameter(
    "proto_weights",
    "uniform",
    "what averages prototypes: uniform, count (samples of the class) or p (the average's weights)",
    "released code of Tan et al. 2022, whose text says count; MarsFL",
    choices=("uniform", "count", "p"),
)


@dataclass(frozen=True)
class Prototypes(Term):
    """Collect and average prototypes. A subclass uses them in `prototype_loss`."""

    proto_weights: str = PROTO_WEIGHTS.default
    features: ClassVar[bool] = True
    sends: ClassVar[tuple[str, ...]] = ("prototypes", "known", "clusters", "owner")

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if len(ctx.shared.get("known", ())) == ctx.classes:  # prototypes of other classes are ignored
            ctx.scratch.update({name: ctx.shared[name] for name in self.sends if name in ctx.shared})
        return start

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        assert batch.features is not None
        if batch.last_epoch:
            z = batch.features.detach()
            if "total" not in ctx.scratch:
                ctx.scratch["total"] = torch.zeros(ctx.classes, z.shape[1], device=z.device)
                ctx.scratch["count"] = torch.zeros(ctx.classes, device=z.device)
            ctx.scratch["total"].index_add_(0, batch.y, z.to(torch.float32))
            ctx.scratch["count"].index_add_(0, batch.y, torch.ones_like(batch.y, dtype=torch.float32))
        return self.prototype_loss(batch, batch.features, ctx)

    def prototype_loss(self, batch: Batch, z: Tensor, ctx: Context) -> Tensor | None:
        """Return what is added to the cross-entropy of a batch with features `z`."""
        return None

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        total, count = ctx.scratch["total"], ctx.scratch["count"]
        return ctx.slot, {"prototypes": total / count.clamp(min=1)[:, None], "count": count}

    def check_message(self, message: Arrays, shared: Arrays, layout: Layout) -> None:
        """Raise ValueError unless the message holds prototypes and counts that fit the model.

        If `head` is one linear layer, the layout gives the number of features and the largest number of classes.
        """
        if missing := {"prototypes", "count"} - message.keys():
            raise ValueError(f"'{min(missing)}' is missing")
        prototypes, count = message["prototypes"], message["count"]
        shape = tuple(prototypes.shape)
        is_float = prototypes.dtype == count.dtype == torch.float32
        if not is_float or len(shape) != 2 or count.shape != shape[:1] or not (count >= 0).all():
            raise ValueError(
                "prototypes must be float32 of shape (classes, features) with a float32 count from 0 for each class, got "
                f"{prototypes.dtype} of shape {shape} with {count.dtype} counts of shape {tuple(count.shape)}"
            )
        head = {e.name.removeprefix("head."): e.shape for e in layout.entries if e.name.startswith("head.")}
        weight = head.get("weight", ())
        is_linear = len(weight) == 2 and head.keys() == {"weight", "bias"} and head["bias"] == weight[:1]
        if is_linear and (shape[0] > weight[0] or shape[1] != weight[1]):
            raise ValueError(
                f"prototypes have shape {shape}, but the model's head has {weight[1]} features and {weight[0]} classes"
            )

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        if not messages:
            return aggregated, shared
        previous = get_previous(messages, shared)
        prototypes = torch.stack([message["prototypes"] for message in messages])
        count = torch.stack([message["count"] for message in messages])  # [k, classes]
        shares = (count > 0).to(prototypes)
        if self.proto_weights == "count":
            shares = count.to(prototypes)
        elif self.proto_weights == "p":
            shares = shares * ctx.weights.to(prototypes)[:, None]
        total = shares.sum(dim=0)
        known = total > 0
        mean = (shares[:, :, None] * prototypes).sum(dim=0) / total.where(known, 1.0)[:, None]
        if previous:
            mean = torch.where(known[:, None], mean, previous["prototypes"].to(mean))
            known = known | previous["known"].to(known)
        return aggregated, {"prototypes": mean, "known": known.to(torch.int64)}


def get_known_classes(ctx: Context) -> Tensor | None:
    """Return which classes have a global prototype, or None if there are no global prototypes yet."""
    return ctx.scratch["known"].bool() if "known" in ctx.scratch else None


def compare_cosine(z: Tensor, vectors: Tensor) -> Tensor:
    """Return the cosine similarity of each row of `z` to each row of `vectors`."""
    return functional.normalize(z, dim=1) @ functional.normalize(vectors, dim=1).T


def get_previous(messages: Sequence[Arrays], shared: Arrays) -> Arrays:
    """Return the shared values if they have prototypes of the shape of all messages, else nothing."""
    is_same = "prototypes" in shared and all(shared["prototypes"].shape == m["prototypes"].shape for m in messages)
    return shared if is_same else {}
