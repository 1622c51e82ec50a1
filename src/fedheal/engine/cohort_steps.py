"""What the terms prepared for the clients of a cohort, stacked at fixed addresses, and the graphs of its steps."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedheal.core.layout import Layout, Packed
from fedheal.engine.graph_inputs import FixedContext, list_tensors, make_shape_key
from fedheal.local.term import Context, NotCapturableError
from fedheal.models.client_rows import ClientRows
from fedheal.models.stacked_layers import stack_module

AnyContext = TypeVar("AnyContext", bound=Context)
Kind = tuple[int, tuple[int, ...], tuple[bool, ...]]  # active clients; batch sizes and last epochs if a term needs them


class FrozenNets:
    """The frozen networks of all clients under one name, such as MOON's previous ones, applied to all batches at once."""

    def __init__(self, module: nn.Module, layout: Layout, rows: ClientRows) -> None:
        low = None if rows.low is None else rows.low.dtype
        self.rows = ClientRows(layout, len(rows.params), rows.params.device, trains=False, low=low)
        self.rows.valid = rows.valid  # the same batches
        self.module = stack_module(module, self.rows).eval()
        self.x: Tensor | None = None
        self.parts: list[Tensor] = []
        self.outputs: dict[str, Tensor] = {}

    def set_batch(self, x: Tensor, parts: list[Tensor], batch_size: int) -> None:
        """Set the batch of a step; `parts` are the clients' examples in it."""
        self.rows.active, self.rows.batch_size = len(parts), batch_size
        self.x, self.parts, self.outputs = x, parts, {}

    def apply(self, client: int, what: str, x: Tensor) -> Tensor:
        """Return the features or the logits of a client's examples."""
        if self.x is None or x is not self.parts[client]:
            raise NotCapturableError("a term applies a frozen network to something else than the batch")
        if what not in self.outputs:
            with torch.no_grad():
                self.outputs[what] = self.module.features(self.x) if what == "features" else self.module(self.x)  # type: ignore[operator]
        size = self.rows.batch_size
        return self.outputs[what][client * size : client * size + len(x)]


@dataclass(frozen=True)
class FrozenNet:
    """One client's network of `FrozenNets`, as a term finds it in `ctx.scratch`."""

    nets: FrozenNets
    client: int

    def features(self, x: Tensor) -> Tensor:
        """Return the features of the client's examples."""
        return self.nets.apply(self.client, "features", x)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of the client's examples."""
        return self.nets.apply(self.client, "logits", x)


class ClientContext(FixedContext):
    """The context that `Term.loss` gets: no module holds this client's parameters alone."""

    VARYING = FixedContext.VARYING | {"module", "layout", "nets", "evaluate", "lr"}


class StackedContext(ClientContext):
    """The context that `Term.grad` gets: its parameters and tensors have a first dimension for clients."""

    @property
    def params(self) -> list[Tensor]:
        """The parameters in training of all active clients, in the order of the flat vector."""
        parameters: list[Tensor] = object.__getattribute__(self, "_rows").list_parameters()
        return parameters


@dataclass
class Prepared:
    """A client that is ready to train: its contexts, the model it starts from, and the networks its terms prepared."""

    contexts: Sequence[Context]
    start: Packed
    nets: dict[tuple[int, str], Packed] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """What must be equal for clients to be stacked: the shapes of what their terms prepared."""
        return tuple(make_shape_key(ctx.scratch) for ctx in self.contexts), tuple(sorted(self.nets))


def take_out_nets(contexts: Sequence[Context], start: Packed) -> Prepared:
    """Return the prepared client; copy the networks in `scratch`, which the next client's `prepare` overwrites."""
    nets = {}
    for k, ctx in enumerate(contexts):
        for name in [name for name, value in ctx.scratch.items() if isinstance(value, nn.Module)]:
            nets[k, name] = ctx.layout.pack(ctx.scratch.pop(name).state_dict())
    return Prepared(contexts, start, nets)


