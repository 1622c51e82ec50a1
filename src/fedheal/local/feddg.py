"""FedDG (ELCFS): clients train on images that have the low frequencies' amplitudes of other clients, in episodes.

Liu et al., "FedDG: Federated Domain Generalization on Medical Image Segmentation via Episodic Learning in Continuous Frequency
Space", CVPR 2021.

A bank holds amplitudes of the low frequencies of some images of every client. In each step a client makes a second
version of its batch. The phases stay. The low amplitudes are mixed with those of a random spectrum of another client:
`(1 - l) A + l A'`, with l uniform in [0, 1]. An inner step on the batch, `w' = w - meta_lr grad CE(w)`, is followed by
the cross-entropy of w' on the second version, and the loss is the sum of both. As in the released code the inner
gradient is a constant, which makes this first-order MAML.

For classification, both losses are cross-entropies. The boundary term is left out, since it contrasts pixels inside and
outside of a contour. Other deviations:

- The bank fills as clients take part; while it is empty there is no second version. Each client sends the same
  `spectra` spectra with every reply, so that all messages have one shape. In the released code it shares an eighth of
  its images. Everyone gets the whole bank, and leaves its own spectra out.
- `window` is 0.1: 7 x 7 frequencies of a 32 x 32 image. The paper's 0.01 gives 7 x 7 of its 384 x 384 images, and the mean
  alone here. The released loader exchanges only the mean, in full; the released demo and the paper interpolate, as here.
- Running statistics follow the batch as it is, not the second version. The inner gradient is not clamped (released: +-100).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.pixels import get_pixel_scale
from fedheal.local.nearby_loss import compute_loss_at, get_trained
from fedheal.local.term import Arrays, Batch, Context, ServerContext, Term

PREFIX = "amplitudes."  # of the shared value that holds a client's spectra
FEDDG_WINDOW = Parameter(
    "window",
    0.1,
    "half width of the low frequencies, as a share of the image",
    "ours: see the methods page",
    ge=0,
    lt=0.5,
)
FEDDG_SPECTRA = Parameter(
    "spectra", 8, "images of which a client sends the spectrum", "ours; original: of 1/8 of the images", ge=1
)
FEDDG_META_LR = Parameter("meta_lr", 0.001, "length of the inner step", "Liu et al. 2021", ge=0)
FEDDG_OUTER = Parameter("outer", 1.0, "weight of the loss after the inner step", "Liu et al. 2021", ge=0)


@declare_parameters(FEDDG_WINDOW, FEDDG_SPECTRA, FEDDG_META_LR, FEDDG_OUTER)
@dataclass(frozen=True)
class FedDG(Term):
    """Liu et al. 2021, for classification: episodes on images in the amplitudes of other clients. `outer=0` is FedAvg."""

    window: float = FEDDG_WINDOW.default
    spectra: int = FEDDG_SPECTRA.default
    meta_lr: float = FEDDG_META_LR.default
    outer: float = FEDDG_OUTER.default
    sends: ClassVar[tuple[str, ...]] = ("bank",)

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        if not self.outer:
            return start
        ctx.scratch["collects"] = "amplitudes" not in ctx.slot
        if "bank" in ctx.shared:
            bank, own = ctx.shared["bank"], ctx.slot.get("amplitudes", ctx.shared["bank"][:0])
            if own.shape[1:] != bank.shape[1:]:
                return start  # the bank is of images of another size
            is_own = (bank[:, None] == own).flatten(2).all(dim=2).any(dim=1)
            if not is_own.all():
                ctx.scratch["bank"] = bank[~is_own]
        return start

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        if ctx.scratch.get("collects"):
            self._collect(batch.x, ctx)
        if "bank" not in ctx.scratch or not match_window(ctx.scratch["bank"], batch.x, self.window):
            return None
        params = get_trained(ctx)
        gradients = torch.autograd.grad(batch.ce, list(params.values()), retain_graph=True, materialize_grads=True)
        inner = {name: w - self.meta_lr * g for (name, w), g in zip(params.items(), gradients, strict=True)}
        return self.outer * compute_loss_at(ctx, inner, self._mix(batch.x, ctx.scratch["bank"]), batch.y)

    def _collect(self, x: Tensor, ctx: Context) -> None:
        """Keep the spectra of the first images of a batch; those of the last batch stay."""
        amplitudes = take_low_frequencies(to_spectrum(x[: self.spectra].detach()), self.window).abs()
        if "amplitudes" not in ctx.scratch:
            ctx.scratch["amplitudes"] = amplitudes.new_zeros(self.spectra, *amplitudes.shape[1:])
        ctx.scratch["amplitudes"][: len(amplitudes)].copy_(amplitudes)

    def _mix(self, x: Tensor, bank: Tensor) -> Tensor:
        """Return the images with their low amplitudes mixed with random spectra of the bank."""
        spectrum = to_spectrum(x)
        chosen = bank[torch.randint(len(bank), (len(x),), device=x.device)]
        share = torch.rand(len(x), 1, 1, 1, device=x.device)
        return to_images(mix_amplitudes(spectrum, chosen, share, self.window))

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        if not self.outer:
            return ctx.slot, {}
        slot = {"amplitudes": ctx.scratch["amplitudes"]} if ctx.scratch["collects"] else ctx.slot
        return slot, slot

    def check_message(self, message: Arrays, shared: Arrays, layout: Layout) -> None:
        if "amplitudes" not in message:
            return
        amplitudes = message["amplitudes"]
        shape, dtype = tuple(amplitudes.shape), amplitudes.dtype
        if dtype != torch.float32 or len(shape) != 4 or shape[:2] != (self.spectra, 3):
            raise ValueError(
                f"spectra must be float32 of shape ({self.spectra}, 3, k, k), got {dtype} of shape {shape}"
            )
        if not (amplitudes >= 0).all() or not (amplitudes <= 1 + 1e-5).all():
            raise ValueError("the amplitudes of pixels from 0 to 1 must be from 0 to 1 too")

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        sent = {}
        for client, message in zip(ctx.updates.clients, messages, strict=True):
            if "amplitudes" in message:
                sent[f"{PREFIX}{client}"] = message["amplitudes"].clone()
        if len(shapes := sorted({tuple(amplitudes.shape) for amplitudes in sent.values()})) > 1:
            raise ValueError(f"clients sent spectra of the shapes {shapes[0]} and {shapes[1]}: use images of one size")
        known = {name: value for name, value in shared.items() if name.startswith(PREFIX)}
        if shapes:  # what other clients sent before may be of another size, but most clients are of one
            known = {name: value for name, value in known.items() if tuple(value.shape) == shapes[0]}
        known |= sent
        bank = torch.cat([known[name] for name in sorted(known)]) if known else torch.empty(0, 1)
        bank = bank[bank.flatten(1).any(dim=1)]  # a client with few images leaves rows of zeros
        return aggregated, known | ({"bank": bank} if len(bank) else {})


def to_spectrum(x: Tensor) -> Tensor:
    """Return the spectrum of normalised images as pixels from 0 to 1; the frequency 0 is the mean pixel."""
    mean, std = get_pixel_scale(x.device)
    spectrum: Tensor = torch.fft.fft2(x * std + mean, norm="forward")
    return spectrum


def to_images(spectrum: Tensor) -> Tensor:
    """Return normalised images from a spectrum of pixels, which are clipped to 0 and 1."""
    mean, std = get_pixel_scale(spectrum.device)
    pixels: Tensor = torch.fft.ifft2(spectrum, norm="forward").real
    return (pixels.clamp(0, 1) - mean) / std


def _get_half_width(images: Tensor, window: float) -> int:
    return int(window * min(images.shape[-2:]))


def _index_low_frequencies(spectrum: Tensor, window: float) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the frequencies -b to b, with b the `window` as a share of the shorter side."""
    height, width = spectrum.shape[-2:]
    b = _get_half_width(spectrum, window)
    frequencies = torch.arange(-b, b + 1, device=spectrum.device)
    return (frequencies % height)[:, None], frequencies % width


