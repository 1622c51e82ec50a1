"""Specifications of data sets: their domains, full sizes, where their files are looked for and where to get them.

A protocol's "1 % of the training images" is a share of the full data set. So the full sizes are stated here. A client
gets the same number of images if only a part of the data set is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedheal.core.errors import format_count, shorten_list
from fedheal.data.readers import folders, parquet
from fedheal.data.readers.camera_traps import list_location
from fedheal.data.readers.images import SUFFIXES
from fedheal.data.splits import EncodedImages, Pixels, RawDomain

IMAGE_FOLDERS = "image folders"  # the name of that layout
# Where text files with splits are looked for: beside the domains' folders, one above, and in these folders there.
LIST_FOLDERS = (".", "splits", "label", "pacs_label", "Train val splits and h5py files pre-read")


@dataclass(frozen=True)
class DomainFiles:
    """The files of a domain on disk, not read yet."""

    name: str
    layout: str
    folder: Path
    files: tuple[Path, ...]
    read: Callable[[], RawDomain]
    note: str = ""  # how its split differs from the one that is distributed with it


@dataclass(frozen=True)
class FileLayout:
    """A fixed set of files, first those of the training split; `files` lists the accepted names of each."""

    name: str
    files: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...]
    read_split: Callable[..., Pixels]  # of the paths of one split
    read_test: Callable[..., Pixels] | None = None  # if it differs, as where one file has both splits

    @property
    def looks_for(self) -> str:
        return ", ".join(dict.fromkeys(names[0] for names in self.files))

    def locate(self, name: str, folder: Path) -> DomainFiles | list[str]:
        """Return the domain's files, or the missing ones if only some are there (empty if none are)."""
        candidates = [next((folder / n for n in names if (folder / n).is_file()), None) for names in self.files]
        paths = [path for path in candidates if path is not None]
        if len(paths) < len(candidates):
            missing = [str(folder / n[0]) for n, path in zip(self.files, candidates, strict=True) if path is None]
            return missing if paths else []
        return DomainFiles(name, self.name, folder, tuple(paths), partial(self._read, name, paths))

    def _read(self, name: str, paths: Sequence[Path]) -> RawDomain:
        half = len(paths) // 2
        test = (self.read_test or self.read_split)(*paths[half:])
        return RawDomain(name, self.classes, self.read_split(*paths[:half]), test)


@dataclass(frozen=True)
class FolderLayout:
    """One folder of images per class, optionally inside folders for training and testing, or split by text files."""

    classes: tuple[str, ...] = ()  # classes that must be present, if the data set fixes them
    looks_for: str = f"<class>/*.jpg or {{train,test}}/<class>/*.jpg (or {', '.join(SUFFIXES[1:])})"
    split_lists: tuple[str, ...] = ()  # text files near the folder that may define the split; {} is the domain
    train_folders: tuple[str, ...] = folders.TRAIN_NAMES
    is_numbered: bool = False  # the folders of all classes may be called 0, 1, ...

    def locate(self, name: str, folder: Path) -> DomainFiles | list[str]:
        """Return the domain's files, or the missing ones if only some are there (empty if none are)."""
        if not folder.is_dir():
            return []
        lists = self._find_lists(name, folder.parent)
        if missing := [str(path) for path in lists if not path.is_file()]:
            return missing
        note = ""
        if lists:
            domain, absent = folders.read_split_lists(name, folder.parent, *lists)
            if absent:
                are = f"{format_count(len(absent), 'image')} of the split files {'is' if len(absent) == 1 else 'are'}"
                note = f"{are} not there: {shorten_list([str(image) for image in absent])}"
        else:
            domain = folders.scan_folder(name, folder, self.train_folders)
            if self.split_lists and not folders.find_split_folders(folder, self.train_folders):
                names = " and ".join(pattern.format(name) for pattern in self.split_lists)
                note = f"{names} are not there, so of every ten images the first eight are for training"
        is_numbered = self.is_numbered and domain.classes == tuple(map(str, range(len(self.classes))))
        if is_numbered:
            domain = replace(domain, classes=self.classes)
        missing = [str(folder / label) for label in self.classes if label not in domain.classes]
        if missing or not domain.classes:
            return missing if len(missing) < len(self.classes) else []
        return _list_files(domain, folder, "numbered folders" if is_numbered else IMAGE_FOLDERS, lists, note)

    def _find_lists(self, name: str, parent: Path) -> list[Path]:
        """Return the text files that define the split, in the first folder that has any of them."""
        for place in (base / part for base in (parent, parent.parent) for part in LIST_FOLDERS):
            paths = [place / pattern.format(name) for pattern in self.split_lists]
            if any(path.is_file() for path in paths):
                return paths
        return []


