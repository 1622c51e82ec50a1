"""Put the valid replies of a round together into one cohort of `Updates`; skip the others with the reason."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, Self, TypeVar

from fedheal.core.layout import Layout
from fedheal.core.state import RunState
from fedheal.core.updates import Updates
from fedheal.federation.extra_checks import (
    check_extras,
    find_far_extras,
    find_unusable_extras,
    measure_buffer_moves,
)
from fedheal.federation.message_checks import MessageChecker, SeenMessages, digest_messages, find_unusual
from fedheal.federation.replies import AUTO, MissingRequirement, RejectedReply, ReplyRequirements, TrainReply
from fedheal.federation.reply_limits import find_far_norms
from fedheal.federation.reply_updates import ReplyUpdates, UpdateWriter
from fedheal.local.term import Term


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

    def build(
        self,
        received: Iterable[R],
        state: RunState,
        seen: SeenMessages | None = None,
        count_clients: Callable[[Collection[str]], int] = len,
    ) -> Cohort:
        """Build the cohort.

        Args:
            received: The replies as they arrived.
            state: The state before the round.
            seen: The structures of earlier messages of the local terms.
            count_clients: The number of the federation's clients, given those of a cohort.
        """
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
        digests: dict[str, str] = {}
        if self.terms:
            digests, needed = self._skip_unusable_messages(
                replies, state, seen or SeenMessages(), count_clients, skipped
            )
            missing += needed
        missing_requirement = missing[0] if missing and not replies else None
        moved = measure_buffer_moves(replies, self.layout, state.model)
        unusable = find_unusable_extras(replies, moved, state.model, self.requirements.needs)
        skipped |= unusable
        replies = {client: reply for client, reply in sorted(replies.items()) if client not in unusable}
        skips_diverged = self.requirements.skips_diverged
        updates = all_updates = ReplyUpdates(replies, state.model, self._writer, skips_diverged)
        moved = {client: moved[client] for client in replies}
        far_extras = find_far_extras(replies, moved, self.requirements.needs)
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
        seen: SeenMessages,
        count_clients: Callable[[Collection[str]], int],
        skipped: dict[str, str],
    ) -> tuple[dict[str, str], list[str]]:
        """Skip clients whose messages the server cannot use.

        Return the structures of the messages that the terms can use, by client, and what is needed instead of the others.
        """
        checks = MessageChecker(self.terms, self.layout, self._writer, self.num_rounds)
        errors = checks.find_rejected(replies, state)
        usable = {client: reply for client, reply in replies.items() if client not in errors}
        digests = {client: digest_messages(reply.messages) for client, reply in usable.items()}
        errors |= checks.find_unabsorbable(usable, digests, seen, state, count_clients)
        digests = {client: digest for client, digest in digests.items() if client not in errors}
        reasons = {
            client: f"the server cannot use the messages of its local terms ({why})" for client, why in errors.items()
        }
        reasons |= find_unusual(digests, seen)
        skipped |= reasons
        for client in reasons:
            del replies[client]
        return digests, [
            f"messages of the clients' local terms that the server can use ({why})" for why in errors.values()
        ]

    def _find_too_long(self, norms: Mapping[str, float]) -> dict[str, str]:
        """Return the clients whose updates are longer than `max_norm`. The aggregator names those that are not finite."""
        max_norm = self.requirements.max_norm
        if max_norm == AUTO:
            return {c: f"its update has {far}, and max_norm is '{AUTO}'" for c, far in find_far_norms(norms).items()}
        if not isinstance(max_norm, int | float):
            return {}
        too_long = {client: norm for client, norm in norms.items() if norm > max_norm}
        return {c: f"its update has norm {norm:g}, more than max_norm = {max_norm:g}" for c, norm in too_long.items()}
