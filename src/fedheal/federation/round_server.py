"""The server of any federation: its state, its rounds, the server step that simulations use, and the run folder.

A framework's own part brings the messages. Nothing here waits or sends.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fedheal.aggregate import Aggregator
from fedheal.aggregate.reduce import is_finite
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.checks import check_count, check_text
from fedheal.core.errors import format_count, shorten_list
from fedheal.core.layout import Layout, Packed
from fedheal.core.parameter import Parameter
from fedheal.core.state import RunState, TermState
from fedheal.federation.cohort import Cohort, CohortBuilder, Sender
from fedheal.federation.extra_checks import find_far_examples
from fedheal.federation.message_checks import SeenMessages
from fedheal.federation.node_sampling import TooManyEmptyRounds
from fedheal.federation.open_round import OpenRound
from fedheal.federation.replies import EvaluateReply, RejectedReply, ReplyRequirements, TrainReply
from fedheal.federation.round_history import RoundHistory
from fedheal.federation.round_summary import describe_causes, describe_last_outliers, describe_round
from fedheal.federation.run_folder import KnownClients, RunFolder
from fedheal.local.term import Term
from fedheal.methods.server_step import ClientTerms, ServerStep, StepOutcome, apply_server_step
from fedheal.runs.schema import RoundRecord

K = TypeVar("K", bound=KnownClients)
R = TypeVar("R", bound=Sender)
O = TypeVar("O", bound=OpenRound)  # noqa: E741

NO_REPLY = "it did not reply"  # why a client is in `not_evaluated`
NO_ACCURACY = "it sent no 'accuracy' that is a number, and others did"  # likewise


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings that every federation has; see `FairStrategy` and `FairController`."""

    seed: int = 0
    data: str = "federation"
    min_replies: int = 1
    max_empty_rounds: int | None = 3
    budget: int | None = None

    def __post_init__(self) -> None:
        check_count("seed", self.seed)
        check_text("data", self.data)
        Parameter("min_replies", 1, ge=1).check(self.min_replies)
        for name, least in (("max_empty_rounds", 1), ("budget", 0)):
            if (value := getattr(self, name)) is not None:
                Parameter(name, 1, ge=least).check(value)


