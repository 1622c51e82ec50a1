"""What a data set is before any of it is on disk: its domains, how large the whole is, where to look and where to get it.

A protocol's "1 % of the training images" is a share of the *whole* set, so its size stands here and not in the files: whoever
has a part on disk samples as many images as everybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedheal.data.readers import folders
from fedheal.data.readers import parquet as tables
from fedheal.data.splits import RawDomain


@dataclass(frozen=True)
class Located:
    """A domain found on disk and not read yet."""

    name: str
    layout: str
    folder: Path
    files: tuple[Path, ...]
    read: Callable[[], RawDomain]


class Layout(Protocol):
    """A way in which a domain's files may lie in a folder."""

    @property
    def looks_for(self) -> str:
        """In words, for whoever has to put files there."""

    def locate(self, name: str, folder: Path) -> Located | list[str]:
        """The domain, or what is missing of it; nothing is missing of what is not there at all."""


@dataclass(frozen=True)
class FileLayout:
    """Certain files; for each, the names it may have."""

    name: str
    files: tuple[tuple[str, ...], ...]
    reader: Callable[[str, Sequence[Path]], RawDomain]

    @property
    def looks_for(self) -> str:
        return ", ".join(names[0] for names in self.files)

    def locate(self, name: str, folder: Path) -> Located | list[str]:
        found = [next((folder / n for n in names if (folder / n).is_file()), None) for names in self.files]
        paths = [path for path in found if path is not None]
        if len(paths) < len(found):
            wanted = [str(folder / names[0]) for names, path in zip(self.files, found, strict=True) if path is None]
            return wanted if paths else []
        return Located(name, self.name, folder, tuple(paths), lambda: self.reader(name, paths))


@dataclass(frozen=True)
class FolderLayout:
    """Image folders by class, with or without folders for training and testing."""

    classes: tuple[str, ...] = ()  # those that must be there, where the data set says so
    looks_for: str = "<class>/*.jpg or {train,test}/<class>/*.jpg"
    name: str = "image folders"
    lists: bool = False  # beside the folder, <domain>_train.txt and <domain>_test.txt may say what is for what

    def locate(self, name: str, folder: Path) -> Located | list[str]:
        if not folder.is_dir():
            return []
        tree = self._listed(name, folder) or folders.scanned(folder)
        if not tree.classes:
            return []
        absent = [str(folder / wanted) for wanted in self.classes if wanted not in tree.classes]
        if absent:
            return absent if len(absent) < len(self.classes) else []
        return Located(name, self.name, folder, tree.files, lambda: folders.read(name, tree))

    def _listed(self, name: str, folder: Path) -> folders.Tree | None:
        paths = [folder.parent / f"{name}_{part}.txt" for part in ("train", "test")]
        if not self.lists or not all(path.is_file() for path in paths):
            return None
        return folders.listed(folder.parent, *paths)


@dataclass(frozen=True)
class Web:
    """A file to download: its address, and its SHA-256 where that is known for certain."""

    url: str
    sha256: str = ""


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub, as Parquet files; `files` are patterns of those that are needed."""

    repository: str
    files: tuple[str, ...] = ("data/*.parquet",)
    domain: str = ""  # its value in the table's column `domain`, if there are several in one table

    def folder(self, root: Path) -> Path:
        """Where its files lie below a data root."""
        return root / "hub" / self.repository.replace("/", "--")

    def locate(self, name: str, root: Path, classes: tuple[str, ...]) -> Located | None:
        paths = tables.files(self.folder(root), self.files)
        if not paths:
            return None
        return Located(
            name, "Parquet", self.folder(root), paths, lambda: tables.read(name, paths, self.domain, classes)
        )


@dataclass(frozen=True)
class Source:
    """One domain: the size of the whole, where it may lie below a data root, and where it can be had."""

    name: str
    train: int  # images of the whole training split
    test: int
    folders: tuple[str, ...]
    layouts: tuple[Layout, ...]
    home: str
    hub: Hub | None = None
    web: tuple[Web, ...] = ()
    stand_in: Source | None = None  # what may take its place, under its own name

    @property
    def available(self) -> str:
        """Where it can be had, in words."""
        places = [f"the Hugging Face hub as {self.hub.repository}"] if self.hub else []
        return " or ".join([*places, *([self.home] if self.home else [])])


@dataclass(frozen=True)
class Description:
    """A data set, and the settings of an experiment on it that are not said otherwise."""

    name: str
    about: str
    sources: tuple[Source, ...]
    size: int  # images are resized to size x size
    clients: int  # per domain
    fraction: float  # of the whole training split, that each client holds; 0: its share of all there is
    classes: tuple[str, ...] = ()  # empty: the names of the folders
    protocol: Mapping[str, Any] = field(default_factory=dict)


def eight_of_ten(images: int) -> tuple[int, int]:
    """How many images the split of `folders` gives for training and testing.

    >>> eight_of_ten(1123), eight_of_ten(157)
    ((899, 224), (127, 30))
    """
    train = images // 10 * folders.OF_TEN + min(images % 10, folders.OF_TEN)
    return train, images - train
