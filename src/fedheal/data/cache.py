"""The cache of prepared data: images decoded and resized once, in memory-mapped files with a fingerprint.

The name of a prepared data set is a hash of what decides its bytes: the source files (names, sizes and modification
times), the image size, the choice of classes, and the versions of fedheal and Pillow. The data set is written to a
temporary folder and renamed when complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import PIL
import torch
from pydantic import BaseModel

from fedheal.core.atomic_files import sync_path
from fedheal.core.errors import format_count
from fedheal.data.domains import Domain, Domains, Excerpt, Split, fingerprint
from fedheal.data.readers import images
from fedheal.data.splits import Labels, RawDomain, RawSplit, explain_empty_split
from fedheal.version import __version__

FORMAT: Literal["fedheal-prepared-2"] = "fedheal-prepared-2"
VARIABLE = "FEDHEAL_CACHE"
UNFINISHED = ".making-"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class CacheInputs:
    """What a prepared data set is made from: enough to name it, and a function that reads the images."""

    name: str
    size: int
    class_rule: str
    files: Mapping[str, Sequence[Path]]  # of each domain
    read: Callable[[], tuple[tuple[str, ...], Sequence[RawDomain]]]  # returns classes and domains

    @property
    def key(self) -> str:
        def describe(path: Path) -> tuple[str, int, int]:
            try:
                status = path.stat()
            except OSError:  # a broken link; reading it will raise
                return str(path), 0, 0
            return str(path), status.st_size, status.st_mtime_ns

        files = {domain: [describe(path) for path in sorted(paths)] for domain, paths in self.files.items()}
        inputs = [FORMAT, __version__, PIL.__version__, self.name, self.size, self.class_rule, files]
        return hashlib.sha256(json.dumps(inputs).encode("utf-8", "surrogateescape")).hexdigest()


class CachedDomain(BaseModel):
    """A domain in a manifest."""

    name: str
    train: int
    test: int
    whole: int  # size of the full training split, if this is an excerpt
    dropped: dict[str, list[int]]  # positions of the images that could not be decoded, by split
    unreadable: list[str]  # the reasons
    dropped_classes: list[str] = []  # classes of its own that the data set does not use


class CacheManifest(BaseModel):
    """The contents of `manifest.json`."""

    format: Literal["fedheal-prepared-2"]
    name: str
    classes: tuple[str, ...]
    size: int
    domains: list[CachedDomain]
    fingerprint: str


@dataclass(frozen=True)
class PreparedData:
    """A prepared data set: its folder and its manifest."""

    folder: Path
    manifest: CacheManifest

    def map_domains(self) -> tuple[Domain, ...]:
        """Return the domains; their images stay in the files until they are used."""
        return tuple(self._map_domain(number, domain) for number, domain in enumerate(self.manifest.domains))

    def _map_domain(self, number: int, domain: CachedDomain) -> Domain:
        def map_file(name: str, dtype: Any, *shape: int) -> torch.Tensor:
            """Map a file copy-on-write: changes of the tensor do not reach the file."""
            path = self.folder / f"{number}.{name}"
            if not path.is_file() or path.stat().st_size != math.prod(shape) * np.dtype(dtype).itemsize:
                raise ValueError(
                    f"the prepared data in {self.folder} are damaged: run 'fedheal data prepare DATA --again'"
                )
            return torch.from_numpy(np.memmap(path, dtype=dtype, mode="c", shape=shape))

        def map_split(part: str, count: int) -> Split:
            pixels = map_file(f"{part}.images", np.uint8, count, 3, self.manifest.size, self.manifest.size)
            return Split(pixels, map_file(f"{part}.labels", np.int64, count))

        excerpt = None
        if domain.whole:
            positions = map_file("positions", np.int64, domain.train)
            excerpt = Excerpt(positions, map_file("whole", np.int64, domain.whole))
        return Domain(domain.name, map_split("train", domain.train), map_split("test", domain.test), excerpt=excerpt)


def prepare_data(inputs: CacheInputs, again: bool = False) -> PreparedData:
    """Return the prepared data set. Make it if it is not in the cache, or if `again` is set."""
    short = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(inputs.name).name)[:40]
    cache = os.environ.get(VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fedheal")
    folder = Path(cache).expanduser() / f"{short}-{inputs.size}-{inputs.key[:16]}"
    if again and folder.exists():
        shutil.rmtree(folder)
    if not folder.exists():
        with _create_atomically(folder) as temporary:
            _write_data(inputs, temporary)
    try:
        return PreparedData(folder, CacheManifest.model_validate_json((folder / "manifest.json").read_bytes()))
    except (OSError, ValueError) as error:
        raise ValueError(f"the prepared data in {folder} are damaged: remove that folder") from error


def _write_data(inputs: CacheInputs, folder: Path) -> None:
    classes, raw_domains = inputs.read()
    domains = [_write_domain(folder, number, raw, inputs.size) for number, raw in enumerate(raw_domains)]
    manifest = CacheManifest(
        format=FORMAT, name=inputs.name, classes=classes, size=inputs.size, domains=domains, fingerprint=""
    )
    data = Domains(inputs.name, classes, PreparedData(folder, manifest).map_domains(), (), ())
    manifest.fingerprint = fingerprint(data)
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _write_domain(folder: Path, number: int, raw: RawDomain, size: int) -> CachedDomain:
    counts: dict[str, int] = {}
    dropped: dict[str, list[int]] = {}
    unreadable: list[str] = []
    for part, split in (("train", raw.train), ("test", raw.test)):
        labels, errors = _write_images(folder / f"{number}.{part}.images", split, size)
        _write_integers(folder / f"{number}.{part}.labels", labels)
        counts[part] = len(labels)
        dropped[part] = list(errors)
        unreadable += errors.values()
    if not counts["train"] or not counts["test"]:
        if unreadable:
            found = f"{counts['train']} training and {counts['test']} test images that can be read, and needs both"
            broken = f"{format_count(len(unreadable), 'file')} cannot be ({unreadable[0]})"
            raise ValueError(f"domain '{raw.name}' has {found}; {broken}: replace the broken files")
        raise ValueError(explain_empty_split(raw.name, counts["train"], counts["test"]))
    whole = 0
    if raw.excerpt is not None:
        if unreadable:
            raise ValueError(f"the export is damaged ({unreadable[0]}): export the data again")
        _write_integers(folder / f"{number}.positions", raw.excerpt.positions.numpy())
        _write_integers(folder / f"{number}.whole", raw.excerpt.labels.numpy())
        whole = len(raw.excerpt.labels)
    return CachedDomain(
        name=raw.name, **counts, whole=whole, dropped=dropped, unreadable=unreadable,
        dropped_classes=list(raw.dropped_classes),
    )  # fmt: skip


def _write_images(path: Path, split: RawSplit, size: int) -> tuple[Labels, dict[int, str]]:
    """Write the readable images. Return their labels, and the errors of the others by position."""
    labels: list[int] = []
    errors: dict[int, str] = {}
    decoded = chain.from_iterable(images.decode_batches(len(split), split.image, size))
    with path.open("wb") as file:
        for index, image in enumerate(decoded):
            if isinstance(image, images.UnreadableImageError):
                errors[index] = str(image)
            else:
                file.write(np.ascontiguousarray(image).data)
                labels.append(int(split.labels[index]))
    return np.array(labels, dtype=np.int64), errors


def _write_integers(path: Path, values: Labels) -> None:
    path.write_bytes(np.ascontiguousarray(values, dtype="<i8").tobytes())


def _explain_write_error(folder: Path, error: OSError) -> ValueError:
    place = f"prepared data cannot be written to {folder.parent} ({error.strerror})"
    return ValueError(f"{place}: set {VARIABLE} to another folder{', or make room' if error.errno in NO_ROOM else ''}")


@contextmanager
def _create_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. Rename it to `folder` on success, and remove it otherwise."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in folder.parent.glob(f"{UNFINISHED}*"):  # of processes that were killed more than a day ago
            with suppress(FileNotFoundError):  # its process may finish just now
                if time.time() - leftover.stat().st_mtime > 86_400:
                    shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    except OSError as error:
        raise _explain_write_error(folder, error) from error
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):  # a power failure must not leave the name without the images
            sync_path(path)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # another process may have made the same data meanwhile
                raise
    except OSError as error:
        if error.errno in NO_ROOM:  # others may come from the images that are read
            raise _explain_write_error(folder, error) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
