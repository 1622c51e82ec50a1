"""Values come out of a channel as they went in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from disk_hooks import raise_disk_full
from fedheal.engine.channel import PIPED, Outbox

VALUES: dict[str, Any] = {
    "whole": torch.arange(5),
    "part": torch.arange(10)[2:5],
    "nothing": torch.empty(0, 3),
    "number": torch.tensor(3.0, dtype=torch.float64),
    "bfloat16": torch.linspace(0, 1, 7).bfloat16(),
    "booleans": torch.tensor([True, False]),
    "channels last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "transposed": torch.rand(3, 4).t(),
    "conjugate": torch.rand(3, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.rand(2)),
    "text": "as it is",
}


@pytest.fixture(params=["memory", "temporary file"])
def outbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outbox]:
    if request.param == "temporary file":
        monkeypatch.delattr(os, "memfd_create")
    new_outbox = Outbox()
    yield new_outbox
    new_outbox.close()


@pytest.mark.parametrize("share", [False, True])
def test_tensors_keep_their_bits_dtypes_and_strides(outbox: Outbox, share: bool) -> None:
    received = outbox.read(outbox.write(VALUES), share)
    assert received.pop("text") == VALUES["text"]
    for name, value in received.items():
        assert torch.equal(value, VALUES[name]), name
        assert (type(value), value.dtype, value.stride()) == (
            type(VALUES[name]),
            VALUES[name].dtype,
            VALUES[name].stride(),
        )
    assert received["part"].untyped_storage().nbytes() < VALUES["part"].untyped_storage().nbytes() or share


@pytest.mark.parametrize("share", [False, True])
def test_a_long_value_does_not_fill_the_pipe(outbox: Outbox, share: bool) -> None:
    """Otherwise the sender would wait for a process that is still starting."""
    value = ["x" * PIPED, torch.arange(3), "end"]
    place = outbox.write(value)
    assert place.pickled == b""
    text, tensor, end = outbox.read(place, share)
    assert (text, tensor.tolist(), end) == (value[0], [0, 1, 2], "end")


def test_two_values_can_wait_and_what_is_read_stays(outbox: Outbox) -> None:
    first, second = (outbox.write(torch.full((3,), float(i))) for i in range(2))
    read = outbox.read(first)
    outbox.write(torch.full((3,), 9.0))
    assert outbox.read(second).tolist() == [1.0] * 3
    assert read.tolist() == [0.0] * 3


def test_no_room_is_a_sentence(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", raise_disk_full)
    with pytest.raises(OSError, match=r"no room for 40 bytes .*\(No space left on device\): free memory, .*workers=1"):
        outbox.write(torch.arange(5))
