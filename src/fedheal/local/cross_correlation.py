"""What FCCL and FCCL+ share: learning from the other clients' outputs on public images, which have no labels.

At the end of its round a client sends its logits on the public images, and the server averages them. At the start of
its next round, a client takes steps on the public images. They make its logits correlate with this mean, class by
class. With C the correlation matrix of both over a batch, the loss is `sum_i (C_ii - 1)^2 + off_diagonal sum_{i != j}
(C_ij + 1)^2`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter
from fedheal.local.term import Arrays, Context, ServerContext, Term

OFF_DIAGONAL = Parameter(
    "off_diagonal", 0.0051, "weight of the correlation between different classes", "Huang, Ye and Du 2022", ge=0
)
PUBLIC_IMAGES = Parameter(
    "public_images", 512, "how many public images are used, at most", "ours; Huang, Ye and Du 2022: 5000", ge=2
)
PUBLIC_BATCH = Parameter(
    "public_batch", 256, "public images in a batch, at most", "released code: 128 to 512, by the data set", ge=2
)
PUBLIC_EPOCHS = Parameter(
    "public_epochs", 1, "how often a client goes over the public images in a round", "released code", ge=1
)
PUBLIC_LR = Parameter(
    "public_lr", 0.01, "learning rate on public images; 0: clients send and use no outputs", "ours", ge=0
)
PUBLIC_WEIGHTS = Parameter(
    "public_weights",
    "uniform",
    "what averages the clients' outputs: uniform or p (the average's weights)",
    "Huang, Ye and Du 2022",
    choices=("uniform", "p"),
)
PUBLIC_PARAMETERS = (OFF_DIAGONAL, PUBLIC_IMAGES, PUBLIC_BATCH, PUBLIC_EPOCHS, PUBLIC_LR, PUBLIC_WEIGHTS)
MAX_NORM = 1.0  # of a public step's gradient: with a temperature of 0.02 it can be large
MIN_DEVIATION = 1e-6  # of a class's logits over a batch


@dataclass(frozen=True)
class CrossCorrelation(Term):
    """Exchange outputs on public images. A subclass adds to `compute_outputs` and `public_loss`, and distils while training."""

    off_diagonal: float = OFF_DIAGONAL.default
    public_images: int = PUBLIC_IMAGES.default
    public_batch: int = PUBLIC_BATCH.default
    public_epochs: int = PUBLIC_EPOCHS.default
    public_lr: float = PUBLIC_LR.default
    public_weights: str = PUBLIC_WEIGHTS.default
    sends: ClassVar[tuple[str, ...]] = ("logits",)

    def compute_outputs(self, net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """Return what clients compare on a batch of public images: float32 `[images, ...]` by name."""
        return {"logits": net(x).to(torch.float32)}

    def public_loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a batch of public images; `targets` are the clients' mean outputs."""
        return correlate_logits(outputs["logits"], targets["logits"], self.off_diagonal)

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if not self.public_lr or not ctx.shared:
            return start
        ctx.layout.load_into(ctx.module, start)
        module = use_batch_statistics(ctx.module)
        params = [p for p in module.parameters() if p.requires_grad]
        for _ in range(self.public_epochs):
            for x, targets in self._pair_targets(ctx):
                loss = self.public_loss(self.compute_outputs(module, x), targets)
                _take_step(params, torch.autograd.grad(loss, params, allow_unused=True), self.public_lr)
        return ctx.layout.pack(module.state_dict())

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        if not self.public_lr:
            return ctx.slot, {}
        net = use_batch_statistics(ctx.net("public", local))
        with torch.no_grad():
            outputs = [self.compute_outputs(net, x) for x in self._get_batches(ctx)]
        return ctx.slot, {name: torch.cat([output[name] for output in outputs]) for name in self.sends}

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        if not self.public_lr or not messages:
            return aggregated, shared
        weights = ctx.weights if self.public_weights == "p" else torch.full_like(ctx.weights, 1 / len(messages))
        means = {}
        for name in self.sends:
            outputs = torch.stack([message[name] for message in messages])
            means[name] = torch.tensordot(weights.to(outputs), outputs, dims=1)
        return aggregated, means

    def check_message(self, message: Arrays, shared: Arrays, layout: Layout) -> None:
        """Raise an exception if a client's message cannot hold outputs on the public images."""
        if not self.public_lr:
            return
        shapes = {name: tuple(message[name].shape) for name in self.sends}
        is_float = all(message[name].dtype == torch.float32 for name in self.sends)
        if not is_float or any(len(shape) != 2 or not 2 <= shape[0] <= self.public_images for shape in shapes.values()):
            raise ValueError(
                f"outputs on public images must be float32 of shape (images, ...), with 2 to {self.public_images} images, "
                f"got shapes {shapes}"
            )
        bias = next((entry.shape for entry in layout.entries if entry.name == "head.bias"), shapes["logits"][1:])
        if shapes["logits"][1:] != bias:
            raise ValueError(f"logits have {shapes['logits'][1]} classes, but the model's head has {bias[0]}")

    def _get_batches(self, ctx: Context) -> list[Tensor]:
        """Return the public images in batches, which are the same for every client and round."""
        batches = list(ctx.public_batches(self.public_batch))
        if not batches:
            raise ValueError(
                f"{type(self).__name__} needs public images, the same for every client: give LocalTraining(public=...)"
            )
        return batches

    def _pair_targets(self, ctx: Context) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the batches of public images, each with the clients' mean outputs on it."""
        batches = self._get_batches(ctx)
        sizes = [len(x) for x in batches]
        for name in self.sends:
            if len(ctx.shared[name]) != sum(sizes):
                raise ValueError(
                    f"the server's mean outputs are of {len(ctx.shared[name])} public images, but client '{ctx.client}' has "
                    f"{sum(sizes)}: give every client the same"
                )
        parts = {name: torch.split(ctx.shared[name], sizes) for name in self.sends}
        for i, x in enumerate(batches):
            yield x, {name: part[i] for name, part in parts.items()}


