"""Draw and try what clients send: Flower replies to the strategy, and updates to the aggregator alone."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from guard import Broken, Limits
from hypothesis import strategies as st
from mutations import EDGE_FLOATS, byte_edits, edit_bytes, texts
from torch import nn

from fedheal import Layout, Updates, methods
from fedheal.core.layout import Packed
from fedheal.flower import FairStrategy, client
from fedheal.flower.messages import TERM_MESSAGES
from flower.local_grid import LocalGrid
from flower.sites import Sites

# What a Flower message can hold: 64-bit integers, floats, text, bytes, and lists of one type.
wire_numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from(EDGE_FLOATS), st.floats())
wire_texts = texts.map(lambda text: text.encode("utf-8", "replace").decode())
wire_values = st.one_of(
    wire_numbers,
    st.booleans(),
    wire_texts,
    st.binary(max_size=8),
    st.lists(st.floats(), max_size=3),
    st.lists(wire_texts, max_size=3),
)
array_values = st.sampled_from((
    "NaN", "infinity", "huge", "tiny", "zeros", "integers", "complex", "half", "double", "fortran", "scalar", "empty", "longer",
    "negative", "text", "objects", "big-endian", "bool", "unsigned",
))  # fmt: skip
labels = st.tuples(wire_texts, st.lists(st.integers(-1, 2**40), max_size=3), wire_texts)
metric_names = st.sampled_from(("num-examples", "loss", "accuracy", "partition-id", "new"))
info_names = st.sampled_from(("client", "domain", "round", "token", "terms", "state_round", "x"))
record_names = st.sampled_from(("arrays", "metrics", "fedheal", "more"))
message_edits = st.sampled_from(("error", "twice", "stranger", "old", "silent", "no content"))
places = st.integers(0, 19)
reply_edits = st.lists(
    st.one_of(
        st.tuples(st.just("bytes"), places, byte_edits),
        st.tuples(st.just("array"), places, array_values),
        st.tuples(st.just("term message"), places, array_values),
        st.tuples(st.just("label"), places, labels),
        st.tuples(st.just("name"), places, wire_texts),
        st.tuples(st.just("metric"), metric_names, wire_numbers),
        st.tuples(st.just("info"), info_names, wire_values),
        st.tuples(st.just("record"), record_names, st.sampled_from(("drop", "double", "many"))),
        st.tuples(st.just("message"), message_edits, wire_texts),
    ),
    min_size=1,
    max_size=3,
)
SITES = ("north", "south", "west")
FIRST, BAD = 10, 1  # the first node, and the site that misbehaves


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))


@dataclass
class Server:
    """A strategy in the middle of a run, with its sites."""

    strategy: FairStrategy
    grid: LocalGrid
    sites: list[str]
    arrays: ArrayRecord  # the model


class FlowerReplies:
    """Replies of one of several sites. Whatever it sends, the round must end, the others count, and the model be finite."""

    name, limits = "Flower replies", Limits()
    aggregated = ("fedheal", "fedheal:variant=released", "afl", "fedavg", "qffl", "fedavg+total-variance")
    trained = ("scaffold", "fedproto")  # by fedheal's own engine: their local terms send messages
    cases = st.tuples(st.one_of(st.sampled_from(aggregated), st.sampled_from(trained)), reply_edits)
    valid: ClassVar[list[Any]] = [(method, []) for method in (*aggregated, *trained)]

    def __init__(self, work: Path) -> None:
        self.folder, self.edits = work / "play" / "federations", list[Any]()
        self.servers: dict[str, Server] = {}
        self.opened = 0

    def open_server(self, method: str) -> Server:
        """Return the server of this method. It continues with the next round, as in a deployment."""
        if method not in self.servers:
            self.opened += 1
            settings = {"folder": self.folder / str(self.opened), "max_empty_rounds": None, "save_seconds": 3600}
            if method in self.trained:
                sites = Sites(method=method)
                strategy = sites.strategy(max_norm="auto", **settings)  # training must not diverge at the other sites
                names, initial, grid = sites.names, sites.initial, sites.grid(self.spoil, first=FIRST)
            else:
                module, names = make_module(), list(SITES)
                strategy, initial = FairStrategy(method, model=module, **settings), ArrayRecord(module.state_dict())
                grid = LocalGrid(make_app(), {i: {"name": name} for i, name in enumerate(SITES, FIRST)}, self.spoil)
            self.servers[method] = Server(strategy, grid, names, strategy.begin(initial))
        return self.servers[method]

    def attempt(self, case: Any) -> str:
        method, self.edits = case
        server = self.open_server(method)
        strategy, grid, number = server.strategy, server.grid, len(server.strategy.history) + 1
        try:
            replies = grid.send_and_receive(strategy.configure_train(number, server.arrays, ConfigRecord(), grid))
            server.arrays, _ = strategy.aggregate_train(number, replies)
            replies = grid.send_and_receive(strategy.configure_evaluate(number, server.arrays, ConfigRecord(), grid))
            strategy.aggregate_evaluate(number, replies)
            return self.check(server)
        except BaseException:
            del self.servers[method]  # the next attempt opens a new one
            raise

    def check(self, server: Server) -> str:
        record = server.strategy.history[-1]
        if not all(np.isfinite(array.numpy()).all() for array in server.arrays.values()):
            raise Broken("the model is not finite")
        counted = {name for name, weight in record.weights.items() if weight > 0}
        good = {name for i, name in enumerate(server.sites) if i != BAD}
        # AFL may give a client no weight. An update that makes the model overflow ends the round for all, with a reason.
        if not good & record.weights.keys() and "unmoved" not in record.report:
            raise Broken(f"only {sorted(counted)} count: {record.report}")
        if record.weights and any(record.weights.values()) and abs(math.fsum(record.weights.values()) - 1) > 1e-9:
            raise Broken(f"the weights sum to {math.fsum(record.weights.values())}")
        if len(record.to_json()) > 20_000:
            raise Broken(f"a line of {len(record.to_json())} characters")
        return "accepted" if server.sites[BAD] in counted and not record.report["skipped"] else "rejected"

    def spoil(self, node: int, reply: Message) -> list[Message]:
        replies = [reply]
        for edit in self.edits if node == FIRST + BAD and reply.has_content() else ():
            replies = [spoilt for original in replies for spoilt in spoil_reply(original, *edit)]
        return replies


def spoil_reply(reply: Message, kind: str, place: Any, value: Any) -> list[Message]:
    """Apply one edit to a reply."""
    if not reply.has_content():
        return [reply]
    content = reply.content
    records = list(content.array_records.values())
    if kind == "term message":
        kind, records = "array", [content.array_records[TERM_MESSAGES]] if TERM_MESSAGES in content else []
    if kind in ("bytes", "array", "label", "name") and records and len(record := records[place % len(records)]):
        name = list(record)[place // len(records) % len(record)]
        if kind == "name":
            record[value] = record.pop(name)
        else:
            record[name] = change_array(record[name], kind, value)
    elif kind == "metric" and content.metric_records:
        next(iter(content.metric_records.values()))[place] = value
    elif kind == "info" and content.config_records:
        next(iter(content.config_records.values()))[place] = value
    elif kind == "record":
        change_record(content, place, value)
    elif kind == "message":
        return change_message(reply, place, value)
    return [reply]


def change_array(array: Array, kind: str, value: Any) -> Array:
    if kind == "bytes":
        return Array(array.dtype, array.shape, array.stype, edit_bytes(array.data, value))
    if kind == "label":
        return Array(value[0], tuple(value[1]), value[2] or array.stype, array.data)
    try:
        numbers = array.numpy()
    except Exception:  # an earlier edit has broken it, and numpy's parser of headers raises nearly anything
        return array
    if value == "objects":
        header = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (16,), }"
        return Array("object", (16,), "numpy.ndarray", header.ljust(127) + b"\n" + b"x" * 128)
    return Array(np.asarray(change_numbers(numbers, value)))


def change_numbers(numbers: Any, kind: str) -> Any:
    filled = {"NaN": math.nan, "infinity": math.inf, "huge": 3e38, "tiny": 1e-45, "zeros": 0.0, "negative": -3e38}
    if kind in filled:
        return np.full(numbers.shape, filled[kind], np.float32)
    casts = {
        "integers": np.int64,
        "complex": np.complex64,
        "half": np.float16,
        "double": np.float64,
        "text": "U3",
        "big-endian": ">f4",
        "bool": np.bool_,
        "unsigned": np.uint16,
    }
    if kind in casts:
        cast = numbers.astype(casts[kind])
        return cast * 1e300 if kind == "double" else cast
    reshaped = {"fortran": np.asfortranarray(numbers), "scalar": np.float32(1), "empty": np.zeros(0, np.float32)}
    return reshaped.get(kind, np.concatenate([numbers.ravel(), numbers.ravel()]))


def change_record(content: RecordDict, key: str, how: str) -> None:
    if how == "drop":
        content.pop(key, None)
    elif how == "double" and key in content:
        content["again"] = content[key]
    else:
        for number in range(70):
            content[f"{key}-{number}"] = MetricRecord({"x": 1})


def change_message(reply: Message, how: str, text: str) -> list[Message]:
    if how in ("error", "no content"):
        failed = Message(Error(code=1 if how == "error" else 2**31, reason=text), reply_to=reply)
        failed.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
        return [failed]
    if how == "stranger":
        reply.metadata.__dict__["_src_node_id"] = 10 if text == "" else 999
    elif how == "old":
        reply.metadata.__dict__["_reply_to_message_id"] = text
    return {"twice": [reply, reply], "silent": []}.get(how, [reply])


def make_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = client.read_model(message)
        steps = {
            name: torch.full_like(value, 0.01) if value.is_floating_point() else 1 for name, value in model.items()
        }
        trained = {
            name: 0.9 * value + steps[name] if value.is_floating_point() else value + 1 for name, value in model.items()
        }
        return client.reply(message, context, trained, 10, {"loss": 1.0, "reach": 0.1, "lr": 0.1}, domain="here")

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return client.reply_evaluation(message, context, 10, {"accuracy": 0.5}, domain="here")

    app.query()(client.introduce)
    return app


values = st.one_of(st.sampled_from(EDGE_FLOATS), st.floats(width=32), st.floats(-1, 1, width=32))
kinds = st.sampled_from(
    ("float32", "float32", "float32", "float64", "float16", "bfloat16", "int64", "complex64", "bool")
)
rows = st.tuples(
    st.sampled_from(("a", "b", "c", "", "\udcff", "x" * 300)),  # a client's id, which may come twice
    st.lists(values, min_size=4, max_size=4),
    values,  # examples
    values,  # loss
)


class CohortUpdates:
    """A cohort's updates, given to an aggregator: extreme numbers, wrong types and shapes, repeated clients."""

    name, limits = "updates", Limits()
    used = (
        "fedheal",
        "fedheal:variant=released",
        "fedavg+fael-exact",
        "afl",
        "qffl",
        "fedfv",
        "fedavg",
        "uniform",
        "fphl",
    )
    policies, lengths = st.sampled_from(("skip", "raise")), st.sampled_from((0, 0, 0, 1, -1))
    cases = st.tuples(st.sampled_from(used), policies, st.lists(rows, max_size=4), kinds, lengths, st.booleans())
    valid: ClassVar[list[Any]] = [
        (
            method,
            "raise",
            [("a", [0.1, -0.2, 0.0, 0.3], 5.0, 1.0), ("b", [0.2, 0.1, 0.1, -0.3], 7.0, 2.0)],
            "float32",
            0,
            False,
        )
        for method in used
    ]

    def __init__(self, work: Path) -> None:
        self.layout = Layout.flat(4)
        self.aggregators = {name: methods.get(name).aggregator for name in self.used}

    def attempt(self, case: Any) -> str:
        from dataclasses import replace

        method, policy, cohort, kind, extra, is_odd = case
        aggregator = replace(self.aggregators[method], on_bad_update=policy)
        model = torch.tensor([0.5, -0.5, 0.0, 1.0])
        before, state = model.clone(), aggregator.init(self.layout)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy's, for a silent overflow
            try:
                updates = make_updates(cohort, getattr(torch, kind), extra, is_odd)
                for _ in range(2):
                    result = aggregator.apply(model, updates, state)
                    self.check(result.model, result.weights)
                    model, state = result.model, result.state
            except (ValueError, TypeError):
                return "rejected"
        if not torch.equal(before, torch.tensor([0.5, -0.5, 0.0, 1.0])):
            raise Broken("the aggregator has changed the model that it received")
        return "accepted"

    def check(self, model: torch.Tensor, weights: torch.Tensor) -> None:
        values = model.params if isinstance(model, Packed) else model
        if not bool(torch.isfinite(values).all()):
            raise Broken("the model is not finite")
        total = math.fsum(weights.tolist())
        if not (total == 0 or abs(total - 1) < 1e-9) or bool((weights < -1e-12).any()):
            raise Broken(f"the weights are {weights.tolist()}")


def make_updates(cohort: Any, dtype: torch.dtype, extra: int, is_odd: bool) -> Updates:
    length = 4 + extra
    deltas = torch.zeros(len(cohort), length, dtype=torch.float64)
    for row, (_, numbers, _, _) in enumerate(cohort):
        deltas[row, : min(4, length)] = torch.tensor(numbers[: min(4, length)], dtype=torch.float64)
    if is_odd:
        return Updates.collect(
            [
                (c, d, n, None, None, {"loss": loss, "reach": 0.1})
                for (c, _, n, loss), d in zip(cohort, deltas.to(dtype), strict=True)
            ],
            on_bad_update="skip",
        )
    metrics = {"loss": [row[3] for row in cohort], "reach": [0.1] * len(cohort), "lr": [0.1] * len(cohort)}
    return Updates([row[0] for row in cohort], deltas.to(dtype), [row[2] for row in cohort], metrics=metrics)
