"""The server of an NVFLARE federation: its state, the server step that simulations use, the record of each round.

Controller and aggregator bring the messages; nothing here waits or sends.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import nvflare
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor, nn

from fedheal import methods
from fedheal.aggregate.reduce import is_finite
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.checks import check_count, check_switch
from fedheal.core.clock import Clock
from fedheal.core.import_path import import_function
from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter
from fedheal.core.state import RunState
from fedheal.federation.cohort import Cohort, CohortBuilder, EvaluateReply, RejectedReply, ReplyRequirements
from fedheal.federation.model_arrays import infer_tensor_layout, match_bfloat16
from fedheal.federation.node_sampling import TooManyEmptyRounds
from fedheal.federation.round_summary import describe_causes, describe_round, summarise_evaluations
from fedheal.federation.run_folder import Framework, KnownClients, RunFolder
from fedheal.methods import Method
from fedheal.methods.server_step import ServerStep, apply_server_step, mean_train_loss, resolve_server
from fedheal.nvflare.exchange import (
    CLIENT,
    EXAMPLES,
    SiteReply,
    read_site_evaluation,
    read_site_reply,
    state_dict_to_params,
)
from fedheal.runs.schema import RoundRecord

log = logging.getLogger("fedheal.nvflare")
NVFLARE = Framework("nvflare", {"nvflare": nvflare.__version__}, KnownClients, log)


@dataclass(frozen=True, kw_only=True)
class FederationSettings:
    """The settings that controller and aggregator share; see `FairController`."""

    method: str
    folder: str | None = None
    resume: bool = False
    data: str = "federation"
    seed: int = 0
    server: Mapping[str, Any] | None = None
    min_responses: int = 1
    max_empty_rounds: int | None = 3
    max_examples: float = 1e9
    max_norm: float | str | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        check_switch("resume", self.resume)
        check_count("seed", self.seed)
        for name, least in (("min_responses", 1), ("max_empty_rounds", 1), ("budget", 0)):
            if (value := getattr(self, name)) is not None:
                Parameter(name, 1, ge=least).check(value)

    def resolve_method(self) -> Method:
        """Return the method. Raise ValueError if it does not work here."""
        given: object = self.method
        if not isinstance(given, str):
            raise ValueError(f"method = {given!r}: use a name such as 'fedheal:tau=0.4', which a job can carry")
        method = methods.get(given)
        if method.local:
            stages = given.partition("+")[2] or "fedheal"
            remedy = f"use its server part, such as '{stages}', and train as you like; fedheal.flower runs local terms"
            raise ValueError(
                f"method = '{given}' has local terms, which fedheal.nvflare does not send to sites: {remedy}"
            )
        return method

    def resolve_server(self, method: Method) -> Server:
        """Return the server optimiser of the settings or of the method."""
        return resolve_server(method, None if self.server is None else Server(**self.server))

    def to_requirements(self, method: Method) -> ReplyRequirements:
        """Return what a reply must hold."""
        needs = tuple(
            sorted(method.aggregator.stage.needs - {"domain"})
        )  # every site has a domain, if only its own name
        return ReplyRequirements(
            examples_key=EXAMPLES, max_examples=self.max_examples, max_norm=self.max_norm, needs=needs
        )


@dataclass
class SiteRound:
    """A round under way."""

    number: int
    asked: Sequence[str]
    clock: Clock = field(default_factory=Clock)
    replied: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    report: dict[str, Any] = field(default_factory=lambda: {"skipped": {}, "missing": []})
    evaluations: list[EvaluateReply] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether sites were asked to train and the model stays as it was."""
        return bool(self.asked) and (not any(self.weights.values()) or "unmoved" in self.report)

    def to_record(self, client_domains: Mapping[str, str]) -> RoundRecord:
        clients = {*self.weights, *(evaluation.client for evaluation in self.evaluations)}
        return RoundRecord(
            round=self.number,
            cohort=len(self.asked),
            replied=self.replied,
            weights=self.weights,
            train_loss=self.train_loss,
            report=self.report,
            seconds=self.clock.seconds,
            client_domains={client: client_domains[client] for client in sorted(clients & client_domains.keys())},
            **summarise_evaluations(self.evaluations),
        )


