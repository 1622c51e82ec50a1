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
    """Nodes by id. `spoil(node, reply)` may change, drop or repeat a reply."""

    def __init__(self, app: ClientApp, nodes: dict[int, dict[str, Any]], spoil: Spoil | None = None) -> None:
        self.app, self.spoil = app, spoil or (lambda node, reply: [reply])
        self.contexts = {node: Context(1, node, config, RecordDict(), {}) for node, config in nodes.items()}
        self.asked: list[list[int]] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies: list[Message] = []
        self.asked.append([])
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked[-1].append(node)
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            try:
                reply = self.app(message, self.contexts[node])
            except Exception as error:  # as Flower does: a client that raises answers with an error
                reply = Message(Error(code=0, reason=repr(error)), reply_to=message)
            replies += self.spoil(node, reply)
        return replies[::-1]  # any order

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError
