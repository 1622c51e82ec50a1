"""Track runs in TensorBoard."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedheal.runs.schema import RoundRecord
from fedheal.tracking.base import LAST_METRIC, Tracker, hash_experiment, import_libraries, make_title, result_metrics

HEADLINE = ("fairness/avg", "fairness/std", "fairness/worst")


class TensorBoard(Tracker):
    """Write event files: scalars, and the experiment as hyperparameters and as text.

    Args:
        folder: A folder for TensorBoard's `--logdir`; each run gets a subfolder.
    """

    name = "tensorboard"

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._torch, self._summary, self._reader = import_libraries(
            "torch.utils.tensorboard",
            "torch.utils.tensorboard.summary",
            "tensorboard.backend.event_processing.event_accumulator",
        )
        self._writer: Any = None

    def _open(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> set[int]:
        # The run's folder is found by a hash: its name may change between a run and its resumption.
        title, hashed = re.sub(r"[^\w.+=-]+", "_", make_title(experiment)), hash_experiment(experiment)
        folder = min(self._folder.glob(f"*-{hashed}"), default=self._folder / f"{title}-{hashed}")
        steps = self._read_steps(folder)
        # Readers ignore what older files have at this step or later: rounds that a crash took back.
        purge_step = None if steps is None else len(done) + 1
        self._writer = self._torch.SummaryWriter(str(folder), purge_step=purge_step)
        if steps is None:
            self._write_experiment(experiment)
        return {step for step in steps or () if step <= len(done)}

    def _read_steps(self, folder: Path) -> set[int] | None:
        """Return the rounds that event files hold, or None if there are no such files."""
        if not list(folder.glob("events.out.tfevents.*")):
            return None
        events = self._reader.EventAccumulator(str(folder), size_guidance={self._reader.SCALARS: 0})
        events.Reload()
        return {e.step for e in events.Scalars(LAST_METRIC)} if LAST_METRIC in events.Tags()["scalars"] else set()

    def _write_experiment(self, experiment: Mapping[str, Any]) -> None:
        fields = {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in experiment.items()}
        for part in self._summary.hparams(fields, dict.fromkeys(HEADLINE, 0.0))[:2]:  # add_hparams makes a second run
            self._writer.file_writer.add_summary(part)
        self._writer.add_text("experiment", _format_text(experiment), 0)
        self._writer.flush()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _finish(self, result: Mapping[str, Any]) -> None:
        last = max(self._logged, default=0)
        self._log(last, result_metrics(result))
        self._writer.add_text("result", _format_text(result), last)
        self._writer.file_writer.add_summary(self._summary.hparams({}, {})[2])
        self._abandon()

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _format_text(values: Mapping[str, Any]) -> str:
    """Return JSON that TensorBoard, which renders Markdown, shows unchanged."""
    return "".join(f"    {line}\n" for line in json.dumps(dict(values), indent=2, default=str).splitlines())