class RoundServer:
    """A federation's state and its rounds: `begin`, then `open_round`, `aggregate`, `evaluate`, `end_round`, and `finish`."""

    def __init__(self, settings: FederationSettings, num_rounds: int, layout: Layout | None) -> None:
        self.settings, self.num_rounds, self.layout = settings, num_rounds, layout
        self.method = settings.resolve_method()
        self.server = settings.resolve_server(self.method)
        self.requirements = settings.to_requirements(self.method)
        self.aggregator = replace(self.method.aggregator, on_bad_update="skip")
        self.folder = None
        if settings.folder is not None:
            self.folder = RunFolder(Path(settings.folder), settings.resume, NVFLARE)
        self.clients, self.history = KnownClients(), list[RoundRecord]()
        self._state: RunState | None = None
        self._round: SiteRound | None = None
        self._builder: CohortBuilder[SiteReply] | None = None
        self._empty_rounds = 0  # in a row; not in the checkpoint, because a resume comes after the cause was fixed

    @property
    def state(self) -> RunState:
        if self._state is None:
            raise RuntimeError("the server has no model yet: call begin first")
        return self._state

    @property
    def current(self) -> SiteRound:
        if self._round is None:
            raise RuntimeError("no round is under way: call open_round first")
        return self._round

    def begin(self, initial: Mapping[str, Tensor]) -> None:
        """Start from the folder's newest checkpoint, or else from the initial model, a `state_dict`."""
        layout = self.layout = self.layout or infer_tensor_layout(initial)
        model = layout.pack(match_bfloat16(layout, initial))
        if not (is_finite(model.params) and is_finite(model.buffers)):
            raise ValueError("the initial model holds NaN or infinity: start from a finite one")
        self._builder = CohortBuilder(layout, self.requirements, read_site_reply, (), self.settings.budget)
        self._state = RunState(
            round=0,
            seed=self.settings.seed,
            model=model,
            aggregator=self.aggregator.init(layout),
            server=self.server.init(),
        )
        resumed = self.folder.open(self._describe_settings(), layout) if self.folder is not None else None
        if resumed is not None:
            self._state, self.clients, self.history = resumed
            log.info("resuming after round %d", self.state.round)

    def get_params(self) -> dict[str, Any]:
        """Return the model as arrays to send."""
        assert self.layout is not None
        return state_dict_to_params(self.layout.unpack(self.state.model))

    def open_round(self, asked: Sequence[str]) -> None:
        """Begin the next round, in which these sites are asked to train."""
        self._round = SiteRound(self.state.round + 1, sorted(asked))

    def aggregate(self, results: Sequence[FLModel], failures: Mapping[str, str]) -> None:
        """Take the server step with the usable replies. `failures`: sites whose reply is an error, with its text."""
        current, state = self.current, self.state
        assert self.layout is not None
        current.clock.end_phase("train")
        if self.folder is not None:  # the step reuses the memory that the last checkpoint is written from
            self.folder.settle()
        replies = self._name_replies(results)
        repeated = {client: n for client, n in Counter(r.client for r in replies).items() if n > 1}
        skipped = {**failures, **{client: f"it replied {n} times in this round" for client, n in repeated.items()}}
        cohort = self._build_cohort([reply for reply in replies if reply.client not in skipped])
        num_clients = max(len({*self.clients.accepted, *cohort.replies}), 1)
        step = ServerStep(self.aggregator, self.server, (), self.layout, self.num_rounds)
        outcome = apply_server_step(step, state, cohort.updates, {}, num_clients)
        heard = {*failures, *(reply.client for reply in replies)}
        skipped |= cohort.skipped | {str(c): str(why) for c, why in outcome.aggregated.report["skipped"].items()}
        missing = sorted(set(current.asked) - heard)
        current.replied = len(heard - failures.keys())
        current.report = dict(outcome.aggregated.report) | {"skipped": skipped, "missing": missing}
        current.report |= {"far_norms": cohort.far_norms} if cohort.far_norms else {}
        current.report |= {"unmoved": outcome.refusal} if outcome.is_refused else {}
        current.weights = dict(zip(cohort.updates.clients, outcome.aggregated.weights.tolist(), strict=True))
        current.train_loss = mean_train_loss(cohort.updates, outcome.accepted)
        self.clients.accepted |= dict.fromkeys(outcome.accepted, current.number)
        self.clients.client_domains |= {client: cohort.replies[client].domain for client in outcome.accepted}
        size = _count_bytes(state.model)
        sent, received = state.sent + size * len(current.asked), state.received + size * len(replies)
        self._state = replace(outcome.state, round=current.number, sent=sent, received=received)
        self._warn(current.report)
        current.clock.end_phase("aggregate")

    def read_evaluations(self, results: Sequence[FLModel]) -> tuple[list[EvaluateReply], dict[str, str]]:
        """Return the usable evaluations in these replies, and the sites whose evaluation is not, with the reason."""
        evaluations, problems = [], {}
        for reply in self._name_replies(results):
            try:
                evaluations.append(read_site_evaluation(reply, self.settings.max_examples))
            except RejectedReply as error:
                log.warning("evaluation: '%s' is skipped: %s", reply.client, error)
                problems[reply.client] = str(error)
        for evaluation in evaluations:
            self.clients.client_domains[evaluation.client] = evaluation.domain
            self.clients.test_examples[evaluation.client] = evaluation.num_examples
        return sorted(evaluations, key=lambda evaluation: evaluation.client), problems

    def evaluate(self, results: Sequence[FLModel], failures: Mapping[str, str]) -> None:
        """Record the sites' accuracies of the new model."""
        self.current.evaluations, problems = self.read_evaluations(results)
        if problems := {**failures, **problems}:
            self.current.report["not_judged"] = problems
        self.current.clock.end_phase("evaluate")

    def end_round(self) -> None:
        """Record and save the round; a resume does not repeat it. Raise TooManyEmptyRounds if the run ends here."""
        current, limit = self.current, self.settings.max_empty_rounds
        self._empty_rounds = self._empty_rounds + 1 if current.is_empty else 0
        ending = None
        if limit is not None and self._empty_rounds >= limit:
            ending = f"max_empty_rounds = {limit}: the last {limit} rounds left the model as it was"
            current.report["ended"] = ending
        record = current.to_record(self.clients.client_domains)
        self.history.append(record)
        log.info("[round %d] %s", current.number, describe_round(record))
        if self.folder is not None:
            self.folder.save_round(self.state, record, self.clients)
        self._round = None
        if ending is not None:
            self.release()
            remedy = "fix the cause and resume, or set max_empty_rounds=None"
            raise TooManyEmptyRounds(f"{ending}; {describe_causes(record)}: {remedy}")

    def amend_last_round(self, evaluations: Sequence[EvaluateReply]) -> None:
        """Add accuracies to the last round's record: sites evaluate its model when the next round begins."""
        if not self.history or not evaluations:
            return
        last, domains = self.history[-1], self.clients.client_domains
        clients = {*last.weights, *(evaluation.client for evaluation in evaluations)}
        homes = {client: domains[client] for client in sorted(clients & domains.keys())}
        self.history[-1] = last.model_copy(update={"client_domains": homes, **summarise_evaluations(evaluations)})
        if self.folder is not None:
            self.folder.replace_last_round(self.history[-1])

    def finish(self) -> None:
        """Write the final model, and the result if sites evaluated a model; release the folder."""
        if self.folder is None:
            return
        assert self.layout is not None
        self.folder.flush()
        self.folder.write_result(self.layout, self.state, self.history, self.clients)
        if not any(record.domains for record in self.history):
            log.warning("no site sent an 'accuracy': %s has no result.json to report", self.folder.path)
        self.release()

    def release(self) -> None:
        """Wait for the checkpoint under way, and unlock the folder."""
        if self.folder is not None:
            try:
                self.folder.flush()
            finally:
                self.folder.release()

    def _name_replies(self, results: Sequence[FLModel]) -> list[SiteReply]:
        named = [(str((result.meta or {}).get(CLIENT, "")), result) for result in results]
        return [SiteReply(client, result, self.state.model) for client, result in named if client]

    def _build_cohort(self, replies: Sequence[SiteReply]) -> Cohort:
        """Build the cohort to aggregate. Raise ValueError if no site sends what the method needs."""
        assert self._builder is not None
        cohort = self._builder.build(replies, self.state, {})
        # A silent site might have had it, and one of many says nothing about the others.
        is_conclusive = len(replies) >= len(self.current.asked) and not self.clients.accepted
        if cohort.missing_requirement and is_conclusive:
            raise ValueError(f"'{self.method.name}' needs {cohort.missing_requirement}")
        usable, needed = len(cohort.updates.clients), self.settings.min_responses
        if usable >= needed:
            return cohort
        return cohort.skip_all(f"this round has only {usable} usable replies, fewer than min_responses = {needed}")

    def _warn(self, report: Mapping[str, Any]) -> None:
        for client, reason in report["skipped"].items():
            log.warning("round %d: '%s' is skipped: %s", self.current.number, client, reason)
        for client, how_far in report.get("far_norms", {}).items():
            log.warning("round %d: the update of '%s' has %s", self.current.number, client, how_far)
        if report["missing"]:
            log.warning("round %d: no reply from %s", self.current.number, ", ".join(report["missing"]))
        if "unmoved" in report:
            log.warning("round %d: the model stays as it was: %s", self.current.number, report["unmoved"])

    def _describe_settings(self) -> dict[str, Any]:
        """Return what `federation.toml` holds."""
        values = asdict(self.settings) | {
            "framework": "nvflare",
            "rounds": self.num_rounds,
            "server": asdict(self.server),
        }
        values |= {"method": self.method.name, "algorithm": self.method.full_name}
        hidden = ("folder", "resume")
        return {key: value for key, value in values.items() if value is not None and key not in hidden}


def resolve_module(path: str | None) -> nn.Module | None:
    """Return the module that the function of this path makes, None without one. Raise ValueError if it makes none."""
    if path is None:
        return None
    if not isinstance(path, str) or ":" not in path:
        raise ValueError(f"model = {path!r}: use 'module:function', where the function makes the model")
    make: Callable[[], Any] = import_function("model", path)
    module = make()
    if not isinstance(module, nn.Module):
        raise ValueError(f"model = '{path}' makes a {type(module).__name__}: it must make a torch module")
    return module


def _count_bytes(model: Packed) -> int:
    return sum(vector.nbytes for vector in (model.params, model.buffers, model.counters))
