"""Map a model to flat vectors and back.

Aggregation treats a model as three vectors: *parameters*, *float buffers* (running means and variances) and *counters*
(integers and booleans, such as the number of batches seen). `Layout` maps a `state_dict` to them and back, bit for bit
(only a NaN's payload may change, where one vector holds several dtypes). A tensor with several names (tied parameters)
is one slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fedheal.core.checks import check_type
from fedheal.core.errors import add_article

Kind = Literal["param", "buffer", "counter"]
KINDS: tuple[Kind, ...] = ("param", "buffer", "counter")
ALIGNED = 16  # entries: rows that start at such a multiple are read fastest on a GPU

MEAN, VARIANCE = "running_mean", "running_var"  # as torch's BatchNorm calls its buffers


@dataclass(frozen=True)
class Packed:
    """A model as three vectors.

    Attributes:
        params: `[G]`, floats.
        buffers: `[B]`, floats, such as BatchNorm's running statistics.
        counters: `[C]`, integers, such as BatchNorm's count of batches.
    """

    params: Tensor
    buffers: Tensor
    counters: Tensor

    def __repr__(self) -> str:
        """Return lengths and device only: the values fill pages.

        >>> Packed(torch.zeros(5), torch.zeros(2), torch.zeros(1, dtype=torch.int64))
        Packed(params=float32[5], buffers=float32[2], counters=int64[1], device='cpu')
        """
        parts = [f"{key}={str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for key, v in vars(self).items()]
        return f"Packed({', '.join(parts)}, device='{self.params.device}')"


@dataclass(frozen=True)
class Entry:
    """One name of a `state_dict`: its vector and its slice of it. Tied names share `start` and `stop`."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


