"""What travels in Flower's messages: models as named arrays, and beside them what fedheal's two sides tell each other.

A stock client reads the model and the config and answers with a model and metrics; it never looks at the rest. Every record
of ours has a name that starts with `fedheal`; what clients are told stands in the config itself, under keys that do, since
Flower's mods take messages with one config only.

numpy has no bfloat16. Such numbers travel as float32, which holds them all, labelled as what they are: we read them back as
they were, and a stock client, whose `load_state_dict` rounds to the model's own dtype, finds the same values.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedheal.core.layout import Entry, Kind, Layout, Packed
from fedheal.local.term import Arrays

TOLD = "fedheal."  # how keys begin that tell clients of the round, of what is needed, and which of their rounds counted
ABOUT = "fedheal"  # from clients, a ConfigRecord: who they are
SHARED = "fedheal.shared"  # to clients: what the method's terms share
MESSAGES = "fedheal.messages"  # from clients: what the terms tell the server
KEPT = "fedheal.kept"  # from clients that mask their own update: which entries they kept, as bits

# How numpy's file format begins, by version: how many bytes tell the header's length, and what reads both. Numbers look alike
# in versions 2 and 3. An archive, which `numpy.load` would open too, is no array.
NPY = {
    b"\x93NUMPY\x01\x00": (2, np.lib.format.read_array_header_1_0),
    b"\x93NUMPY\x02\x00": (4, np.lib.format.read_array_header_2_0),
    b"\x93NUMPY\x03\x00": (4, np.lib.format.read_array_header_2_0),
}

# Without the module nobody can tell a float buffer from a parameter but by its name: these are torch's.
BUFFERS = ("running_mean", "running_var")


def layout_of(record: ArrayRecord) -> Layout:
    """The layout of a record's arrays: integers are counters, names that end like these are float buffers.

    >>> layout_of(ArrayRecord({"w": Array(np.zeros(3)), "bn.running_mean": Array(np.zeros(2))})).sizes()
    Sizes(tensors=(('w', 3),), buffers=2, counters=0)
    """
    entries: list[Entry] = []
    ends: dict[Kind, int] = {"param": 0, "buffer": 0, "counter": 0}
    for name, array in record.items():
        values = _tensor(array)
        kind: Kind = "counter"
        if values.is_floating_point():
            kind = "buffer" if name.endswith(BUFFERS) else "param"
        elif values.is_complex():
            raise ValueError(f"'{name}' holds complex numbers: give the strategy the module itself as `model`")
        start = ends[kind]
        ends[kind] = start + values.numel()
        entries.append(Entry(name, kind, tuple(values.shape), values.dtype, start, ends[kind]))
    if not ends["param"]:
        raise ValueError("the initial arrays hold no float parameters: give the model's state_dict as an ArrayRecord")
    return Layout(tuple(entries))


def check_travels(layout: Layout) -> None:
    """Refuse what numpy has no numbers for, nor wider ones."""
    for entry in layout.entries:
        try:
            widened(torch.empty(0, dtype=entry.dtype)).numpy()
        except TypeError:
            raise ValueError(
                f"'{entry.name}' of the model is {entry.dtype}, which Flower's arrays cannot hold: use bfloat16, float16, "
                "float32 or float64"
            ) from None


def packed(layout: Layout, record: ArrayRecord) -> Packed:
    """A record's arrays as vectors, in memory of their own."""
    return layout.pack(fitted(layout, tensors(record)))


