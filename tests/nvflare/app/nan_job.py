"""The example's job with a site that sends NaN and one that raises. Run it in the app's folder: FOLDER WORKSPACE [resume]."""

import sys


def main() -> None:
    from nvflare.fuel.utils.constants import FrameworkType
    from nvflare.job_config.script_runner import ScriptRunner

    sys.path.insert(0, ".")
    from job import make_job

    folder, workspace, *resume = sys.argv[1:]
    job = make_job("fedheal", 5, folder, resume=bool(resume), steps=2, evaluate_every=5)
    for site in ("nan-0", "failing-0"):
        job.to(ScriptRunner(script="nan_site.py", framework=FrameworkType.NUMPY), site)
    raise SystemExit(job.simulator_run(workspace))


if __name__ == "__main__":
    main()
