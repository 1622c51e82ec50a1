"""Image folders: `<class>/...` or `{train,test}/<class>/...`, and text files that list the images of a split.

Images are sorted by class, then by name. Without a given split, the paper's split of Office-Caltech is made: of every ten
images in that order the first eight are for training.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from fedheal.data.readers.images import SUFFIXES, UnreadableImageError, quote_unprintable
from fedheal.data.splits import EncodedImages, RawDomain, find_training_images

TRAIN_NAMES, TEST_NAMES = ("train", "training"), ("test", "val", "validation", "testing")
SPLIT_NAMES = {*TRAIN_NAMES, *TEST_NAMES, "valid"}
IGNORED = "__MACOSX"  # a folder that archives made on macOS have beside their contents
MAX_DEPTH = 16  # folders below a class
MAX_BYTES = 1 << 28  # of one image file

LabelledPaths = list[tuple[str, Path]]  # (class, image file)


def scan_folder(name: str, folder: Path, train_names: Sequence[str] = TRAIN_NAMES) -> RawDomain:
    """List the images of a domain; they are read on demand."""
    splits = find_split_folders(folder, train_names)
    return _make_domain(name, *map(_list_by_class, splits)) if splits else divide_images(name, _list_by_class(folder))


def find_split_folders(folder: Path, train_names: Sequence[str] = TRAIN_NAMES) -> list[Path]:
    """Return the folders of training and test images, or an empty list unless both are there."""
    names = {name.lower(): name for name in list_subfolders(folder)}
    found = [next((folder / names[n] for n in known if n in names), None) for known in (train_names, TEST_NAMES)]
    splits = [path for path in found if path]
    return splits if len(splits) == len(found) else []


def note_split_folders(folder: Path) -> str:
    """Say which folder is the test set of a domain if none is called test, and which folders beside the splits are not used."""
    used = [path.name for path in find_split_folders(folder)]
    if not used:
        return ""
    is_named = used[1].lower().startswith("test")
    others = [f"{name}/" for name in list_subfolders(folder) if name not in used]
    left = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not used" if others else ""
    return "; ".join(filter(None, ("" if is_named else f"{used[1]}/ is the test set", left)))


def check_split_folders(name: str, folder: Path) -> None:
    """Raise ValueError if a domain has folders of splits, but not of both: they would count as classes.

    A class may be called train, too. It is a class if its folder has images, or stands beside a class of another name.
    """
    names = list_subfolders(folder)
    if not names or find_split_folders(folder) or not {n.lower() for n in names} <= SPLIT_NAMES:
        return
    if not all(_has_only_folders(folder / n) for n in names):
        return
    found = next((n for n in names if n.lower() in TRAIN_NAMES), "")
    others = [f"{n}/" for n in names if n != found]
    if found and others:
        raise ValueError(f"domain '{name}' has {found}/ but no test/ (found {', '.join(others)}): name it test")
    problem = f"{found}/ but no test/" if found else f"{names[0]}/ but no train/"
    raise ValueError(f"domain '{name}' has {problem}: add it, or put the folders of classes into {name}/ itself")


def _has_only_folders(folder: Path) -> bool:
    entries = list_entries(folder)
    has_images = any(name.lower().endswith(SUFFIXES) for name, is_folder in entries if not is_folder)
    return any(is_folder for _, is_folder in entries) and not has_images


def divide_images(name: str, images: LabelledPaths) -> RawDomain:
    """Make a domain of images that are sorted by class and name: of every ten the first eight are for training."""
    is_train = find_training_images(len(images))
    return _make_domain(name, list(compress(images, is_train)), list(compress(images, ~is_train)))


def read_split_lists(name: str, root: Path, train: Path, test: Path) -> tuple[RawDomain, list[Path]]:
    """List the images of two text files with lines of `<domain>/<class>/<file>`, below `root`, and optionally a number.

    Returns:
        The domain, and the listed images that are not there.
    """
    listed = [_read_list(root, path) for path in (train, test)]
    absent = {image for images in listed for _, image in images if not image.is_file()}
    domain = _make_domain(name, *([pair for pair in images if pair[1] not in absent] for images in listed))
    if not domain.classes:
        raise ValueError(f"{train} and {test} list no image that is below {root}: put its images there")
    return domain, sorted(absent)


def _make_domain(name: str, *splits: LabelledPaths) -> RawDomain:
    classes = tuple(sorted({label for split in splits for label, _ in split}))
    number = {label: i for i, label in enumerate(classes)}
    train, test = (
        EncodedImages(
            [str(path) for _, path in split], np.array([number[c] for c, _ in split], np.int64), _read_image_file
        )
        for split in splits
    )
    return RawDomain(name, classes, train, test)


def list_subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden ones."""
    return [name for name, is_folder in list_entries(folder) if is_folder]


def _read_list(root: Path, path: Path) -> LabelledPaths:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error})") from error
    images = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        parts = Path(words[0]).parts if words else ()
        if words and (len(parts) < 3 or ".." in parts or parts[0] == "/"):
            raise ValueError(f"line {number} of {path} is not <domain>/<class>/<file>")
        if words:
            images.append((parts[1], root / words[0]))
    return images


def _list_by_class(folder: Path) -> LabelledPaths:
    return [(name, path) for name in list_subfolders(folder) for path in _list_images(folder / name, (folder,))]


def _list_images(folder: Path, parents: tuple[Path, ...]) -> list[Path]:
    """List all images below a folder. Reject a link to a parent folder, which would recurse for ever."""
    if any(os.path.samefile(folder, parent) for parent in parents):
        raise ValueError(f"{folder} is a link to a folder that contains it: remove the link")
    if len(parents) > MAX_DEPTH:
        raise ValueError(f"{folder} is more than {MAX_DEPTH} folders deep: put images into <class>/...")
    entries = list_entries(folder)
    images = [folder / name for name, is_folder in entries if not is_folder and name.lower().endswith(SUFFIXES)]
    for name, is_folder in entries:
        if is_folder:
            images += _list_images(folder / name, (*parents, folder))
    return images


def list_entries(folder: Path) -> list[tuple[str, bool]]:
    """Return the sorted names in a folder, without hidden ones and what archives add, and whether each is a folder."""
    try:
        with os.scandir(folder) as entries:
            shown = (entry for entry in entries if not entry.name.startswith(".") and entry.name != IGNORED)
            names = [(entry.name, entry.is_dir()) for entry in shown]
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{error.filename} is a link to itself: remove it") from error
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
    for name, is_folder in names:
        if is_folder and not name.isprintable():  # also bytes that are not text
            raise ValueError(f"{str(folder)!r} has a folder {name!r}, which is not a valid domain or class name")
    return sorted(names)


def _read_image_file(name: str) -> bytes:
    shown = quote_unprintable(name)
    try:
        if not os.path.isfile(name):  # a pipe would block for ever, and a link may be broken
            raise UnreadableImageError(f"{shown} is not a file")
        if os.path.getsize(name) > MAX_BYTES:
            raise UnreadableImageError(f"{shown} has more than {MAX_BYTES:,} bytes")
        return Path(name).read_bytes()
    except OSError as error:
        raise UnreadableImageError(f"{shown} cannot be read: {error.strerror}") from error