@dataclass(kw_only=True)
class RoundServer(Generic[K, R, O]):
    """A federation's state and its rounds.

    Call `begin`. Then, for every round, `open_round`, `build_cohort`, `take_step`, `record_evaluations` and `end_round`; and
    `finish`. `clients` is what the server remembers about them, `read` reads and checks one reply.
    """

    name: str  # of the method
    aggregator: Aggregator
    server: Server
    terms: tuple[Term, ...] = ()
    settings: ServerSettings
    requirements: ReplyRequirements
    read: Callable[[R, Layout, ReplyRequirements], TrainReply]
    clients: K
    log: logging.Logger
    folder: RunFolder[K] | None = None
    num_rounds: int = 0  # 0 if it is unknown which round is the last
    history: list[RoundRecord] | RoundHistory = field(default_factory=list)
    builder: CohortBuilder[R] = field(init=False)
    _state: RunState | None = field(default=None, init=False)
    _round: O | None = field(default=None, init=False)
    # Whom the latest empty rounds in a row asked. It is not in the checkpoint: a resume comes after the cause was fixed, and
    # would end at once if they still counted.
    _empty_rounds: list[Collection[int | str]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        min_updates = max(self.aggregator.min_updates, self.settings.min_replies)
        self.aggregator = replace(self.aggregator, on_bad_update="skip", min_updates=min_updates)

    @property
    def has_begun(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> RunState:
        if self._state is None:
            raise RuntimeError("the server has no model yet: call begin first")
        return self._state

    @property
    def layout(self) -> Layout:
        return self.builder.layout

    @property
    def current(self) -> O:
        if self._round is None:
            raise RuntimeError("no round is under way: call open_round first")
        return self._round

    def find_round(self, number: int) -> O | None:
        """Return the round under way if it has this number."""
        return self._round if self._round is not None and self._round.number == number else None

    def begin(self, layout: Layout, model: Packed, described: Mapping[str, Any]) -> None:
        """Start from the folder's newest checkpoint, or else from this model. `described`: the settings for the folder."""
        _check_finite("the initial model", model, layout)
        self.builder = CohortBuilder(
            layout, self.requirements, self.read, self.terms, self.settings.budget, self.num_rounds
        )
        self._state = RunState(
            round=0,
            seed=self.settings.seed,
            model=model,
            aggregator=self.aggregator.init(layout),
            server=self.server.init(),
            terms=tuple(TermState(term.init(layout), {}) for term in self.terms),
        )
        resumed = self.folder.open(described, layout) if self.folder is not None else None
        if resumed is not None:
            self._state, self.clients, self.history = resumed
        self._log_start()

    def _log_start(self) -> None:
        """Say where a resume starts: a mistyped folder, or a number of rounds that is reached already, is easy to miss."""
        if self.folder is None or not self.folder.resume:
            return
        path, saved = self.folder.path, self.state.round
        if not self.folder.is_resumed:
            self.log.warning("%s holds no federation to resume: this one starts at round 1", path)
        elif not saved:
            self.log.warning("%s holds a federation that saved no round: it starts at round 1", path)
        elif 0 < self.num_rounds <= saved:
            text = "%s has %d rounds already, and %d are asked for: no round is left to run"
            self.log.warning(text, path, saved, self.num_rounds)
        else:
            self.log.info("resuming after round %d", saved)

    def set_model(self, model: Packed) -> None:
        """Continue from another model than the last round's."""
        _check_finite("the model to continue from", model, self.layout)
        self._state = replace(self.state, model=model)

    def open_round(self, current: O) -> None:
        """Begin a round."""
        self._round = current

    def build_cohort(
        self,
        replies: Sequence[R],
        seen: SeenMessages | None = None,
        count_clients: Callable[[Collection[str]], int] = len,
    ) -> Cohort:
        """Build the cohort from replies that nothing is known against yet; with fewer than `min_replies`, skip all.

        Raise ValueError if the app, not a client, lacks what the method needs. `seen`, `count_clients`: see `CohortBuilder`.
        """
        cohort = self.builder.build(replies, self.state, seen, count_clients)
        # A silent or failing client might have had it, and one of many says nothing about the others.
        is_conclusive = len(replies) >= max(len(self.current.asked), min(2, self.current.num_connected))
        if cohort.missing_requirement and is_conclusive and not self.clients.accepted:
            raise ValueError(f"'{self.name}' needs {cohort.missing_requirement}")
        return self.skip_small_cohort(cohort)

    def skip_small_cohort(self, cohort: Cohort) -> Cohort:
        """Return the cohort, or one with every client skipped if it has fewer than `min_replies`."""
        usable, needed = len(cohort.updates.clients), self.settings.min_replies
        if usable >= needed:
            return cohort
        return cohort.skip_all(f"this round has only {usable} usable replies, fewer than min_replies = {needed}")

    def make_step(self) -> ServerStep:
        """Return the fixed parts of the server step."""
        return ServerStep(self.aggregator, self.server, self.terms, self.layout, self.num_rounds, refuses_errors=True)

    def take_step(
        self, step: ServerStep, cohort: Cohort, num_clients: int, lost_slots: Collection[str] = ()
    ) -> StepOutcome:
        """Take the server step with a cohort; see `apply_server_step`."""
        if self.folder is not None:  # the step reuses the memory that the last checkpoint is written from
            self.folder.settle()
        terms = {client: ClientTerms(reply.messages) for client, reply in cohort.replies.items()}
        outcome = apply_server_step(step, self.state, cohort.updates, terms, num_clients, lost_slots)
        self._state = replace(outcome.state, round=self.current.number)
        return outcome

    def count_bytes(self, sent: int, received: int) -> None:
        """Add to the bytes of the run."""
        self._state = replace(self.state, sent=self.state.sent + sent, received=self.state.received + received)

    def read_evaluations(
        self, replies: Iterable[R], read: Callable[[R], EvaluateReply]
    ) -> tuple[list[EvaluateReply], dict[str, str]]:
        """Return the usable evaluations in these replies, and the clients whose evaluation is not, with the reason."""
        evaluations, problems = [], {}
        for reply in replies:
            try:
                evaluations.append(read(reply))
            except RejectedReply as error:
                self.log.warning("evaluation: '%s' is skipped: %s", reply.client, error)
                problems[reply.client] = str(error)
        if any(evaluation.accuracy is not None for evaluation in evaluations):
            problems |= {e.client: NO_ACCURACY for e in evaluations if e.accuracy is None}
        for evaluation in evaluations:
            self.clients.client_domains[evaluation.client] = evaluation.domain
            self.clients.test_examples[evaluation.client] = evaluation.num_examples
        return sorted(evaluations, key=lambda evaluation: evaluation.client), problems

    def record_evaluations(
        self, evaluations: Sequence[EvaluateReply], problems: Mapping[str, str], missing: Sequence[str] = ()
    ) -> None:
        """Record the accuracies of the new model, and the clients that sent none that can be used or did not reply."""
        self.current.evaluations = evaluations
        if missing:
            self.log.warning("round %d: no evaluation from %s", self.current.number, ", ".join(missing))
        if problems or missing:
            self.current.report["not_evaluated"] = {**dict.fromkeys(missing, NO_REPLY), **problems}
        if far := find_far_examples({e.client: float(e.num_examples) for e in evaluations}):
            self.current.report["far_evaluations"] = far
        for client, why in far.items():
            self.log.warning("round %d: '%s' evaluated on %s; ask it why", self.current.number, client, why)
        self.current.clock.end_phase("evaluate")

    def end_round(self, is_due: bool = False) -> None:
        """Record and save the round; a resume does not repeat it from here on. `is_due`: whatever `save_seconds` is.

        Raise TooManyEmptyRounds if the run ends here.
        """
        current = self.current
        self._empty_rounds = [*self._empty_rounds, current.asked] if current.is_empty else []
        ending = self._find_ending()
        if ending is not None:
            current.report["ended"] = ending
        record = current.to_record(self.clients.client_domains)
        self._state = replace(self.state, round=current.number)  # also if a wrapper withheld the replies
        self.history.append(record)
        self.log.info("[round %d] %s", current.number, describe_round(record))
        if self.folder is not None:
            self.folder.save_round(self.state, record, self.clients, is_due)
            if ending is None and not self.num_rounds:  # any round may be the last
                self.write_result()
        self._round = None
        if ending is not None:
            self.release()
            remedy = "fix the cause and resume, or set max_empty_rounds=None"
            causes = describe_causes(record) + describe_last_outliers(self.history)
            raise TooManyEmptyRounds(f"{ending}; {causes}: {remedy}")

    def _find_ending(self) -> str | None:
        """Return why the run ends here, or None. One bad client that is drawn again and again does not end it."""
        number, limit = len(self._empty_rounds), self.settings.max_empty_rounds
        asked = {client for clients in self._empty_rounds for client in clients}
        if limit is None or number < limit or len(asked) < min(2, self.current.num_connected):
            return None
        return f"max_empty_rounds = {limit}: the last {number} rounds left the model as it was"

    def write_result(self) -> None:
        """Write the last round's checkpoint, the model, and the result if clients evaluated a model."""
        if self.folder is not None:
            self.folder.flush()
            self.folder.write_result(self.layout, self.state, list(self.history), self.clients)

    def finish(self) -> None:
        """Write the final model and the result, and release the folder."""
        self.write_result()
        if unused := _explain_unused_updates(self.history):
            self.log.warning("%s", unused)
        if self.folder is not None and not any(record.domains for record in self.history):
            reason = _explain_no_accuracy(self.history)
            self.log.warning("%s: %s has no result.json to report", reason, self.folder.path)
        self.release()

    def release(self) -> None:
        """Wait for the checkpoint under way, and unlock the folder."""
        if self.folder is not None:
            try:
                self.folder.flush()
            finally:
                self.folder.release()


def _explain_unused_updates(history: Iterable[RoundRecord]) -> str | None:
    """Say why no update counted in any round, or return None if one did or nobody was asked to train."""
    num_rounds, reasons = 0, Counter[str]()
    for record in history:
        if any(record.weights.values()) and "unmoved" not in record.report:
            return None
        num_rounds += record.cohort > 0
        reasons.update(str(reason) for reason in record.report["skipped"].values())
        reasons.update([NO_REPLY] * len(record.report["missing"]))
        reasons.update([str(record.report["unmoved"])] if "unmoved" in record.report else [])
    if not num_rounds:
        return None
    unused = f"no update counted in {format_count(num_rounds, 'round')}, so training did not change the model"
    most_frequent = max(reasons, key=reasons.__getitem__, default="every weight was 0")
    return f"{unused}; the most frequent reason: {most_frequent}"


def _explain_no_accuracy(history: Iterable[RoundRecord]) -> str:
    """Say why no round has an accuracy."""
    problems = [problem for record in history for problem in record.report.get("not_evaluated", {}).values()]
    rejected = sum(problem != NO_REPLY for problem in problems)
    if not problems:
        return "no client sent an 'accuracy'"
    counts = f"{rejected} replies were rejected, {len(problems) - rejected} did not come"
    return f"no usable 'accuracy' came ({counts}; see not_evaluated in rounds.jsonl)"


def _check_finite(which: str, model: Packed, layout: Layout) -> None:
    """Raise ValueError that names the tensors which are not finite, and says how to keep a constant out of the model."""
    if is_finite(model.params, model.buffers):
        return
    vectors = {"param": model.params, "buffer": model.buffers}
    slices = [(e, vectors[e.kind][e.start : e.stop]) for e in layout.entries if e.kind in vectors]
    bad = [(entry, values) for entry, values in slices if not is_finite(values)]
    names = shorten_list([f"'{entry.name}'" for entry, _ in bad])
    remedy = "start from a finite one"
    # Without the module most buffers look like parameters; a parameter that diverged usually holds NaN.
    if any(entry.kind == "buffer" or not values.isnan().any() for entry, values in bad):
        remedy += ", and keep a constant such as an attention mask out of it: register_buffer(..., persistent=False)"
    raise ValueError(f"{which} holds NaN or infinity in {names}: {remedy}")
