"""Images decoded once: resized bytes in files that are mapped into memory, with a fingerprint.

The name of a prepared set hashes everything that decides its bytes: the files it was made from (their names, sizes and times
of change), the size, the choice of classes, the versions of fedheal and Pillow. A set appears whole, by one rename, or not
at all.
"""

from __future__ import annotations

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
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import PIL
import torch
from pydantic import BaseModel

from fedheal.data.domains import Domain, Domains, Excerpt, Split, fingerprint
from fedheal.data.readers import images
from fedheal.data.splits import Raw, RawDomain
from fedheal.version import __version__

FORMAT: Literal["fedheal-prepared-1"] = "fedheal-prepared-1"
VARIABLE = "FEDHEAL_CACHE"
UNFINISHED = ".making-"
A_DAY = 86_400


@dataclass(frozen=True)
class Recipe:
    """What a prepared set is made of: enough to name it, and how to read the images if it is not there yet."""

    name: str
    size: int
    choice: str  # of classes
    files: Mapping[str, Sequence[Path]]  # of each domain
    read: Callable[[], tuple[tuple[str, ...], Sequence[RawDomain]]]  # classes and domains

    @property
    def key(self) -> str:
        listed = {
            domain: [(str(path), *_stamp(path)) for path in sorted(paths)] for domain, paths in self.files.items()
        }
        said = [FORMAT, __version__, PIL.__version__, self.name, self.size, self.choice, listed]
        return hashlib.sha256(json.dumps(said).encode("utf-8", "surrogateescape")).hexdigest()


class Described(BaseModel):
    """A domain, in a manifest."""

    name: str
    train: int
    test: int
    whole: int  # training images of the whole, where only some of them are here
    dropped: dict[str, list[int]]  # positions of what could not be decoded, by split
    unreadable: list[str]  # and why


class Manifest(BaseModel):
    """What stands in the file beside the images."""

    format: Literal["fedheal-prepared-1"]
    name: str
    classes: tuple[str, ...]
    size: int
    domains: list[Described]
    fingerprint: str


@dataclass(frozen=True)
class Prepared:
    """A prepared set: where it lies, and what its manifest says."""

    folder: Path
    manifest: Mapping[str, Any]

    def domains(self) -> tuple[Domain, ...]:
        return tuple(
            _mapped(self.folder, number, domain, self.manifest["size"])
            for number, domain in enumerate(self.manifest["domains"])
        )


def home() -> Path:
    """Where prepared sets lie: FEDHEAL_CACHE, or the user's folder for such things."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedheal"


def prepare(recipe: Recipe, again: bool = False) -> Prepared:
    """The prepared set, made now if it is not there; `again` makes it anew."""
    short = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(recipe.name).name)[:40]
    folder = home() / f"{short}-{recipe.size}-{recipe.key[:16]}"
    if again and folder.exists():
        shutil.rmtree(folder)
    if not folder.exists():
        with _appearing(folder) as temporary:
            _make(recipe, temporary)
    return _opened(folder)


def _make(recipe: Recipe, folder: Path) -> None:
    classes, raws = recipe.read()
    described = [_write(folder, number, raw, recipe.size) for number, raw in enumerate(raws)]
    manifest = {"format": FORMAT, "name": recipe.name, "classes": classes, "size": recipe.size, "domains": described}
    numbers = (0,) * len(described)
    whole = Domains(recipe.name, classes, Prepared(folder, manifest).domains(), numbers, numbers)
    manifest["fingerprint"] = fingerprint(whole)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _write(folder: Path, number: int, raw: RawDomain, size: int) -> dict[str, Any]:
    counts: dict[str, int] = {}
    dropped: dict[str, list[int]] = {}
    bad: list[str] = []
    for part, split in (("train", raw.train), ("test", raw.test)):
        labels, troubles = _decode(folder / f"{number}.{part}.images", split, size)
        _save(folder / f"{number}.{part}.labels", labels)
        counts[part] = len(labels)
        dropped[part] = list(troubles)
        bad += troubles.values()
    if not counts["train"] or not counts["test"]:
        why = f" ({bad[0]})" if bad else ""
        raise ValueError(f"domain '{raw.name}' has {counts['train']} training and {counts['test']} test images{why}")
    whole = 0
    if raw.excerpt is not None:
        if bad:
            raise ValueError(f"the export is damaged: {bad[0]}")
        _save(folder / f"{number}.positions", raw.excerpt.positions)
        _save(folder / f"{number}.whole", raw.excerpt.labels)
        whole = len(raw.excerpt.labels)
    return {"name": raw.name, **counts, "whole": whole, "dropped": dropped, "unreadable": bad}


def _decode(path: Path, split: Raw, size: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], dict[int, str]]:
    """Write the images that can be read; their labels, and what is wrong with the others, by position."""
    kept: list[int] = []
    troubles: dict[int, str] = {}
    index = 0
    with path.open("wb") as file:
        for batch in images.batches(len(split), split.image, size):
            for found in batch:
                if isinstance(found, images.Unreadable):
                    troubles[index] = str(found)
                else:
                    file.write(np.ascontiguousarray(found).data)
                    kept.append(int(split.labels[index]))
                index += 1
    return np.array(kept, dtype=np.int64), troubles


def _mapped(folder: Path, number: int, domain: Mapping[str, Any], size: int) -> Domain:
    def split(part: str) -> Split:
        count = domain[part]
        pixels = _map(folder / f"{number}.{part}.images", np.uint8, (count, 3, size, size))
        return Split(pixels, _map(folder / f"{number}.{part}.labels", np.int64, (count,)))

    excerpt = None
    if domain["whole"]:
        positions = _map(folder / f"{number}.positions", np.int64, (domain["train"],))
        excerpt = Excerpt(positions, _map(folder / f"{number}.whole", np.int64, (domain["whole"],)))
    return Domain(domain["name"], split("train"), split("test"), excerpt=excerpt)


def _map(path: Path, kind: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A file as a tensor. Pages come when they are looked at; writing to the tensor would not reach the file."""
    wanted = math.prod(shape) * np.dtype(kind).itemsize
    if not path.is_file() or path.stat().st_size != wanted:
        raise ValueError(
            f"the prepared data in {path.parent} are damaged: 'fedheal data prepare --again' makes them anew"
        )
    return torch.from_numpy(np.memmap(path, dtype=kind, mode="c", shape=shape))


def _save(path: Path, values: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    path.write_bytes(np.ascontiguousarray(values, dtype="<i8").tobytes())


def _opened(folder: Path) -> Prepared:
    try:
        manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"the prepared data in {folder} are damaged: remove that folder") from error
    return Prepared(folder, manifest.model_dump())


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes its final name when all went well, and is gone otherwise."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _tidy(folder.parent)
        temporary = Path(mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"prepared data cannot be written to {folder.parent} ({error.strerror}): name another folder with {VARIABLE}"
        ) from error
    try:
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # another process may have made the same meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what processes that were killed have left."""
    for left in folder.glob(f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):  # its process may finish just now
            if time.time() - left.stat().st_mtime > A_DAY:
                shutil.rmtree(left, ignore_errors=True)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:  # a link that leads nowhere: reading it will say so
        return 0, 0
    return status.st_size, status.st_mtime_ns
