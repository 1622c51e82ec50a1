"""Show a run while it runs: a live display on a terminal or in a notebook, plain lines elsewhere."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from fedheal.core.errors import format_count
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.callbacks import Callback


def is_interactive() -> bool:
    """Return whether the output is a terminal or a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


class Progress(Callback):
    """A callback that shows rounds done, time left and accuracy per domain."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.is_live = self.console.is_terminal or self.console.is_jupyter
        self.bar = ProgressBar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}", markup=False),  # a domain may be called [old]
            console=self.console,
            disable=not self.is_live,
        )

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        self.name, self.rounds = experiment["method"], int(experiment["rounds"])
        self.task = self.bar.add_task(self.name, total=self.rounds, completed=len(done), accuracy="")
        resumed = f", resumed after round {len(done)}" if done else ""
        rounds = format_count(self.rounds, "round")
        self._print_line(f"{self.name} on {experiment['data']}, seed {experiment['seed']}: {rounds}{resumed}")

    def round(self, record: RoundRecord) -> None:
        self.bar.advance(self.task)
        if record.fairness:
            accuracy = format_accuracy(record)
            self.bar.update(self.task, accuracy=accuracy)
            seconds = sum(record.seconds.values())
            self._print_line(f"{self.name} round {record.round}/{self.rounds} ({seconds:.1f} s)  {accuracy}")

    def _print_line(self, text: str) -> None:
        if not self.is_live:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def format_accuracy(record: RoundRecord) -> str:
    """Return the accuracies of an evaluated round in one line."""
    domains = "  ".join(f"{name} {accuracy:.1f}" for name, accuracy in (record.domains or {}).items())
    fairness = record.fairness or {}
    return f"{domains}  AVG {fairness['avg']:.1f} STD {fairness['std']:.1f}"
