"""Run jobs as tasks of a Ray cluster. Each run's folder comes back as bytes and is written here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from fedheal.campaign.gpu_estimate import is_small_run
from fedheal.campaign.jobs import Job, handle_failed_job, run_job
from fedheal.campaign.placement import MAX_RUNS_PER_GPU
from fedheal.engine.ray_cluster import connect_to_cluster
from fedheal.runs.folder import write_bytes
from fedheal.simulate.experiment import Experiment


def run_on_ray(jobs: Sequence[Job], address: str) -> Iterator[Job]:
    """Run the jobs on the cluster at this address, and yield each job when its folder is written."""
    with connect_to_cluster(address) as ray:
        remote, tasks = ray.remote(max_retries=3)(_run_on_cluster), {}
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        for job in jobs:
            resources = _choose_resources(job.experiment, has_gpus)
            tasks[remote.options(**resources).remote(job.experiment.to_dict(), job.track)] = job
        waiting = list(tasks)
        while waiting:
            (task,), waiting = ray.wait(waiting, num_returns=1)
            with handle_failed_job(tasks[task]):
                _write_folder(_get_files(task), tasks[task].folder)
            yield tasks[task]


def _choose_resources(experiment: Experiment, has_gpus: bool) -> dict[str, float]:
    """Return a task's share of the cluster. `auto` means a GPU if the cluster has any; small runs share one."""
    uses_gpu = experiment.device.startswith("cuda") or (experiment.device == "auto" and has_gpus)
    share = (1 / MAX_RUNS_PER_GPU if is_small_run(experiment) else 1.0) if uses_gpu else 0.0
    return {"num_cpus": experiment.threads * experiment.workers, "num_gpus": share}


def _run_on_cluster(fields: dict[str, Any], track: str | None) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        run_job(Job(Experiment.of(fields), folder, track))
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _get_files(task: Any) -> dict[str, bytes]:
    """Return a task's files. Raise the run's own error rather than Ray's wrapper of it."""
    import ray

    try:
        return cast(dict[str, bytes], ray.get(task))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ChildProcessError(f"a run on the Ray cluster was lost ({reason}); rerun the command to resume") from None


def _write_folder(files: dict[str, bytes], folder: Path) -> None:
    """Write a run's files atomically, `result.json` last: a folder that has it is complete."""
    for name in sorted(files, key=lambda name: name == "result.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, files[name])
