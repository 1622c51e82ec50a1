"""Pass values between processes: the bytes of tensors apart from everything else.

On one machine they go through files in memory, and the rest through a pipe; to another machine both go as a parcel.

torch would open a file for every tensor that it sends, and many clients would run out of open files. A channel has two files
for each direction, whatever it sends. They take no room in /dev/shm, have no name, and end with their processes.
"""

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64  # bytes, as torch's own memory has it
PIPED = 1 << 15  # bytes that fit into a pipe which nobody reads yet


class Place(NamedTuple):
    """Where a value was left: which of two files, the lengths of its parts there, and the rest of it unless that is a part."""

    turn: int
    lengths: list[int]
    pickled: bytes


class SharedFile:
    """An open file without a name, which can be given to a process that is being started."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _open_unnamed_file() if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd  # which Windows lacks: there is one process there

        return _inherit, (DupFd(self.descriptor),)

    def write(self, parts: Sequence[memoryview]) -> None:
        """Write parts one after another, each at a multiple of `ALIGNMENT`. Raise OSError if there is no room."""
        try:
            for start, part in zip(_list_starts([len(part) for part in parts]), parts, strict=True):
                done = 0
                while done < len(part):  # the system may write less than it was asked to
                    done += os.pwrite(self.descriptor, part[done:], start + done)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for {sum(map(len, parts))} bytes that another process needs ({error.strerror}): "
                "free memory, set TMPDIR to a folder with more room, or use workers=1",
            ) from error

    def read(self, lengths: Sequence[int]) -> list[Tensor]:
        """Return the parts as new tensors of bytes."""
        parts = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        for start, part in zip(_list_starts(lengths), parts, strict=True):
            left = part.numpy().data
            while len(left):
                count = os.preadv(self.descriptor, [left], start)
                left, start = left[count:], start + count
        return parts

    def map(self, lengths: Sequence[int]) -> list[Tensor]:
        """Return the parts as tensors of bytes in memory that all processes share."""
        if not (size := os.fstat(self.descriptor).st_size):
            return self.read(lengths)
        whole = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        return [whole[start : start + length] for start, length in zip(_list_starts(lengths), lengths, strict=True)]

    def close(self) -> None:
        os.close(self.descriptor)


def _open_unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # on Linux: limited by memory, where /dev/shm is often small
        return os.memfd_create("fedheal")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _inherit(descriptor: Any) -> SharedFile:
    return SharedFile(descriptor.detach())


def _list_starts(lengths: Sequence[int]) -> list[int]:
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return starts


class Outbox:
    """Holds the last two values that a process has left for others."""

    def __init__(self) -> None:
        self.files, self.turn = (SharedFile(), SharedFile()), 0

    def write(self, value: object) -> Place:
        """Leave a value; return what `read` needs to find it."""
        pickled, parts = _pickle_apart(value)
        if len(pickled) > PIPED:
            pickled, parts = b"", [*parts, memoryview(pickled)]
        self.turn = 1 - self.turn
        self.files[self.turn].write(parts)
        return Place(self.turn, [len(part) for part in parts], pickled)

    def read(self, place: Place, share: bool = False) -> Any:
        """Return the value at a place; `share`: with tensors in memory that all processes share."""
        file = self.files[place.turn]
        parts = [part.numpy() for part in (file.map(place.lengths) if share else file.read(place.lengths))]
        pickled: Any = place.pickled or parts.pop()
        return pickle.loads(pickled, buffers=parts)  # noqa: S301  (our own process's)

    def close(self) -> None:
        for file in self.files:
            file.close()


class Parcel(NamedTuple):
    """A value on its way to another machine: the bytes of its tensors, as arrays, and the rest of it."""

    pickled: bytes
    parts: list[NDArray[np.uint8]]


def pack_parcel(value: object) -> Parcel:
    """Return a value in parts that share the memory of its tensors. Tensors on a GPU are copied."""
    pickled, parts = _pickle_apart(value)
    return Parcel(pickled, [np.asarray(part) for part in parts])


def unpack_parcel(parcel: Parcel) -> Any:
    """Return the value with tensors in new memory, as torch aligns it. Tensors of a GPU are on this process's GPU."""
    parts = [torch.empty(len(part), dtype=torch.uint8).numpy() for part in parcel.parts]
    for part, received in zip(parts, parcel.parts, strict=True):
        part[:] = received
    return pickle.loads(parcel.pickled, buffers=parts)  # noqa: S301  (our own process's)


class Channel(NamedTuple):
    """One end of a connection. A process may send two values before it has to wait for a reply to the first."""

    connection: "Connection[Any, Any]"
    outbox: Outbox
    inbox: Outbox

    def send(self, value: object) -> None:
        self.connection.send_bytes(pickle.dumps(tuple(self.outbox.write(value))))  # `send` takes twice as long

    def receive(self) -> Any:
        return self.inbox.read(Place(*pickle.loads(self.connection.recv_bytes())))  # noqa: S301  (our own process's)

    def close(self) -> None:
        for end in self:
            end.close()


def _pickle_apart(value: object) -> tuple[bytes, list[memoryview]]:
    """Return a value without the bytes of its tensors, and these bytes where they are."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5, buffer_callback=buffers.append).dump(value)
    return pickled.getvalue(), [buffer.raw() for buffer in buffers]


class _Pickler(pickle.Pickler):
    """Leaves the bytes of tensors to `buffer_callback`, and keeps their strides, which change the order of sums."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.requires_grad or value.layout != torch.strided:
            return NotImplemented
        if value.is_cuda:
            return _move_to_gpu, (value.cpu(),)
        plain = value.resolve_conj().resolve_neg()
        if plain.untyped_storage().nbytes() != plain.nbytes:  # part of something larger
            plain = plain.clone()
        data = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
        return _rebuild_tensor, (pickle.PickleBuffer(data.numpy().data), plain.dtype, plain.shape, plain.stride())


def _move_to_gpu(value: Tensor) -> Tensor:
    return value.cuda()


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    if not len(data):  # torch cannot view nothing as another dtype
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.from_numpy(data).view(dtype).as_strided(shape, stride)
