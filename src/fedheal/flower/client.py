"""The client's side: what a Flower client adds so that fair aggregation knows it and can ask more of it.

With a training loop of your own, answer with `reply`. It also sends the client's name and domain, and masks the update
if the server asks for it. `train` and `evaluate` do the whole work with fedheal's own engine, local terms included::

    app = ClientApp()

    @app.train()
    def train(message, context):
        return client.train(message, context, local_training, name)

The state that a method keeps with a client is saved in `context.state`, or in a `folder` that outlives the run.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from fedheal.aggregate import State, client_share
from fedheal.core.deprecated_paths import warn_of_renames
from fedheal.core.errors import add_article
from fedheal.core.layout import Layout, Packed
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.serial import LocalTraining, Task
from fedheal.federation.model_arrays import match_bfloat16
from fedheal.flower import client_state, messages
from fedheal.flower.client_state import ClientStore, SavedState, load_newest, open_store
from fedheal.flower.messages import CLIENT_INFO, RoundInstructions
from fedheal.local.term import Term

__all__ = ["evaluate", "get_client_name", "introduce", "read_model", "reply", "reply_evaluation", "train"]

log = logging.getLogger("flwr.fedheal")

SIGNS = "signs"  # prefix of the client's sign counts in what it saves

RENAMED = {"judged": "reply_evaluation", "name_of": "get_client_name", "received": "read_model"}
__getattr__ = warn_of_renames(__name__, RENAMED)


def get_client_name(context: Context) -> str:
    """Return the site's name: `name` in the node's config, else its partition.

    Args:
        context: The context that Flower gives.

    Raises:
        ValueError: The node's config has neither.

    >>> get_client_name(Context(1, 2, {"partition-id": 3}, RecordDict(), {}))
    'partition-3'
    """
    for key, template in (("name", "{}"), ("partition-id", "partition-{}")):
        if key in context.node_config:
            return template.format(context.node_config[key])
    remedy = "start it with --node-config 'name=\"...\"'"
    raise ValueError(f"neither 'name' nor 'partition-id' is in the node's config: {remedy}")


def read_model(message: Message, key: str = "arrays") -> dict[str, Tensor]:
    """Return the model that the server sent, as a `state_dict`.

    Args:
        message: The message that Flower gives.
        key: The model's record in it.
    """
    return messages.record_to_tensors(message.content.array_records[key])


def introduce(message: Message, context: Context, name: str | None = None, domain: str | None = None) -> Message:
    """Answer a roll call with the client's name, for `@app.query()`.

    Args:
        message: The message that Flower gives.
        context: The context that Flower gives.
        name: The client's name; by default `get_client_name(context)`.
        domain: The client's domain, which a report groups by.

    Returns:
        The answer.
    """
    return Message(_make_content(name or get_client_name(context), domain, message, 0, {}), reply_to=message)


def reply(
    message: Message,
    context: Context,
    model: Mapping[str, Tensor],
    num_examples: float,
    metrics: Mapping[str, float] | None = None,
    *,
    name: str | None = None,
    domain: str | None = None,
    folder: str | Path | None = None,
    layout: Layout | None = None,
    key: str = "arrays",
) -> Message:
    """Answer a training message with the trained model.

    If the server leaves FPHL to its clients, entries that disagree with this client's history are reset to the received ones.

    Args:
        message: The message that Flower gives.
        context: The context that Flower gives.
        model: The trained model, as a `state_dict`.
        num_examples: The number of training examples.
        metrics: Metrics to send. AFL, q-FFL and FedFV need the `loss` of the *received* model, q-FFL also `reach`.
        name: The client's name; by default `get_client_name(context)`.
        domain: The client's domain, which a report groups by.
        folder: Where to save the client's history; by default `context.state`.
        layout: The model's layout; only needed if the strategy was given the module as `model`.
        key: The model's record in the messages.

    Returns:
        The answer.
    """
    name = name or get_client_name(context)
    content = _make_content(name, domain, message, num_examples, metrics or {})
    local = {k: v.detach().cpu() for k, v in model.items()}
    instructions = RoundInstructions.from_message(message)
    if instructions.tau is not None:
        session = _ClientSession.open(context, name, folder, instructions)
        received = message.content.array_records[key]
        layout = layout or messages.infer_layout(received)
        packed = layout.pack(match_bfloat16(layout, local))
        masked = session.mask(content, layout, messages.record_to_model(layout, received), packed)
        local = layout.unpack(masked)
        session.save(content)
    content[key] = messages.tensors_to_record(local)
    return Message(content, reply_to=message)


def reply_evaluation(
    message: Message,
    context: Context,
    num_examples: float,
    metrics: Mapping[str, float],
    *,
    name: str | None = None,
    domain: str | None = None,
) -> Message:
    """Answer an evaluation message.

    Args:
        message: The message that Flower gives.
        context: The context that Flower gives.
        num_examples: The number of test examples.
        metrics: Metrics to send; a report shows `accuracy`, from 0 to 1.
        name: The client's name; by default `get_client_name(context)`.
        domain: The client's domain, which a report groups by.

    Returns:
        The answer.
    """
    name = name or get_client_name(context)
    return Message(_make_content(name, domain, message, num_examples, metrics), reply_to=message)


def train(
    message: Message,
    context: Context,
    local_training: LocalTraining,
    client: str | None = None,
    *,
    domain: str | None = None,
    folder: str | Path | None = None,
    key: str = "arrays",
) -> Message:
    """Train from the received model with fedheal's engine, local terms included, and answer.

    Random numbers derive from (the seed of `local_training`, the round, the client), so results are those of a simulation.

    Args:
        message: The message that Flower gives.
        context: The context that Flower gives.
        local_training: How to train; it holds the client's examples.
        client: The client's name there; by default `get_client_name(context)`.
        domain: The client's domain, which a report groups by.
        folder: Where to save what the method keeps with the client; by default `context.state`.
        key: The model's record in the messages.

    Returns:
        The answer.
    """
    client = client or get_client_name(context)
    instructions = RoundInstructions.from_message(message)
    session = _ClientSession.open(context, client, folder, instructions)
    num_terms = len(local_training.terms)
    shared = messages.record_to_terms(message.content.array_records.get(messages.SHARED), num_terms)
    model = messages.record_to_model(local_training.layout, message.content.array_records[key])
    rounds, received_loss = instructions.rounds or local_training.rounds, "loss" in instructions.needs
    local_training = replace(local_training, rounds=rounds, received_loss=received_loss)
    task = Task(client, instructions.round, session.read_slots(local_training.terms))
    result = serial.train_client(local_training, model, shared, task)
    local = Packed(
        model.params + torch.as_tensor(result.reply.delta),
        model.buffers if result.reply.buffers is None else torch.as_tensor(result.reply.buffers),
        model.counters if result.reply.counters is None else torch.as_tensor(result.reply.counters),
    )
    metrics = {name: float(value) for name, value in result.reply.metrics.items()}
    content = _make_content(client, domain, message, result.reply.num_examples, metrics)
    session.arrays |= {f"slots.{i}.{n}": t for i, slot in enumerate(result.slots) for n, t in slot.items()}
    if instructions.tau is not None:
        local = session.mask(content, local_training.layout, model, local)
    if local_training.terms:
        content.config_records[CLIENT_INFO]["terms"] = messages.describe_terms(local_training.terms)
    if any(result.messages):
        content[messages.TERM_MESSAGES] = messages.terms_to_record(result.messages)
    if session.arrays:
        session.save(content)
    content[key] = messages.model_to_record(local_training.layout, local)
    return Message(content, reply_to=message)


def evaluate(
    message: Message,
    context: Context,
    local_training: LocalTraining,
    test: Split,
    client: str | None = None,
    *,
    domain: str | None = None,
    folder: str | Path | None = None,
    key: str = "arrays",
) -> Message:
    """Evaluate the received model, or the client's personalised one, on the client's own test examples, and answer.

    Args:
        message: The message that Flower gives.
        context: The context that Flower gives.
        local_training: How the client trains; it holds the module and the terms.
        test: The client's test examples.
        client: The client's name; by default `get_client_name(context)`.
        domain: The client's domain, which a report groups by.
        folder: Where `train` saves what the method keeps with the client; by default `context.state`.
        key: The model's record in the messages.

    Returns:
        The answer.
    """
    client = client or get_client_name(context)
    model = messages.record_to_model(local_training.layout, message.content.array_records[key])
    instructions = RoundInstructions.from_message(message)
    store = _open_store(context, client, folder, instructions)
    accepted = instructions.get_accepted_round(client, store.read_token())
    # Nothing is dropped yet: the server may die before it has saved this round.
    saved = load_newest(store, instructions.round if accepted is None else accepted)
    slots = _read_slots(saved, len(local_training.terms))
    for term, slot in zip(local_training.terms, slots, strict=True):
        model = term.evaluated(model, {}, {client: slot})
    loss, accuracy = serial.evaluate_split(local_training, model, test)
    metrics = {"eval_loss": loss, "accuracy": accuracy}
    return reply_evaluation(message, context, len(test), metrics, name=client, domain=domain)


@dataclass
class _ClientSession:
    """A client's saved state in one training round: what it loaded, and what it will save."""

    store: ClientStore
    instructions: RoundInstructions
    accepted: int | None  # the client's last accepted round; None if the server does not say
    warning: str | None  # about a state that is missing
    loaded: SavedState
    arrays: dict[str, Tensor] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, context: Context, client: str, folder: str | Path | None, instructions: RoundInstructions) -> Self:
        store = _open_store(context, client, folder, instructions)
        accepted = instructions.get_accepted_round(client, store.read_token())
        warning = client_state.describe_missing_state(store, client, accepted)
        loaded = client_state.load_before_round(store, instructions.round, accepted)
        return cls(store, instructions, accepted, warning, loaded)

    def read_slots(self, terms: Sequence[Term]) -> tuple[dict[str, Tensor], ...]:
        """Return what the terms kept with this client; a slot from before the server's sums over slots began anew is void."""
        is_void = self.accepted is not None and self.accepted <= self.instructions.restarted
        slots = _read_slots(self.loaded, len(terms))
        return tuple({} if term.sums_slots and is_void else slot for term, slot in zip(terms, slots, strict=True))

    def mask(self, content: RecordDict, layout: Layout, received: Packed, local: Packed) -> Packed:
        """Reset the entries that disagree with the client's history, and put the mask into the reply."""
        assert self.instructions.tau is not None
        arrays, described, _ = self.loaded
        signs = {k.removeprefix(f"{SIGNS}."): v for k, v in arrays.items() if k.startswith(f"{SIGNS}.")}
        history = State.from_arrays(signs, described[SIGNS]) if signs else None
        delta = local.params - received.params
        share, history = client_share(delta, history, float(self.instructions.tau), layout=layout)
        content[messages.MASK] = messages.mask_to_record(share.kept)
        signs, self.described[SIGNS] = history.to_arrays()
        self.arrays |= {f"{SIGNS}.{k}": v for k, v in signs.items()}
        return replace(local, params=torch.where(share.kept, local.params, received.params))

    def save(self, content: RecordDict) -> None:
        """Save for the next round. Put the client's token, and the round whose state it continued from, into the reply.

        Only a method that saves something can have lost it, so the warning comes here.
        """
        if self.warning:
            log.warning("%s", self.warning)
        if not self.store.read_token():
            self.store.write_token(secrets.token_hex(16))
        info = content.config_records[CLIENT_INFO]
        info["token"], info["state_round"] = self.store.read_token(), self.loaded.round
        self.store.save(self.instructions.round, self.arrays, self.described)


