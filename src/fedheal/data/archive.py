"""The file format of an export: one ZIP archive with just the images that some experiments use.

It has `manifest.json` and, for every domain, the labels of the full training split, the positions of the images in the
archive, and the images as distributed. Image files are copied byte for byte, arrays are stored as PNG strips
(lossless). The other machine decodes and resizes the images (only Pillow is needed), and compares a fingerprint of the
result.
"""

from __future__ import annotations

import io
import logging
import math
import os
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from zipfile import ZipInfo  # without a date, so that the same images always give the same file

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator, BaseModel, ValidationError

from fedheal.data.domains import Excerpt
from fedheal.data.readers.images import UnreadableImageError
from fedheal.data.splits import EncodedImages, Labels, Pixels, RawDomain, RawSplit
from fedheal.runs.schema import explain_problem

STRIP = 1000  # images in a PNG, one below the other
MAX_BYTES = 1 << 28  # of one member
MAX_MANIFEST = 1 << 26
MAX_ARRAY = 1 << 31  # of the images of a split that are arrays, decoded
# Errors that the readers raise on bytes that are not an export.
DAMAGE = (
    zipfile.BadZipFile, zlib.error, AttributeError, EOFError, IndexError, KeyError, NotImplementedError, TypeError, ValueError
)  # fmt: skip


def _require_printable(name: str) -> str:
    if not name or not name.isprintable():
        raise ValueError("the name is not printable")
    return name


Name = Annotated[str, AfterValidator(_require_printable)]
Reader = Callable[[str], bytes]


class ExportedSplit(BaseModel):
    """A split: image files by name, or arrays of images of one shape."""

    kind: Literal["files", "pixels"]
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()


class ExportedDomain(BaseModel):
    """A domain of an export."""

    name: Name
    train: ExportedSplit
    test: ExportedSplit


class ExportManifest(BaseModel):
    """The contents of `manifest.json`."""

    format: Literal["fedheal-export-1"] = "fedheal-export-1"
    name: Name
    classes: tuple[Name, ...]
    identity: str  # fingerprint of the full data set
    size: int  # to which images are resized
    fingerprint: str  # of the exported images, decoded and resized
    settings: dict[str, Any]  # of the experiments that it is for
    notes: tuple[str, ...] = ()
    domains: tuple[ExportedDomain, ...] = ()


def write_export(path: Path, manifest: ExportManifest, domains: Sequence[RawDomain]) -> None:
    """Write an export atomically. Each domain must have an excerpt."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
            exported = tuple(_write_domain(file, number, domain) for number, domain in enumerate(domains))
            complete = manifest.model_copy(update={"domains": exported})
            file.writestr(ZipInfo("manifest.json"), complete.model_dump_json(indent=1).encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def find_export(root: Path, name: str) -> Path | None:
    """Return the export of that data set that a data root is or contains, if any."""
    if root.is_file():
        exported = read_manifest(root).name
        if exported != name:
            raise ValueError(
                f"{root} is an export of '{exported}', not of '{name}': use data={exported}, or another data_root"
            )
        return root
    paths = []
    for path in sorted(root.glob("*.export")):
        try:
            paths += [path] if read_manifest(path).name == name else []
        except ValueError as error:  # another file may be the right one
            _warn_once(str(error))
    if len(paths) > 1:
        raise ValueError(
            f"{root} has several exports of '{name}': set data_root to one of {', '.join(p.name for p in paths)}"
        )
    return paths[0] if paths else None


@cache
def _warn_once(reason: str) -> None:
    logging.getLogger("fedheal").warning("%s: ignored", reason)


def read_manifest(path: Path) -> ExportManifest:
    """Return the manifest of an export. Raise ValueError if the file is not one."""
    try:
        with zipfile.ZipFile(path) as file:
            return ExportManifest.model_validate_json(_read_bounded(file, "manifest.json", MAX_MANIFEST))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        reason = explain_problem(error.errors()[0])
        raise ValueError(
            f"{path} is not an export that this version can read ({reason}): export the data again"
        ) from error
    except DAMAGE as error:
        raise ValueError(f"{path} is not an export, or is damaged ({error!s:.300})") from error


def _read_bounded(file: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return a member. `ZipFile.read` would unpack all of it, whatever size the archive states."""
    info = file.getinfo(name)
    if info.file_size > limit or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} has {info.file_size:,} bytes, more than {limit:,}, or an unknown compression")
    with file.open(name) as stream:
        return stream.read(info.file_size)


def verify_fingerprint(path: Path, size: int, decoded: str) -> tuple[str, list[str]]:
    """Return the fingerprint of the full data set, or of the images if they decode otherwise than at the export; and notes."""
    manifest = read_manifest(path)
    if decoded == manifest.fingerprint:
        return manifest.identity, list(manifest.notes)
    note = (
        "the exported images decode to other bytes on this machine (another version of Pillow): results are not comparable "
        "bit by bit"
    )
    return decoded, [*manifest.notes, note] if size == manifest.size else list(manifest.notes)


