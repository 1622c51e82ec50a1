"""The client's side: what a Flower client adds so that fair aggregation knows it and can ask more of it.

With a training loop of your own, answer with `reply`: it sends the client's name and domain along, and masks the update where
the server asks for that. `train` and `evaluate` do the whole work with fedheal's own engine, local terms included:

    app = ClientApp()

    @app.train()
    def train(message, context):
        return client.train(message, context, local_training, name)

What a method keeps with a client lives in `context.state`, or in a `folder` that outlives the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from fedheal.aggregate import State, client_share
from fedheal.core.layout import Layout, Packed
from fedheal.data.domains import Split
from fedheal.engine import serial
from fedheal.engine.serial import LocalTraining, Task
from fedheal.flower import messages as wire
from fedheal.flower.client_state import Memory, lost, memory_of, newest, recalled
from fedheal.flower.terms import spelled

log = logging.getLogger("flwr.fedheal")


def name_of(context: Context) -> str:
    """The site's name: `name` in the node's config, else its partition.

    >>> name_of(Context(1, 2, {"partition-id": 3}, RecordDict(), {}))
    'partition-3'
    """
    for key, form in (("name", "{}"), ("partition-id", "partition-{}")):
        if key in context.node_config:
            return form.format(context.node_config[key])
    raise ValueError(
        "the node's config has neither 'name' nor 'partition-id': start it with --node-config 'name=\"...\"'"
    )


def received(message: Message, key: str = "arrays") -> dict[str, Tensor]:
    """The model that the server sent, as a `state_dict`."""
    return wire.tensors(message.content.array_records[key])


def introduce(message: Message, context: Context, name: str | None = None, domain: str | None = None) -> Message:
    """The answer to a roll call, for `@app.query()`: who this is."""
    return Message(_content(name or name_of(context), domain, message, 0, {}), reply_to=message)


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
    """The answer to a training message: the trained `model` (a `state_dict`), and who this is.

    `metrics`: AFL, q-FFL and FedFV need the `loss` of the *received* model. Where the server leaves FPHL to its clients, the
    entries that disagree with this client's history are put back to what was received; the history is kept in
    `context.state`, or under `folder`. `layout` is only needed where the strategy was given the module as `model`.
    """
    name = name or name_of(context)
    content = _content(name, domain, message, num_examples, metrics or {})
    local = {k: v.detach().cpu() for k, v in model.items()}
    told = _told(message)
    if "tau" in told:
        memory, counted = _memory(context, name, folder, told)
        forgotten = lost(memory, name, counted)
        arrays, described = recalled(memory, int(told["round"]), counted)
        before = message.content.array_records[key]
        layout = layout or wire.layout_of(before)
        own = layout.pack(wire.fitted(layout, local))
        masked, kept, state = _masked(layout, wire.packed(layout, before), own, told, arrays, described)
        local = layout.unpack(masked)
        content[wire.KEPT] = wire.bits(kept)
        _remember(memory, told, *_prefixed(state), forgotten)
    content[key] = wire.record(local)
    return Message(content, reply_to=message)


def judged(
    message: Message,
    context: Context,
    num_examples: float,
    metrics: Mapping[str, float],
    *,
    name: str | None = None,
    domain: str | None = None,
) -> Message:
    """The answer to an evaluation message: what was found (a report shows `accuracy`, from 0 to 1), and who this is."""
    return Message(_content(name or name_of(context), domain, message, num_examples, metrics), reply_to=message)


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
    """Train `client` of `local_training` from the received model, with the local_training's terms, and answer.

    Chance derives from (the local_training's seed, the round, the client), as in a simulation: the results are the same.
    """
    client = client or name_of(context)
    told = _told(message)
    memory, counted = _memory(context, client, folder, told)
    forgotten = lost(memory, client, counted)
    arrays, described = recalled(memory, int(told["round"]), counted)
    slots = _slots(arrays, len(local_training.terms))
    shared = wire.grouped(message.content.array_records.get(wire.SHARED), len(local_training.terms))
    model = wire.packed(local_training.layout, message.content.array_records[key])
    asked = replace(
        local_training, rounds=int(told["rounds"]) or local_training.rounds, received_loss="loss" in told["needs"]
    )
    done = serial.train_client(asked, model, shared, Task(client, int(told["round"]), slots))
    local = Packed(
        model.params + torch.as_tensor(done.reply.delta),
        model.buffers if done.reply.buffers is None else torch.as_tensor(done.reply.buffers),
        model.counters if done.reply.counters is None else torch.as_tensor(done.reply.counters),
    )
    content = _content(client, domain, message, done.reply.num_examples, done.reply.metrics)
    kept_arrays = {f"slots.{i}.{n}": t for i, slot in enumerate(done.slots) for n, t in slot.items()}
    kept_described: dict[str, Any] = {}
    if "tau" in told:
        local, kept, state = _masked(local_training.layout, model, local, told, arrays, described)
        content[wire.KEPT] = wire.bits(kept)
        signs, kept_described = _prefixed(state)
        kept_arrays |= signs
    if local_training.terms:
        content.config_records[wire.ABOUT]["terms"] = spelled(local_training.terms)
    if any(done.messages):
        content[wire.MESSAGES] = wire.flattened(done.messages)
    if kept_arrays:
        _remember(memory, told, kept_arrays, kept_described, forgotten)
    content[key] = wire.record_of(local_training.layout, local)
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
    """Judge the received model on the client's own test examples; what a personalised method keeps here has its say."""
    client = client or name_of(context)
    model = wire.packed(local_training.layout, message.content.array_records[key])
    told = _told(message)
    memory, counted = _memory(context, client, folder, told)
    # Nothing is forgotten yet: the server may die before it has saved this round.
    arrays, _ = newest(memory, int(told["round"]) if counted is None else counted)
    slots = _slots(arrays, len(local_training.terms))
    for term, slot in zip(local_training.terms, slots, strict=True):
        model = term.evaluated(model, {}, {client: slot})
    loss, accuracy = serial.evaluate_split(local_training, model, test)
    found = {"eval_loss": loss, "accuracy": accuracy}
    return judged(message, context, len(test), found, name=client, domain=domain)


def _told(message: Message) -> dict[str, Any]:
    """What the strategy says of the round; a stock strategy says less."""
    told: dict[str, Any] = {"round": 1, "rounds": 0, "needs": [], "federation": ""}
    for record in message.content.config_records.values():
        told |= {"round": record["server-round"]} if "server-round" in record else {}
        told |= {key.removeprefix(wire.TOLD): value for key, value in record.items() if key.startswith(wire.TOLD)}
    return told


def _content(
    name: str, domain: str | None, message: Message, num_examples: float, metrics: Mapping[str, float]
) -> RecordDict:
    about: dict[str, Any] = {"client": name, "round": _told(message)["round"]}
    about |= {} if domain is None else {"domain": domain}
    numbers: dict[str, Any] = {"num-examples": num_examples, **metrics}
    return RecordDict({"metrics": MetricRecord(numbers), wire.ABOUT: ConfigRecord(about)})


def _memory(
    context: Context, client: str, folder: str | Path | None, told: Mapping[str, Any]
) -> tuple[Memory, int | None]:
    """Where the client remembers, and which of its rounds counted last, where the server says so."""
    federation, found = str(told["federation"]), told.get("counted")
    memory = memory_of(context, client, folder, federation)
    return memory, None if found is None else wire.counted_of(client, str(found), federation)


def _remember(
    memory: Memory,
    told: Mapping[str, Any],
    arrays: Mapping[str, Tensor],
    described: Mapping[str, Any],
    forgotten: str | None,
) -> None:
    """Keep this for the next round. Only a method that keeps something can have lost it: now is the time to say so."""
    if forgotten:
        log.warning("%s", forgotten)
    memory.save(int(told["round"]), arrays, described)


def _slots(arrays: Mapping[str, Tensor], terms: int) -> tuple[dict[str, Tensor], ...]:
    found: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(terms))
    for key, tensor in arrays.items():
        kind, _, rest = key.partition(".")
        number, _, name = rest.partition(".")
        if kind == "slots" and int(number) < terms:
            found[int(number)][name] = tensor
    return found


def _masked(
    layout: Layout,
    before: Packed,
    local: Packed,
    told: Mapping[str, Any],
    arrays: Mapping[str, Tensor],
    described: Mapping[str, Any],
) -> tuple[Packed, Tensor, State]:
    """The local model with inconsistent entries put back, which entries stayed, and the client's new history."""
    own = {k.removeprefix("signs."): v for k, v in arrays.items() if k.startswith("signs.")}
    state = State.from_arrays(own, described["signs"]) if own else None
    share, after = client_share(local.params - before.params, state, float(told["tau"]), layout=layout)
    return replace(local, params=torch.where(share.kept, local.params, before.params)), share.kept, after


def _prefixed(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    arrays, described = state.to_arrays()
    return {f"signs.{name}": tensor for name, tensor in arrays.items()}, {"signs": described}
