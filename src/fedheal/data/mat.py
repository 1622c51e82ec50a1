"""SVHN's and SYN's cropped digits as MATLAB files: `X` is 32 x 32 x 3 x N unsigned bytes, `y` one label an image.

The header is read first, so that a file which holds something else is refused before anything of it is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat, whosmat

from fedheal.data.raw import Labels, Pixels

MOST_IMAGES = 1_000_000  # Ganin's SYN, the largest, has 479,400


def images(path: Path, classes: int, zero_is_ten: bool) -> Pixels:
    """RGB images and their labels; SVHN writes 10 for the digit zero."""
    sizes = {name: (tuple(shape), kind) for name, shape, kind in _loaded(whosmat, path)}
    pictures, kind = sizes.get("X", ((), ""))
    if len(pictures) != 4 or pictures[2] != 3 or kind != "uint8" or not 0 < pictures[3] <= MOST_IMAGES:
        raise ValueError(f"{path} has {_shown(sizes, 'X')}; height x width x 3 x N in uint8 is needed")
    if max(pictures[:2]) > 64:
        raise ValueError(f"{path} has {_shown(sizes, 'X')}; images of at most 64 x 64 pixels are needed")
    found, kind = sizes.get("y", ((), ""))
    number = pictures[3]
    if found not in ((number, 1), (1, number)) or not (kind.startswith(("int", "uint")) or kind == "double"):
        raise ValueError(f"{path} has {_shown(sizes, 'y')}; {number} x 1 numbers are needed")
    held = _loaded(loadmat, path, variable_names=["X", "y"])
    if held["X"].shape != pictures or held["X"].dtype != np.uint8 or held["y"].dtype.kind not in "iuf":
        raise ValueError(f"{path} does not hold what its header says")
    return Pixels(held["X"].transpose(3, 0, 1, 2), _labels(held["y"].ravel(), path, classes, zero_is_ten))


def _labels(found: Any, path: Path, classes: int, zero_is_ten: bool) -> Labels:
    first = 1 if zero_is_ten else 0
    if not ((found >= first) & (found <= first + classes - 1) & (found == np.floor(found))).all():
        raise ValueError(
            f"{path} has labels from {found.min()} to {found.max()}; {first} to {first + classes - 1} are known"
        )
    labels: Labels = found.astype(np.int64) % classes if zero_is_ten else found.astype(np.int64)
    return labels


def _loaded(reader: Any, path: Path, **keys: Any) -> Any:
    try:
        return reader(path, **keys)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except NotImplementedError:
        raise ValueError(f"{path} is a MATLAB 7.3 file; save it in the version 5 format (-v7)") from None
    except Exception as error:  # scipy raises whatever damaged bytes make it trip over
        raise ValueError(f"{path} is not a MATLAB file that can be read, or is cut off ({error})") from error


def _shown(sizes: dict[str, tuple[tuple[int, ...], str]], name: str) -> str:
    if name not in sizes:
        return f"no variable {name}"
    shape, kind = sizes[name]
    return f"{name} of {' x '.join(map(str, shape))} in {kind}"