def read_export(path: Path) -> tuple[tuple[str, ...], list[RawDomain]]:
    """Return the classes and the domains of an export."""
    manifest = read_manifest(path)
    try:
        read = _make_member_reader(path)
        return manifest.classes, [_read_domain(read, n, d, manifest.classes) for n, d in enumerate(manifest.domains)]
    except (*DAMAGE, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): export it again") from error


def _read_domain(read: Reader, number: int, domain: ExportedDomain, classes: tuple[str, ...]) -> RawDomain:
    all_labels, test_labels, positions = (
        np.frombuffer(read(f"{number}/{name}"), kind).astype(np.int64)
        for name, kind in (("whole", "<u2"), ("test.labels", "<u2"), ("positions", "<u4"))
    )
    if not len(positions) or (np.diff(positions) <= 0).any() or positions[-1] >= len(all_labels):
        raise ValueError(f"positions of '{domain.name}'")
    if max(all_labels.max(), test_labels.max()) >= len(classes):
        raise ValueError(f"labels of '{domain.name}'")
    train = _read_split(read, f"{number}/train", domain.train, all_labels[positions])
    test = _read_split(read, f"{number}/test", domain.test, test_labels)
    return RawDomain(
        domain.name, classes, train, test, Excerpt(torch.from_numpy(positions), torch.from_numpy(all_labels))
    )


def _read_split(read: Reader, prefix: str, split: ExportedSplit, labels: Labels) -> RawSplit:
    if split.kind == "files":
        names = [f"{prefix}/{name}" for name in split.names]
        if len(names) != len(labels):
            raise ValueError(f"{prefix}: {len(names)} images for {len(labels)} labels")
        return EncodedImages(names, labels, read)
    if len(split.shape) not in (2, 3) or min(split.shape) < 1 or len(labels) * math.prod(split.shape) > MAX_ARRAY:
        raise ValueError(f"{prefix}: {len(labels):,} images of shape {split.shape}")
    pixels = np.empty((len(labels), *split.shape), np.uint8)
    for start in range(0, len(labels), STRIP):
        strip = pixels[start : start + STRIP]
        with Image.open(io.BytesIO(read(f"{prefix}/{start}.png")), formats=("PNG",)) as image:
            if image.size != (strip.shape[2], strip.shape[0] * strip.shape[1]):
                raise ValueError(f"a strip of {image.size} pixels")
            strip[:] = np.asarray(image).reshape(strip.shape)
    return Pixels(pixels, labels)


def _write_domain(file: zipfile.ZipFile, number: int, domain: RawDomain) -> ExportedDomain:
    assert domain.excerpt is not None
    whole, positions = domain.excerpt.labels.numpy(), domain.excerpt.positions.numpy()
    members = (("whole", whole, "<u2"), ("positions", positions, "<u4"), ("test.labels", domain.test.labels, "<u2"))
    for name, values, kind in members:
        file.writestr(ZipInfo(f"{number}/{name}"), values.astype(kind).tobytes(), zipfile.ZIP_DEFLATED)
    train = _write_split(file, f"{number}/train", domain.train)
    return ExportedDomain(name=domain.name, train=train, test=_write_split(file, f"{number}/test", domain.test))


def _write_split(file: zipfile.ZipFile, prefix: str, split: RawSplit) -> ExportedSplit:
    if isinstance(split, Pixels):
        for start in range(0, len(split), STRIP):
            images, strip = split.array[start : start + STRIP], io.BytesIO()
            Image.fromarray(np.ascontiguousarray(images).reshape(-1, *images.shape[2:])).save(strip, "PNG")
            file.writestr(ZipInfo(f"{prefix}/{start}.png"), strip.getvalue())
        return ExportedSplit(kind="pixels", shape=split.array.shape[1:])
    names = []
    for index, name in enumerate(split.names):
        names.append(f"{index:06d}{Path(name).suffix.lower()}")
        file.writestr(ZipInfo(f"{prefix}/{names[-1]}"), split.read(name))
    return ExportedSplit(kind="files", names=tuple(names))


def _make_member_reader(path: Path) -> Reader:
    """Return a thread-safe function that reads members by name. The file is closed with the last reference to it."""
    file, lock = zipfile.ZipFile(path), threading.Lock()

    def read_member(name: str) -> bytes:
        try:
            with lock:
                return _read_bounded(file, name, MAX_BYTES)
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, ValueError, zlib.error) as error:
            raise UnreadableImageError(
                f"{name} of {path} cannot be read ({error!s:.300})"
            ) from error  # zipfile quotes pages of bytes

    return read_member