def match_window(amplitudes: Tensor, images: Tensor, window: float) -> bool:
    """Return whether amplitudes are those of the low frequencies of such images."""
    size = 2 * _get_half_width(images, window) + 1
    return amplitudes.shape[-2:] == (size, size)


def take_low_frequencies(spectrum: Tensor, window: float) -> Tensor:
    """Return the entries of the frequencies -b to b, `[N, 3, 2b + 1, 2b + 1]`."""
    rows, columns = _index_low_frequencies(spectrum, window)
    return spectrum[..., rows, columns]


def mix_amplitudes(spectrum: Tensor, amplitudes: Tensor, share: Tensor, window: float) -> Tensor:
    """Return a spectrum with this share of other low amplitudes, and its own phases.

    Args:
        spectrum: The spectra, `[N, 3, H, W]`.
        amplitudes: The other amplitudes, `[N, 3, 2b + 1, 2b + 1]`.
        share: The share of the other amplitudes, 0 to 1, `[N, 1, 1, 1]`.
        window: The half width b of the low frequencies, as a share of the shorter side.
    """
    rows, columns = _index_low_frequencies(spectrum, window)
    low = spectrum[..., rows, columns]
    mixed = spectrum.clone()
    mixed[..., rows, columns] = torch.polar((1 - share) * low.abs() + share * amplitudes, low.angle())
    return mixed
