"""Initial values of a model from a local safetensors file. Nothing is downloaded, and no format is read that can run code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedheal.core.errors import shorten_list

SUFFIX = ".safetensors"
COUNTER = "num_batches_tracked"  # of batch normalisation: files of old networks lack it


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raise ValueError if it is missing, damaged or of another format."""
    if not path.endswith(SUFFIX):
        raise ValueError(
            f"weights = {path!r}: only {SUFFIX} files are read, since others can run code; convert it with "
            f"safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'weights{SUFFIX}')"
        )
    if not Path(path).is_file():
        raise ValueError(f"weights = {path!r}: there is no such file; nothing is downloaded")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"weights = {path!r}: the file cannot be read ({error})") from error


def load_weights(model: nn.Module, values: Mapping[str, Tensor], path: str) -> None:
    """Copy values into a model. A `head` for another number of classes keeps its initial values.

    Raises:
        ValueError: If the file lacks values of the model, has others, or has some of another shape or not finite.
    """
    own = model.state_dict()
    head = {key for key in own if key.startswith("head.")}
    if any(key not in values or values[key].shape != own[key].shape for key in head):
        values = {key: value for key, value in values.items() if not key.startswith("head.")}
        own = {key: value for key, value in own.items() if key not in head}
    missing = [key for key in own if key not in values and not key.endswith(COUNTER)]
    unknown = [key for key in values if key not in own]
    for problem, keys in (("lacks", missing), ("has values that the model lacks:", unknown)):
        if keys:
            raise ValueError(f"weights = {path!r}: the file {problem} {shorten_list(keys)}; is it of another model?")
    for key, value in values.items():
        if value.shape != own[key].shape or value.is_floating_point() != own[key].is_floating_point():
            raise ValueError(
                f"weights = {path!r}: {key} is {value.dtype} of shape {tuple(value.shape)}, but the model has "
                f"{own[key].dtype} of shape {tuple(own[key].shape)}"
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"weights = {path!r}: {key} has values that are not finite")
    model.load_state_dict(dict(values), strict=False)
