"""The file format of an export: one ZIP archive with just the images that some experiments use.

It has `manifest.json` and, for every domain, the labels of the full training split, the positions of the images in the archive,
and the images as distributed: image files byte for byte, arrays as PNG strips (lossless). Reading it needs only Pillow; the
images are decoded and resized on the other machine, and a fingerprint of the result is compared.
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

import numpy as np
from PIL import Image
from pydantic import AfterValidator, BaseModel, ValidationError

from fedheal.data.readers.images import UnreadableImageError
from fedheal.data.splits import Bytes, EncodedImages, Labels, Pixels, RawDomain, RawExcerpt, RawSplit

log = logging.getLogger("fedheal")

FORMAT: Literal["fedheal-export-1"] = "fedheal-export-1"
SUFFIX = ".export"
STRIP = 1000  # images in a PNG
MAX_BYTES = 1 << 28  # of one member
TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # constant, so that the same images always give the same file
# Errors that the readers raise on bytes that are not an export.
DAMAGE = (
    zipfile.BadZipFile, zlib.error, AttributeError, EOFError, IndexError, KeyError, NotImplementedError, TypeError, ValueError
)  # fmt: skip


def _require_printable(name: str) -> str:
    if not name or not name.isprintable():
        raise ValueError("the name is not printable")
    return name


Name = Annotated[str, AfterValidator(_require_printable)]


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

    format: Literal["fedheal-export-1"] = FORMAT
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
            _write_member(file, "manifest.json", complete.model_dump_json(indent=1).encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def find_export(root: Path, name: str) -> Path | None:
    """Return the export of that data set that a data root is or contains, if any."""
    if root.is_file():
        exported = read_manifest(root).name
        if exported != name:
            raise ValueError(f"{root} is an export of '{exported}', not of '{name}'")
        return root
    paths = [path for path in sorted(root.glob(f"*{SUFFIX}")) if _read_name(path) == name]
    if len(paths) > 1:
        raise ValueError(f"{root} has several exports of '{name}': choose one of {', '.join(p.name for p in paths)}")
    return paths[0] if paths else None


def _read_name(path: Path) -> str:
    """Return the data set of an export, or "" with a warning if it cannot be read: another file may be the right one."""
    try:
        return read_manifest(path).name
    except (ValueError, OSError) as error:
        _warn_once(str(error))
        return ""


@cache
def _warn_once(reason: str) -> None:
    log.warning("%s: ignored", reason)


def read_manifest(path: Path) -> ExportManifest:
    """Return the manifest of an export. Raise ValueError if the file is not one."""
    status = path.stat()
    return _read_manifest(path, status.st_size, status.st_mtime_ns)


@cache
def _read_manifest(path: Path, size: int, time: int) -> ExportManifest:
    try:
        with zipfile.ZipFile(path) as file:
            return ExportManifest.model_validate_json(file.read("manifest.json"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is not an export that this version can read ({where}: {first['msg']})") from error
    except DAMAGE as error:
        raise ValueError(f"{path} is not an export, or is damaged ({error})") from error


def verify_fingerprint(path: Path, size: int, decoded: str) -> tuple[str, list[str]]:
    """Return the fingerprint of the full data set if the images decode as they did at the export, and the notes.

    Otherwise the fingerprint is that of the decoded images.
    """
    manifest = read_manifest(path)
    notes = list(manifest.notes)
    if decoded == manifest.fingerprint:
        return manifest.identity, notes
    if size == manifest.size:
        notes.append(
            "the exported images decode to other bytes on this machine (another version of Pillow): results are not "
            "comparable bit by bit"
        )
    return decoded, notes


def read_export(path: Path) -> tuple[tuple[str, ...], list[RawDomain]]:
    """Return the classes and the domains of an export."""
    manifest = read_manifest(path)
    try:
        get = _make_member_reader(path)
        domains = [_read_domain(get, n, domain, manifest.classes) for n, domain in enumerate(manifest.domains)]
        return manifest.classes, domains
    except (*DAMAGE, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): export it again") from error


def _read_domain(
    get: Callable[[str], bytes], number: int, domain: ExportedDomain, classes: tuple[str, ...]
) -> RawDomain:
    all_labels = np.frombuffer(get(f"{number}/whole"), "<u2").astype(np.int64)
    positions = np.frombuffer(get(f"{number}/positions"), "<u4").astype(np.int64)
    if not len(positions) or (np.diff(positions) <= 0).any() or positions[-1] >= len(all_labels):
        raise ValueError(f"positions of '{domain.name}'")
    test_labels = np.frombuffer(get(f"{number}/test.labels"), "<u2").astype(np.int64)
    if max(all_labels.max(), test_labels.max()) >= len(classes):
        raise ValueError(f"labels of '{domain.name}'")
    return RawDomain(
        name=domain.name,
        classes=classes,
        train=_read_split(get, f"{number}/train", domain.train, all_labels[positions]),
        test=_read_split(get, f"{number}/test", domain.test, test_labels),
        excerpt=RawExcerpt(positions, all_labels),
    )


def _read_split(get: Callable[[str], bytes], prefix: str, split: ExportedSplit, labels: Labels) -> RawSplit:
    if split.kind == "files":
        names = [f"{prefix}/{name}" for name in split.names]
        if len(names) != len(labels):
            raise ValueError(f"{prefix}: {len(names)} images for {len(labels)} labels")
        return EncodedImages(names, labels, get)
    if len(split.shape) not in (2, 3) or min(split.shape) < 1:
        raise ValueError(f"{prefix}: images of shape {split.shape}")
    strips = [
        _decode_strip(get(f"{prefix}/{start}.png"), min(STRIP, len(labels) - start), split.shape)
        for start in range(0, len(labels), STRIP)
    ]
    return Pixels(np.concatenate(strips), labels)


def _write_domain(file: zipfile.ZipFile, number: int, domain: RawDomain) -> ExportedDomain:
    assert domain.excerpt is not None
    _write_member(file, f"{number}/whole", domain.excerpt.labels.astype("<u2").tobytes(), zipfile.ZIP_DEFLATED)
    _write_member(file, f"{number}/positions", domain.excerpt.positions.astype("<u4").tobytes(), zipfile.ZIP_DEFLATED)
    _write_member(file, f"{number}/test.labels", domain.test.labels.astype("<u2").tobytes(), zipfile.ZIP_DEFLATED)
    train = _write_split(file, f"{number}/train", domain.train)
    return ExportedDomain(name=domain.name, train=train, test=_write_split(file, f"{number}/test", domain.test))


def _write_split(file: zipfile.ZipFile, prefix: str, split: RawSplit) -> ExportedSplit:
    if isinstance(split, Pixels):
        for start in range(0, len(split), STRIP):
            _write_member(file, f"{prefix}/{start}.png", _encode_strip(split.array[start : start + STRIP]))
        return ExportedSplit(kind="pixels", shape=split.array.shape[1:])
    names = []
    for index, name in enumerate(split.names):
        names.append(f"{index:06d}{Path(name).suffix.lower()}")
        _write_member(file, f"{prefix}/{names[-1]}", split.read(name))
    return ExportedSplit(kind="files", names=tuple(names))


def _encode_strip(images: Bytes) -> bytes:
    """Encode images of one size, stacked vertically, as one PNG."""
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(images).reshape(-1, *images.shape[2:])).save(out, "PNG")
    return out.getvalue()


def _decode_strip(data: bytes, count: int, shape: tuple[int, ...]) -> Bytes:
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        if image.size != (shape[1], count * shape[0]) or math.prod((count, *shape)) > 1 << 30:
            raise ValueError(f"a strip of {image.size} pixels")
        return np.asarray(image).reshape(count, *shape)


def _make_member_reader(path: Path) -> Callable[[str], bytes]:
    """Return a thread-safe function that reads members by name. The file is closed with the last reference to it."""
    file, lock = zipfile.ZipFile(path), threading.Lock()

    def read_member(name: str) -> bytes:
        try:
            with lock:
                if file.getinfo(name).file_size > MAX_BYTES:
                    raise UnreadableImageError(f"{name} of {path} has more than {MAX_BYTES:,} bytes")
                return file.read(name)
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, zlib.error) as error:
            raise UnreadableImageError(f"{name} of {path} cannot be read ({error})") from error

    return read_member


def _write_member(file: zipfile.ZipFile, name: str, data: bytes, method: int = zipfile.ZIP_STORED) -> None:
    file.writestr(zipfile.ZipInfo(name, TIMESTAMP), data, method)