def correlate_logits(logits: Tensor, target: Tensor, off_diagonal: float) -> Tensor:
    """Return the cross-correlation loss of logits `[images, classes]`.

    The deviation divides by `images - 1` and the product by `images`, as in the released code.

    >>> x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    >>> correlate_logits(x, x, 1.0)  # correlations of 1/2 and -1/2: twice (1/2 - 1)^2, and twice (-1/2 + 1)^2
    tensor(1.)
    """
    correlation = _standardise(logits).T @ _standardise(target) / len(logits)
    diagonal = correlation.diagonal()
    others = ((correlation + 1) ** 2).sum() - ((diagonal + 1) ** 2).sum()
    loss: Tensor = ((diagonal - 1) ** 2).sum() + off_diagonal * others
    return loss


def _standardise(logits: Tensor) -> Tensor:
    return (logits - logits.mean(dim=0)) / logits.std(dim=0).clamp(min=MIN_DEVIATION)


def use_batch_statistics(module: nn.Module) -> nn.Module:
    """Set batch normalisation to training mode, as the released code does, and every other layer to evaluation mode.

    So dropout draws nothing, and a client's outputs depend on its model alone.
    """
    module.eval()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
    return module


@torch.no_grad()
def _take_step(params: Sequence[Tensor], gradients: Sequence[Tensor | None], lr: float) -> None:
    """Take a step of gradient descent, with the gradient's norm clipped."""
    pairs = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    if pairs:
        moved, steps = ([pair[i] for pair in pairs] for i in (0, 1))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(steps)))
        torch._foreach_sub_(moved, torch._foreach_mul(steps, lr * (MAX_NORM / (norm + 1e-6)).clamp(max=1)))
