"""The example's job with one more site, which sends NaN. Run it in the example's folder: FOLDER WORKSPACE [resume]."""

import sys


def main() -> None:
    from nvflare.fuel.utils.constants import FrameworkType
    from nvflare.job_config.script_runner import ScriptRunner

    sys.path.insert(0, ".")
    from job import make_job

    folder, workspace, *resume = sys.argv[1:]
    job = make_job("fedheal", 5, folder, resume=bool(resume), steps=2, evaluate_every=5)
    job.to(ScriptRunner(script="nan_site.py", framework=FrameworkType.NUMPY), "nan-0")
    raise SystemExit(job.simulator_run(workspace))


if __name__ == "__main__":
    main()
