"""A Flower strategy around any aggregator.

Flower's messages become `Updates`, and the server step that simulations use makes the new model. The same `RunState` is
saved after every round, so that a new run can resume a dead one. `start` is the loop. Flower's differential-privacy
wrappers run Flower's own loop, which calls the same four methods. It may change the model in between, and does not say
which round is the last.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import flwr
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedheal.aggregate import Aggregator
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.checks import check_count, check_type
from fedheal.core.errors import name_callable
from fedheal.core.layout import Layout
from fedheal.core.parameter import Parameter
from fedheal.core.rng import generator
from fedheal.core.state import RunState
from fedheal.federation.cohort import Cohort
from fedheal.federation.message_checks import SeenMessages
from fedheal.federation.node_sampling import NotEnoughNodes, sample_nodes, wait_for_nodes
from fedheal.federation.replies import ReplyRequirements
from fedheal.federation.round_history import RoundHistory
from fedheal.federation.round_server import RoundServer
from fedheal.federation.run_folder import Framework, RunFolder, check_folder_settings
from fedheal.flower import messages as wire
from fedheal.flower.masking import make_masked_mean
from fedheal.flower.messages import SHARED, RoundInstructions, count_bytes, model_to_record, record_to_model
from fedheal.flower.node_registry import NodeRegistry, OpenRequests, ReceivedReply, describe_lost_clients
from fedheal.flower.reply_reader import aggregate_metrics, average_metrics, read_evaluate_reply, read_train_reply
from fedheal.flower.reply_size import ReplyLimits
from fedheal.flower.round_log import FederationState, NodeRound, restore_federation
from fedheal.flower.settings import (
    RoundSettings,
    check_configs,
    check_evaluate_function,
    check_metrics_function,
    check_record_keys,
    resolve_layout,
    resolve_method,
)
from fedheal.flower.silent_nodes import SilentNodes
from fedheal.methods import Method
from fedheal.methods.server_step import ServerStep, resolve_server
from fedheal.runs.schema import RoundRecord

log = logging.getLogger("flwr.fedheal")
FLOWER = Framework("flower", {"flwr": flwr.__version__}, restore_federation, log)

TIMEOUT = 1800.0  # seconds a round waits for replies

MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]
CentralEvaluation = Callable[[int, ArrayRecord], MetricRecord | None]


class FairStrategy(Strategy):
    """Any aggregator, or a whole method with its local terms, as a Flower strategy.

    A client whose reply is bad is skipped, counted and logged, and the run continues. A reply is bad if it is an error
    or a second reply, or if its names or shapes are wrong. So is a reply with NaN, with a number of examples that is
    not positive or above `max_examples`, with an update longer than `max_norm`, or of a training that has diverged. A
    newcomer counts from its first reply. A client that leaves keeps its history.

    Args:
        method: An `Aggregator`, a `Method`, or a name such as "fedprox+fedheal:tau=0.4"; local terms need our client.
        model: The module, or its `Layout`. Without it, torch's names tell float buffers from parameters.
        folder: The run folder, written after every round.
        save_seconds: The least number of seconds between two checkpoints in `folder`. A resume repeats the rounds since
            the last one. With 0 every round has a checkpoint, as always if clients keep a state of their own.
        resume: Whether to continue the run in `folder`.
        data, name: The names of the data and of the method in reports. An aggregator of your own is identified by its name.
        seed: The seed of the cohorts.
        fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, min_available_nodes: As in Flower.
        wait_seconds: How long to wait for enough nodes that answer before `NotEnoughNodes` is raised.
        min_replies: A round with fewer usable replies leaves the model as it was.
        max_empty_rounds: The run ends with an error after so many rounds in a row that leave the model as it was. None: never.
        roll_call: Whether to ask new nodes for their names first, so that a seed draws the same sites in every run.
        evaluate_every: Evaluate every so many rounds, and in the last.
        clients: How many clients there are (for SCAFFOLD, FedDyn); by default all that ever took part or are connected.
        max_examples: The largest number of examples that a reply may give.
        max_norm: The largest norm of an update; "auto" is ten times the round's median. Without a number, updates of
            diverged training are skipped.
        max_reply_bytes: The most bytes of arrays in a reply; by default derived from the model's size.
        budget: Bytes of updates held in memory; more goes to a temporary file.
        server: The server optimiser, such as `Server("adam")`; by default that of the method, as in "fedheal+fedadam".
        placement, tau: "client" if clients mask with threshold `tau` (0.3 by default; see `FedHEAL`) and `method` only
            gives weights. A method's own tau is in its name.
        weighted_by_key, arrayrecord_key, configrecord_key: As in Flower.
        train_metrics_aggr_fn, evaluate_metrics_aggr_fn: As in Flower, for replies that count; by default means by examples.

    Raises:
        ValueError: A setting is out of range, or the method does not work in a federation.
    """

    def __init__(
        self, method: Aggregator | Method | str, *, model: nn.Module | Layout | None = None,
        folder: str | Path | None = None, resume: bool = False, save_seconds: float = 0.0,
        data: str = "federation", name: str | None = None, seed: int = 0,
        fraction_train: float = 1.0, fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2, min_evaluate_nodes: int = 2, min_available_nodes: int = 2,
        wait_seconds: float = 600.0, min_replies: int = 1, max_empty_rounds: int | None = 3, roll_call: bool = False,
        evaluate_every: int = 1, clients: int | None = None,
        max_examples: float = 1e9, max_norm: float | str | None = None, max_reply_bytes: int | None = None,
        budget: int | None = None,
        server: Server | None = None, placement: str = "server", tau: float | None = None,
        weighted_by_key: str = "num-examples", arrayrecord_key: str = "arrays", configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregation | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregation | None = None,
    ) -> None:  # fmt: skip
        arguments = dict(locals())
        check_folder_settings(folder, resume)
        self.settings = RoundSettings(**{field.name: arguments[field.name] for field in fields(RoundSettings)})
        self.method = resolve_method(method, name, self.settings.clients_mask)
        self.server = resolve_server(self.method, server)
        check_record_keys(weighted_by_key, arrayrecord_key, configrecord_key)
        check_metrics_function("train_metrics_aggr_fn", train_metrics_aggr_fn)
        check_metrics_function("evaluate_metrics_aggr_fn", evaluate_metrics_aggr_fn)
        self.name, self.terms = name or self.method.name, self.method.local
        self.requirements = ReplyRequirements(
            arrays_key=arrayrecord_key,
            examples_key=weighted_by_key,
            max_examples=max_examples,
            max_norm=max_norm,
            max_reply_bytes=max_reply_bytes,
            # Every client has a domain, if only its own name.
            needs=tuple(sorted(self.method.aggregator.stage.needs - {"domain"})),
            terms=tuple(wire.describe_terms(self.terms)),
            masked=self.settings.clients_mask,
        )
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or average_metrics
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or average_metrics
        self.folder = None if folder is None else RunFolder(Path(folder), resume, FLOWER, save_seconds)
        self.layout = resolve_layout(model)
        self._num_rounds, self._timeout = 0, TIMEOUT
        self._reset()

    def _reset(self) -> None:
        """Forget all rounds."""
        self.rounds = RoundServer[FederationState, ReceivedReply, NodeRound](
            name=self.name,
            aggregator=self.method.aggregator,
            server=self.server,
            terms=self.terms,
            settings=self.settings,
            requirements=self.requirements,
            read=read_train_reply,
            clients=FederationState(),
            log=log,
            folder=self.folder,
            num_rounds=self._num_rounds,
        )
        self.registry = NodeRegistry()
        self._sent: ArrayRecord | None = None
        self._first_round = 1  # of this run
        # Not in the checkpoint: after a resume a silent node is asked again, which costs one timeout if it is still silent.
        self._silent = SilentNodes()

    @property
    def state(self) -> RunState | None:
        """The run's state; None before the first round."""
        return self.rounds.state if self.rounds.has_begun else None

    @property
    def history(self) -> Sequence[RoundRecord]:
        """The records of all rounds."""
        return self.rounds.history

    @property
    def federation(self) -> FederationState:
        """What the server remembers about its clients."""
        return self.rounds.clients

    # The methods that Flower calls, in this order.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = TIMEOUT,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: CentralEvaluation | None = None,
    ) -> Result:
        """Run rounds up to `num_rounds`, from the folder's checkpoint if it holds one.

        Args:
            grid: The connection to the nodes.
            initial_arrays: The initial model.
            num_rounds: The number of the last round.
            timeout: How many seconds a round waits for replies, once for training and once for evaluation. A node that does
                not reply is not asked again until it answers a short query.
            train_config: Sent with every training message.
            evaluate_config: Sent with every evaluation message.
            evaluate_fn: Evaluates the model on the server, called with the round and the model.

        Returns:
            Flower's result: the final model and the metrics of each round.

        Raises:
            NotEnoughNodes: Too few nodes are connected and answer.
            TooManyEmptyRounds: The model stayed as it was in `max_empty_rounds` rounds in a row.
            TypeError, ValueError: An argument, or what `evaluate_fn` returns, cannot be used.
        """
        _check_grid(grid)
        check_type("initial_arrays", initial_arrays, ArrayRecord, "give ArrayRecord(model.state_dict())")
        check_configs(train_config, evaluate_config)
        check_evaluate_function(evaluate_fn)
        check_count("num_rounds", num_rounds)
        Parameter("timeout", 1.0, gt=0).check(timeout)
        self._num_rounds, self._timeout = num_rounds, timeout
        result = Result()
        arrays = result.arrays = self.begin(initial_arrays)
        if self.folder is not None:  # where every record is JSON
            self.rounds.history = RoundHistory(self.rounds.history)
        self.summary()
        first = self.rounds.state.round + 1
        if first == 1:
            _store(result.evaluate_metrics_serverapp, 0, _evaluate(evaluate_fn, 0, arrays))
        try:
            for number in range(first, num_rounds + 1):
                messages = self.configure_train(number, arrays, train_config or ConfigRecord(), grid)
                arrays, metrics = self.aggregate_train(number, grid.send_and_receive(messages, timeout=timeout))
                result.arrays = arrays
                _store(result.train_metrics_clientapp, number, metrics)
                messages = self.configure_evaluate(number, arrays, evaluate_config or ConfigRecord(), grid)
                replies = grid.send_and_receive(messages, timeout=timeout) if messages else ()
                _store(result.evaluate_metrics_clientapp, number, self.aggregate_evaluate(number, replies))
                _store(result.evaluate_metrics_serverapp, number, _evaluate(evaluate_fn, number, arrays))
        except BaseException:
            self._save_after_error()
            raise
        self.finish()
        return result

    def begin(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the model of the folder's newest checkpoint, or else the initial one, and prepare the first round."""
        self._reset()
        layout = self.layout = self.layout or wire.infer_layout(initial_arrays)
        self.rounds.begin(layout, record_to_model(layout, initial_arrays), self._describe_settings())
        state = self.rounds.state
        limits = ReplyLimits.from_layout(layout, len(self.terms), self.requirements.max_reply_bytes)
        self.registry = NodeRegistry({int(node): client for node, client in self.federation.nodes.items()}, limits)
        self._sent, self._first_round = model_to_record(layout, state.model), state.round + 1
        return self._sent

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Draw this round's nodes and return the messages that ask them to train."""
        self._check_round_order(server_round)
        if not self.rounds.has_begun:
            self.begin(arrays)
        self._set_model(arrays)
        fraction, min_nodes = self.settings.fraction_train, self.settings.min_train_nodes
        nodes: list[int] = []
        responsive: list[int] = []
        if fraction:
            responsive = self._wait_for_nodes(grid, min_nodes, MessageType.TRAIN, server_round)
            self.registry.name_partitions(grid, responsive)
            if self.settings.roll_call:
                responsive = self._call_roll(grid, responsive, server_round)
            nodes = self._sample(responsive, fraction, min_nodes, "cohort", server_round)
        connected = frozenset(grid.get_node_ids())
        if server_round == self._first_round and (lost := describe_lost_clients(self.federation.accepted, connected)):
            log.warning("%s", lost)
        log.info("[round %d/%s] %d nodes train", server_round, self._num_rounds or "?", len(nodes))
        records: dict[str, Any] = {self.requirements.arrays_key: arrays}
        shared = [
            {name: kept.shared[name] for name in term.sends if name in kept.shared}
            for term, kept in zip(self.terms, self.rounds.state.terms, strict=True)
        ]
        if any(shared):
            records[SHARED] = wire.terms_to_record(shared)
        messages = self._make_messages(nodes, records, config, server_round, MessageType.TRAIN)
        requests = self.registry.track_requests(messages)
        current = NodeRound(
            number=server_round,
            asked=requests.nodes.keys(),
            num_connected=len(connected),
            notes=self._make_notes(server_round, responsive),
            requests=requests,
            connected=connected,
            bytes_sent=sum(count_bytes(m.content) for m in messages),
        )
        self.rounds.open_round(current)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord | None]:
        """Return the new model from the valid replies, or the old one if there is none, and the clients' metrics."""
        current, messages = self._get_round(server_round), list(replies)
        received = self._identify(messages, current.requests, server_round, current.connected)
        current.clock.end_phase("train")
        cohort = self._build_cohort([reply for reply in received if reply.problem is None], current)
        num_clients = self._count_clients(current, cohort.replies)
        lost = self.federation.find_lost_states(received)
        outcome = self.rounds.take_step(
            self._make_step(cohort), cohort, num_clients, self.federation.select_valid(lost)
        )
        current.record_training(received, cohort, outcome, self.federation)
        current.log_problems(log)
        received_bytes = sum(count_bytes(m.content) for m in messages if m.has_content())
        self.rounds.count_bytes(current.bytes_sent, received_bytes)
        self._sent = model_to_record(self.rounds.layout, self.rounds.state.model)
        current.clock.end_phase("aggregate")
        accepted = set(outcome.accepted)
        contents = [r.message.content for r in received if r.problem is None and r.client in accepted]
        return self._sent, self._aggregate_metrics("train_metrics_aggr_fn", contents, server_round)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages that ask nodes to evaluate the model; none in a round without evaluation."""
        self._set_model(arrays)
        current, state = self._get_round(server_round), self.rounds.state
        is_due = server_round % self.settings.evaluate_every == 0 or server_round == self._num_rounds
        fraction, min_nodes = self.settings.fraction_evaluate, self.settings.min_evaluate_nodes
        if not fraction or not is_due:
            return []
        try:
            responsive = self._wait_for_nodes(grid, min_nodes, MessageType.EVALUATE, server_round)
        except NotEnoughNodes as error:  # the round is trained, and a resume need not repeat it
            current.report["ended"] = str(error).partition(";")[0]
            self._end_round()
            raise
        nodes = self._sample(responsive, fraction, min_nodes, "judges", server_round)
        model = state.model
        for term, kept in zip(self.terms, state.terms, strict=True):
            model = term.evaluated(model, kept.shared, {})
        record = arrays if model is state.model else model_to_record(self.rounds.layout, model)
        records = {self.requirements.arrays_key: record}
        messages = self._make_messages(nodes, records, config, server_round, MessageType.EVALUATE)
        current.evaluation_requests = self.registry.track_requests(messages)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the clients' accuracies, end and save the round, and return the clients' metrics."""
        current = self._get_round(server_round)
        received = self._identify(replies, current.evaluation_requests, server_round, current.connected)
        evaluations, problems = self.rounds.read_evaluations(
            received, lambda reply: read_evaluate_reply(reply, self.requirements)
        )
        self.rounds.record_evaluations(evaluations, problems, _find_silent(current.evaluation_requests, received))
        self._end_round()
        clients = {evaluation.client for evaluation in evaluations}
        contents = [r.message.content for r in received if r.problem is None and r.client in clients]
        return self._aggregate_metrics("evaluate_metrics_aggr_fn", contents, server_round)

    def _aggregate_metrics(self, name: str, contents: list[RecordDict], number: int) -> MetricRecord | None:
        return aggregate_metrics(name, getattr(self, name), contents, self.requirements.examples_key, number)

    def summary(self) -> None:
        """Log the strategy's settings."""
        settings = self.settings
        nodes = f"at least {max(settings.min_train_nodes, settings.min_available_nodes)} connected"
        nodes += f" (waiting up to {settings.wait_seconds:g} s), at least {settings.min_replies} usable replies"
        log.info("%s with %.0f %% of the nodes a round: %s", self.name, 100 * settings.fraction_train, nodes)
        log.info(
            "a round waits up to timeout = %g s for replies; a late node is not asked again until it answers a query,"
            " and rests if it is late again",
            self._timeout,
        )
        if self.folder is not None:
            log.info("run folder: %s", self.folder.path.resolve())

    def finish(self) -> None:
        """Write the final model and the result, and release the folder."""
        self.rounds.finish()

    def _end_round(self) -> None:
        """Record and save the round."""
        self.federation.nodes = {str(node): client for node, client in self.registry.names.items()}
        # Clients keep a state for the server's last two checkpoints, not for older ones.
        self.rounds.end_round(is_due=bool(self.federation.tokens))

    def _save_after_error(self) -> None:
        try:
            if self.folder is not None:
                self.folder.flush()
        except OSError as error:  # beside the error that ends the run
            log.error("%s", error)

    def _get_round(self, number: int) -> NodeRound:
        current = self.rounds.find_round(number)
        if current is None:
            raise RuntimeError(f"round {number} has not been configured: call configure_train first")
        return current

    def _check_round_order(self, number: int) -> None:
        """Reject a repeated round, and a caller's model in the place of a folder's."""
        is_new = not self.rounds.has_begun
        last = 0 if is_new else self.rounds.state.round
        if is_new and self.folder is not None:
            last = self.folder.count_rounds()
        if last and (is_new or number != last + 1):
            loop = "Flower's own loop, which its wrappers run, starts at round 1 with the initial model"
            advice = "so use a new strategy and a new folder for it"
            raise ValueError(f"round {number} cannot follow round {last}: {loop}, {advice}")

    def _set_model(self, arrays: ArrayRecord) -> None:
        if arrays is not self._sent:  # a wrapper may add noise to the model we returned
            self.rounds.set_model(record_to_model(self.rounds.layout, arrays))
            self._sent = arrays

    def _sample(self, connected: list[int], fraction: float, min_nodes: int, purpose: str, number: int) -> list[int]:
        rng = generator(self.settings.seed, purpose, number)
        return sample_nodes(connected, fraction, min_nodes, rng, self.registry.partition_names | self.registry.names)

    def _call_roll(self, grid: Grid, nodes: list[int], number: int) -> list[int]:
        """Ask new nodes for their names, and return the nodes that are not silent."""
        new = [node for node in nodes if node not in self.registry.names]
        messages = self._make_messages(new, {}, ConfigRecord(), number, MessageType.QUERY)
        replies = grid.send_and_receive(messages, timeout=self._timeout) if messages else ()
        requests, connected = self.registry.track_requests(messages), frozenset(grid.get_node_ids())
        self._identify(replies, requests, number, connected, is_roll_call=True)
        return [node for node in nodes if node not in self._silent.nodes]

    def _make_messages(
        self, nodes: Iterable[int], records: dict[str, Any], config: ConfigRecord, number: int, kind: str
    ) -> list[Message]:
        needs, federation = self.requirements.needs, self.federation.federation
        instructions = RoundInstructions(
            number, self._num_rounds, needs, federation, self.settings.tau, restarted=self.federation.restarted
        )
        accepted, messages = self.federation.accepted, []
        # A node without a name may be any client that keeps a state. Without its token it learns nothing about the others.
        tokens = self.federation.tokens
        for_unknown = instructions.with_accepted_rounds({c: n for c, n in accepted.items() if c in tokens}, tokens)
        for node in nodes:
            client, own = self.registry.names.get(node), for_unknown
            if client is not None:  # it is told its last accepted round, and discards what it saved in later ones
                own = instructions.with_accepted_rounds({client: accepted[client]} if client in accepted else {})
            full_config = ConfigRecord({**config, "server-round": number, **own.to_config()})
            content = RecordDict({**records, self.configrecord_key: full_config})
            messages.append(Message(content, dst_node_id=node, message_type=kind, group_id=str(number)))
        return messages

    def _identify(
        self,
        replies: Iterable[Message],
        requests: OpenRequests,
        number: int,
        connected: frozenset[int],
        is_roll_call: bool = False,
    ) -> list[ReceivedReply]:
        """Identify the senders, in the order of names, and remember them and who is silent."""
        domains = self.federation.client_domains
        received = self.registry.identify_replies(replies, number, requests, domains, connected - self._silent.nodes)
        self.registry.remember([r for r in received if r.is_named or not is_roll_call], connected)
        kind = requests.metadata[0].message_type if requests.metadata else ""
        self._silent.record_replies(requests.nodes, {reply.node for reply in received}, kind, number)
        return received

    def _build_cohort(self, valid: list[ReceivedReply], current: NodeRound) -> Cohort:
        # A node without a key may come back under ever new names: of clients that never counted only those connected matter.
        self.federation.forget_digests({self.registry.get_name(node) for node in current.connected})
        seen = SeenMessages(self.federation.message_digests, self.federation.used_digest)
        return self.rounds.build_cohort(valid, seen, partial(self._count_clients, current))

    def _count_clients(self, current: NodeRound, cohort: Iterable[str]) -> int:
        """Return the number of the federation's clients, given those of a cohort."""
        known = {*self.federation.accepted, *cohort}
        return self.settings.clients or max(len(known), len(current.connected), 1)

    def _make_step(self, cohort: Cohort) -> ServerStep:
        step = self.rounds.make_step()
        masks = {client: reply.mask for client, reply in cohort.replies.items() if reply.mask is not None}
        return replace(step, aggregator=replace(step.aggregator, reduce=make_masked_mean(masks))) if masks else step

    def _wait_for_nodes(self, grid: Grid, min_nodes: int, kind: str, number: int) -> list[int]:
        advice = "finished rounds are saved" + ("; resume=True continues from them" if self._num_rounds else "")
        advice = "without a folder nothing is saved" if self.folder is None else advice
        needed = max(1, min_nodes, self.settings.min_available_nodes)
        nodes = wait_for_nodes(lambda: self._list_nodes(grid), needed, self.settings.wait_seconds, advice)
        return self._silent.leave_out_resting(nodes, kind, number, needed)

    def _list_nodes(self, grid: Grid) -> list[int]:
        def make_queries(nodes: Iterable[int]) -> list[Message]:
            return self._make_messages(nodes, {}, ConfigRecord(), self.rounds.state.round + 1, MessageType.QUERY)

        return self._silent.list_responsive(grid, make_queries)

    def _make_notes(self, number: int, responsive: list[int]) -> dict[str, Any]:
        """Note a resume, and the clients that counted before and cannot be asked now."""
        is_resumed = number == self._first_round and self.folder is not None and self.folder.is_resumed
        names = {self.registry.names.get(node) for node in responsive}
        # A node without a name may be any of them.
        absent = [] if None in names or not names else sorted(self.federation.accepted.keys() - names)
        return ({"resumed": True} if is_resumed else {}) | ({"absent": absent} if absent else {})

    def _describe_settings(self) -> dict[str, Any]:
        """Return what `federation.toml` holds."""
        values = {"method": self.name, "algorithm": self.method.full_name, "rounds": self._num_rounds}
        values |= asdict(self.settings) | asdict(self.requirements) | {"server": asdict(self.server)}
        return {key: value for key, value in values.items() if value is not None and key != "placement"}


