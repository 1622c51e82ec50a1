"""The interface of a term, one part of a method's local training. A method may have several: their effects add up.

A term may change the model that a client starts from (`prepare`), and add to the loss (`loss`) or the gradients
(`grad`). At the end it may keep values with the client (its slot) and send values to the server (its message, both in
`finish`). It may take the last part of the server step (`absorb`) and choose the model to evaluate (`evaluated`).
Slots, messages and shared values are tensors by name. They are passed in and out: a term itself has no state.
"""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedheal.core.errors import CustomPartError, add_article, check_returned, frame_error, name_if_custom, name_part
from fedheal.core.layout import Layout, Packed, restore_dtype
from fedheal.core.updates import Updates

__all__ = ["Batch", "Context", "ServerContext", "Term", "effective_step"]

Arrays = Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """A training batch as `Term.loss` gets it.

    Attributes:
        x: The normalised images.
        y: The labels.
        logits: The module's outputs.
        ce: The mean cross-entropy.
        features: The module's features, if a term has `features = True`.
        last_epoch: Whether this is the client's last epoch of the round.
    """

    x: Tensor
    y: Tensor
    logits: Tensor
    ce: Tensor
    features: Tensor | None = None
    last_epoch: bool = False


@dataclass(frozen=True)
class Context:
    """A client's round as the client-side hooks of a term get it.

    Attributes:
        client: The client's id.
        round: The number of the round, from 1.
        rounds: The number of rounds of the run.
        lr: The learning rate.
        momentum: The momentum.
        steps: The number of steps that the client takes this round.
        classes: The number of classes.
        module: The module in training.
        layout: The layout of the module.
        received: The global model that the client received.
        slot: What the term kept with this client.
        shared: The term's shared values, as broadcast.
        fit: `fit(start, strength)` trains a second model, with a proximal term of that strength.
        gradient: Returns the flat gradient of the mean loss over the client's data at given parameters.
        evaluate: Returns loss and accuracy (0 to 1) on the client's training examples.
        validate: Returns loss and accuracy (0 to 1) on the client's held-out examples.
        scratch: The term's own values for this client and round.
        nets: Frozen copies of the module by name; reused for other clients.
        public_batches: Returns the public images, normalised, in batches of at most so many; see `Term.public_images`.
    """

    client: str
    round: int
    rounds: int
    lr: float
    momentum: float
    steps: int
    classes: int
    module: nn.Module
    layout: Layout
    received: Packed
    slot: Arrays
    shared: Arrays
    fit: Callable[..., Packed]
    gradient: Callable[[Packed], Tensor]
    evaluate: Callable[[Packed], tuple[float, float]]
    validate: Callable[[Packed], tuple[float, float]]
    scratch: dict[str, Any] = field(default_factory=dict)
    nets: dict[str, nn.Module] = field(default_factory=dict)
    public_batches: Callable[[int], Iterable[Tensor]] = field(default_factory=lambda: lambda size: ())

    def net(self, name: str, model: Packed) -> nn.Module:
        """Return the frozen copy of the module of that name, in evaluation mode, with these values."""
        if name not in self.nets:
            self.nets[name] = copy.deepcopy(self.module).eval().requires_grad_(False)
        self.nets[name].load_state_dict(self.layout.unpack(model))
        return self.nets[name]

    @property
    def effective_step(self) -> float:
        """How far the client's steps move on a constant unit gradient."""
        return effective_step(self.lr, self.momentum, self.steps)

    @property
    def params(self) -> list[Tensor]:
        """The parameters in training, in the order of the flat vector."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return [named[name] for name, _ in self.layout.sizes().tensors]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split a flat vector into tensors of the parameters' shapes; a complex parameter gets its two real parts joined."""
        parts = zip(torch.split(flat, self.layout.sizes().lengths), self.params, strict=True)
        return [(restore_dtype(part, p.dtype) if p.is_complex() else part).view(p.shape) for part, p in parts]


@dataclass(frozen=True)
class ServerContext:
    """A round as `Term.absorb` gets it.

    Attributes:
        round: The number of the round, from 1.
        rounds: The number of rounds of the run.
        clients: The number of clients of the federation.
        updates: The updates of the accepted clients.
        weights: Their weights in the average, float64 `[k]`, sum 1.
        unnormalised_weights: The weights before they were normalised over this cohort.
        layout: The layout of the module.
        slots: What each client seen so far keeps, after this round; empty if that stays on clients (Flower).
    """

    round: int
    rounds: int
    clients: int
    updates: Updates
    weights: Tensor
    unnormalised_weights: Tensor
    layout: Layout
    slots: Mapping[str, Arrays]


