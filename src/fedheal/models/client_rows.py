"""The values of several copies of a module, one row per client.

A row has a client's parameters tensor after tensor, each at a multiple of `ALIGNED` entries. A convolution's weights
have their input channels last, as the kernels read them. The layers of a stacked module (`stacked_layers`) use views of
these rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedheal.core.layout import ALIGNED, Layout, Packed


@dataclass(frozen=True)
class RowPlace:
    """Where a tensor lies: its slice of a flat vector of the layout, where its slice of a row begins, and its shape."""

    start: int
    stop: int
    row_start: int
    shape: tuple[int, ...]

    def view(self, rows: Tensor) -> Tensor:
        """Return this tensor of every row, `[rows, *shape]`."""
        flat = rows[:, self.row_start : self.row_start + self.stop - self.start]
        if len(self.shape) != 4:
            return flat.view(-1, *self.shape)
        outputs, inputs, height, width = self.shape
        return flat.view(-1, outputs, height, width, inputs).permute(0, 1, 4, 2, 3)

    def view_flat(self, rows: Tensor) -> Tensor:
        """Return this tensor of rows in the layout's own order, `[rows, *shape]`."""
        return rows[:, self.start : self.stop].view(len(rows), *self.shape)


class ClientRows:
    """The values of `clients` copies of a module, and which of them train now.

    Attributes:
        params: `[clients, length]`, float32, or float64 in a check.
        gradients: As `params`, if the copies are trained.
        velocity: As `params`, the momentum of SGD, if the copies are trained.
        low: A copy of `params` in lower precision, if the kernels use one.
        buffers: `[clients, buffers]`, as `params`.
        counters: `[clients, counters]`, int64.
        valid: `[clients]`, how many examples of each client's batch count; the rest is padding.
        lr: The learning rate, at a fixed address for captured steps.
        ones: `[clients]`, the factors of the clients' losses in the loss.
        active: How many of the clients, from the first, take part in a step.
        batch_size: The number of examples of a client's batch, padding included.
    """

    def __init__(
        self, layout: Layout, clients: int, device: torch.device, trains: bool = True, low: torch.dtype | None = None
    ) -> None:
        self.layout = layout
        self.places: dict[str, RowPlace] = {}
        seen: dict[int, RowPlace] = {}
        end = 0
        for entry in layout.entries:
            if entry.kind == "param":
                if entry.start not in seen:
                    seen[entry.start] = RowPlace(entry.start, entry.stop, end, entry.shape)
                    end += -(-(entry.stop - entry.start) // ALIGNED) * ALIGNED
                self.places[entry.name] = seen[entry.start]
            else:
                self.places[entry.name] = RowPlace(entry.start, entry.stop, entry.start, entry.shape)
        sizes = layout.sizes()
        dtype = next((entry.dtype for entry in layout.entries if entry.kind == "param"), torch.float32)
        self.params = torch.zeros(clients, end, dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.params) if trains else None
        self.velocity = torch.zeros_like(self.params) if trains else None
        self.low = None if low is None else torch.zeros_like(self.params, dtype=low)
        self.buffers = torch.zeros(clients, sizes.buffers, dtype=dtype, device=device)
        self.counters = torch.zeros(clients, sizes.counters, dtype=torch.int64, device=device)
        self.valid = torch.zeros(clients, dtype=torch.int32, device=device)
        self.lr = torch.zeros((), dtype=dtype, device=device)
        self.active, self.batch_size = clients, 1
        self.ones = torch.ones(clients, dtype=dtype, device=device)
        self._to_rows, self._to_flat = _match_entries(list(seen.values()), sizes.params, end, device)
        self._leaves: dict[tuple[str, int], Tensor] = {}
        self._side_stream: torch.cuda.Stream | None = None
        self._side_inputs: list[Tensor] = []

    def load(self, models: list[Packed]) -> None:
        """Load the first rows from these models."""
        number, distinct = len(models), models[:1] if all(model is models[0] for model in models) else models
        params, buffers, counters = (
            torch.stack([getattr(model, name) for model in distinct])
            if len(distinct) > 1
            else getattr(distinct[0], name)
            for name in ("params", "buffers", "counters")
        )
        params = params.index_select(-1, self._to_rows)
        pairs = [(self.params, params), (self.buffers, buffers), (self.counters, counters)]
        if self.low is not None:
            pairs.append((self.low, params))
        targets = [rows[:number] for rows, _ in pairs]
        torch._foreach_copy_(
            targets, [values.expand_as(rows) for rows, (_, values) in zip(targets, pairs, strict=True)]
        )

    def update_low(self) -> None:
        """Copy the parameters to their copy in lower precision."""
        if self.low is not None:
            self.low.copy_(self.params)

    def unload(self, rows: Tensor) -> Packed:
        """Return the models of these rows, in new memory: matrices with a row for each of them."""
        params, buffers, counters = (
            values.index_select(0, rows) for values in (self.params, self.buffers, self.counters)
        )
        return Packed(params.index_select(1, self._to_flat), buffers, counters)

    def get_parameter(self, name: str) -> Tensor:
        """Return a parameter of the active clients, `[active, *shape]`; its `grad` is a view of `gradients`."""
        key = name, self.active
        if key not in self._leaves:
            leaf = self.places[name].view(self.params[: self.active]).detach()
            if self.gradients is not None:
                leaf.requires_grad_()
                leaf.grad = self.places[name].view(self.gradients[: self.active])
            self._leaves[key] = leaf
        return self._leaves[key]

    def list_parameters(self) -> list[Tensor]:
        """Return the parameters of the active clients in the order of the flat vector."""
        return [self.get_parameter(name) for name, _ in self.layout.sizes().tensors]

    @contextmanager
    def use_side_stream(self, *tensors: Tensor) -> Iterator[None]:
        """Launch the context's kernels, which read these tensors, on a side stream; `take_gradients` waits for them."""
        device = self.params.device
        self._side_stream = self._side_stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side_stream.wait_stream(torch.cuda.current_stream(device))
        # While they are referred to, autograd neither frees them nor adds to them in place.
        self._side_inputs += tensors
        with torch.cuda.stream(self._side_stream):
            yield

    def take_gradients(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, or of the active clients' losses.

        Kernels write them to `gradients` themselves. Gradients of torch are copied there.
        """
        parameters = self.list_parameters()
        factors = self.ones[: self.active] if loss.ndim else None
        try:
            found = torch.autograd.grad(loss, parameters, factors, allow_unused=True)
        finally:
            if self._side_stream is not None and self._side_inputs:
                torch.cuda.current_stream(self.params.device).wait_stream(self._side_stream)
            self._side_inputs.clear()
        pairs = [(p.grad, g) for p, g in zip(parameters, found, strict=True) if g is not None and p.grad is not None]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [gradient for _, gradient in pairs])

    def get_buffer(self, name: str) -> Tensor:
        """Return a buffer or a counter of the active clients, `[active, *shape]`."""
        place = self.places[name]
        rows = self.counters if self.get_kind(name) == "counter" else self.buffers
        return place.view_flat(rows[: self.active])

    def get_kind(self, name: str) -> str:
        """Return whether a name is that of a parameter, a buffer or a counter."""
        return next(entry.kind for entry in self.layout.entries if entry.name == name)

    def find_padding(self, images: int) -> Tensor:
        """Return for `[active, images]` whether it counts; a module may have cut every example into several."""
        per_example = images // self.batch_size
        numbers = torch.arange(images, device=self.valid.device)
        return numbers[None, :] < (self.valid[: self.active] * per_example)[:, None]


def split_models(matrices: Packed) -> list[Packed]:
    """Return the models whose vectors are the rows of these matrices."""
    return [Packed(*vectors) for vectors in zip(matrices.params, matrices.buffers, matrices.counters, strict=True)]


def _match_entries(places: list[RowPlace], length: int, row_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each entry of a row its place in a flat vector, and for each of a flat vector its place in a row.

    Where a row has no number, between tensors, it gets the first one: nothing reads it.
    """
    to_rows, to_flat = (torch.zeros(1, number, dtype=torch.int32) for number in (row_length, length))
    flat_places, row_places = (torch.arange(number, dtype=torch.int32)[None] for number in (length, row_length))
    for place in places:
        place.view(to_rows).copy_(place.view_flat(flat_places))
        place.view_flat(to_flat).copy_(place.view(row_places))
    return to_rows[0].to(device), to_flat[0].to(device)
