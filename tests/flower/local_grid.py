"""A Grid in this process: it calls client apps in turn, and a test can change their replies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# A message says which task made it; outside a run nobody has set that.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

Spoil = Callable[[int, Message], "list[Message]"]


class LocalGrid(Grid):
    """Nodes by id. `spoil(node, reply)` may change, drop or repeat a reply; nodes in `dead` answer nothing at all."""

    def __init__(self, app: ClientApp, nodes: dict[int, dict[str, Any]], spoil: Spoil | None = None) -> None:
        self.app, self.spoil = app, spoil or (lambda node, reply: [reply])
        self.contexts = {node: Context(1, node, config, RecordDict(), {}) for node, config in nodes.items()}
        self.asked: list[list[int]] = []
        self.dead: set[int] = set()
        self.answers: dict[str, Message] = {}  # to pushed messages, by their ids

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies: list[Message] = []
        self.asked.append([])
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked[-1].append(node)
            reply = self.answer(message)
            replies += self.spoil(node, reply) if reply is not None else []
        return replies[::-1]  # any order

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        if node in self.dead:
            return None
        try:
            return self.app(message, self.contexts[node])
        except Exception as error:  # as Flower does: a client that raises answers with an error
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Return the ids of messages that could be sent, as Flower's own grids do."""
        ids = []
        for message in messages:
            if (reply := self.answer(message)) is not None:
                ids.append(message.metadata.message_id)
                self.answers[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.answers.pop(number) for number in message_ids if number in self.answers]