def fitted(layout: Layout, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bfloat16 where the layout has it and a wrapper or a stock client did not, and the other way round; all else as it is."""
    dtypes = {entry.name: entry.dtype for entry in layout.entries}
    alike = (torch.float32, torch.bfloat16)
    return {k: t.to(dtypes[k]) if t.dtype in alike and dtypes.get(k) in alike else t for k, t in model.items()}


def widened(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that numpy has, if it has a wider one."""
    return tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor


def record_of(layout: Layout, model: Packed) -> ArrayRecord:
    """Vectors as named arrays, in the original shapes and dtypes."""
    dtypes = {entry.dtype for entry in layout.entries if entry.kind == "param"}
    if len(dtypes) > 1 or any(dtype.is_complex for dtype in dtypes):  # complex numbers are pairs in the vector
        return record(layout.unpack(model))
    # One real dtype, as nearly always: each array straight from its slice, without another copy of the whole model.
    vectors = {"param": model.params, "buffer": model.buffers, "counter": model.counters}
    slices = {e.name: vectors[e.kind][e.start : e.stop].to(e.dtype).reshape(e.shape) for e in layout.entries}
    return record(slices)


def record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as an ArrayRecord."""
    return ArrayRecord({name: _array(tensor) for name, tensor in tensors.items()})


def tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """An ArrayRecord as tensors, in memory of their own."""
    return {name: _tensor(array) for name, array in record.items()}


def viewed(array: Array) -> NDArray[Any]:
    """The array's numbers over its own bytes, which are not copied: a large model's reply is read only once."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"it is serialised as '{array.stype}', not as a numpy array")
    try:
        shape, fortran, dtype, start = _header(_head(array.data))
        flat = np.frombuffer(array.data, dtype, math.prod(shape), start)
        return flat.reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # numpy and Python's parser raise nearly anything, and no client's bytes may end a run
        raise ValueError(f"its bytes are no array ({str(error)[:200] or type(error).__name__})") from None


def _tensor(array: Array) -> Tensor:
    try:
        found = torch.from_numpy(np.array(viewed(array)))
        return found.to(torch.bfloat16) if (array.dtype, found.dtype) == ("bfloat16", torch.float32) else found
    except TypeError:  # text, long doubles and the like
        raise ValueError(f"it holds {array.dtype}, which torch does not have") from None


def _head(data: bytes) -> bytes:
    """All before the numbers."""
    if data[:8] not in NPY:
        raise ValueError("they do not begin as numpy's format does")
    width, _ = NPY[data[:8]]
    return data[: 8 + width + int.from_bytes(data[8 : 8 + width], "little")]


@lru_cache(maxsize=4096)
def _header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, order and dtype, and where the numbers start; the clients' headers are all alike, so each is parsed once."""
    _, read = NPY[head[:8]]
    shape, fortran, dtype = read(io.BytesIO(head[8:]))
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if any(size < 0 for size in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype, len(head)


def flattened(groups: tuple[Arrays, ...]) -> ArrayRecord:
    """Each term's tensors under `<number of the term>.<name>`."""
    return record({f"{i}.{name}": tensor for i, group in enumerate(groups) for name, tensor in group.items()})


def grouped(found: ArrayRecord | None, terms: int) -> tuple[dict[str, Tensor], ...]:
    """The reverse of `flattened`; what belongs to no term is left out."""
    groups: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(terms))
    for key, tensor in tensors(found).items() if found else ():
        number, _, name = key.partition(".")
        if number.isdigit() and int(number) < terms:
            groups[int(number)][name] = tensor
    return groups


def counted(rounds: Mapping[str, int], federation: str) -> str:
    """The last rounds that counted, by client, so that each finds its own and no other's name."""
    return json.dumps({_digest(client, federation): number for client, number in rounds.items()})


def counted_of(client: str, found: str, federation: str) -> int:
    """The client's own; 0 where none of its rounds did.

    >>> counted_of("clinic", counted({"clinic": 3}, "f"), "f"), counted_of("hospital", counted({"clinic": 3}, "f"), "f")
    (3, 0)
    """
    return int(json.loads(found).get(_digest(client, federation), 0))


def bits(mask: Tensor) -> ArrayRecord:
    """Which entries are kept, eight to a byte."""
    return ArrayRecord({"bits": Array(np.packbits(mask.numpy()))})


def unbits(found: ArrayRecord, length: int) -> NDArray[np.uint8]:
    """The reverse, as zeros and ones."""
    if "bits" not in found:
        raise ValueError("its mask is missing")
    packed_bits = viewed(found["bits"])
    if packed_bits.dtype != np.uint8 or packed_bits.shape != (-(-length // 8),):
        raise ValueError(f"its mask has shape {packed_bits.shape}; {length} entries need {-(-length // 8)} bytes")
    return np.unpackbits(packed_bits, count=length)


def _digest(client: str, federation: str) -> str:
    return hashlib.sha256(f"{federation}/{client}".encode()).hexdigest()[:16]


def _array(tensor: Tensor) -> Array:
    """As Flower would make it, with one copy of the bytes instead of two."""
    values = np.ascontiguousarray(widened(tensor.detach().cpu()).numpy()).reshape(tuple(tensor.shape))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    data = b"".join([header.getvalue(), values.reshape(-1).view(np.uint8).data])
    label = "bfloat16" if tensor.dtype == torch.bfloat16 else str(values.dtype)
    return Array(label, tuple(values.shape), "numpy.ndarray", data)