class NotCapturableError(Exception):
    """The module or a term cannot be trained in lanes; the message says why."""


# What the hooks return; `loss` and `grad` are not here.
RETURNS: dict[str, tuple[type, ...]] = {
    "init": (Mapping,),
    "broadcast": (Mapping,),
    "prepare": (Packed,),
    "metrics": (Mapping,),
    "finish": (Mapping, Mapping),
    "upload": (Packed,),
    "absorb": (Packed, Mapping),
    "evaluated": (Packed,),
}


def _check_loss(name: str, loss: Any) -> None:
    """Raise `CustomPartError` unless a user's loss is a scalar tensor or None; warn if it has no gradient."""
    part = f"{name_part('term', name)}: loss"
    if loss is None:
        return
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        actual = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else add_article(type(loss).__name__)
        raise CustomPartError(f"{part} must return a scalar tensor, such as losses.mean(), or None, got {actual}")
    if not loss.requires_grad:
        warnings.warn(f"{part} returned a tensor without a gradient: it changes no step", UserWarning, stacklevel=3)


def _keep_arrays(part: str, arrays: Mapping[Any, Any], old: Arrays) -> dict[str, Tensor]:
    """Return what a user's term keeps or sends, apart from memory that training or the server writes to later.

    Args:
        part: The hook, for error messages.
        arrays: What the hook returned.
        old: What the hook was given to keep: these tensors may stay as they are.

    Raises:
        CustomPartError: A name is not a string, or a value not a tensor.
    """
    for key, value in arrays.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            given = f"{add_article(type(value).__name__)} as {key!r}"
            raise CustomPartError(f"{part} must return tensors by name, got {given}: use torch.as_tensor(...)")
    unchanged = {id(tensor) for tensor in old.values()}
    return {key: value if id(value) in unchanged else value.detach().clone() for key, value in arrays.items()}


def _keep_returned(name: str, hook: str, returned: Any, given: Mapping[str, Any]) -> Any:
    """Return what a hook of a user's term returned, with arrays that outlive the round as copies of their own.

    `given`: the arguments of the hook by the names that `Term` has for them.
    """
    part = f"{name_part('term', name)}: {hook}"
    match hook:
        case "init":
            return _keep_arrays(part, returned, {})
        case "broadcast":  # sent at once
            return _keep_arrays(part, returned, returned)
        case "finish":
            slot, message = returned
            return _keep_arrays(part, slot, given["ctx"].slot), _keep_arrays(part, message, {})
        case "absorb":
            model, shared = returned
            return model, _keep_arrays(part, shared, given["shared"])
    return returned