@dataclass
class StackedSteps:
    """The steps for clients whose terms prepared values of the same shapes: stacked values, contexts and graphs."""

    stacked: list[dict[str, Any]]  # of each term: `scratch`, its tensors with a first dimension for clients
    contexts: list[list[ClientContext]]  # of each client, of each term: for `loss`
    nets: dict[tuple[int, str], FrozenNets]
    graphs: dict[Kind, int | torch.cuda.CUDAGraph] = field(default_factory=dict)
    gradient_contexts: dict[int, list[StackedContext]] = field(default_factory=dict)

    @staticmethod
    def create(prepared: Prepared, module: nn.Module, rows: ClientRows) -> "StackedSteps":
        """Return steps for as many clients like this one as there are rows."""
        clients = len(rows.params)
        stacked = [_allocate(ctx.scratch, clients) for ctx in prepared.contexts]
        layout = prepared.contexts[0].layout if prepared.contexts else None
        nets = {key: FrozenNets(module, layout, rows) for key in prepared.nets if layout is not None}
        contexts = [
            [
                _fix(ClientContext, ctx, _select(values, i))
                for ctx, values in zip(prepared.contexts, stacked, strict=True)
            ]
            for i in range(clients)
        ]
        for (k, name), frozen in nets.items():
            for i, row in enumerate(contexts):
                row[k].scratch[name] = FrozenNet(frozen, i)
        return StackedSteps(stacked, contexts, nets)

    def refill(self, prepared: Sequence[Prepared]) -> None:
        """Copy what the clients' terms prepared; tensors that only steps have put into `scratch` start from zero."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for i, client in enumerate(prepared):
            for values, ctx in zip(self.stacked, client.contexts, strict=True):
                targets += [tensor[i] for tensor in list_tensors(values)]
                sources += list_tensors(ctx.scratch)
        if targets:
            torch._foreach_copy_(targets, sources)
        from_steps = [
            tensor
            for row in self.contexts
            for values, ctx in zip(self.stacked, row, strict=True)
            for name, value in ctx.scratch.items()
            if name not in values
            for tensor in list_tensors(value)
        ]
        if from_steps:
            torch._foreach_zero_(from_steps)
        for key, nets in self.nets.items():
            nets.rows.load([client.nets[key] for client in prepared])

    def get_gradient_contexts(self, rows: ClientRows) -> list[StackedContext]:
        """Return each term's context for `grad`."""
        if rows.active not in self.gradient_contexts:
            made = []
            for k, values in enumerate(self.stacked):
                ctx = _fix(StackedContext, self.contexts[0][k], _select(values, slice(rows.active)))
                object.__setattr__(ctx, "_rows", rows)
                made.append(ctx)
            self.gradient_contexts[rows.active] = made
        return self.gradient_contexts[rows.active]


def _fix(kind: type[AnyContext], ctx: Context, scratch: dict[str, Any]) -> AnyContext:
    values = {f.name: object.__getattribute__(ctx, f.name) for f in fields(Context)}
    return kind(**values | {"scratch": scratch})


def _allocate(value: Any, clients: int) -> Any:
    """Return memory for the tensors of so many clients, laid out as in `ClientRows` if shaped like convolution weights."""
    if isinstance(value, Tensor):
        if value.ndim == 4:
            outputs, inputs, height, width = value.shape
            return value.new_zeros(clients, outputs, height, width, inputs).permute(0, 1, 4, 2, 3)
        return value.new_zeros(clients, *value.shape)
    if isinstance(value, Mapping):
        return {name: _allocate(part, clients) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_allocate(part, clients) for part in value]
    return value


def _select(value: Any, index: Any) -> Any:
    """Return one client's tensors, or those of several, as views."""
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, Mapping):
        return {name: _select(part, index) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_select(part, index) for part in value]
    return value
