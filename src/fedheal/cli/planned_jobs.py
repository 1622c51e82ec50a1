"""Run the jobs of a command, and show how far they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedheal.core.errors import format_count

if TYPE_CHECKING:
    from fedheal.campaign.jobs import Job


def run_jobs(
    planned: Sequence[Job],
    quiet: bool,
    title: str,
    jobs: int,
    ray: str | None = None,
    is_search: bool = False,
    note: str = "",
) -> None:
    """Print notes, and a line with the title and the schedule. Then run the jobs, and show them in a live table."""
    from rich.console import Console

    from fedheal.campaign.pool import describe_schedule, run_all
    from fedheal.cli import display

    console, schedule = Console(quiet=quiet), describe_schedule(planned, jobs, ray)
    finished = run_all(planned, jobs, ray)  # checks all of them before anything is printed
    if ray is None and not is_search:
        display.print_notes((job.experiment for job in planned if not job.is_finished), console)
    if note:
        display.print_note(note, console)
    if title:
        console.print(f"{title}, {schedule}:", highlight=False, markup=False, soft_wrap=True)
    with display.LiveTable(console, planned, is_search) as table:
        for job in finished:
            table.report_finished(job)


def count_runs(planned: Sequence[Job], folder: Path) -> str:
    """Return how many runs go into which folder, as a title for `run_jobs`."""
    return f"{format_count(len(planned), 'run')} into {folder}"
