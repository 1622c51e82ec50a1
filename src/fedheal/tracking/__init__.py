"""Trackers: callbacks that write every round of a run to TensorBoard, MLflow or Weights & Biases."""

from collections.abc import Callable
from pathlib import Path

from fedheal.core.errors import suggest
from fedheal.tracking.base import Tracker
from fedheal.tracking.mlflow import MLflow
from fedheal.tracking.tensorboard import TensorBoard
from fedheal.tracking.wandb import Wandb

__all__ = ["MLflow", "TensorBoard", "Tracker", "Wandb", "tracker"]

_TRACKERS: dict[str, Callable[[str, Path], Tracker]] = {
    "tensorboard": lambda _, folder: TensorBoard(folder / "tensorboard"),
    "mlflow": lambda uri, folder: MLflow(uri or folder / "mlflow", folder=folder / "mlflow"),
    "wandb": lambda _, folder: Wandb("fedheal", folder),
}


def tracker(spec: str, folder: Path) -> Tracker:
    """Return a tracker by its name.

    Args:
        spec: `tensorboard`, `mlflow`, `mlflow:URI` or `wandb`.
        folder: Where the tracker keeps its files.

    Raises:
        ValueError: If there is no such tracker, or its library is not installed.
    """
    name, colon, uri = spec.partition(":")
    if name not in _TRACKERS:
        known = "the trackers are: tensorboard, mlflow (or mlflow:URI), wandb"
        raise ValueError(f"unknown tracker '{name}'{suggest(name, list(_TRACKERS))}; {known}")
    if colon and (name != "mlflow" or not uri):
        raise ValueError(f"tracker '{spec}': only mlflow takes a URI after the colon, as in mlflow:sqlite:///runs.db")
    return _TRACKERS[name](uri, folder)
