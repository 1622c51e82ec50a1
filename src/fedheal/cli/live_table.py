"""Many runs as they go, read from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedheal.campaign.pool import Job
from fedheal.report.rows import load_summary
from fedheal.runs.folder import read_rounds

SHOWN = ("avg", "std", "worst", "seconds")


class Board:
    """Many runs as they go: a live table on a terminal, else a line a run that ends."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console, self.jobs = console, jobs
        self.live = Live(get_renderable=self.table, console=console, refresh_per_second=1, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def ended(self, job: Job) -> None:
        """A run is finished, or was before."""
        if not self.console.is_terminal:
            found = load_summary(job.folder, SHOWN)
            self.console.print(
                f"{job.folder.name}: AVG {found['avg']:.2f} STD {found['std']:.2f} worst {found['worst']:.2f} "
                f"({sum(found['seconds'].values()):.0f} s)",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def table(self) -> Table:
        """Where each run stands, read from its folder."""
        table = Table("run", "rounds", "AVG", "STD", "worst")
        for job in self.jobs:
            done = read_rounds(job.folder)
            judged = [record.fairness for record in done if record.fairness]
            numbers = [f"{judged[-1][name]:.1f}" for name in ("avg", "std", "worst")] if judged else ["", "", ""]
            table.add_row(Text(job.folder.name), f"{len(done)}/{job.experiment.rounds}", *numbers)
        return table
