"""Seconds spent in each phase of a round."""

import time
from collections.abc import Callable

import torch

PHASES = ("train", "aggregate", "evaluate")


class Clock:
    """Measure the phases of one round, one after another.

    >>> ticks = iter([0.0, 2.0, 5.0])
    >>> clock = Clock(now=lambda: next(ticks))
    >>> clock.end_phase("train")
    >>> clock.end_phase("aggregate")
    >>> clock.seconds
    {'train': 2.0, 'aggregate': 3.0, 'evaluate': 0.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._phase_start = now()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def end_phase(self, phase: str) -> None:
        """Record the seconds since the last phase ended, once the GPU has finished its work."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        now = self._now()
        self.seconds[phase] = now - self._phase_start
        self._phase_start = now
