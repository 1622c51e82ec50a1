"""Check that every run of a campaign can start before the first one does. No images are read, and nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedheal import models
from fedheal.campaign import placement
from fedheal.campaign.jobs import Job
from fedheal.data import SPECS, find_loader
from fedheal.data.embedded.scenes import SIZE as EMBEDDED_SIZE
from fedheal.engine import check_engine
from fedheal.engine.precision import resolve_precision
from fedheal.report.rows import ORDER_FILE
from fedheal.runs.folder import check_folder
from fedheal.simulate.build import build_module, check_features, make_data_request
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.model_checks import check_evaluates, check_model, check_trains
from fedheal.simulate.objects import check_is_name

SWEEP_FILE = "sweep.json"  # beside the runs of a sweep
# Of a folder with campaigns, down to the runs of `fedheal reproduce`: campaign/data/run.
RUNS = tuple("*/" * depth + "experiment.toml" for depth in (1, 2, 3))
CLASSES = 10  # of the embedded data, and of a model on data whose classes are not known before they are loaded


def check_campaign_folder(folder: Path) -> Path:
    """Return the folder of a campaign's runs. Raise ValueError if it holds files, but none of an earlier campaign.

    A campaign that was stopped may have left folders of runs that are empty, or hold nothing but a lock.
    """
    if not check_folder(folder).is_dir() or any((folder / name).exists() for name in (ORDER_FILE, SWEEP_FILE)):
        return folder
    if any(next(folder.glob(pattern), None) for pattern in RUNS) or not any(map(_is_foreign, folder.rglob("*"))):
        return folder
    raise ValueError(f"{folder} is not empty and holds no runs: name another folder (--out)")


def _is_foreign(path: Path) -> bool:
    """Return whether a campaign cannot have left this file or link."""
    is_folder = path.is_dir() and not path.is_symlink()
    return not (is_folder or path.suffix == ".tmp" or path.name.startswith("."))


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise ValueError if the data, the engine, the precision, the model or what the method needs would stop a run's start.

    Runs that differ only in what cannot matter here are checked once.
    """
    experiments = [job.experiment for job in jobs]
    for name, request in dict.fromkeys((e.data, make_data_request(e)) for e in experiments if e.data_object is None):
        check_is_name("data", name)
        find_loader(name, request)
    checked = set()
    for e in experiments:
        features = any(term.features for term in e.resolved_method.local)
        model = (e.data, e.image_size, e.model, e.width, e.weights, features)
        kind = (*model, e.device, e.precision, e.engine, e.workers, e.threads, e.ray_address)
        if kind not in checked:
            checked.add(kind)
            _check_start(e, features)


def check_trackers(jobs: Sequence[Job]) -> None:
    """Raise ValueError if a tracker is unknown or its library is not installed."""
    for job in {job.track: job for job in jobs}.values():
        if job.track is not None:
            job.make_tracker()


def _check_start(experiment: Experiment, features: bool) -> None:
    on_gpu = experiment.device.partition(":")[0] in ("auto", "cuda") and placement.count_gpus() > 0
    device = torch.device("cuda" if on_gpu else "cpu")  # by name only: CUDA need not start in this process
    check_engine(device, experiment.engine, experiment.workers, experiment.threads, experiment.ray_address)
    resolve_precision(experiment.precision, device)
    classes, size = _find_shape(experiment)
    try:
        module = build_module(experiment, classes or CLASSES)
    except Exception:  # a user's own model may need the data's number of classes or shape: its run will report it
        if "@" in experiment.model or models.is_import_path(experiment.model):
            return
        raise
    check_features(experiment, module)
    check_model(module, experiment.model)
    if classes:
        image = torch.zeros(1, 3, size, size)
        check_evaluates(module, experiment.model, image, classes)
        check_trains(module, experiment.model, image, classes, features=features)


def _find_shape(experiment: Experiment) -> tuple[int, int]:
    """Return the number of classes and the size of images; no classes if only the data themselves tell."""
    if experiment.data == "embedded":
        return CLASSES, EMBEDDED_SIZE
    spec = SPECS.get(experiment.data)
    return (len(spec.classes), experiment.image_size or spec.size) if spec else (0, 0)
