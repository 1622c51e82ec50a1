"""One file with just the images that some experiments use, to take to another machine.

A ZIP archive: `manifest.json`, and for every domain the labels of the whole training split, the positions of the images that
are here, and the images as they were distributed: image files byte for byte, arrays as PNG strips (lossless). It can be
read wherever Pillow is; the images are decoded and resized there as they would have been here, and a fingerprint of the
result is compared.
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

from fedheal.data.readers.images import Unreadable
from fedheal.data.splits import Bytes, Encoded, Excerpt, Labels, Pixels, Raw, RawDomain

log = logging.getLogger("fedheal")

FORMAT: Literal["fedheal-export-1"] = "fedheal-export-1"
SUFFIX = ".export"
STRIP = 1000  # images
MOST_BYTES = 1 << 28  # of one member
DATED = (1980, 1, 1, 0, 0, 0)  # the same images give the same file, whenever it is written
# What bytes that are not an export make the readers raise.
DAMAGE = (
    zipfile.BadZipFile, zlib.error, AttributeError, EOFError, IndexError, KeyError, NotImplementedError, TypeError, ValueError
)  # fmt: skip


def _printable(name: str) -> str:
    if not name or not name.isprintable():
        raise ValueError("a name that cannot be shown")
    return name


Name = Annotated[str, AfterValidator(_printable)]


class Part(BaseModel):
    """A split: image files by name, or arrays of images of one shape."""

    kind: Literal["files", "pixels"]
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()


class Packed(BaseModel):
    """A domain."""

    name: Name
    train: Part
    test: Part


class Manifest(BaseModel):
    """What an archive holds beside the images."""

    format: Literal["fedheal-export-1"] = FORMAT
    name: Name
    classes: tuple[Name, ...]
    identity: str  # of the whole data set
    size: int  # to which images are resized
    fingerprint: str  # of what is here, decoded and resized
    settings: dict[str, Any]  # the experiments that it is for
    notes: tuple[str, ...] = ()
    domains: tuple[Packed, ...] = ()


def write(path: Path, contents: Manifest, domains: Sequence[RawDomain]) -> None:
    """The file appears whole or not at all. Each domain must have its excerpt."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
            packed = tuple(_put(file, number, domain) for number, domain in enumerate(domains))
            said = contents.model_copy(update={"domains": packed})
            _add(file, "manifest.json", said.model_dump_json(indent=1).encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def found(root: Path, name: str) -> Path | None:
    """The export of that data set that a data root is, or that lies in it."""
    if root.is_file():
        said = manifest(root).name
        if said != name:
            raise ValueError(f"{root} is an export of '{said}', not of '{name}'")
        return root
    fitting = [path for path in sorted(root.glob(f"*{SUFFIX}")) if _named(path) == name]
    if len(fitting) > 1:
        raise ValueError(f"{root} has several exports of '{name}': name one of {', '.join(p.name for p in fitting)}")
    return fitting[0] if fitting else None


def _named(path: Path) -> str:
    """What an export in a data root is of. One that cannot be read is said and passed over: others may be what is needed."""
    try:
        return manifest(path).name
    except (ValueError, OSError) as error:
        _pass_over(str(error))
        return ""


@cache
def _pass_over(reason: str) -> None:
    """Said once, however many data sets are looked for."""
    log.warning("%s: it is passed over", reason)


def manifest(path: Path) -> Manifest:
    status = path.stat()
    return _manifest(path, status.st_size, status.st_mtime_ns)


@cache
def _manifest(path: Path, size: int, time: int) -> Manifest:
    try:
        with zipfile.ZipFile(path) as file:
            return Manifest.model_validate_json(file.read("manifest.json"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is not an export that this fedheal can read ({where}: {first['msg']})") from error
    except DAMAGE as error:
        raise ValueError(f"{path} is not an export, or is damaged ({error})") from error


def provenance(path: Path, size: int, decoded: str) -> tuple[str, list[str]]:
    """The fingerprint of the whole data set, if the images decode here as they did there, and what to know about them."""
    said = manifest(path)
    if decoded == said.fingerprint:
        return said.identity, list(said.notes)
    if size != said.size:
        return decoded, list(said.notes)
    trouble = (
        "the exported images decode to other bytes here (another version of Pillow): results do not compare bit by bit"
    )
    return decoded, [*said.notes, trouble]


def read(path: Path) -> tuple[tuple[str, ...], list[RawDomain]]:
    """Classes and domains, for decoding."""
    said = manifest(path)
    try:
        get = _reader(path)
        return said.classes, [_domain(get, n, one, said.classes) for n, one in enumerate(said.domains)]
    except (*DAMAGE, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): export it again") from error


def _domain(get: Callable[[str], bytes], number: int, said: Packed, classes: tuple[str, ...]) -> RawDomain:
    whole = np.frombuffer(get(f"{number}/whole"), "<u2").astype(np.int64)
    positions = np.frombuffer(get(f"{number}/positions"), "<u4").astype(np.int64)
    if not len(positions) or (np.diff(positions) <= 0).any() or positions[-1] >= len(whole):
        raise ValueError(f"positions of '{said.name}'")
    test = np.frombuffer(get(f"{number}/test.labels"), "<u2").astype(np.int64)
    if max(whole.max(), test.max()) >= len(classes):
        raise ValueError(f"labels of '{said.name}'")
    return RawDomain(
        said.name,
        classes,
        _split(get, f"{number}/train", said.train, whole[positions]),
        _split(get, f"{number}/test", said.test, test),
        Excerpt(positions, whole),
    )


def _split(get: Callable[[str], bytes], prefix: str, said: Part, labels: Labels) -> Raw:
    if said.kind == "files":
        names = [f"{prefix}/{name}" for name in said.names]
        if len(names) != len(labels):
            raise ValueError(f"{prefix}: {len(names)} images for {len(labels)} labels")
        return Encoded(names, labels, get)
    if len(said.shape) not in (2, 3) or min(said.shape) < 1:
        raise ValueError(f"{prefix}: images of shape {said.shape}")
    strips = [
        _unstripped(get(f"{prefix}/{start}.png"), min(STRIP, len(labels) - start), said.shape)
        for start in range(0, len(labels), STRIP)
    ]
    return Pixels(np.concatenate(strips), labels)


def _put(file: zipfile.ZipFile, number: int, domain: RawDomain) -> Packed:
    assert domain.excerpt is not None
    _add(file, f"{number}/whole", domain.excerpt.labels.astype("<u2").tobytes(), zipfile.ZIP_DEFLATED)
    _add(file, f"{number}/positions", domain.excerpt.positions.astype("<u4").tobytes(), zipfile.ZIP_DEFLATED)
    _add(file, f"{number}/test.labels", domain.test.labels.astype("<u2").tobytes(), zipfile.ZIP_DEFLATED)
    train, test = (_put_split(file, f"{number}/{p}", s) for p, s in (("train", domain.train), ("test", domain.test)))
    return Packed(name=domain.name, train=train, test=test)


def _put_split(file: zipfile.ZipFile, prefix: str, split: Raw) -> Part:
    if isinstance(split, Pixels):
        for start in range(0, len(split), STRIP):
            _add(file, f"{prefix}/{start}.png", _stripped(split.array[start : start + STRIP]))
        return Part(kind="pixels", shape=split.array.shape[1:])
    names = []
    for index, name in enumerate(split.names):
        names.append(f"{index:06d}{Path(name).suffix.lower()}")
        _add(file, f"{prefix}/{names[-1]}", split.read(name))
    return Part(kind="files", names=tuple(names))


def _stripped(images: Bytes) -> bytes:
    """Images of one size below each other, as one PNG."""
    joined = np.ascontiguousarray(images).reshape(-1, *images.shape[2:])
    out = io.BytesIO()
    Image.fromarray(joined).save(out, "PNG")
    return out.getvalue()


def _unstripped(data: bytes, number: int, shape: tuple[int, ...]) -> Bytes:
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        if image.size != (shape[1], number * shape[0]) or math.prod((number, *shape)) > 1 << 30:
            raise ValueError(f"a strip of {image.size} pixels")
        return np.asarray(image).reshape(number, *shape)


def _reader(path: Path) -> Callable[[str], bytes]:
    """Reads members; several threads may ask at a time."""
    file, lock = zipfile.ZipFile(path), threading.Lock()  # closed when nobody can read from it any more

    def get(name: str) -> bytes:
        try:
            with lock:
                if file.getinfo(name).file_size > MOST_BYTES:
                    raise Unreadable(f"{name} of {path} is larger than any image")
                return file.read(name)
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, zlib.error) as error:
            raise Unreadable(f"{name} of {path} cannot be read ({error})") from error

    return get


def _add(file: zipfile.ZipFile, name: str, data: bytes, method: int = zipfile.ZIP_STORED) -> None:
    file.writestr(zipfile.ZipInfo(name, DATED), data, method)