@dataclass(frozen=True)
class CameraTrapLayout:
    """A folder of images next to the domain's own, and JSON files that name the location and the class of each."""

    location: str
    classes: tuple[str, ...]
    images: str  # name of the folder
    annotations: tuple[str, ...]  # patterns of the files; those of the first that matches are read

    @property
    def looks_for(self) -> str:
        return f"(in the folder above) {self.images}/ and {self.annotations[0]}"

    def locate(self, name: str, folder: Path) -> DomainFiles | list[str]:
        """Return the domain's files, or what is missing if only images or annotations are there (empty if none are)."""
        base = folder.parent
        images = base / self.images
        files = next(filter(None, (sorted(base.glob(pattern)) for pattern in self.annotations)), [])
        if not files or not images.is_dir():
            return [str(base / self.annotations[0])] if images.is_dir() else [str(images)] if files else []
        listed = list_location(self.location, images, files, self.classes)
        return _list_files(folders.divide_images(name, listed), images, "camera traps", files) if listed else []


def _list_files(
    domain: RawDomain, folder: Path, layout: str, descriptions: Sequence[Path], note: str = ""
) -> DomainFiles:
    """Return a domain's images, and the files that divide or describe them: data are prepared again when one changes."""
    splits = (split for split in (domain.train, domain.test) if isinstance(split, EncodedImages))
    paths = (Path(image) for split in splits for image in split.names)
    return DomainFiles(domain.name, layout, folder, (*paths, *descriptions), lambda: domain, note)


@dataclass(frozen=True)
class WebFile:
    """A file to download, with its SHA-256 if one is published."""

    url: str
    sha256: str = ""


@dataclass(frozen=True)
class HubDataset:
    """A data set of Parquet files on the Hugging Face hub; `files` are patterns of the files to use."""

    repository: str
    files: tuple[str, ...] = ("data/*.parquet",)
    domain: str = ""  # value of the column `domain`, if one table holds several domains

    def folder(self, root: Path) -> Path:
        """Return the folder of its files below a data root."""
        return root / "hub" / self.repository.replace("/", "--")

    def locate(self, name: str, root: Path, classes: tuple[str, ...]) -> DomainFiles | None:
        folder = self.folder(root)
        paths = parquet.find_parquet_files(folder, self.files)
        read = partial(parquet.read_parquet_domain, name, paths, self.domain, classes)
        return DomainFiles(name, "Parquet", folder, paths, read) if paths else None


@dataclass(frozen=True)
class DomainSpec:
    """One domain: its full size, the folders to search below a data root, and where to get it."""

    name: str
    train: int  # images of the full training split
    test: int
    folders: tuple[str, ...]
    layouts: tuple[FileLayout | FolderLayout | CameraTrapLayout, ...]
    home: str  # web page
    hub: HubDataset | None = None
    web: tuple[WebFile, ...] = ()
    stand_in: DomainSpec | None = None  # used under its own name if this domain is missing

    @property
    def available_from(self) -> str:
        hub = f"the Hugging Face hub as {self.hub.repository}" if self.hub else ""
        return " or ".join(filter(None, (hub, self.home)))

    def is_incomplete(self, train: int, test: int) -> bool:
        """Return whether images are missing. Layouts may divide the same images in other ways."""
        return train + test < self.train + self.test


@dataclass(frozen=True)
class DatasetSpec:
    """A data set, and the default settings of an experiment on it."""

    name: str
    about: str
    domains: tuple[DomainSpec, ...]
    size: int  # images are resized to size x size
    clients: int  # per domain
    fraction: float = 0.0  # of the full training split, per client; 0: an equal share of what is on disk
    samples: int = 0  # training images per client, instead of a fraction
    classes: tuple[str, ...] = ()  # empty: the names of the folders
    protocol: Mapping[str, Any] = field(default_factory=dict)
