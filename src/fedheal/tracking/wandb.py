"""Track runs in Weights & Biases."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedheal.runs.schema import RoundRecord
from fedheal.tracking.base import RunIdFile, Tracker, import_libraries, make_title, result_metrics, set_environment


class Wandb(Tracker):
    """Write to a run of Weights & Biases, offline by default: `wandb sync` uploads it later.

    An offline run consists of local files that cannot be continued. A resume therefore writes a new offline run with all
    rounds, and leaves the earlier one as it is. With `mode="online"` a resume continues the same run.

    Args:
        project: The W&B project.
        folder: Where W&B's local files go, in a subfolder `wandb`.
        mode: `offline` or `online`.
    """

    name = "wandb"

    def __init__(self, project: str, folder: str | Path, mode: str = "offline") -> None:
        super().__init__()
        self._project, self._folder, self._mode = project, Path(folder), mode
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it reports errors to its makers
        (self._wandb,) = import_libraries("wandb")
        self._run: Any = None

    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        files = (self._folder / "wandb").resolve()
        files.mkdir(parents=True, exist_ok=True)
        online = self._mode == "online"
        self._id_file = RunIdFile(files if online else None, self.name, experiment)
        run_id = self._id_file.read() or secrets.token_hex(4)
        self._id_file.write(run_id)
        with set_environment(WANDB_CACHE_DIR=str(files / "cache")):  # its service, which starts here, logs there
            self._run = self._wandb.init(
                project=self._project,
                id=run_id,
                name=make_title(experiment),
                dir=str(files.parent),
                config=dict(experiment),
                mode=self._mode,
                resume="allow" if online else None,
                reinit="create_new",  # a run that the caller has open stays open
                settings=self._make_settings(),
            )
        return set(range(self._run.starting_step))  # 0 unless a server has the run

    def _make_settings(self) -> Any:
        """Return settings that record only what callbacks write, and flush it at once; unknown names are left out."""
        switches = ("disable_code", "disable_git", "silent", "x_disable_meta", "x_disable_stats")
        flush_seconds = {"x_transaction_log_flush_interval": 0.2}  # 15 by default
        settings = {"console": "off", **dict.fromkeys(switches, True), **flush_seconds}
        known = self._wandb.Settings.model_fields
        return self._wandb.Settings(**{key: value for key, value in settings.items() if key in known})

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def _finish(self, result: Mapping[str, Any]) -> None:
        texts = {f"result/{key}": value for key, value in result.items() if isinstance(value, str)}
        self._run.summary.update(result_metrics(result) | texts)
        self._abandon(exit_code=0)
        self._id_file.delete()

    def _abandon(self, exit_code: int = 1) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
