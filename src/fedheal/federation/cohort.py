"""Put the valid replies of a round together into one cohort of `Updates`; skip the others with the reason."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, Self, TypeVar

import torch

from fedheal.core.errors import name_if_custom
from fedheal.core.layout import Layout, Packed
from fedheal.core.state import RunState
from fedheal.core.updates import Updates
from fedheal.federation.extra_checks import check_extras, find_far_extras
from fedheal.federation.replies import AUTO, MissingRequirement, RejectedReply, ReplyRequirements, TrainReply
from fedheal.federation.reply_limits import escape_text, find_far_norms
from fedheal.federation.reply_updates import ReplyUpdates, UpdateWriter
from fedheal.local.term import Arrays, ServerContext, Term


class Sender(Protocol):
    """A reply as it arrived."""

    @property
    def client(self) -> str: ...


R = TypeVar("R", bound=Sender)


@dataclass(frozen=True)
class Cohort:
    """The updates to aggregate, the replies they come from, and the skipped clients with the reasons."""

    updates: Updates
    replies: Mapping[str, TrainReply]
    skipped: dict[str, str]
    missing_requirement: str | None = None  # what the method needs, if no reply has it
    message_digests: dict[str, str] = field(default_factory=dict)  # by client; of their names, shapes and dtypes
    get_norms: Callable[[], Mapping[str, float]] = dict  # of all updates that could be read
    far_extras: Mapping[str, str] = field(default_factory=dict)  # how far a client's buffers, messages or metrics are

    def find_far_norms(self) -> dict[str, str]:
        """Return the clients that count, although far from the others, and how far.

        After the server step this costs nothing: its first pass over the updates measures them.
        """
        far = {**self.far_extras, **find_far_norms(self.get_norms())}
        return {client: why for client, why in far.items() if client in self.replies}

    def skip_all(self, reason: str) -> Self:
        """Return the cohort with every client skipped."""
        no_updates = Updates([], self.updates.no_rows, [], domains=[])
        skipped = self.skipped | dict.fromkeys(self.updates.clients, reason)
        return replace(self, updates=no_updates, replies={}, skipped=skipped, missing_requirement=None, get_norms=dict)


class CohortBuilder(Generic[R]):
    """Reads the replies of a round after another."""

    def __init__(
        self,
        layout: Layout,
        requirements: ReplyRequirements,
        read: Callable[[R, Layout, ReplyRequirements], TrainReply],  # reads and checks one reply
        terms: Sequence[Term] = (),
        budget: int | None = None,
        num_rounds: int = 0,
    ) -> None:
        self.layout, self.requirements, self.read, self.terms = layout, requirements, read, terms
        self.num_rounds = num_rounds
        self._writer = UpdateWriter(layout, budget)

    def build(self, received: Iterable[R], state: RunState, known_digests: Mapping[str, str]) -> Cohort:
        """Build the cohort. `known_digests`: of each client's last usable messages."""
        replies: dict[str, TrainReply] = {}
        skipped: dict[str, str] = {}
        missing: list[str] = []
        for reply in received:
            try:
                read = self.read(reply, self.layout, self.requirements)
                check_extras(read, self.layout, state.model)
                replies[reply.client] = read
            except RejectedReply as error:
                skipped[reply.client] = str(error)
                missing += [error.needed] if isinstance(error, MissingRequirement) else []
        if self.terms:
            missing += self._skip_unusable_messages(replies, state, skipped, known_digests)
        missing_requirement = missing[0] if missing and not replies else None
        digests = {client: _digest_messages(reply.messages) for client, reply in replies.items()} if self.terms else {}
        _skip_unusual_messages(replies, known_digests, digests, skipped)
        replies = dict(sorted(replies.items()))
        skips_diverged = self.requirements.skips_diverged
        updates = all_updates = ReplyUpdates(replies, state.model, self._writer, skips_diverged)
        far_extras = find_far_extras(replies, self.layout, state.model, self.requirements.needs)
        too_long = self._find_too_long(all_updates.norms) if self.requirements.max_norm is not None else {}
        if self.requirements.max_norm == AUTO:
            too_long = {c: f"it sends {far}, and max_norm is '{AUTO}'" for c, far in far_extras.items()} | too_long
        if too_long:
            skipped |= too_long
            replies = {client: reply for client, reply in replies.items() if client not in too_long}
            updates = ReplyUpdates(replies, state.model, self._writer, skips_diverged)
        return Cohort(updates, replies, skipped, missing_requirement, digests, lambda: all_updates.norms, far_extras)

    def _skip_unusable_messages(
        self,
        replies: dict[str, TrainReply],
        state: RunState,
        skipped: dict[str, str],
        known_digests: Mapping[str, str],
    ) -> list[str]:
        """Skip clients whose messages the server's terms cannot use; return what is needed instead."""
        missing = []

        def skip_where(find_error: Callable[[TrainReply], str | None]) -> None:
            for client, reply in list(replies.items()):
                if error := find_error(reply):
                    skipped[client] = f"the server cannot use the messages of its local terms ({error})"
                    missing.append(f"messages of the clients' local terms that the server can use ({error})")
                    del replies[client]

        skip_where(lambda reply: self._find_message_error(reply, state))
        if any(map(_must_be_tried, self.terms)):  # the structure first, which may decide how much memory `absorb` takes
            digests = {client: _digest_messages(reply.messages) for client, reply in replies.items()}
            _skip_unusual_messages(replies, known_digests, digests, skipped, only_by_majority=True)
            skip_where(lambda reply: self._try_absorb(reply, state))
        return missing

    def _find_message_error(self, reply: TrainReply, state: RunState) -> str | None:
        """Return the error if a term rejects its message in this reply."""
        for term, message, before in zip(self.terms, reply.messages, state.terms, strict=True):
            try:
                term.check_message(message, before.shared, self.layout)
            except Exception as error:  # missing or misshapen values may raise nearly anything
                return _describe_error(error)
        return None

    def _try_absorb(self, reply: TrainReply, state: RunState) -> str | None:
        """Return the error if a user's term that checks no messages cannot absorb this one, tried on copies."""
        for term, message, before in zip(self.terms, reply.messages, state.terms, strict=True):
            if not _must_be_tried(term):
                continue
            updates = ReplyUpdates({reply.client: reply}, state.model, self._writer, skips_diverged=False)
            one = torch.ones(1, dtype=torch.float64)
            context = ServerContext(
                round=state.round + 1,
                rounds=self.num_rounds,
                clients=1,
                layout=self.layout,
                slots={},
                updates=updates,
                weights=one,
                unnormalised_weights=one,
            )
            models = [Packed(*(part.clone() for part in vars(state.model).values())) for _ in range(2)]
            shared, sent = ({name: t.clone() for name, t in arrays.items()} for arrays in (before.shared, message))
            try:
                term.absorb(models[0], models[1], [sent], shared, context)
            except Exception as error:
                return _describe_error(error)
        return None

    def _find_too_long(self, norms: Mapping[str, float]) -> dict[str, str]:
        """Return the clients whose updates are longer than `max_norm`. The aggregator names those that are not finite."""
        max_norm = self.requirements.max_norm
        if max_norm == AUTO:
            return {c: f"its update has {far}, and max_norm is '{AUTO}'" for c, far in find_far_norms(norms).items()}
        if not isinstance(max_norm, int | float):
            return {}
        too_long = {client: norm for client, norm in norms.items() if norm > max_norm}
        return {c: f"its update has norm {norm:g}, more than max_norm = {max_norm:g}" for c, norm in too_long.items()}