def _open_store(
    context: Context, client: str, folder: str | Path | None, instructions: RoundInstructions
) -> ClientStore:
    """Return where the client saves its state. In a folder, `~` is the user's home."""
    folder = None if folder is None else Path(folder).expanduser()
    return open_store(context, client, folder, instructions.federation)


def _make_content(
    name: str, domain: str | None, message: Message, num_examples: float, metrics: Mapping[str, float]
) -> RecordDict:
    info: dict[str, Any] = {"client": name, "round": RoundInstructions.from_message(message).round}
    info |= {} if domain is None else {"domain": domain}
    numbers: dict[str, Any] = {"num-examples": _to_number("num_examples", num_examples, "send a number")}
    numbers |= {key: _to_metric(f"metrics[{key!r}]", value) for key, value in metrics.items()}
    return RecordDict({"metrics": MetricRecord(numbers), CLIENT_INFO: ConfigRecord(info)})


def _to_metric(name: str, value: object) -> Any:
    """Return a metric as Flower takes it: a Python number, or a list of Python numbers of one type."""
    value = _unwrap(value)
    if not isinstance(value, list | tuple):
        return _to_number(name, value, "send a number or a list of numbers")
    numbers = [_to_number(f"an item of {name}", item, "send numbers") for item in value]
    return numbers if all(isinstance(number, int) for number in numbers) else [float(number) for number in numbers]


def _to_number(name: str, value: object, remedy: str) -> float:
    """Return a value as a Python number. Raise TypeError if it is none."""
    value = _unwrap(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {add_article(type(value).__name__)}: {remedy}")
    return int(value) if isinstance(value, Integral) else float(value)


def _unwrap(value: object) -> Any:
    """Return the Python number or list in a scalar or array of numpy or torch; another value as it is."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 else value.tolist()
    return value


def _read_slots(saved: SavedState, num_terms: int) -> tuple[dict[str, Tensor], ...]:
    slots = {key.removeprefix("slots."): tensor for key, tensor in saved[0].items() if key.startswith("slots.")}
    return messages.split_by_term(slots, num_terms)
