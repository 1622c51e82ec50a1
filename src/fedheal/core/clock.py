"""Seconds spent in each phase of a round."""

import time
from collections.abc import Callable

import torch

Mark = float | torch.cuda.Event
PHASES = ("train", "aggregate", "evaluate")


class Clock:
    """Measure the phases of one round, one after another, without waiting for a GPU.

    A phase ends when the host has launched its work and the GPU has finished it. Meanwhile the host may begin the next one.

    >>> ticks = iter([0.0, 2.0, 5.0])
    >>> clock = Clock(now=lambda: next(ticks))
    >>> clock.end_phase("train")
    >>> clock.end_phase("aggregate")
    >>> clock.seconds
    {'train': 2.0, 'aggregate': 3.0, 'evaluate': 0.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        is_gpu_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._mark: Callable[[], Mark] = _record_event if is_gpu_used else now
        self._start = self._mark()
        self._ends: list[tuple[str, Mark]] = []

    def end_phase(self, phase: str) -> None:
        """End a phase; the next one begins."""
        self._ends.append((phase, self._mark()))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, 0 for one that has not ended; a GPU is waited for."""
        seconds, start = dict.fromkeys(PHASES, 0.0), self._start
        for phase, end in self._ends:
            seconds[phase] = _measure(start, end)
            start = end
        return seconds


def _record_event() -> torch.cuda.Event:
    """Mark the time at which the GPU will have finished what was launched so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _measure(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start