class _Group(NamedTuple):
    """The entries of one vector, tied ones once, with their lengths, the vector's length and its dtype."""

    entries: list[Entry]
    lengths: list[int]
    length: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Sizes:
    """The part of a layout that aggregation needs: parameter tensors with lengths, and the number of buffers and counters."""

    tensors: tuple[tuple[str, int], ...]
    buffers: int = 0
    counters: int = 0

    @property
    def lengths(self) -> list[int]:
        return [length for _, length in self.tensors]

    @property
    def params(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Layout:
    """Map names and shapes to slices of the flat vectors.

    Attributes:
        entries: The tensors of the `state_dict`, in order, with their places in the vectors.

    >>> layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    >>> layout.sizes()
    Sizes(tensors=(('0.weight', 6), ('0.bias', 3), ('1.weight', 3), ('1.bias', 3)), buffers=6, counters=1)
    """

    entries: tuple[Entry, ...]

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """Return the layout of `module.state_dict()`. Raise TypeError if the state holds something that is no tensor."""
        remedy = "give the module itself; its state_dict does not say which tensors are parameters"
        check_type("module", module, nn.Module, remedy)
        parameters = {id(p) for p in module.parameters()}
        entries: list[Entry] = []
        seen: dict[int, Entry] = {}
        ends: dict[Kind, int] = {"param": 0, "buffer": 0, "counter": 0}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"state_dict entry '{name}' is {add_article(type(tensor).__name__)}, not a tensor: "
                    "extra state of other kinds cannot be averaged; leave it out of the module's state_dict"
                )
            if id(tensor) not in seen:
                kind: Kind = "param" if id(tensor) in parameters else "buffer"
                if not (tensor.is_floating_point() or tensor.is_complex()):
                    kind = "counter"
                start = ends[kind]
                ends[kind] += tensor.numel() * (2 if tensor.is_complex() else 1)
                seen[id(tensor)] = Entry(name, kind, tuple(tensor.shape), tensor.dtype, start, ends[kind])
            entries.append(replace(seen[id(tensor)], name=name))
        return Layout(tuple(entries))

    @staticmethod
    def flat(size: int) -> Layout:
        """Return the layout of one float32 parameter tensor of this size, without buffers or counters."""
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size = {size!r}: a flat layout needs a whole number of parameters, at least one")
        return Layout((Entry("params", "param", (size,), torch.float32, 0, size),))

    def sizes(self) -> Sizes:
        """Return the names and lengths of the parameters, and the lengths of buffers and counters."""
        params, buffers, counters = (self._groups[kind] for kind in KINDS)
        names = (e.name for e in params.entries)
        return Sizes(tuple(zip(names, params.lengths, strict=True)), buffers.length, counters.length)

    def pack(self, state_dict: Mapping[str, Tensor]) -> Packed:
        """Return a `state_dict` as new vectors on the device of its first tensor. Raise ValueError if it does not fit."""
        check_type("state_dict", state_dict, Mapping, "give module.state_dict()")
        self._check(state_dict)
        device = next((t.device for t in state_dict.values()), torch.device("cpu"))

        def vector(kind: Kind) -> Tensor:
            parts = [state_dict[e.name].detach() for e in self._groups[kind].entries]
            return _join(parts, self._groups[kind].dtype, device)

        return Packed(vector("param"), vector("buffer"), vector("counter"))

    def unpack(self, packed: Packed) -> dict[str, Tensor]:
        """Return the `state_dict` of these vectors, in new memory. Raise ValueError if one has not the layout's length."""
        check_type("packed", packed, Packed, "give what `pack` or an aggregator's `apply` returned for a packed model")
        vectors = {kind: vector.detach().clone() for kind, vector in self._list_vectors(packed).items()}
        made: dict[tuple[Kind, int, int], Tensor] = {}
        result: dict[str, Tensor] = {}
        for e in self.entries:
            where = (e.kind, e.start, e.stop)
            if where not in made or e.start == e.stop:  # empty tensors share a place without being tied
                made[where] = restore_dtype(vectors[e.kind][e.start : e.stop], e.dtype).reshape(e.shape)
            result[e.name] = made[where]
        return result

    def load_into(self, module: nn.Module, packed: Packed) -> None:
        """Load vectors into a module, as `module.load_state_dict(self.unpack(packed))` does, without copies in between."""
        self.bind(module).load(packed)

    def bind(self, module: nn.Module) -> BoundModule:
        """Find a module's tensors once, to load and pack it several times; it must keep its tensors and parts meanwhile."""
        return BoundModule(self, module, self._find_tensors(module))

    def _find_tensors(self, module: nn.Module) -> dict[Kind, list[Tensor]] | None:
        """Return a module's own tensors, if it has them on one device as this layout says and its `state_dict` adds nothing."""
        state: dict[str, Tensor] = {}
        if not _add_state(module, "", state) or state.keys() != self._names:
            return None
        device = next((tensor.device for tensor in state.values()), None)
        for e in self.entries:
            tensor = state[e.name]
            if tensor.device != device or tensor.dtype != e.dtype or tensor.shape != e.shape or e.dtype.is_complex:
                return None
        found: dict[Kind, list[Tensor]] = {k: [state[e.name] for e in g.entries] for k, g in self._groups.items()}
        is_tied = len({id(tensor) for tensor in state.values()}) < len(state)
        return None if is_tied or sum(map(len, found.values())) < len(self.entries) else found

    def _list_vectors(self, packed: Packed) -> dict[Kind, Tensor]:
        """Return the vectors by kind. Raise ValueError if one has not the layout's length."""
        vectors: dict[Kind, Tensor] = {"param": packed.params, "buffer": packed.buffers, "counter": packed.counters}
        for kind, vector in vectors.items():
            if vector.shape != (length := self._groups[kind].length,):
                raise ValueError(
                    f"{kind}s of shape {tuple(vector.shape)} do not fit this layout, which has {length} of them"
                )
        return vectors

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(e.name for e in self.entries)

    @cached_property
    def _groups(self) -> dict[Kind, _Group]:
        groups: dict[Kind, _Group] = {}
        for kind in KINDS:
            distinct: dict[tuple[int, str], Entry] = {}
            for e in self.entries:
                if e.kind == kind:  # empty tensors share slices without being tied: their names distinguish them
                    distinct.setdefault((e.start, e.name if e.start == e.stop else ""), e)
            lengths = [e.stop - e.start for e in distinct.values()]
            groups[kind] = _Group(list(distinct.values()), lengths, sum(lengths), self._choose_dtype(kind))
        return groups

    def _choose_dtype(self, kind: Kind) -> torch.dtype:
        """Return a dtype that holds every entry exactly: the common one, or else float32 or float64."""
        if kind == "counter":
            return torch.int64
        dtypes = {_real_dtype(e.dtype) for e in self.entries if e.kind == kind}
        if len(dtypes) == 1:
            return dtypes.pop()
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def _check(self, state_dict: Mapping[str, Tensor]) -> None:
        missing = [e.name for e in self.entries if e.name not in state_dict]
        extra = sorted(set(state_dict) - {e.name for e in self.entries})
        if missing or extra:
            problems = [f"lacks {missing[:3]}"] if missing else []
            problems += [f"has unknown {extra[:3]}"] if extra else []
            raise ValueError(f"the state_dict does not belong to this layout: it {' and '.join(problems)}")
        first: dict[tuple[Kind, int, int], str] = {}
        for e in self.entries:
            tensor = state_dict[e.name]
            if not isinstance(tensor, Tensor):
                raise ValueError(f"'{e.name}' is {add_article(type(tensor).__name__)}, not a tensor")
            if tuple(tensor.shape) != e.shape or tensor.dtype != e.dtype:
                raise ValueError(
                    f"'{e.name}' is {tensor.dtype} of shape {tuple(tensor.shape)}; this layout has {e.dtype} of shape {e.shape}"
                )
            if e.start == e.stop:
                continue
            twin = first.setdefault((e.kind, e.start, e.stop), e.name)
            if twin == e.name:
                continue
            bits = [as_real(t.detach()).contiguous().reshape(-1).view(torch.uint8) for t in (tensor, state_dict[twin])]
            if not torch.equal(bits[0], bits[1].to(bits[0].device)):
                raise ValueError(f"'{e.name}' and '{twin}' are tied in this layout but differ in the state_dict")


