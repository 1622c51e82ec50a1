"""Damage data files of every reader, inside and outside their compression; and make bombs, which unpack to far more."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from guard import Broken, Limits
from hypothesis import strategies as st
from mutations import byte_edits, edit_bytes, edit_json, json_edits
from PIL import Image
from pyarrow import parquet
from scipy.io import savemat

import layouts
from fedheal.data.archive import ExportManifest, read_export, read_manifest, write_export
from fedheal.data.domains import Excerpt
from fedheal.data.readers.camera_traps import list_location
from fedheal.data.readers.folders import read_split_lists, scan_folder
from fedheal.data.readers.idx import read_idx_images
from fedheal.data.readers.images import decode_batches
from fedheal.data.readers.libsvm import read_libsvm_images
from fedheal.data.readers.mat import MatNames, read_mat_images
from fedheal.data.readers.parquet import read_parquet_domain
from fedheal.data.splits import Pixels, RawDomain

LIMIT = 1024  # megabytes; see `bombs`
SIZE = 16  # to which images are resized
Unpack, Pack = Callable[[bytes], bytes], Callable[[bytes], bytes]
COMPRESSIONS: dict[str, tuple[Unpack, Pack]] = {
    ".gz": (gzip.decompress, gzip.compress),
    ".bz2": (bz2.decompress, bz2.compress),
}


def make_png(width: int, height: int, rows: int) -> bytes:
    """Return a grey PNG with this size in its header and so many rows of zeros."""

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compress(bytes((width + 1) * rows), 1)
    return b"\x89PNG\r\n\x1a\n" + make_chunk(b"IHDR", header) + make_chunk(b"IDAT", packed) + make_chunk(b"IEND", b"")


def make_pictures() -> dict[str, bytes]:
    pictures = {
        f"a.{form.lower()}": layouts.picture(1, form=form) for form in ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP")
    }
    for name, image in (
        ("deep.png", Image.fromarray(np.full((20, 30), 40_000, np.uint16))),
        ("flat.gif", Image.new("P", (20, 30))),
    ):
        out = io.BytesIO()
        image.save(out, name.rpartition(".")[2])
        pictures[name] = out.getvalue()
    return pictures


def write_parquet(path: Path, columns: dict[str, Any], **settings: Any) -> None:
    parquet.write_table(pa.table(columns), path, **settings)


def make_zip(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return out.getvalue()


class DataFiles:
    """One file of a data set, read by its reader, with all images decoded."""

    name, limits = "data files", Limits(megabytes=LIMIT)
    kinds = (
        "idx",
        "idx labels",
        "libsvm",
        "mat",
        "mat packed",
        "image",
        "list",
        "camera",
        "folder",
        "parquet",
        "export",
        "manifest",
        "member",
    )
    cases = st.tuples(st.sampled_from(kinds), st.integers(0, 7), st.booleans(), byte_edits, json_edits)
    valid: ClassVar[list[Any]] = [
        (kind, number, True, [], []) for kind in kinds for number in range(8 if kind == "image" else 2)
    ]
    bombs: ClassVar[list[Any]] = [(f"bomb {name}", 0, True, [], []) for name in (
        "gzip", "gzip rows", "idx", "bzip2", "bzip2 lines", "mat", "png", "png rows", "zip manifest", "zip of depth",
        "zip member", "zip lying member", "zip strips", "parquet rows", "parquet page", "parquet words",
    )]  # fmt: skip

    def __init__(self, work: Path) -> None:
        self.folder = work / "play" / "data"
        root = layouts.digits(work / "play" / "digits") / "digits"
        self.mnist, self.pictures = root / "mnist", make_pictures()
        self.usps = (root / "usps" / "usps.t.bz2").read_bytes()
        self.mats = [(root / "svhn" / "test_32x32.mat").read_bytes()]
        savemat(work / "play" / "plain.mat", {"X": layouts.pixels(6, 32, 32, 3, 20), "y": layouts.labels(20)[:, None]})
        self.mats.append((work / "play" / "plain.mat").read_bytes())
        images = [{"bytes": layouts.picture(i, form="PNG"), "path": ""} for i in range(10)]
        write_parquet(
            work / "play" / "a.parquet",
            {"image": images, "label": ["dog", "cat"] * 5, "domain": [1] * 10},
            row_group_size=4,
        )
        self.parquet = (work / "play" / "a.parquet").read_bytes()
        self.exports = [
            make_export(work / "play" / "a.export"),
            make_export_of_files(work / "play" / "b.export", self.pictures),
        ]
        self.folder.mkdir()

    def attempt(self, case: Any) -> str:
        kind, number, is_inside, edits, values = case
        try:
            if kind.startswith("bomb "):
                self.read_bomb(kind.removeprefix("bomb "))
            else:
                self.clear()
                getattr(self, f"read_{kind.replace(' ', '_')}")(number, is_inside, edits, values)
        except ValueError as error:
            if len(str(error)) > 5000 or not str(error).strip():
                raise Broken(f"an error of {len(str(error))} characters") from None
            return "rejected"
        if kind.startswith("bomb "):
            raise Broken("a bomb is accepted")
        return "accepted"

    def write_edited(self, name: str, data: bytes, edits: Any, is_inside: bool) -> Path:
        """Write a file with edits, inside its compression if it has one and `is_inside`."""
        unpack, pack = COMPRESSIONS.get(Path(name).suffix, (bytes, bytes))
        changed = pack(edit_bytes(unpack(data), edits)) if is_inside else edit_bytes(data, edits)
        (self.folder / name).write_bytes(changed)
        return self.folder / name

    def read_idx(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        images, labels = (self.mnist / f"t10k-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1"))
        decode_images(
            read_idx_images(self.write_edited("images.gz", images.read_bytes(), edits, is_inside), labels, 10)
        )

    def read_idx_labels(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        images, labels = (self.mnist / f"t10k-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1"))
        read_idx_images(images, self.write_edited("labels.gz", labels.read_bytes(), edits, is_inside), 10)

    def read_libsvm(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        decode_images(read_libsvm_images(self.write_edited("usps.bz2", self.usps, edits, is_inside), 10))

    def read_mat(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        decode_images(read_mat_images(self.write_edited("a.mat", self.mats[1], edits, is_inside), 10, MatNames()))

    def read_mat_packed(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        decode_images(
            read_mat_images(self.write_edited("a.mat", self.mats[0], edits, is_inside), 10, MatNames(first_label=1))
        )

    def read_image(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        name = sorted(self.pictures)[number % len(self.pictures)]
        self.write_folder(name, edit_bytes(self.pictures[name], edits))
        self.read_all_images()

    def read_folder(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        """Read a folder with odd names of files and folders."""
        self.write_folder("0.png", self.pictures["a.png"])
        for _, place, _, text in edits:
            name = text.replace(b"/", b"_").replace(b"\0", b"_") or b"x"
            if name not in (b".", b".."):
                if place % 2:
                    (self.folder / "cats" / os.fsdecode(name)).mkdir(exist_ok=True)
                else:
                    (self.folder / os.fsdecode(name + b".png")).touch()
        self.read_all_images()

    def read_list(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        self.write_folder("0.png", self.pictures["a.png"])
        text = b"".join(b"data/%s/%d.png 3\n" % (name, i) for name in (b"cats", b"dogs") for i in range(10))
        path = self.write_edited("list.txt", text, edits, is_inside)
        domain, _ = read_split_lists("a", self.folder.parent, path, path)
        decode_images(domain.train)

    def read_camera(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        """Read annotations of camera traps with edited values or bytes."""
        images = [{"id": i, "file_name": f"{i}.png", "location": "38"} for i in range(5)]
        annotations = [{"image_id": i, "category_id": i % 2} for i in range(5)]
        content = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": i, "name": n} for i, n in enumerate(("cat", "dog"))],
        }
        self.write_folder("0.png", self.pictures["a.png"])
        text = json.dumps(edit_json(content, values) if is_inside else content).encode()
        path = self.write_edited("a.json", text, [] if is_inside else edits, True)
        list_location("38", self.folder / "cats", [path], ("cat", "dog"))

    def read_parquet(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        domain = read_parquet_domain(
            "a", [self.write_edited("train.parquet", self.parquet, edits, True)], "", ("cat", "dog")
        )
        decode_images(domain.train)

    def read_export(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        self.open_export_bytes(edit_bytes(self.exports[number % 2], edits))

    def read_manifest(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        members = unzip(self.exports[number % 2])
        members["manifest.json"] = json.dumps(edit_json(json.loads(members["manifest.json"]), values)).encode()
        self.open_export_bytes(make_zip(members))

    def read_member(self, number: int, is_inside: bool, edits: Any, values: Any) -> None:
        members = unzip(self.exports[number % 2])
        name = sorted(members)[edits[0][1] % len(members) if edits else 0]
        members[name] = edit_bytes(members[name], edits)
        self.open_export_bytes(make_zip(members))

    def open_export_bytes(self, data: bytes) -> None:
        path = self.folder / "a.export"
        path.write_bytes(data)
        self.open_export(path)

    def open_export(self, path: Path) -> None:
        read_manifest(path)
        for domain in read_export(path)[1]:
            decode_images(domain.train)
            decode_images(domain.test)

    def write_folder(self, name: str, data: bytes) -> None:
        for label in ("cats", "dogs"):
            (self.folder / label).mkdir()
            for number in range(5):
                (self.folder / label / f"{number}.{name.rpartition('.')[2]}").write_bytes(data)

    def read_all_images(self) -> None:
        domain = scan_folder("a", self.folder)
        decode_images(domain.train)

    def prepare(self, case: Any) -> None:
        """Write a bomb before the clock starts: that takes longer than to reject it."""
        if not case[0].startswith("bomb "):
            return
        self.clear()
        name, path = case[0].removeprefix("bomb "), self.folder / "bomb"
        if name == "gzip":  # more than the header states
            head = gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 20, 28, 28))
            (self.folder / "bomb.gz").write_bytes(head + gzip.compress(bytes(1 << 24)) * 192)
        elif name == "gzip rows":  # as much as the header states
            head = gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 1 << 11, 1 << 10, 1 << 10))
            (self.folder / "bomb.gz").write_bytes(head + gzip.compress(bytes(1 << 24)) * 128)
        elif name == "idx":  # a header before nothing
            path.write_bytes(struct.pack(">HBB3I", 0, 8, 3, 1 << 9, 1 << 10, 1 << 10))
        elif name == "bzip2":
            (self.folder / "bomb.bz2").write_bytes(bz2.compress(b"0" * (1 << 24)) * 128)
        elif name == "bzip2 lines":  # each line an image
            (self.folder / "bomb.bz2").write_bytes(bz2.compress(b"1\n" * (1 << 20)) * 31)
        elif name == "mat":  # a variable that unpacks to three gigabytes
            packer = zlib.compressobj()
            packed = packer.compress(struct.pack("<IIIIII", 14, 2**31 - 1, 6, 8, 9, 0)) + packer.flush(
                zlib.Z_FULL_FLUSH
            )
            packed += (packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)) * 192  # blocks that repeat
            path.write_bytes(self.mats[1][:128] + struct.pack("<II", 15, len(packed)) + packed)
        elif name.startswith("png"):
            side = 60_000 if name == "png" else 7_900
            self.write_folder("0.png", make_png(side, side, 10))
        elif name.startswith("zip"):
            path.write_bytes(self.make_zip_bomb(name))
        elif name.startswith("parquet"):
            self.write_parquet_bomb(name)

    def clear(self) -> None:
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def read_bomb(self, name: str) -> None:
        """Read a bomb."""
        path, labels = self.folder / "bomb", self.mnist / "t10k-labels-idx1-ubyte.gz"
        if name.startswith(("gzip", "idx")):
            read_idx_images(path if name == "idx" else self.folder / "bomb.gz", labels, 10)
        elif name.startswith("bzip2"):
            read_libsvm_images(self.folder / "bomb.bz2", 10)
        elif name == "mat":
            read_mat_images(path, 10, MatNames(first_label=1))
        elif name.startswith("png"):
            errors = decode_images(scan_folder("a", self.folder).train)
            raise ValueError(f"{errors} images cannot be read")
        elif name.startswith("zip"):
            self.open_export(path)
        else:
            decode_images(read_parquet_domain("a", [self.folder / "train.parquet"], "", ("cat", "dog")).train)
            raise ValueError("the images cannot be read")

    def make_zip_bomb(self, name: str) -> bytes:
        members = unzip(self.exports[0])
        if name == "zip manifest":
            members["manifest.json"] = b" " * (1 << 30) + members["manifest.json"]
        elif name == "zip of depth":
            members["manifest.json"] = b'{"settings": ' + b"[" * 1_000_000
        elif name == "zip strips":  # three gigabytes, a quarter in each
            manifest = json.loads(members["manifest.json"])
            manifest["domains"][0]["train"]["shape"] = [500, 500]
            positions, strip = np.arange(12_000, dtype="<u4"), make_png(500, 500_000, 500_000)
            members |= {"manifest.json": json.dumps(manifest).encode(), "0/positions": positions.tobytes()}
            members["0/whole"] = np.zeros(12_000, "<u2").tobytes()
            members |= {f"0/train/{start}.png": strip for start in range(0, 12_000, 1000)}
        else:
            members["0/whole"] = bytes(1 << 30)
        data = make_zip(members)
        if name == "zip lying member":  # the directory states 100 bytes
            data = data.replace(struct.pack("<I", 1 << 30), struct.pack("<I", 100))
        return data

    def write_parquet_bomb(self, name: str) -> None:
        path, rows = self.folder / "train.parquet", 2_000_000
        if name == "parquet rows":  # a constant column takes a few bytes
            batch = pa.table({"image": pa.nulls(rows, pa.binary()), "label": pa.array(np.zeros(rows, np.int64))})
            with parquet.ParquetWriter(path, batch.schema) as writer:
                for _ in range(60):
                    writer.write_table(batch)
            return
        number, text = 40, "w" * (1 << 24)
        words = {"image": [text.encode()] * number, "label": [0] * number}
        if name == "parquet words":
            words = {"image": [b""] * number, "label": [text] * number}
        parquet.write_table(pa.table(words), path, compression="zstd", use_dictionary=False)


def decode_images(split: Any) -> int:
    """Decode and resize all images, and return how many cannot be read."""
    errors = 0
    for batch in decode_batches(len(split), split.image, SIZE):
        for image in batch:
            errors += isinstance(image, Exception)
            if not isinstance(image, Exception) and image.shape != (3, SIZE, SIZE):
                raise Broken(f"an image of shape {image.shape}")
    return errors


def unzip(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def make_manifest() -> ExportManifest:
    return ExportManifest(name="a", classes=("cat", "dog"), identity="1", size=SIZE, fingerprint="2", settings={})


def make_export(path: Path) -> bytes:
    import torch

    split = Pixels(layouts.pixels(1, 10, 8, 8), np.arange(10) % 2)
    excerpt = Excerpt(torch.arange(10), torch.arange(10) % 2)
    write_export(path, make_manifest(), [RawDomain("one", ("cat", "dog"), split, split, excerpt)])
    return path.read_bytes()


def make_export_of_files(path: Path, pictures: dict[str, bytes]) -> bytes:
    import torch

    from fedheal.data.splits import EncodedImages

    split = EncodedImages(["a.png", "a.jpeg"], np.array([0, 1]), pictures.__getitem__)
    excerpt = Excerpt(torch.arange(2), torch.arange(2))
    write_export(path, make_manifest(), [RawDomain("one", ("cat", "dog"), split, split, excerpt)])
    return path.read_bytes()
