"""A run as it goes: a live display on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fedheal.runs.schema import RoundRecord
from fedheal.simulate.callbacks import Callback


def watched() -> bool:
    """Whether somebody is looking: a terminal, or a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


class Progress(Callback):
    """Rounds done, time left, accuracy per domain."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.live = self.console.is_terminal or self.console.is_jupyter
        self.bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}", markup=False),  # a domain may be called [old]
            console=self.console,
            disable=not self.live,
        )
        self.rounds = 0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        self.name, self.rounds = experiment["method"], int(experiment["rounds"])
        self.task = self.bar.add_task(self.name, total=self.rounds, completed=len(done), accuracy="")
        if not self.live:
            goes_on = f", going on after round {len(done)}" if done else ""
            self._line(f"{self.name} on {experiment['data']}, seed {experiment['seed']}: {self.rounds} rounds{goes_on}")

    def round(self, record: RoundRecord) -> None:
        if record.fairness:
            self.bar.update(self.task, accuracy=summary(record))
        self.bar.advance(self.task)
        if not self.live and record.fairness:
            took = sum(record.seconds.values())
            self._line(f"{self.name} round {record.round}/{self.rounds} ({took:.1f} s)  {summary(record)}")

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def summary(record: RoundRecord) -> str:
    """One line on an evaluated round."""
    domains = "  ".join(f"{name} {accuracy:.1f}" for name, accuracy in (record.domains or {}).items())
    evenness = record.fairness or {}
    return f"{domains}  AVG {evenness['avg']:.1f} STD {evenness['std']:.1f}"
