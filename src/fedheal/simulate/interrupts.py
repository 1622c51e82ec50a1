"""Being stopped where it does no harm: at once while clients train, after the round once updates are being aggregated.

A round reuses the memory of the state it starts from as soon as aggregation begins, so from there until the round is over there
is no whole state to save. That is short; a second Ctrl-C does not wait. SIGTERM, by which schedulers of clusters stop what they
run, is taken like Ctrl-C where `stop_on_terminate` was called: by the command line, and by its processes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Self

from fedheal.core.layout import Packed
from fedheal.engine import Engine
from fedheal.engine.serial import ClientResult, Shared, Task

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_on_terminate() -> None:
    """From now on SIGTERM is `KeyboardInterrupt`, so that a run saves what it has."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class Interrupts:
    """While entered, Ctrl-C waits where it is `held`. Does nothing outside the main thread, or where it is ignored."""

    def __init__(self) -> None:
        self.held = self.pending = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if callable(signal.getsignal(number))]
            self.before = {number: signal.signal(number, self._came) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.held and not self.pending:
            self.pending = True
        else:
            self.before[number](number, frame)

    def release(self) -> None:
        """Let it come; `KeyboardInterrupt` now if it came meanwhile."""
        self.held = False
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt

    def around(self, engine: Engine) -> Engine:
        """Return an engine whose training can be interrupted; what follows it cannot be until `release`."""
        return _GuardedEngine(self, engine)


class _GuardedEngine:
    def __init__(self, interrupts: Interrupts, engine: Engine) -> None:
        self.interrupts, self.engine = interrupts, engine

    def train(self, model: Packed, shared: Shared, tasks: Sequence[Task]) -> Iterator[ClientResult]:
        yield from self.engine.train(model, shared, tasks)
        self.interrupts.held = True
