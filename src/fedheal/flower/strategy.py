"""A Flower strategy around any aggregator of the core.

Flower's messages become `Updates`, `Aggregator.apply` makes the new model, and what survives a round is the same `RunState` as
in a simulation, saved after every round, so that a new run goes on where a dead one stopped. A round reads top to bottom in
`start`. Flower's own loop, which its differential-privacy wrappers run, calls the same four methods and may change the model in
between; nobody says then which round is the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedheal import methods
from fedheal.aggregate import Aggregator
from fedheal.aggregate.reduce import finite
from fedheal.aggregate.server_optimizer import Server, check_plain
from fedheal.core.checks import check_among, check_count, check_share, check_switch
from fedheal.core.layout import Layout, Packed
from fedheal.core.rng import generator
from fedheal.core.state import RunState, TermState
from fedheal.flower import messages as wire
from fedheal.flower.intake import Cohort, Intake
from fedheal.flower.judging import judged
from fedheal.flower.node_registry import Asked, Heard
from fedheal.flower.node_sampling import Attendance, chosen
from fedheal.flower.replies import Admission, Refused, averaged
from fedheal.flower.roll import Roll
from fedheal.flower.round_log import Known, Round
from fedheal.flower.run_folder import Folder, describe_round
from fedheal.flower.server_step import check_placed, stepped
from fedheal.flower.terms import check_terms, spelled
from fedheal.methods import Method
from fedheal.runs.schema import RoundRecord

log = logging.getLogger("flwr.fedheal")

PLACEMENTS = ("server", "client")


class FairStrategy(Strategy):
    """Any aggregator, or a whole method with its local terms, as a Flower strategy.

    `method`: an `Aggregator`, a `Method`, or a method's name such as "fedprox+fedheal:tau=0.4". With local terms the clients
    must train with `fedheal.flower.client`; everything else works with a stock client.

    Evidence and state: `folder` is a run folder, written after every round; with `resume=True` a run goes on from what it
    holds. `data`, `name` and `seed` say how a report shows it; an aggregator of your own is known by its `name` alone.
    `model` is the module (or its `Layout`): without it, float arrays called `...running_mean` or `...running_var` are
    buffers, integers are counters, all else are parameters.

    Who takes part: see `Attendance`. With `roll_call` nodes that are new are asked for their names before a cohort is drawn
    (`fedheal.flower.client.introduce` answers), so that a seed draws the same sites in every run. A round with fewer than
    `min_replies` usable replies leaves the model as it was. A newcomer counts from the round in which it first replies; who
    leaves keeps its history. `clients`: how many there are in all, where a method needs it (SCAFFOLD, FedDyn); else as many as
    have ever taken part or are connected.

    Bad replies are left out, counted and logged, and the run goes on: errors, wrong names or shapes, NaN, a second answer, a
    number of examples that is not positive or above `max_examples`, an update longer than `max_norm`. `budget`: bytes of
    updates held in memory; more goes to a temporary file.

    `train_metrics_aggr_fn`, `evaluate_metrics_aggr_fn`: as in Flower's FedAvg, given the replies that count; without, every
    metric is averaged by examples over the clients that send it.

    `placement="client"`: the clients apply FPHL's mask with this `tau` (see `fedheal.flower.FedHEAL`), and `method` gives the
    weights alone.
    """

    def __init__(
        self,
        method: Aggregator | Method | str,
        *,
        model: nn.Module | Layout | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        data: str = "federation",
        name: str | None = None,
        seed: int = 0,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        wait_seconds: float = 600.0,
        min_replies: int = 1,
        roll_call: bool = False,
        evaluate_every: int = 1,
        clients: int | None = None,
        max_examples: float = 1e9,
        max_norm: float | None = None,
        budget: int | None = None,
        server: Server | None = None,
        placement: str = "server",
        tau: float = 0.3,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None = None,
        evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None = None,
    ) -> None:
        whole = methods.get(method) if isinstance(method, str) else method
        if isinstance(whole, Aggregator):
            whole = Method((), whole, name or "custom")
        check_terms(whole.local)
        check_among("placement", placement, PLACEMENTS)
        if placement == "client":
            check_placed(whole)
        check_share("tau", tau)
        check_count("seed", seed)
        check_switch("roll_call", roll_call)
        check_switch("resume", resume)
        if not isinstance(model, nn.Module | Layout | None):
            raise ValueError(f"model = {model!r}: use the module or its Layout, or leave it out")
        _check_least("min_replies", 1, min_replies)
        _check_least("evaluate_every", 1, evaluate_every)
        _check_least("clients", 1, clients)
        _check_least("budget", 0, budget)
        self.name, self.terms, self.seed = name or whole.name, whole.local, seed
        self.algorithm = whole.spelled or whole.name
        self.aggregator = replace(whole.aggregator, on_bad_update="skip")
        self.server = server or Server()
        for term in self.terms:
            if term.needs_plain_server:
                check_plain(self.server, term.needs_plain_server)
        self.attendance = Attendance(
            fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, min_available_nodes, wait_seconds
        )
        self.admission = Admission(
            arrayrecord_key,
            weighted_by_key,
            max_examples,
            max_norm,
            tuple(sorted(self.aggregator.stage.needs - {"domain"})),  # which a client always has, if only its own name
            tuple(spelled(self.terms)),
            placement == "client",
        )
        self.configrecord_key, self.tau = configrecord_key, tau
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or averaged
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or averaged
        self.roll_call = roll_call
        self.min_replies, self.evaluate_every, self.clients, self.budget = min_replies, evaluate_every, clients, budget
        self.folder = None if folder is None else Folder(Path(folder), resume)
        self.data = data
        self.layout: Layout | None = Layout.of(model) if isinstance(model, nn.Module) else model
        if self.layout is not None:
            wire.check_travels(self.layout)
        self.state: RunState | None = None
        self.history: list[RoundRecord] = []
        self.known = Known()
        self.roll = Roll()
        self._rounds, self._timeout = 0, 3600.0
        self._round: Round | None = None
        self._intake: Intake | None = None
        self._sent: ArrayRecord | None = None

    # What Flower calls, in this order.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Rounds up to `num_rounds`, from where the folder's state stands. `timeout`: seconds a round waits for replies."""
        _check_least("num_rounds", 0, num_rounds)
        self._rounds, self._timeout = num_rounds, timeout
        result = Result()
        arrays = result.arrays = self.begin(initial_arrays)
        self.summary()
        first = self._state.round + 1
        if evaluate_fn and first == 1:
            _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, arrays))
        for number in range(first, num_rounds + 1):
            asked = self.configure_train(number, arrays, train_config or ConfigRecord(), grid)
            arrays, metrics = self.aggregate_train(number, grid.send_and_receive(asked, timeout=timeout))
            result.arrays = arrays
            _keep(result.train_metrics_clientapp, number, metrics)
            judges = self.configure_evaluate(number, arrays, evaluate_config or ConfigRecord(), grid)
            metrics = self.aggregate_evaluate(number, grid.send_and_receive(judges, timeout=timeout) if judges else ())
            _keep(result.evaluate_metrics_clientapp, number, metrics)
            if evaluate_fn:
                _keep(result.evaluate_metrics_serverapp, number, evaluate_fn(number, arrays))
        self.finish()
        return result

    def begin(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Take the initial model, or the folder's newest state where it holds one; the model to go on with."""
        layout = self.layout = self.layout or wire.layout_of(initial_arrays)
        self._intake = Intake(layout, self.admission, self.terms, self.budget)
        self.history, self.known, self.roll = [], Known(), Roll()
        terms = tuple(TermState(term.init(layout), {}) for term in self.terms)
        model = self._sound(initial_arrays)
        self.state = RunState(0, self.seed, model, self.aggregator.init(layout), self.server.init(), terms)
        if self.folder is not None:
            saved = self.folder.open(self._described(), layout)
            if saved is not None:
                self.state, told, self.history = saved
                self.known = Known(**told)
                self.roll = Roll({int(node): client for node, client in self.known.nodes.items()})
                log.info("going on after round %d from %s", self.state.round, self.folder.path)
        self._sent = wire.record_of(layout, self.state.model)
        return self._sent

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask this round's nodes to train."""
        self._check_next(server_round)
        if self.state is None:
            self.begin(arrays)
        self._take(arrays)
        fraction, least = self.attendance.fraction_train, self.attendance.min_train_nodes
        there = self.attendance.awaited(grid, least, self._left()) if fraction else list(grid.get_node_ids())
        if self.roll_call and fraction:
            self._call_roll(grid, there, server_round)
        chance = generator(self.seed, "cohort", server_round)
        nodes = chosen(there, fraction, least, chance, self.roll.names) if fraction else []
        log.info("[round %d/%s] %d nodes train", server_round, self._rounds or "?", len(nodes))
        records: dict[str, Any] = {self.admission.arrays_key: arrays}
        shared = tuple(
            {name: kept.shared[name] for name in term.sends if name in kept.shared}
            for term, kept in zip(self.terms, self._state.terms, strict=True)
        )
        if any(shared):
            records[wire.SHARED] = wire.flattened(shared)
        messages = self._messages(nodes, records, config, server_round, MessageType.TRAIN)
        self._round = Round(
            server_round, self.roll.asked(messages), frozenset(there), sum(_size(m.content) for m in messages)
        )
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord | None]:
        """The new model from the replies that are sound; the old one where none is."""
        now, replies = self._current(server_round), list(replies)
        arrived = self._arrived(replies, now.asked)
        now.clock.lap("train")
        cohort = self._cohort(arrived, now)
        everyone = self.clients or max(len({*self.known.accepted, *cohort.read}), len(now.connected), 1)
        after, out = stepped(
            self.aggregator, self.server, self.terms, self._layout, self._state, cohort, self._rounds, everyone
        )
        taken = now.note(arrived, cohort, out, self.known)
        self.state = replace(
            after,
            round=server_round,
            sent=after.sent + now.size,
            received=after.received + sum(_size(message.content) for message in replies if message.has_content()),
        )
        self._sent = wire.record_of(self._layout, self.state.model)
        now.clock.lap("aggregate")
        counted = set(taken)
        contents = [one.message.content for one in arrived if one.trouble is None and one.client in counted]
        key = self.admission.examples_key
        return self._sent, self.train_metrics_aggr_fn(contents, key) if contents else None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask nodes to judge the model; nobody where it is not this round's turn."""
        self._take(arrays)
        now, state = self._current(server_round), self._state
        due = server_round % self.evaluate_every == 0 or server_round == self._rounds
        if not self.attendance.fraction_evaluate or not due:
            return []
        fraction, least = self.attendance.fraction_evaluate, self.attendance.min_evaluate_nodes
        there = self.attendance.awaited(grid, least, self._left())
        nodes = chosen(there, fraction, least, generator(self.seed, "judges", server_round), self.roll.names)
        model = state.model
        for term, kept in zip(self.terms, state.terms, strict=True):
            model = term.evaluated(model, kept.shared, {})
        record = arrays if model is state.model else wire.record_of(self._layout, model)
        messages = self._messages(
            nodes, {self.admission.arrays_key: record}, config, server_round, MessageType.EVALUATE
        )
        now.judges = self.roll.asked(messages)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What the clients found, each by name; with this the round is over, and written down."""
        now = self._current(server_round)
        contents: list[RecordDict] = []
        for one in self._arrived(list(replies), now.judges):
            try:
                found = judged(one, self.admission)
            except Refused as why:
                log.warning("round %d, evaluation: '%s' is left out: %s", server_round, one.client, why)
                now.report.setdefault("not_judged", {})[one.client] = str(why)
                continue
            contents.append(one.message.content)
            self.known.client_domains[one.client], self.known.tests[one.client] = found.domain, found.num_examples
            now.judged.append(found)
        now.clock.lap("evaluate")
        self._end_round(now)
        return self.evaluate_metrics_aggr_fn(contents, self.admission.examples_key) if contents else None

    def summary(self) -> None:
        """Log what this strategy is."""
        who = self.attendance
        log.info(
            "%s with %.0f %% of the nodes a round: at least %d connected (waiting up to %g s), at least %d usable replies",
            self.name,
            100 * who.fraction_train,
            max(who.min_train_nodes, who.min_available_nodes),
            who.wait_seconds,
            self.min_replies,
        )
        if self.folder is not None:
            log.info("run folder: %s", self.folder.path.resolve())

    def finish(self) -> None:
        """Write the final model and the result; the folder is free again."""
        if self.folder is not None:
            self._conclude(self.folder)
            self.folder.release()
            if not any(record.domains for record in self.history):
                where = self.folder.path
                log.warning("no client sent an 'accuracy': %s has no result.json, and a report cannot show it", where)

    # The parts of these.

    @property
    def _state(self) -> RunState:
        if self.state is None:
            raise RuntimeError("the strategy has no model yet: start, begin or configure_train comes first")
        return self.state

    @property
    def _layout(self) -> Layout:
        assert self.layout is not None
        return self.layout

    def _left(self) -> str:
        """What an end before the last round leaves behind, in words."""
        if self.folder is None:
            return "without a folder nothing is saved"
        return "finished rounds are saved" + (", and resume=True goes on from them" if self._rounds else "")

    def _check_next(self, number: int) -> None:
        """Nobody may do a round twice, nor put a model of their own in the place of a folder's."""
        done = self.history[-1].round if self.history else 0
        if self.state is None and self.folder is not None:
            done = self.folder.done()
        if done and (self.state is None or number != done + 1):
            raise ValueError(
                f"round {number} cannot follow round {done}: Flower's own loop, which its wrappers run, starts at round 1 "
                "with the initial model, so that there a strategy and its folder serve once"
            )

    def _sound(self, arrays: ArrayRecord) -> Packed:
        """The model in these arrays, which must be one to go on from."""
        model = wire.packed(self._layout, arrays)
        if not (finite(model.params) and finite(model.buffers)):
            raise ValueError("the model to go on from holds NaN or infinity: start from a sound one")
        return model

    def _take(self, arrays: ArrayRecord) -> None:
        """Take over the model as the caller has it: a wrapper may add noise to what we gave it."""
        if arrays is not self._sent:
            self.state, self._sent = replace(self._state, model=self._sound(arrays)), arrays

    def _end_round(self, now: Round) -> None:
        """Write down what the round left behind; from here on a resume does not repeat it."""
        record = now.record(self.known.client_domains)
        self.state = replace(self._state, round=now.number)  # also where a wrapper kept the replies to itself
        self.history.append(record)
        log.info("[round %d] %s", now.number, describe_round(record))
        if self.folder is not None:
            self.known.nodes = {str(node): client for node, client in self.roll.names.items()}
            self.folder.save(self._state, record, asdict(self.known))
            if not self._rounds:  # not our own loop: any round may be the last
                self._conclude(self.folder)
        self._round = None

    def _conclude(self, folder: Folder) -> None:
        folder.conclude(self._layout, self._state, self.history, self.known.client_domains, self.known.tests)

    def _current(self, number: int) -> Round:
        if self._round is None or self._round.number != number:
            raise RuntimeError(f"round {number} has not been configured: configure_train comes first")
        return self._round

    def _messages(
        self, nodes: Iterable[int], records: dict[str, Any], config: ConfigRecord, number: int, kind: str
    ) -> list[Message]:
        """One message a node: the records, and the config with the round and what `fedheal.flower.client` is told."""
        told: dict[str, Any] = {"round": number, "rounds": self._rounds, "needs": list(self.admission.needs)}
        told |= {"federation": self.known.federation} | ({"tau": self.tau} if self.admission.masked else {})
        accepted = self.known.accepted
        everyone = wire.counted(accepted, self.known.federation)
        made = []
        for node in nodes:
            # A client is told which of its rounds counted last: it undoes a later one. A node not heard yet may be anyone.
            client = self.roll.names.get(node)
            own = {client: accepted[client]} if client in accepted else {}
            told["counted"] = everyone if client is None else wire.counted(own, self.known.federation)
            ours = {f"{wire.TOLD}{key}": value for key, value in told.items()}
            written = ConfigRecord({**config, "server-round": number, **ours})
            content = RecordDict({**records, self.configrecord_key: written})
            made.append(Message(content, dst_node_id=node, message_type=kind, group_id=str(number)))
        return made

    def _arrived(self, replies: list[Message], asked: Asked) -> list[Heard]:
        """Everyone who replied, told apart and in the order of names; the names are remembered."""
        assert self._round is not None
        found = self.roll.heard(replies, self._round.number, asked, self.known.client_domains, self._round.connected)
        self.roll.learn(found)
        return found

    def _call_roll(self, grid: Grid, there: Iterable[int], number: int) -> None:
        """Ask nodes that are new for their names; who does not answer stays without."""
        new = [node for node in there if node not in self.roll.names]
        messages = self._messages(new, {}, ConfigRecord(), number, MessageType.QUERY)
        replies = grid.send_and_receive(messages, timeout=self._timeout) if messages else ()
        found = self.roll.heard(replies, number, self.roll.asked(messages), self.known.client_domains, frozenset(there))
        self.roll.learn(one for one in found if one.named)

    def _cohort(self, arrived: list[Heard], now: Round) -> Cohort:
        """What can be aggregated of this round's replies."""
        assert self._intake is not None
        sound = [one for one in arrived if one.trouble is None]
        cohort = self._intake.cohort(sound, self._state, self.known.looks)
        # Of clients that are silent or fail nobody can say that they would not have it, nor of all from one of many.
        everyone = {one.node for one in sound} >= now.asked.nodes.keys()
        if cohort.needed and not self.known.accepted and everyone and len(sound) >= min(2, len(now.connected)):
            raise ValueError(f"'{self.name}' needs {cohort.needed}")
        now.replied = sum(not one.message.has_error() for one in arrived)
        few = len(cohort.updates.clients)
        if few >= self.min_replies:
            return cohort
        why = f"only {few} replies of this round can be used, fewer than min_replies = {self.min_replies}"
        return cohort.emptied(why)

    def _described(self) -> dict[str, Any]:
        """What `federation.toml` holds."""
        told = {
            "method": self.name,
            "algorithm": self.algorithm,
            "data": self.data,
            "seed": self.seed,
            "rounds": self._rounds,
        }
        told |= {"min_replies": self.min_replies, "evaluate_every": self.evaluate_every}
        told |= {"roll_call": self.roll_call, "clients": self.clients, "budget": self.budget}
        told |= {"tau": self.tau if self.admission.masked else None}
        settings = asdict(self.attendance) | asdict(self.admission) | {"server": asdict(self.server)}
        return {key: value for key, value in (told | settings).items() if value is not None}


def _keep(kept: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        kept[number] = metrics


def _size(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def _check_least(name: str, least: int, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name} = {value!r}: use a whole number, at least {least}")