def _digest_messages(groups: Sequence[Arrays]) -> str:
    """Return a digest of the names, shapes and dtypes of a client's messages."""
    described = [sorted((name, list(t.shape), str(t.dtype)) for name, t in group.items()) for group in groups]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _must_be_tried(term: Term) -> bool:
    """Return whether a term is a user's own and does not check the messages that its `absorb` gets."""
    for kind in type(term).__mro__:
        if "check_message" in vars(kind):
            return False
        if "absorb" in vars(kind):
            return bool(name_if_custom(kind))
    return False


def _describe_error(error: Exception) -> str:
    """Return a term's error, which may quote what a client sent."""
    return f"{type(error).__name__}: {escape_text(error, 200)}"


def _skip_unusual_messages(
    replies: dict[str, TrainReply],
    known: Mapping[str, str],
    digests: Mapping[str, str],
    skipped: dict[str, str],
    only_by_majority: bool = False,
) -> None:
    """Skip clients whose messages differ in shape from those of most clients, each as last seen.

    Args:
        replies: The replies of this round.
        known: By client, the digest of its last usable messages.
        digests: By client, the digest of its messages of this round.
        skipped: Gets the reason by client.
        only_by_majority: Whether to skip nobody unless more than half agree.
    """
    counts = Counter({**known, **digests}.values())
    if only_by_majority and 2 * max(counts.values(), default=0) <= counts.total():
        return
    usual = [digest for digest, count in counts.items() if count == max(counts.values())]
    if len(usual) > 1:  # as many clients send the one as the other: earlier rounds decide
        usual = [digest for digest in usual if digest in known.values()]
    for client in [client for client in digests if usual != [digests[client]]]:
        skipped[client] = "the messages of its local terms differ in names, shapes or dtypes from those of most clients"
        del replies[client]