@dataclass(frozen=True)
class BoundModule:
    """A module, and its tensors in the order of a layout's vectors: loading and packing skip its `state_dict`.

    `tensors` is None for a module that does more than copy when it is loaded or saved. Then its `state_dict` is used.
    """

    layout: Layout
    module: nn.Module
    tensors: Mapping[Kind, list[Tensor]] | None

    @torch.no_grad()
    def load(self, packed: Packed) -> None:
        """Load vectors into the module."""
        if self.tensors is None or packed.params.device != self._device:
            self.module.load_state_dict(self.layout.unpack(packed))
            return
        for kind, vector in self.layout._list_vectors(packed).items():
            if tensors := self.tensors[kind]:
                torch._foreach_copy_(tensors, _unflatten_dense_tensors(vector, tensors))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def pack(self) -> Packed:
        """Return the module's state as new vectors."""
        if self.tensors is None:
            return self.layout.pack(self.module.state_dict())
        groups = self.layout._groups
        return Packed(*(_join(self.tensors[kind], groups[kind].dtype, self._device) for kind in KINDS))

    @property
    def _device(self) -> torch.device:
        """The device of the module's tensors."""
        tensors = [] if self.tensors is None else [group[0] for group in self.tensors.values() if group]
        return tensors[0].device if tensors else torch.device("cpu")


def _join(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new vector of all numbers."""
    if not tensors:
        return torch.empty(0, dtype=dtype, device=device)
    if len(tensors) > 1 and all(tensor.dtype == dtype and tensor.device == device for tensor in tensors):
        return cast(Tensor, _flatten_dense_tensors(tensors))  # type: ignore[no-untyped-call]  # of one it gives a view
    return torch.cat([as_real(tensor).reshape(-1).to(device, dtype) for tensor in tensors])


def _add_state(module: nn.Module, prefix: str, state: dict[str, Tensor]) -> bool:
    """Add a module's tensors by their names in its `state_dict`; return False if loading or saving does more than copy them."""
    if not _is_plain(type(module)):  # type: ignore[arg-type]
        return False
    if module._state_dict_pre_hooks or module._state_dict_hooks:
        return False
    if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
        return False
    for name, parameter in module._parameters.items():
        if parameter is not None:
            state[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            state[prefix + name] = buffer
    return all(
        _add_state(part, f"{prefix}{name}.", state) for name, part in module._modules.items() if part is not None
    )


@cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """Return whether a class of modules leaves loading and saving to `nn.Module`."""
    names = ("state_dict", "load_state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in names):
        return False
    # BatchNorm's own one only knows old versions.
    return kind._load_from_state_dict in (nn.Module._load_from_state_dict, nn.BatchNorm2d._load_from_state_dict)


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor as a flat vector holds it: a complex number becomes its two parts."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def restore_dtype(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Return part of a flat vector as numbers of this dtype; the inverse of `as_real`."""
    if dtype.is_complex:
        return torch.view_as_complex(vector.to(_real_dtype(dtype), copy=True).reshape(-1, 2))
    return vector.to(dtype)


def allocate_rows(rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix without values; on a GPU each row starts at a multiple of `ALIGNED` entries."""
    width = length if device.type == "cpu" else -(-length // ALIGNED) * ALIGNED
    return torch.empty(rows, width, dtype=dtype, device=device)[:, :length]
