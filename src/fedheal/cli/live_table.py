"""Show many runs while they run, read from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedheal.campaign.jobs import Job
from fedheal.report.rows import load_summary
from fedheal.runs.folder import read_rounds


class LiveTable:
    """A live table of runs on a terminal; elsewhere one line for each finished run."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console, self.jobs = console, jobs
        self.live = Live(get_renderable=self.make_table, console=console, refresh_per_second=1, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def report_finished(self, job: Job) -> None:
        """Print a line about a finished run, unless the live table shows it."""
        if not self.console.is_terminal:
            result = load_summary(job.folder, ("avg", "std", "worst", "seconds"))
            metrics = f"AVG {result['avg']:.2f} STD {result['std']:.2f} worst {result['worst']:.2f}"
            line = f"{job.folder.name}: {metrics} ({sum(result['seconds'].values()):.0f} s)"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def make_table(self) -> Table:
        """Return the rounds done by each run, and the numbers of its last evaluation."""
        table = Table("run", "rounds", "AVG", "STD", "worst")
        for job in self.jobs:
            done = read_rounds(job.folder)
            evaluated = [record.fairness for record in done if record.fairness]
            metrics = [f"{evaluated[-1][name]:.1f}" if evaluated else "" for name in ("avg", "std", "worst")]
            table.add_row(Text(job.folder.name), f"{len(done)}/{job.experiment.rounds}", *metrics)
        return table
