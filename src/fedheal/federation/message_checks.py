"""Check what clients send for the local terms: each message by its term, and its structure by what most clients send."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from fedheal.core.errors import name_if_custom
from fedheal.core.layout import Layout, Packed
from fedheal.core.state import RunState
from fedheal.federation.replies import TrainReply
from fedheal.federation.reply_limits import escape_text
from fedheal.federation.reply_updates import ReplyUpdates, UpdateWriter
from fedheal.local.term import Arrays, ServerContext, Term

STRUCTURE = "the messages of its local terms differ in names, shapes or dtypes from"
UNLIKE_MOST = f"{STRUCTURE} those of most clients"
UNLIKE_USED = f"{STRUCTURE} those that were used last, and as many clients send the one as the other"
UNDECIDED = f"{STRUCTURE} those of other clients, and as many send the one as the other"


@dataclass(frozen=True)
class SeenMessages:
    """The structures of earlier messages, as digests of their names, shapes and dtypes.

    Attributes:
        by_client: Of each client's last messages that its terms accepted.
        used: Of the messages that the server used last; empty if it has used none.
    """

    by_client: Mapping[str, str] = field(default_factory=dict)
    used: str = ""


@dataclass(frozen=True)
class MessageChecker:
    """The checks of a round's messages. A client fails them for itself, or by what most clients send."""

    terms: Sequence[Term]
    layout: Layout
    writer: UpdateWriter
    num_rounds: int = 0

    def find_rejected(self, replies: Mapping[str, TrainReply], state: RunState) -> dict[str, str]:
        """Return the clients with a message that its term rejects, and the errors."""
        errors = {client: self._find_message_error(reply, state) for client, reply in replies.items()}
        return {client: error for client, error in errors.items() if error is not None}

    def _find_message_error(self, reply: TrainReply, state: RunState) -> str | None:
        for term, message, before in zip(self.terms, reply.messages, state.terms, strict=True):
            try:
                term.check_message(message, before.shared, self.layout)
            except Exception as error:  # missing or misshapen values may raise nearly anything
                return _describe_error(error) + _explain_inherited_check(type(term))
        return None

    def find_unabsorbable(
        self,
        replies: Mapping[str, TrainReply],
        digests: Mapping[str, str],
        seen: SeenMessages,
        state: RunState,
        count_clients: Callable[[Collection[str]], int],
    ) -> dict[str, str]:
        """Return the clients whose messages a user's term cannot absorb, and the errors.

        A term that checks no messages has its `absorb` tried on copies: with all messages and, if that fails, without some.

        Args:
            replies: The replies with messages that no term rejects.
            digests: By client, the structure of these messages.
            seen: The structures of earlier messages.
            state: The state before the round.
            count_clients: The number of the federation's clients, given those of a cohort.
        """
        tried = [i for i, term in enumerate(self.terms) if _must_be_tried(term)]
        if not tried:
            return {}
        # The structure first: it may decide how much memory `absorb` takes.
        unlike_most = find_unusual(digests, seen, only_by_majority=True)
        clients = sorted(replies.keys() - unlike_most.keys())
        errors: dict[str, str] = {}
        copies = [Packed(*map(torch.empty_like, vars(state.model).values())) for _ in range(2)]
        for i in tried:
            try_absorb = partial(self._try_absorb, i, replies, state, count_clients(clients), copies)
            errors |= _find_culprits([client for client in clients if client not in errors], try_absorb)
        return errors

    def _try_absorb(
        self,
        i: int,
        replies: Mapping[str, TrainReply],
        state: RunState,
        num_clients: int,
        copies: Sequence[Packed],
        clients: Collection[str],
    ) -> str | None:
        """Return the error if term i cannot absorb the messages of these clients together. `copies`: memory for models."""
        replies = {client: replies[client] for client in sorted(clients)}
        weights = torch.full((len(replies),), 1 / len(replies), dtype=torch.float64)
        context = ServerContext(
            round=state.round + 1,
            rounds=self.num_rounds,
            clients=num_clients,
            layout=self.layout,
            slots={},
            updates=ReplyUpdates(replies, state.model, self.writer, skips_diverged=False),
            weights=weights,
            unnormalised_weights=weights * len(replies),
        )
        for model in copies:
            for copy, part in zip(vars(model).values(), vars(state.model).values(), strict=True):
                copy.copy_(part)
        messages = [_copy_arrays(reply.messages[i]) for reply in replies.values()]
        try:
            self.terms[i].absorb(copies[0], copies[1], messages, _copy_arrays(state.terms[i].shared), context)
        except Exception as error:
            return _describe_error(error)
        return None