def _find_silent(requests: OpenRequests, received: Sequence[ReceivedReply]) -> list[str]:
    """Return the clients that were asked and did not reply, from any node."""
    nodes, names = {reply.node for reply in received}, {reply.client for reply in received if reply.problem is None}
    return sorted(name for node, name in requests.nodes.items() if node not in nodes and name not in names)


def _check_grid(grid: object) -> None:
    """Raise TypeError unless messages can be sent with it. It need not be Flower's class: tests and guides have their own."""
    if isinstance(grid, type) or not hasattr(grid, "send_and_receive"):
        given = f"grid is the class {grid.__name__}" if isinstance(grid, type) else f"grid is a {type(grid).__name__}"
        raise TypeError(f"{given}: give the one that Flower passes to the ServerApp's main(grid, context)")


def _evaluate(evaluate_fn: CentralEvaluation | None, number: int, arrays: ArrayRecord) -> MetricRecord | None:
    """Evaluate the model on the server. Raise TypeError if the function returns something else than metrics."""
    if evaluate_fn is None:
        return None
    metrics = evaluate_fn(number, arrays)
    check_type(
        f"what evaluate_fn = {name_callable(evaluate_fn)} returned",
        metrics,
        MetricRecord | None,
        "return a MetricRecord or None",
    )
    return metrics


def _store(metrics_by_round: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        metrics_by_round[number] = metrics
