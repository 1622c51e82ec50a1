"""FedDG by hand and against numpy: amplitudes of images, the episodic gradient, and the bank of spectra."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedheal.core.layout import Layout
from fedheal.core.pixels import get_pixel_scale
from fedheal.data.augment import normalise_images
from fedheal.local import feddg
from fedheal.local.feddg import FedDG
from local import softmax
from local.quadratic import absorb_updates, make_packed, make_term_context

BATCH = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
MEAN, STD = get_pixel_scale(BATCH.device)
X, Y = normalise_images(BATCH), torch.tensor([0, 1, 2, 0])


def mix_in_numpy(pixels: np.ndarray, amplitudes: np.ndarray, share: float, window: float) -> np.ndarray:
    """Mix amplitudes like the original code: shift frequency 0 to the middle, mix a square of amplitudes, keep the phases."""
    spectrum = np.fft.fftshift(np.fft.fft2(pixels), axes=(-2, -1))
    (height, width), amplitude, phase = pixels.shape[-2:], np.abs(spectrum), np.angle(spectrum)
    b = int(window * min(height, width))
    square = (..., slice(height // 2 - b, height // 2 + b + 1), slice(width // 2 - b, width // 2 + b + 1))
    amplitude[square] = (1 - share) * amplitude[square] + share * amplitudes[square]
    return np.fft.ifft2(np.fft.ifftshift(amplitude * np.exp(1j * phase), axes=(-2, -1))).real


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (6, 11)], ids=str)
@pytest.mark.parametrize("window", [0.0, 0.1, 0.3, 0.49])
def test_mixed_images_equal_those_in_numpy(size: tuple[int, int], window: float) -> None:
    rng = np.random.default_rng(0)
    own, other = rng.random((2, 5, 3, *size))
    expected = mix_in_numpy(own, np.fft.fftshift(np.abs(np.fft.fft2(other)), axes=(-2, -1)), 0.3, window)
    spectrum, target = (torch.fft.fft2(torch.from_numpy(images), norm="forward") for images in (own, other))
    share = torch.full((5, 1, 1, 1), 0.3, dtype=torch.float64)
    mixed = feddg.mix_amplitudes(spectrum, feddg.take_low_frequencies(target, window).abs(), share, window)
    assert np.allclose(torch.fft.ifft2(mixed, norm="forward").real.numpy(), expected, atol=1e-13)


def test_grey_images_by_hand() -> None:
    """A grey image has the frequency 0 alone: its amplitude is the pixel. A quarter of 0.8 and the rest of 0.4: 0.5."""
    grey = normalise_images(torch.full((1, 3, 8, 8), 102, dtype=torch.uint8))  # 0.4
    amplitudes = torch.zeros(1, 3, 3, 3)
    amplitudes[:, :, 1, 1] = 0.8
    mixed = feddg.to_images(feddg.mix_amplitudes(feddg.to_spectrum(grey), amplitudes, torch.tensor(0.25), 0.13))
    assert torch.allclose(mixed, ((0.5 - MEAN) / STD).expand(1, 3, 8, 8), atol=1e-5)


def test_no_share_or_its_own_amplitudes_leave_an_image_as_it_is() -> None:
    spectrum = feddg.to_spectrum(X)
    own = feddg.take_low_frequencies(spectrum, 0.3).abs()
    for amplitudes, share in ((torch.rand_like(own), 0.0), (own, 1.0)):
        mixed = feddg.mix_amplitudes(spectrum, amplitudes, torch.tensor(share), 0.3)
        assert torch.allclose(feddg.to_images(mixed), X, atol=1e-4)


def test_pixels_are_clipped() -> None:
    """As bright as a pixel can be, whatever was mixed in."""
    images = feddg.to_images(feddg.to_spectrum(X) * 100)
    assert torch.allclose(images.amax(dim=(0, 2, 3), keepdim=True), (1 - MEAN) / STD)


def test_a_step_equals_the_one_in_numpy() -> None:
    """The inner step changes where the second gradient is taken, and nothing else of the parameters."""
    w = np.random.default_rng(1).normal(size=(3, 192)) / 10
    term, bank = FedDG(window=0.3, meta_lr=0.2, outer=0.7), torch.rand(6, 3, 5, 5)
    torch.manual_seed(2)
    chosen, share = bank[torch.randint(6, (4,))], torch.rand(4, 1, 1, 1)
    other = feddg.to_images(feddg.mix_amplitudes(feddg.to_spectrum(X), chosen, share, 0.3))
    x, other_x = (images.flatten(1).double().numpy() for images in (X, other))
    expected = w - 0.1 * softmax.compute_feddg_gradient(w, x, other_x, Y.numpy(), 0.2, 0.7)
    module = softmax.make_linear(w).float()
    torch.manual_seed(2)
    local_model, _ = softmax.train(
        term, module, X, Y, shared={"bank": bank}, slot={"amplitudes": torch.zeros(8, 3, 5, 5)}
    )
    assert np.allclose(local_model.params.numpy(), expected.ravel(), atol=1e-6)
    assert not np.allclose(
        expected, w - 0.1 * softmax.compute_feddg_gradient(w, x, other_x, Y.numpy(), 0.0, 0.7), atol=1e-4
    )


def train_and_finish(term: FedDG, slot: Any, x: Tensor = X, y: Tensor = Y) -> tuple[Any, Any]:
    """Take a step, and return the slot and the message."""
    local_model, ctx = softmax.train(term, softmax.make_linear(np.zeros((3, 192))).float(), x, y, slot=slot)
    return term.finish(ctx, local_model)


def test_a_client_sends_amplitudes_of_its_first_images_and_the_same_ones_ever_after() -> None:
    """Phases stay behind. Rows of zeros stand for images that a client does not have."""
    slot, message = train_and_finish(FedDG(window=0.3, spectra=5), {})
    spectra = np.fft.fftshift(np.abs(np.fft.fft2(BATCH.numpy() / 255)) / 64, axes=(-2, -1))
    assert np.allclose(message["amplitudes"][:4].numpy(), spectra[..., 2:7, 2:7], atol=1e-6)
    assert not message["amplitudes"][4].any()
    assert slot is message
    assert train_and_finish(FedDG(window=0.3, spectra=5), slot, X.flip(0)) == (slot, slot)
    assert train_and_finish(FedDG(outer=0.0), {}) == ({}, {})


def absorb_spectra(messages: list[Any], shared: Any) -> Any:
    moved = {name: torch.ones(1, dtype=torch.float64) for name in "abc"[: len(messages)]}
    weights = [1 / len(moved)] * len(moved)
    return absorb_updates(FedDG(spectra=2), make_packed(0.0), moved, messages, shared, weights=weights)[1]


def test_the_bank_holds_each_clients_last_spectra_and_no_name_is_sent() -> None:
    first, second, three = torch.rand(3, 2, 3, 3, 3)
    second[1] = 0  # a client with one image
    shared = absorb_spectra([{"amplitudes": first}, {"amplitudes": second}, {}], {})
    assert torch.equal(shared["bank"], torch.cat([first, second[:1]]))
    shared = absorb_spectra([{"amplitudes": three}], shared)  # a lost its slot, and sends others
    assert torch.equal(shared["bank"], torch.cat([three, second[:1]]))
    assert list(FedDG().broadcast("a", shared)) == ["bank"]
    assert absorb_spectra([{"amplitudes": torch.zeros(2, 3, 3, 3)}], {}).keys() == {"amplitudes.a"}


def test_a_client_leaves_its_own_spectra_out() -> None:
    bank = torch.rand(5, 3, 3, 3)
    ctx = make_term_context(FedDG(), make_packed(0.0), slot={"amplitudes": bank[1:3]}, shared={"bank": bank})
    FedDG().prepare(ctx, ctx.received)
    assert torch.equal(ctx.scratch["bank"], bank[[0, 3, 4]])
    alone = make_term_context(FedDG(), make_packed(0.0), slot={"amplitudes": bank}, shared={"bank": bank})
    FedDG().prepare(alone, alone.received)
    assert "bank" not in alone.scratch


GOOD = torch.rand(2, 3, 3, 3)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (GOOD.double(), r"must be float32 of shape \(2, 3, k, k\), got torch.float64"),
        (GOOD[0], r"got torch.float32 of shape \(3, 3, 3\)"),
        (GOOD[:1], r"got torch.float32 of shape \(1, 3, 3, 3\)"),
        (GOOD - 1, "must be from 0 to 1"),
        (GOOD + 1, "must be from 0 to 1"),
        (GOOD * torch.nan, "must be from 0 to 1"),
    ],
)
def test_spectra_that_cannot_be_used_are_refused(bad: Tensor, reason: str) -> None:
    """A federation then skips the client."""
    with pytest.raises(ValueError, match=reason):
        FedDG(spectra=2).check_message({"amplitudes": bad}, {}, Layout.flat(1))


def test_spectra_of_two_sizes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"spectra of the shapes \(2, 3, 3, 3\) and \(2, 3, 5, 5\): use images of one size"
    ):
        absorb_spectra([{"amplitudes": GOOD}, {"amplitudes": torch.rand(2, 3, 5, 5)}], {})


def test_a_bank_of_images_of_another_size_is_not_mixed_with() -> None:
    shared, slot = {"bank": torch.ones(4, 3, 9, 9)}, {"amplitudes": torch.ones(2, 3, 3, 3)}
    term, start = FedDG(), make_packed(1.0)
    ctx = make_term_context(term, start, shared=shared, slot=slot)
    assert term.prepare(ctx, start) is start
    assert "bank" not in ctx.scratch
