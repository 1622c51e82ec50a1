"""What travels in Flower's messages: models as named arrays, and the records that fedheal adds.

A stock client reads the model and the config, and replies with a model and metrics. It ignores the rest. Every record
of ours has a name that starts with `fedheal`. Instructions to clients are keys of the config itself, because Flower's
mods accept messages with one config only.

numpy has no bfloat16. Such arrays travel as float32, which holds every value, with the label bfloat16. Our client
restores them. A stock client gets the same values, since its `load_state_dict` rounds to the model's own dtype.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedheal.core.layout import Layout, Packed
from fedheal.federation.model_arrays import infer_tensor_layout, match_bfloat16, widen_bfloat16
from fedheal.local.term import Arrays

INSTRUCTIONS = "fedheal."  # prefix of the config keys that instruct clients
CLIENT_INFO = "fedheal"  # from clients, a ConfigRecord: name, domain, round, local terms
SHARED = "fedheal.shared"  # to clients: the shared values of the method's terms
TERM_MESSAGES = "fedheal.messages"  # from clients: the messages of the terms to the server
MASK = "fedheal.kept"  # from clients that mask their own update: which entries they kept, as bits

# How numpy's file format begins, by version: the width of the header's length, and the header's parser. Numbers look the same
# in versions 2 and 3. An archive, which `numpy.load` would open too, is not an array.
NPY_HEADERS = {
    b"\x93NUMPY\x01\x00": (2, np.lib.format.read_array_header_1_0),
    b"\x93NUMPY\x02\x00": (4, np.lib.format.read_array_header_2_0),
    b"\x93NUMPY\x03\x00": (4, np.lib.format.read_array_header_2_0),
}


@dataclass(frozen=True)
class RoundInstructions:
    """What the strategy tells `fedheal.flower.client` about a round; a stock strategy sends only the round."""

    round: int = 1
    rounds: int = 0  # 0: unknown
    needs: Sequence[str] = ()  # metrics that the aggregation needs
    federation: str = ""  # id of the federation, drawn at its start
    tau: float | None = None  # threshold for clients that mask their own update
    accepted: str | None = None  # JSON: digest of a client's name -> its last accepted round
    restarted: int = 0  # the last round that ended with the terms' sums over clients' slots begun anew

    @classmethod
    def from_message(cls, message: Message) -> Self:
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for record in message.content.config_records.values():
            values |= {"round": record["server-round"]} if "server-round" in record else {}
            values |= {key.removeprefix(INSTRUCTIONS): v for key, v in record.items() if key.startswith(INSTRUCTIONS)}
        return cls(**{key: value for key, value in values.items() if key in known})

    def to_config(self) -> dict[str, Any]:
        values = asdict(self) | {"needs": list(self.needs)}
        return {f"{INSTRUCTIONS}{key}": value for key, value in values.items() if value is not None}

    def with_accepted_rounds(self, accepted: Mapping[str, int], tokens: Mapping[str, str] | None = None) -> Self:
        """Add clients' last accepted rounds, under digests: a client finds its own and learns no other name.

        With a client's token in it, nobody else can find out whether a guessed name is that of a member.

        >>> instructions = RoundInstructions(federation="f").with_accepted_rounds({"clinic": 3}, {"clinic": "7f"})
        >>> instructions.get_accepted_round("clinic", "7f"), instructions.get_accepted_round("clinic")
        (3, 0)
        """
        tokens = tokens or {}
        digests = {self._digest(client, tokens.get(client, "")): number for client, number in accepted.items()}
        return replace(self, accepted=json.dumps(digests))

    def get_accepted_round(self, client: str, token: str = "") -> int | None:
        """Return the client's last accepted round, 0 if there is none, or None if the server does not say."""
        if self.accepted is None:
            return None
        rounds = json.loads(self.accepted)
        return int(rounds.get(self._digest(client, token), rounds.get(self._digest(client), 0)))

    def _digest(self, client: str, token: str = "") -> str:
        return hashlib.sha256("/".join((self.federation, client, *([token] * bool(token)))).encode()).hexdigest()[:16]


def describe_terms(terms: Sequence[object]) -> list[str]:
    """Describe terms in words that are the same on every machine; of one that is not a dataclass, only its class.

    >>> from fedheal import methods
    >>> describe_terms(methods.get("fedprox:mu=0.1").local)
    ['FedProx(mu=0.1)']
    """
    described = []
    for term in terms:
        shown = [f.name for f in fields(term) if f.repr] if is_dataclass(term) else []
        values = ((name, getattr(term, name)) for name in shown)
        # A function's repr has its address in memory, which differs between processes.
        words = ", ".join(f"{key}={getattr(value, '__qualname__', repr(value))}" for key, value in values)
        described.append(f"{type(term).__qualname__}({words})" if is_dataclass(term) else type(term).__qualname__)
    return described


def infer_layout(record: ArrayRecord) -> Layout:
    """Infer a layout from the initial arrays."""
    return infer_tensor_layout(record_to_tensors(record))


def check_dtypes(layout: Layout) -> None:
    """Raise ValueError if a tensor's dtype fits no array of Flower's."""
    for entry in layout.entries:
        try:
            widen_bfloat16(torch.empty(0, dtype=entry.dtype)).numpy()
        except TypeError:
            problem = f"'{entry.name}' of the model is {entry.dtype}, which Flower's arrays cannot hold"
            raise ValueError(f"{problem}: use bfloat16, float16, float32 or float64") from None


