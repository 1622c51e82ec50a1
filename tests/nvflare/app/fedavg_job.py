"""The stock FedAvg workflow with the fair aggregator; sites send differences. Run it in the app's folder: FOLDER WORKSPACE."""

import sys


def main() -> None:
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.client.config import TransferType
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import ScriptRunner

    from fedheal.nvflare import FairModelAggregator, FolderPersistor

    sys.path.insert(0, ".")
    from digits import SITES

    folder, workspace = sys.argv[1:]
    job = FedJob(name="fair-fedavg", min_clients=len(SITES))
    job.set_app_packages(["fedheal"])
    job.add_file_to_server("digits.py")
    job.to_server(FolderPersistor("digits:make_model", folder), id="persistor")
    aggregator = FairModelAggregator("fedheal", model="digits:make_model", folder=folder)
    job.to_server(FedAvg(num_clients=len(SITES), num_rounds=2, aggregator=aggregator, ignore_result_error=True))
    job.to_server({"server": {"task_request_interval": 0.2}})
    for site in SITES:
        runner = ScriptRunner(
            script="site.py", script_args="--rounds 2 --steps 2", params_transfer_type=TransferType.DIFF
        )
        job.to(runner, site)
    raise SystemExit(job.simulator_run(workspace))


if __name__ == "__main__":
    main()
