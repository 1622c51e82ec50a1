"""One of many runs: an experiment, its folder and its tracker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedheal.engine.memory import release_gpu_memory
from fedheal.simulate.build import check_method
from fedheal.simulate.callbacks import Callback
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.round import Diverged
from fedheal.simulate.runner import check_folder_owner, run

log = logging.getLogger("fedheal")


@dataclass(frozen=True)
class Job:
    """A run and the folder it writes to. Raise ValueError at once if the experiment cannot be run.

    If it `may_diverge`, a run whose training does so ends without a result, and other jobs go on.
    """

    experiment: Experiment
    folder: Path
    track: str | None = None
    may_diverge: bool = False

    def __post_init__(self) -> None:
        check_method(self.experiment)

    @property
    def has_result(self) -> bool:
        return (self.folder / "result.json").exists()

    @property
    def is_finished(self) -> bool:
        """Whether the folder holds the result of this experiment. Raise ValueError if it holds another one."""
        check_folder_owner(self.folder, self.experiment)
        return self.has_result

    def make_tracker(self) -> Callback:
        """Return the tracker of this run, which has one. Raise ValueError if that is not possible."""
        from fedheal.tracking import tracker  # imported late: its libraries are optional

        assert self.track is not None
        return tracker(self.track, self.folder)


def run_job(job: Job) -> None:
    """Run or resume a job in this process, without a progress display."""
    callbacks = [] if job.track is None else [job.make_tracker()]
    try:
        run(job.experiment, job.folder, resume=True, callbacks=callbacks, progress=False)
    finally:
        release_gpu_memory()  # other processes may share the GPU


@contextmanager
def handle_failed_job(job: Job) -> Iterator[None]:
    """Add the run's folder to an error. Log the error of training that diverges if it may, and go on."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Diverged) and job.may_diverge:
            log.warning("%s: %s", job.folder.name, error)
            return
        error.add_note(f"in the run {job.folder}")
        raise