def digest_messages(groups: Sequence[Arrays]) -> str:
    """Return a digest of the names, shapes and dtypes of a client's messages."""
    described = [sorted((name, list(t.shape), str(t.dtype)) for name, t in group.items()) for group in groups]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def find_unusual(digests: Mapping[str, str], seen: SeenMessages, only_by_majority: bool = False) -> dict[str, str]:
    """Return the clients whose messages have another structure than most clients', each as last seen, with the reason.

    If as many clients send the one as the other, the structure that was used last counts. Then no newcomers can stop a
    federation unless they are more than the others.

    Args:
        digests: By client, the structure of its messages of this round.
        seen: The structures of earlier messages.
        only_by_majority: Whether to find nobody unless more than half agree.

    >>> list(find_unusual({"a": "x", "b": "x", "c": "y"}, SeenMessages()))
    ['c']
    >>> list(find_unusual({"a": "x", "b": "y"}, SeenMessages({"a": "x", "b": "y"}, used="y")))
    ['a']
    """
    counts = Counter({**seen.by_client, **digests}.values())
    most = max(counts.values(), default=0)
    if only_by_majority and 2 * most <= counts.total():
        return {}
    usual = [digest for digest, count in counts.items() if count == most]
    reason = UNLIKE_MOST
    if len(usual) > 1:
        reason = UNLIKE_USED if seen.used in usual else UNDECIDED
        usual = [seen.used]
    return {client: reason for client, digest in digests.items() if [digest] != usual}


def _find_culprits(clients: Sequence[str], try_absorb: Callable[[Sequence[str]], str | None]) -> dict[str, str]:
    """Return the clients without whose messages `absorb` works, with the errors; few trials if it works with all.

    If no such clients are found, the term may be at fault, and nobody is blamed.
    """
    error = try_absorb(clients) if clients else None
    if error is None:
        return {}
    alone = {client: try_absorb([client]) for client in clients}
    errors = {client: why for client, why in alone.items() if why is not None}
    usable = [client for client in clients if client not in errors]
    if usable and len(errors) > len(usable) and try_absorb(list(errors)) is None:  # most clients need each other
        return dict.fromkeys(usable, error)
    together = usable or clients  # if all fail alone, `absorb` may need several messages
    error = try_absorb(together) if len(together) > 2 else None
    if error is not None:  # is one of them at odds with all others?
        odd = [client for client in together if try_absorb([c for c in together if c != client]) is None]
        found = {client: error for client in odd if len(odd) == 1}
        if not usable:
            return found
        errors |= found
        usable = [client for client in usable if client not in errors]
    if not usable and len(clients) > 1:
        return {}
    for client in list(errors):
        if usable and alone[client] is not None and try_absorb([*usable, client]) is None:  # it fails only alone
            usable.append(client)
            del errors[client]
    return errors


def _must_be_tried(term: Term) -> bool:
    """Return whether a term is a user's own and does not check the messages that its `absorb` gets."""
    for kind in type(term).__mro__:
        if "check_message" in vars(kind):
            return False
        if "absorb" in vars(kind):
            return bool(name_if_custom(kind))
    return False


def _explain_inherited_check(kind: type[Term]) -> str:
    """Return what the author of a term may have to change if a check that it inherits rejects a message."""
    owner = next(parent for parent in kind.__mro__ if "check_message" in vars(parent))
    name = name_if_custom(kind)
    if owner is kind or not name:
        return ""
    return f"; `{name}` inherits check_message from {owner.__name__}: override it if clients send something else"


def _describe_error(error: Exception) -> str:
    """Return a term's error, which may quote what a client sent."""
    return f"{type(error).__name__}: {escape_text(error, 200)}"


def _copy_arrays(arrays: Arrays) -> Arrays:
    return {name: tensor.clone() for name, tensor in arrays.items()}
