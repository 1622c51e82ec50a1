"""Track runs in MLflow."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedheal.runs.schema import RoundRecord
from fedheal.tracking import base

BATCH = 1000  # the most metrics that MLflow takes at once


class MLflow(base.Tracker):
    """Write to a run of an MLflow experiment.

    Args:
        uri_or_folder: A tracking URI, or a folder for an SQLite database.
        experiment_name: The MLflow experiment.
        folder: Where the id of an unfinished run is kept for a resume; by default the database's folder.
    """

    name = "mlflow"

    def __init__(
        self, uri_or_folder: str | Path, experiment_name: str = "fedheal", folder: str | Path | None = None
    ) -> None:
        super().__init__()
        self._uri, self._database_folder = str(uri_or_folder), None
        if not ("://" in self._uri or self._uri.startswith(("databricks", "file:"))):
            self._database_folder = Path(uri_or_folder)
            self._uri = f"sqlite:///{(self._database_folder.resolve() / 'mlflow.db').as_posix()}"
        self._experiment_name = experiment_name
        self._id_folder = Path(folder) if folder is not None else self._database_folder
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import
        database = ("sqlalchemy", "alembic") if self._uri.startswith("sqlite:") else ()
        self._mlflow, self._entities, *_ = base.import_libraries("mlflow", "mlflow.entities", *database)
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs every table it creates
        self._client: Any = None
        self._run: str | None = None

    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        if self._database_folder is not None:
            self._database_folder.mkdir(parents=True, exist_ok=True)
        with base.set_environment(MLFLOW_SQLALCHEMYSTORE_POOLCLASS="NullPool"):  # no open connection between two writes
            self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            experiment_id = self._find_experiment()
        self._id_file = base.RunIdFile(self._id_folder, self.name, experiment)
        self._run = self._find_run(self._id_file.read())
        if self._run is None:
            self._run = str(self._client.create_run(experiment_id, run_name=base.make_title(experiment)).info.run_id)
            parameters = [self._entities.Param(key, str(value)) for key, value in experiment.items()]
            self._client.log_batch(self._run, params=parameters)
            self._id_file.write(self._run)
            return set()
        self._client.update_run(self._run, status="RUNNING")
        return {point.step for point in self._client.get_metric_history(self._run, base.LAST_METRIC)}

    def _find_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment_name)
        if experiment is not None:
            return str(experiment.experiment_id)
        folder = self._database_folder
        location = None if folder is None else (folder.resolve() / "artifacts").as_uri()
        return str(self._client.create_experiment(self._experiment_name, artifact_location=location))

    def _find_run(self, run: str | None) -> str | None:
        """Return the run's id if the store still has it."""
        if run is None:
            return None
        try:
            stage = self._client.get_run(run).info.lifecycle_stage
        except self._mlflow.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if stage == "active" else None

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        points = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self._run, metrics=points[start : start + BATCH])

    def _finish(self, result: Mapping[str, Any]) -> None:
        self._log(max(self._logged, default=0), base.result_metrics(result))
        texts = {key: value for key, value in result.items() if isinstance(value, str)} | result.get("versions", {})
        tags = [self._entities.RunTag(f"fedheal.{key}", value) for key, value in texts.items()]
        self._client.log_batch(self._run, tags=tags)
        self._client.set_terminated(self._run, "FINISHED")
        self._id_file.delete()
        self._client, self._run = None, None

    def _abandon(self) -> None:
        client, run = self._client, self._run
        self._client, self._run = None, None
        if client is not None and run is not None:
            client.set_terminated(run, "FAILED")