def _frame_hook(name: str, key: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook of a user's own term; wrong values and exceptions are framed by the term's name."""
    names = list(inspect.signature(getattr(Term, key)).parameters)[1:]

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            returned = hook(self, *args, **kwargs)
            if getattr(type(self), key) is call:  # what a subclass gets from `super()` is its own matter
                if key == "loss":
                    _check_loss(name, returned)
                elif key in RETURNS:
                    check_returned(f"{name_part('term', name)}: {key}", returned, *RETURNS[key])
                    return _keep_returned(name, key, returned, dict(zip(names, args, strict=False)) | kwargs)
            return returned
        except (torch.OutOfMemoryError, NotCapturableError, CustomPartError):  # for the engine
            raise
        except (Exception, SystemExit) as error:  # `sys.exit()` would end the run without a word
            # The engine runs a step without a graph if capturing it fails. It does not catch SystemExit.
            is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if is_capturing and isinstance(error, Exception):
                raise
            raise frame_error("term", name, error) from error

    return call


class Term:
    """Base class of local terms. Every hook does nothing by default; override those the method needs."""

    features: ClassVar[bool] = False  # whether it needs a module with `features` and `head`
    clip: float | None = None  # the largest norm of the gradient
    personalised: ClassVar[bool] = False  # whether clients evaluate models of their own
    validates: ClassVar[bool] = False  # whether clients hold examples out of their training data
    sends: ClassVar[tuple[str, ...]] = ()  # the shared values that the server sends to every client
    public_images: int = 0  # how many public images it uses at most: the same for all clients, without labels
    sums_slots: ClassVar[bool] = False  # whether its shared values are sums over slots: a lost slot makes them wrong

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if name := name_if_custom(cls):
            for hook, own in list(vars(cls).items()):
                if isinstance(own, FunctionType) and isinstance(vars(Term).get(hook), FunctionType):
                    setattr(cls, hook, _frame_hook(name, hook, own))

    def init(self, layout: Layout) -> Arrays:
        """Return the shared values before the first round."""
        return {}

    @property
    def needs_plain_server(self) -> str:
        """The reason why this term needs the aggregated model to become the global model; "" if any server optimiser works."""
        return ""

    @property
    def needs_sgd(self) -> str:
        """The reason why clients must train by SGD with this term; "" if any optimiser works."""
        return ""

    def broadcast(self, client: str, shared: Arrays) -> Arrays:
        """Return the shared values that are sent to this client."""
        return {name: shared[name] for name in self.sends if name in shared}

    def local_bytes(self, module: nn.Module, layout: Layout) -> int:
        """Return how many bytes of the model are not sent to a client that has a slot."""
        return 0

    def prepare(self, ctx: Context, start: Packed) -> Packed:
        """Return the model that the client starts from; `start` is what earlier terms returned."""
        return start

    def loss(self, batch: Batch, ctx: Context) -> Tensor | None:
        """Return what is added to the cross-entropy, or None.

        `loss` and `grad` may read `ctx.scratch`, which `prepare` fills, but nothing else of `ctx` that differs between clients
        or rounds. Then one captured step can be replayed for all of them (see `engine.lanes`).
        """
        return None

    def grad(self, ctx: Context) -> None:
        """Change the gradients of `ctx.params`, before momentum."""

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        """Return numbers that the aggregation needs from the client. Called before `finish`."""
        return {}

    def finish(self, ctx: Context, local: Packed) -> tuple[Arrays, Arrays]:
        """Return the client's new slot and its message to the server."""
        return ctx.slot, {}

    def upload(self, ctx: Context, local: Packed) -> Packed:
        """Return the model that the client sends, with local entries replaced by the received ones."""
        return local

    def check_message(self, message: Arrays, shared: Arrays, layout: Layout) -> None:
        """Raise an exception if the server cannot use a client's message: the client is then left out of the round.

        A federation calls it for every message, with the shared values before the round. A user's term without it has its
        `absorb` tried on copies instead. A term that sends other messages than the one it inherits from overrides it.
        """

    def absorb(
        self, before: Packed, aggregated: Packed, messages: Sequence[Arrays], shared: Arrays, ctx: ServerContext
    ) -> tuple[Packed, Arrays]:
        """Return the global model and the new shared values; `aggregated` is the model made from this round's updates.

        Keep nothing on the term itself: a federation may call this several times in a round; see `check_message`.
        """
        return aggregated, shared

    def evaluated(self, model: Packed, shared: Arrays, slots: Mapping[str, Arrays]) -> Packed:
        """Return the model to evaluate for a domain, given the slots of its clients."""
        return model


def effective_step(lr: float, momentum: float, steps: int) -> float:
    """Return how far K steps on a constant unit gradient move, `eta [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho)`.

    Args:
        lr: The learning rate, eta.
        momentum: The momentum, rho.
        steps: The number of steps, K.

    >>> round(effective_step(1.0, 0.9, 10), 1), effective_step(0.5, 0.0, 4)
    (41.4, 2.0)
    """
    rho = momentum
    return lr * (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


def add_to_gradients(ctx: Context, tensors: Sequence[Tensor], strength: float = 1.0) -> None:
    """Add `strength * tensors` to the gradients of the parameters in training."""
    rows = [(p.grad, tensor) for p, tensor in zip(ctx.params, tensors, strict=True) if p.grad is not None]
    if rows:
        grads, addends = (list(column) for column in zip(*rows, strict=True))
        torch._foreach_add_(grads, addends, alpha=strength)


def check_vector(message: Arrays, name: str, length: int) -> None:
    """Raise ValueError unless a message has a vector of floats of this name and length."""
    if name not in message:
        raise ValueError(f"'{name}' is missing")
    vector = message[name]
    if vector.shape != (length,) or not vector.is_floating_point():
        raise ValueError(f"'{name}' must be {length} floats, got {vector.dtype} of shape {tuple(vector.shape)}")


@torch.no_grad()
def add_proximal_gradient(ctx: Context, anchor: Sequence[Tensor], strength: float) -> None:
    """Add `strength * (w - anchor)` to the gradients of the parameters in training."""
    add_to_gradients(ctx, torch._foreach_sub(ctx.params, list(anchor)), strength)