def record_to_model(layout: Layout, record: ArrayRecord) -> Packed:
    return layout.pack(match_bfloat16(layout, record_to_tensors(record)))


def model_to_record(layout: Layout, model: Packed) -> ArrayRecord:
    """Turn vectors into named arrays of the original shapes and dtypes."""
    dtypes = {entry.dtype for entry in layout.entries if entry.kind == "param"}
    if len(dtypes) > 1 or any(dtype.is_complex for dtype in dtypes):  # complex numbers are pairs in the vector
        return tensors_to_record(layout.unpack(model))
    # Usually there is one real dtype: each array comes straight from its slice, without another copy of the whole model.
    vectors = {"param": model.params, "buffer": model.buffers, "counter": model.counters}
    slices = {e.name: vectors[e.kind][e.start : e.stop].to(e.dtype).reshape(e.shape) for e in layout.entries}
    return tensors_to_record(slices)


def tensors_to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: _to_array(tensor) for name, tensor in tensors.items()})


def record_to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Copy a record's arrays into tensors. Raise ValueError that names one which torch cannot hold."""
    return {name: _to_tensor(name, array) for name, array in record.items()}


def view_array(array: Array) -> NDArray[Any]:
    """View an array's bytes as numbers, without a copy. Raise ValueError if they are not a numeric numpy array."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"it is serialised as '{array.stype}', not as a numpy array")
    data = array.data
    try:
        if (magic := data[:8]) not in NPY_HEADERS:
            raise ValueError("they do not begin with numpy's magic string")
        start = 8 + NPY_HEADERS[magic][0]
        start += int.from_bytes(data[8:start], "little")
        shape, is_fortran, dtype = _parse_header(data[:start])
        return np.ndarray(shape, dtype, data, start, order="F" if is_fortran else "C")
    except Exception as error:  # numpy and Python's parser raise nearly anything, and no client's bytes may end a run
        raise ValueError(f"its bytes are not an array ({str(error)[:200] or type(error).__name__})") from None


def _to_tensor(name: str, array: Array) -> Tensor:
    try:
        values = view_array(array)
        tensor = torch.from_numpy(np.array(values))
    except ValueError as error:
        raise ValueError(f"'{name}' cannot be read: {error}") from None
    except TypeError:  # text, long doubles and the like
        raise ValueError(f"'{name}' holds {values.dtype}, which torch does not have") from None
    return tensor.to(torch.bfloat16) if (array.dtype, tensor.dtype) == ("bfloat16", torch.float32) else tensor


@lru_cache(maxsize=4096)  # all clients send the same headers
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the order is Fortran's, and the dtype."""
    _, parse = NPY_HEADERS[header[:8]]
    shape, is_fortran, dtype = parse(io.BytesIO(header[8:]))
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if any(size < 0 for size in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, is_fortran, dtype


def _to_array(tensor: Tensor) -> Array:
    """Make the array that Flower would make, with one copy of the bytes instead of two."""
    values = np.ascontiguousarray(widen_bfloat16(tensor.detach().cpu()).numpy()).reshape(tuple(tensor.shape))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    data = b"".join([header.getvalue(), values.reshape(-1).view(np.uint8).data])
    label = "bfloat16" if tensor.dtype == torch.bfloat16 else str(values.dtype)
    return Array(label, tuple(values.shape), "numpy.ndarray", data)


def terms_to_record(groups: Sequence[Arrays]) -> ArrayRecord:
    """Put each term's tensors into one record, under `<index of the term>.<name>`."""
    return tensors_to_record({f"{i}.{name}": t for i, group in enumerate(groups) for name, t in group.items()})


def record_to_terms(record: ArrayRecord | None, num_terms: int) -> tuple[dict[str, Tensor], ...]:
    return split_by_term(record_to_tensors(record) if record else {}, num_terms)


def split_by_term(tensors: Arrays, num_terms: int) -> tuple[dict[str, Tensor], ...]:
    """Split tensors called `<index of the term>.<name>` by term. Tensors of no term are left out."""
    groups: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(num_terms))
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if index.isdecimal() and int(index) < num_terms:
            groups[int(index)][name] = tensor
    return groups


def mask_to_record(mask: Tensor) -> ArrayRecord:
    """Pack a boolean mask, eight entries to a byte."""
    return ArrayRecord({"bits": Array(np.packbits(mask.numpy()))})


def record_to_mask(record: ArrayRecord, length: int) -> NDArray[np.uint8]:
    """Unpack a mask into zeros and ones."""
    if "bits" not in record:
        raise ValueError("its mask is missing: answer with fedheal.flower.client.reply or client.train")
    packed_bits, size = view_array(record["bits"]), -(-length // 8)
    if packed_bits.dtype != np.uint8 or packed_bits.shape != (size,):
        given = f"its mask is {packed_bits.dtype} of shape {packed_bits.shape}"
        raise ValueError(f"{given}; {length} entries need {size} bytes, as uint8")
    return np.unpackbits(packed_bits, count=length)


def count_bytes(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
