"""Image folders: `<class>/...` or `{train,test}/<class>/...`.

Images are sorted by class, then by name. Where there is no split, the paper's for Office-Caltech is made: of every ten
images in that order the first eight are for training.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedheal.data.readers.images import SUFFIXES, Unreadable, printable
from fedheal.data.splits import Encoded, RawDomain

TRAIN, TEST = ("train", "training"), ("test", "val", "validation", "testing")
OF_TEN = 8  # are for training
DEEPEST = 16  # folders below a class
MOST_BYTES = 1 << 28  # of one image file


@dataclass(frozen=True)
class Tree:
    """The images of a domain on disk, by class: `(class, path)` in order, for each split."""

    train: tuple[tuple[str, Path], ...]
    test: tuple[tuple[str, Path], ...]
    classes: tuple[str, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for _, path in (*self.train, *self.test))


def scanned(folder: Path) -> Tree:
    """What images there are; nothing is opened yet."""
    names = {name.lower(): name for name in subfolders(folder)}
    train = next((names[name] for name in TRAIN if name in names), None)
    test = next((names[name] for name in TEST if name in names), None)
    if train and test:
        parts = [_by_class(folder / part) for part in (train, test)]
        classes = sorted({*parts[0], *parts[1]})
        return Tree(_pairs(parts[0]), _pairs(parts[1]), tuple(classes))
    found = _by_class(folder)
    pairs = _pairs(found)
    return Tree(
        tuple(pair for i, pair in enumerate(pairs) if i % 10 < OF_TEN),
        tuple(pair for i, pair in enumerate(pairs) if i % 10 >= OF_TEN),
        tuple(found),
    )


def listed(root: Path, train: Path, test: Path) -> Tree:
    """What two lists name, a line each: a path below `root` as `<domain>/<class>/<file>`, then perhaps a number."""
    splits = [_lines(root, path) for path in (train, test)]
    return Tree(splits[0], splits[1], tuple(sorted({name for split in splits for name, _ in split})))


def read(name: str, tree: Tree) -> RawDomain:
    return RawDomain(name, tree.classes, _split(tree.train, tree.classes), _split(tree.test, tree.classes))


def subfolders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted; hidden ones do not count."""
    return [name for name, is_folder in _entries(folder) if is_folder]


def _lines(root: Path, path: Path) -> tuple[tuple[str, Path], ...]:
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error})") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        parts = Path(words[0]).parts if words else ()
        if words and (len(parts) < 3 or ".." in parts or parts[0] == "/"):
            raise ValueError(f"line {number} of {path} is not <domain>/<class>/<file>")
        if words and (root / words[0]).is_file():
            found.append((parts[1], root / words[0]))
    return tuple(found)


def _by_class(folder: Path) -> dict[str, list[Path]]:
    found = {name: _images(folder / name, (folder,)) for name in subfolders(folder)}
    return {name: paths for name, paths in found.items() if paths}


def _images(folder: Path, above: tuple[Path, ...]) -> list[Path]:
    """All images below a folder; a link back to a folder above is refused, since it would never end."""
    if any(os.path.samefile(folder, other) for other in above):
        raise ValueError(f"{folder} is a link to a folder that it lies in: remove the link")
    if len(above) > DEEPEST:
        raise ValueError(f"{folder} lies more than {DEEPEST} folders deep: images are looked for in <class>/...")
    entries = _entries(folder)
    found = [folder / name for name, is_folder in entries if not is_folder and name.lower().endswith(SUFFIXES)]
    for name, is_folder in entries:
        if is_folder:
            found += _images(folder / name, (*above, folder))
    return found


def _entries(folder: Path) -> list[tuple[str, bool]]:
    try:
        with os.scandir(folder) as listed:
            found = [(entry.name, entry.is_dir()) for entry in listed if not entry.name.startswith(".")]
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{error.filename} is a link that leads to itself: remove it") from error
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
    for name, is_folder in found:
        if is_folder and not name.isprintable():  # also bytes that are no text
            raise ValueError(f"{str(folder)!r} has a folder {name!r}: a domain or class cannot be called that")
    return sorted(found)


def _pairs(found: dict[str, list[Path]]) -> tuple[tuple[str, Path], ...]:
    return tuple((name, path) for name, paths in found.items() for path in paths)


def _split(pairs: Sequence[tuple[str, Path]], classes: tuple[str, ...]) -> Encoded:
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[name] for name, _ in pairs], dtype=np.int64)
    return Encoded([str(path) for _, path in pairs], labels, _bytes)


def _bytes(name: str) -> bytes:
    try:
        if not os.path.isfile(name):  # a pipe would never end, and a link may lead nowhere
            raise Unreadable(f"{printable(name)} is not a file")
        if os.path.getsize(name) > MOST_BYTES:
            raise Unreadable(f"{printable(name)} has more than {MOST_BYTES:,} bytes")
        return Path(name).read_bytes()
    except OSError as error:
        raise Unreadable(f"{printable(name)} cannot be read: {error.strerror}") from error
