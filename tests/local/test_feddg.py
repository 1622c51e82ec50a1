"""FedDG by hand and against numpy: amplitudes of images, the episodic gradient, and the bank of spectra."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedheal.data.augment import normalise_images
from fedheal.local import feddg
from fedheal.local.feddg import FedDG
from local import softmax
from local.quadratic import absorbed, packed
from local.rounds import make_federation, run_rounds

BATCH = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
X, Y = normalise_images(BATCH), torch.tensor([0, 1, 2, 0])


def mix_in_numpy(pixels: np.ndarray, amplitudes: np.ndarray, share: float, window: float) -> np.ndarray:
    """The original's steps: shift the frequency 0 to the middle, exchange a square of amplitudes there, keep the phases."""
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
    assert torch.allclose(
        mixed,
        (0.5 - torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        / torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1).expand(1, 3, 8, 8),
        atol=1e-5,
    )


def test_no_share_or_its_own_amplitudes_leave_an_image_as_it_is() -> None:
    spectrum = feddg.to_spectrum(X)
    own = feddg.take_low_frequencies(spectrum, 0.3).abs()
    for amplitudes, share in ((torch.rand_like(own), 0.0), (own, 1.0)):
        mixed = feddg.mix_amplitudes(spectrum, amplitudes, torch.tensor(share), 0.3)
        assert torch.allclose(feddg.to_images(mixed), X, atol=1e-4)


def test_pixels_are_clipped() -> None:
    """As bright as a pixel can be, whatever was mixed in."""
    images = feddg.to_images(feddg.to_spectrum(X) * 100)
    assert torch.allclose(
        images.amax(dim=(0, 2, 3)), (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    )


def test_a_step_equals_the_one_in_numpy() -> None:
    """The inner step changes where the second gradient is taken, and nothing else of the parameters."""
    w = np.random.default_rng(1).normal(size=(3, 192)) / 10
    term, bank = FedDG(window=0.3, meta_lr=0.2, outer=0.7), torch.rand(6, 3, 5, 5)
    torch.manual_seed(2)
    chosen, share = bank[torch.randint(6, (4,))], torch.rand(4, 1, 1, 1)
    other = feddg.to_images(feddg.mix_amplitudes(feddg.to_spectrum(X), chosen, share, 0.3))
    x, other_x = (images.flatten(1).double().numpy() for images in (X, other))
    expected = w - 0.1 * softmax.episodic(w, x, other_x, Y.numpy(), 0.2, 0.7)
    module = softmax.linear(w).float()
    torch.manual_seed(2)
    sent, _ = softmax.train(term, module, X, Y, shared={"bank": bank}, slot={"sent": torch.tensor(1)})
    assert np.allclose(sent.params.numpy(), expected.ravel(), atol=1e-6)
    assert not np.allclose(expected, w - 0.1 * softmax.episodic(w, x, other_x, Y.numpy(), 0.0, 0.7), atol=1e-4)


def collected(term: FedDG, **keys: Any) -> tuple[Any, Any]:
    """The slot and the message after a step."""
    sent, ctx = softmax.train(term, softmax.linear(np.zeros((3, 192))).float(), X, Y, **keys)
    return term.finish(ctx, sent)


def test_a_client_sends_amplitudes_of_its_images_once() -> None:
    """Four images make four spectra, though eight may be sent; amplitudes of images, of which the phases stay behind."""
    slot, message = collected(FedDG(window=0.3))
    spectra = np.fft.fftshift(np.abs(np.fft.fft2(BATCH.numpy() / 255)) / 64, axes=(-2, -1))
    assert np.allclose(message["amplitudes"].numpy(), spectra[..., 2:7, 2:7], atol=1e-6)
    assert collected(FedDG(window=0.3), slot=slot) == (slot, {})
    assert len(collected(FedDG(spectra=3))[1]["amplitudes"]) == 3


def test_without_an_outer_loss_nothing_is_collected() -> None:
    assert collected(FedDG(outer=0.0)) == ({}, {})


def test_a_client_gets_the_spectra_of_the_others_without_their_names() -> None:
    state = run_rounds(make_federation(method="feddg:spectra=2", participation=0.6), 1)
    shared, term = state.terms[0].shared, FedDG(spectra=2)
    name, *others = sorted(shared)
    bank = term.broadcast(name.removeprefix("amplitudes."), shared)
    assert list(bank) == ["bank"]
    assert torch.equal(bank["bank"], torch.cat([shared[other] for other in others]))
    assert len(term.broadcast("newcomer", shared)["bank"]) == 2 * len(shared) == 6
    assert term.broadcast("newcomer", {}) == {}


GOOD = torch.rand(2, 3, 3, 3)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (GOOD.double(), "must be float32"),
        (GOOD[0], r"shape \(n, 3, k, k\)"),
        (torch.rand(2, 1, 3, 3), r"shape \(n, 3, k, k\)"),
        (GOOD[:0], "1 to 4, got 0"),
        (torch.rand(5, 3, 3, 3), "1 to 4, got 5"),
        (torch.rand(2, 3, 5, 5), "of those in the bank"),
        (GOOD - 1, "from 0 to 1"),
        (GOOD + 1, "from 0 to 1"),
        (GOOD * torch.nan, "from 0 to 1"),
    ],
)
def test_spectra_that_cannot_be_used_stay_out_of_the_bank(
    bad: Tensor, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client cannot stop the round of the others. Whoever sent spectra before sends none."""
    before, moved = packed(0.0), {name: torch.ones(1, dtype=torch.float64) for name in "abc"}
    with caplog.at_level(logging.WARNING):
        messages = [{"amplitudes": GOOD}, {"amplitudes": bad}, {}]
        _, shared = absorbed(FedDG(spectra=4), before, moved, messages, {}, weights=[0.2, 0.3, 0.5])
    assert list(shared) == ["amplitudes.a"]
    assert "client 'b'" in caplog.text
    assert re.search(reason, caplog.text)
