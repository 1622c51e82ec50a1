"""Small data sets on disk, in the layouts in which the real ones are distributed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
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
        stored_labels = np.where(labels(number) == 0, 10, labels(number))[:, None]
        savemat(
            folder / f"{part}_32x32.mat",
            {"X": pixels(seed, 32, 32, 3, number), "y": stored_labels},
            do_compression=True,
        )


def syn(folder: Path, train: int = 30, test: int = 20) -> None:
    folder.mkdir(parents=True)
    for part, number, seed in (("train", train, 7), ("test", test, 8)):
        arrays = {"X": pixels(seed, 32, 32, 3, number), "y": labels(number)[:, None]}
        savemat(folder / f"synth_{part}_32x32.mat", arrays)


def digits(root: Path) -> Path:
    """Write all four domains of Digits, with a stand-in for SYN."""
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
    """Write image folders `<class>/0000.jpg`, ..."""
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


def digit_five(folder: Path, train: int = 12, test: int = 6) -> None:
    """Write MATLAB files as Peng et al. share them, with their axes, label conventions and cell array."""
    folder.mkdir(parents=True)

    def make_both_splits(seed: int, *shape: int) -> list[np.ndarray[Any, Any]]:
        return [pixels(seed + part, number, *shape) for part, number in enumerate((train, test))]

    column, one_hot = [labels(n)[:, None] for n in (train, test)], [np.eye(10)[labels(n)] for n in (train, test)]
    grey, colour, large = make_both_splits(20, 32, 32), make_both_splits(30, 28, 28, 3), make_both_splits(40, 32, 32, 3)
    named = {"label_train": one_hot[0], "label_test": one_hot[1]}
    savemat(folder / "mnist_data.mat", {"train_32": grey[0], "test_32": grey[1], "train_28": 0, **named})
    savemat(folder / "mnistm_with_label.mat", {"train": colour[0], "test": colour[1], **named}, do_compression=True)
    data = {"train_data": large[0], "test_data": large[1], "train_label": column[0], "test_label": column[1]}
    savemat(folder / "syn_number.mat", data)
    cells = np.empty((2, 2), dtype=object)
    for row, cube in enumerate(make_both_splits(50, 1, 28, 28)):
        cells[row, 0], cells[row, 1] = cube / 256, column[row]
    savemat(folder / "usps_28x28.mat", {"dataset": cells}, do_compression=True)
    for part, cube, own in (("train", large[0], column[0]), ("test", large[1], column[1])):
        x, y = cube.transpose(1, 2, 3, 0), np.where(own == 0, 10, own)
        savemat(folder / f"svhn_{part}_32x32.mat", {"X": x, "y": y})


def split_lists(folder: Path, patterns: tuple[str, str], domain: str, images: Path) -> None:
    """Write text files that split a domain's images: the last of each class is for testing."""
    lines: tuple[list[str], list[str]] = ([], [])
    for number, name in enumerate(sorted(path.name for path in images.iterdir()), 1):
        *most, last = sorted((images / name).iterdir())
        lines[0].extend(f"{domain}/{name}/{path.name} {number}" for path in most)
        lines[1].append(f"{domain}/{name}/{last.name} {number}")
    folder.mkdir(parents=True, exist_ok=True)
    for pattern, part in zip(patterns, lines, strict=True):
        (folder / pattern.format(domain)).write_text("\n".join(part) + "\n")


def camera_traps(root: Path, each: int = 11, classes: tuple[str, ...] = ("bird", "cat")) -> None:
    """Write images of four locations and of one that is not used, with two annotation files."""
    images = root / "eccv_18_all_images_sm"
    images.mkdir(parents=True)
    names = [*classes, "badger"]
    described: list[dict[str, Any]] = [{"images": [], "annotations": []} for _ in range(2)]
    for place, location in enumerate((100, 38, 43, 46, 7)):
        for number in range(each):
            key = f"{location}-{number:02d}"
            (images / f"{key}.jpg").write_bytes(picture(1000 * place + number))
            file = described[number % 2]
            file["images"].append({"id": key, "file_name": f"{key}.jpg", "location": location, "seq_id": "s"})
            file["annotations"].append({"id": key, "image_id": key, "category_id": number % len(names)})
    (root / "eccv_18_annotation_files").mkdir()
    for part, file in zip(("train", "cis_test"), described, strict=True):
        categories = [{"id": i, "name": name} for i, name in enumerate(names)]
        path = root / "eccv_18_annotation_files" / f"{part}_annotations.json"
        path.write_text(json.dumps(file | {"categories": categories}))
