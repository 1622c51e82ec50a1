"""Small data sets on disk, in the layouts in which the real ones are distributed."""

from __future__ import annotations

import bz2
import gzip
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

from fedheal.data.catalogue.image_folders import OFFICE_CALTECH_CLASSES


def pixels(seed: int, *shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return (np.arange(number) % 10).astype(np.uint8)


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(folder: Path, train: int = 40, test: int = 20, zipped: bool = True) -> None:
    folder.mkdir(parents=True)
    for part, number, seed in (("train", train, 1), ("t10k", test, 2)):
        for name, array in (("images-idx3", pixels(seed, number, 28, 28)), ("labels-idx1", labels(number))):
            path = folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))


def usps_text(number: int, seed: int) -> bytes:
    values = np.random.default_rng(seed).integers(-1000, 1001, (number, 256)) / 1000
    lines = [
        f"{i % 10 + 1} " + " ".join(f"{place}:{value:g}" for place, value in enumerate(row, 1)) + " \n"
        for i, row in enumerate(values)
    ]
    return "".join(lines).encode()


def usps(folder: Path, train: int = 30, test: int = 20) -> None:
    folder.mkdir(parents=True)
    (folder / "usps.bz2").write_bytes(bz2.compress(usps_text(train, 3)))
    (folder / "usps.t.bz2").write_bytes(bz2.compress(usps_text(test, 4)))


def svhn(folder: Path, train: int = 40, test: int = 20) -> None:
    folder.mkdir(parents=True)
    for part, number, seed in (("train", train, 5), ("test", test, 6)):
        said = np.where(labels(number) == 0, 10, labels(number))[:, None]
        savemat(folder / f"{part}_32x32.mat", {"X": pixels(seed, 32, 32, 3, number), "y": said}, do_compression=True)


def syn(folder: Path, train: int = 30, test: int = 20) -> None:
    folder.mkdir(parents=True)
    for part, number, seed in (("train", train, 7), ("test", test, 8)):
        held = {"X": pixels(seed, 32, 32, 3, number), "y": labels(number)[:, None]}
        savemat(folder / f"synth_{part}_32x32.mat", held)


def digits(root: Path) -> Path:
    """All four domains, with a stand-in for SYN."""
    mnist(root / "digits" / "mnist")
    usps(root / "digits" / "usps")
    svhn(root / "digits" / "svhn")
    syn(root / "digits" / "syn_standin")
    return root


def picture(seed: int, height: int = 20, width: int = 30, form: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels(seed, height, width, 3)).save(out, form)
    return out.getvalue()


def image_folders(folder: Path, counts: dict[str, int], seed: int = 0, suffix: str = ".jpg") -> None:
    """`<class>/0000.jpg`, ... in a folder."""
    form = {".jpg": "JPEG", ".png": "PNG"}[suffix]
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{i:04d}{suffix}").write_bytes(picture(1000 * seed + 100 * number + i, form=form))


def office_caltech(
    root: Path, domains: tuple[str, ...] = ("caltech", "amazon", "webcam", "dslr"), each: int = 7
) -> Path:
    for seed, domain in enumerate(domains):
        image_folders(root / "office_caltech_10" / domain, dict.fromkeys(OFFICE_CALTECH_CLASSES, each), seed)
    return root
