"""Defer Ctrl-C while a round aggregates.

A round reuses the memory of the state it starts from once aggregation begins. From there until the round is over there
is no whole state to save. So a first Ctrl-C waits, and a second one does not. `stop_on_terminate` makes SIGTERM, which
cluster schedulers send, act like Ctrl-C; the command line and its processes call it.
"""

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_on_terminate() -> None:
    """Raise KeyboardInterrupt on SIGTERM from now on, so that a run saves its state."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class Interrupts:
    """Defer signals between `hold` and `release`.

    Does nothing outside the main thread, nor for a signal that the process ignores.
    """

    def __init__(self) -> None:
        self.is_holding = self.is_pending = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if callable(signal.getsignal(number))]
            self.handlers = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_holding and not self.is_pending:
            self.is_pending = True
        else:
            self.handlers[number](number, frame)

    def hold(self) -> None:
        """Defer the first signal that arrives from now on."""
        self.is_holding = True

    def release(self) -> None:
        """Stop deferring; raise KeyboardInterrupt if a signal arrived meanwhile."""
        self.is_holding = False
        if self.is_pending:
            self.is_pending = False
            raise KeyboardInterrupt
