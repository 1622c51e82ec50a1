"""Digits seen at four sites, learnt together with FedHEAL: the job, and a run of it in NVFLARE's simulator."""

import argparse
from pathlib import Path

from digits import SITES
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

from fedheal.nvflare import FairController


def make_job(
    method: str, rounds: int, folder: str, resume: bool = False, steps: int | None = None, evaluate_every: int = 1
) -> FedJob:
    """Return the job: a controller on the server, the same script at every site."""
    job = FedJob(name="fair-digits", min_clients=len(SITES))
    job.set_app_packages(["fedheal"])  # installed everywhere: the job does not carry it
    job.add_file_to_server("digits.py")
    controller = FairController(
        method,
        model="digits:make_model",
        num_rounds=rounds,
        folder=str(Path(folder).resolve()),
        resume=resume,
        evaluate_every=evaluate_every,
        data="embedded",
        task_check_period=0.1,
    )
    job.to_server(controller)
    job.to_server(
        {"server": {"task_request_interval": 0.2}}
    )  # sites ask for work five times a second, not every other one
    arguments = f"--method {method} --rounds {rounds}" + (f" --steps {steps}" if steps else "")
    for site in SITES:
        job.to(ScriptRunner(script="site.py", script_args=arguments), site)
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedheal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="local steps a round; by default the whole data once an epoch")
    parser.add_argument("--folder", default="runs/nvflare")
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    parser.add_argument("--evaluate-every", type=int, default=1)
    parser.add_argument("--workspace", default="runs/nvflare-workspace", help="NVFLARE's own files")
    options = vars(parser.parse_args())
    workspace = str(Path(options.pop("workspace")).resolve())
    raise SystemExit(make_job(**options).simulator_run(workspace))


if __name__ == "__main__":
    main()
