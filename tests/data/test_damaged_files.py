"""Damaged and hostile files on the command line: a sentence, exit code 2, and no half cache left behind."""

from __future__ import annotations

import bz2
import gzip
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

import command_line
import layouts
from tiny_data import WORDS

LIBSVM_BYTES = 1 << 20  # the most that is read in these tests, so that a bomb may be small


def make_png_bomb(side: int) -> bytes:
    """Return a PNG of some kilobytes whose header claims side x side pixels."""

    def make_chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + make_chunk(b"IHDR", header)
        + make_chunk(b"IDAT", zlib.compress(b"\0" * 100_000))
        + make_chunk(b"IEND", b"")
    )


def truncate_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_gzip(root: Path) -> None:
    truncate_file(root / "digits" / "mnist" / "train-images-idx3-ubyte.gz")


def replace_gzip_by_text(root: Path) -> None:
    (root / "digits" / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(b"plain text")


def damage_gzip_checksum(root: Path) -> None:
    path = root / "digits" / "mnist" / "t10k-images-idx3-ubyte.gz"
    data = bytearray(path.read_bytes())
    data[-8] ^= 0xFF
    path.write_bytes(data)


def write_lying_idx_header(root: Path) -> None:
    data = struct.pack(">HBB3I", 0, 8, 3, 2_000_000, 32, 32)
    (root / "digits" / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(data))


def write_gzip_bomb(root: Path) -> None:
    header = struct.pack(">HBB3I", 0, 8, 3, 40, 28, 28)
    bomb = gzip.compress(header + b"\0" * 5_000_000)
    (root / "digits" / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(bomb)


def cut_bzip2(root: Path) -> None:
    truncate_file(root / "digits" / "usps" / "usps.bz2")


def write_bzip2_bomb(root: Path) -> None:
    (root / "digits" / "usps" / "usps.t.bz2").write_bytes(bz2.compress(b"0" * 2 * LIBSVM_BYTES))


def cut_mat(root: Path) -> None:
    truncate_file(root / "digits" / "svhn" / "train_32x32.mat")


def write_mat_of_objects(root: Path) -> None:
    arrays = {"X": np.array([{"a": 1}], dtype=object), "y": np.ones((4, 1))}
    savemat(root / "digits" / "svhn" / "test_32x32.mat", arrays)


def write_mat_of_another_shape(root: Path) -> None:
    arrays = {"X": layouts.pixels(0, 30, 28, 28), "y": np.ones((30, 1))}
    savemat(root / "digits" / "syn_standin" / "synth_train_32x32.mat", arrays)


def replace_file_by_folder(root: Path) -> None:
    path = root / "digits" / "svhn" / "train_32x32.mat"
    path.unlink()
    path.mkdir()


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (cut_gzip, "train-images-idx3-ubyte.gz"),
    (replace_gzip_by_text, "train-labels-idx1-ubyte.gz"),
    (damage_gzip_checksum, "t10k-images-idx3-ubyte.gz"),
    (write_lying_idx_header, "train-images-idx3-ubyte.gz"),
    (write_gzip_bomb, "train-images-idx3-ubyte.gz"),
    (cut_bzip2, "usps.bz2"),
    (write_bzip2_bomb, "usps.t.bz2"),
    (cut_mat, "train_32x32.mat"),
    (write_mat_of_objects, "test_32x32.mat"),
    (write_mat_of_another_shape, "synth_train_32x32.mat"),
    (replace_file_by_folder, "train_32x32.mat"),
]


def assert_sentence(done: command_line.Done, *words: str) -> None:
    command_line.assert_sentence(done, *words)
    assert done.err[:-1].isprintable()


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damaged_digits(
    tmp_path: Path,
    cache_folder: Path,
    call,
    damage: Callable[[Path], None],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedheal.data.readers.libsvm.MAX_BYTES", LIBSVM_BYTES)
    root = layouts.digits(tmp_path / "data")
    damage(root)
    for words in (["data", "prepare", "digits", f"--data-root={root}"], ["run", "data=digits", f"data_root={root}"]):
        assert_sentence(call(*words), named)
        assert not cache_folder.exists() or list(cache_folder.iterdir()) == []
    assert not (tmp_path / "runs").exists()
    if damage is not replace_file_by_folder:
        done = call("data", "check", "digits", "--data-root", root)
        assert done.code == 2
        assert named in done.err
        assert "svhn" in done.out  # the others are told all the same


@pytest.mark.parametrize("side", [20_000, 100_000, 2**31 - 1])
def test_an_image_that_claims_to_be_enormous_is_one_that_cannot_be_read(tmp_path: Path, call, side: int) -> None:
    layouts.image_folders(tmp_path / "d" / "a", {"x": 10, "y": 10})
    (tmp_path / "d" / "a" / "x" / "0000.png").write_bytes(make_png_bomb(side))
    done = call("data", "prepare", f"folder:{tmp_path / 'd'}")
    assert done.code == 0, done.err
    assert "a: 1 image could not be read" in done.out
    assert "0000.png" in done.out


def add_class_with_newline(root: Path) -> None:
    (root / "a" / "new\nline").mkdir()


def add_link_loop(root: Path) -> None:
    (root / "a" / "x" / "back").symlink_to(root / "a", target_is_directory=True)


def add_link_to_itself(root: Path) -> None:
    (root / "a" / "x" / "self").symlink_to(root / "a" / "x" / "self")


def remove_all_classes(root: Path) -> None:
    shutil.rmtree(root / "a")
    (root / "a").mkdir()


def remove_second_class(root: Path) -> None:
    shutil.rmtree(root / "a" / "y")


def remove_domain(root: Path) -> None:
    shutil.rmtree(root / "a")


def damage_all_images(root: Path) -> None:
    for path in root.rglob("*.jpg"):
        path.write_bytes(b"\xff\xd8\xff\xe0 and no more")


@pytest.mark.parametrize(
    "damage",
    [
        add_class_with_newline,
        add_link_loop,
        add_link_to_itself,
        remove_all_classes,
        remove_second_class,
        remove_domain,
        damage_all_images,
    ],
)
def test_hostile_folders(tmp_path: Path, cache_folder: Path, call, damage: Callable[[Path], None]) -> None:
    layouts.image_folders(tmp_path / "d" / "a", {"x": 10, "y": 10})
    damage(tmp_path / "d")
    for words in (["data", "prepare", f"folder:{tmp_path / 'd'}"], ["run", f"data=folder:{tmp_path / 'd'}"]):
        assert_sentence(call(*words))
        assert not cache_folder.exists() or list(cache_folder.iterdir()) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["data=folder:"], ["data=folder:/no/such/place"], ["data=folder:/dev/null"], ["data=folder:a\nb"],
        ["data=digits"], ["data=digits", "data_root=/no/such"], ["data=digits", "data_root=/dev/null"],
        ["data=digits", "data_root=a\nb"], ["data=digits", "data_root=."], ["image_size=0"], ["image_size=4000"],
        ["classes=some"], ["dirichlet=0"], ["dirichlet=-1"], ["dirichlet=nan"], ["dirichlet=1", "class_filling=true"],
        ["fraction=0"], ["fraction=1.5"], ["fraction=x"], ["fraction=0.1", "samples_per_client=3"],
        ["clients_per_domain=0"], ["clients_per_domain=plain=0"], ["clients_per_domain=plain=2.5"],
        ["clients_per_domain=nowhere=2"], ["fraction=nowhere=0.5"], ["clients_per_domain={plain=true}"],
        ["clients_per_domain=true"], ["samples_per_client=plain=1000"], ["fraction=0.001"], ["clients_per_domain=[2]"],
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_are_wrong(call, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if words == ["data=folder:"]:  # not even where data of other sets lie
        monkeypatch.setenv("FEDHEAL_DATA", str(layouts.digits(tmp_path / "data")))
    own = [] if any(word.startswith("data=") for word in words) else WORDS
    assert_sentence(call("run", *own, *words))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["prepare", "export", "show", "check", "fetch"])
def test_data_sets_that_are_not_there(call, command: str) -> None:
    assert_sentence(call("data", command, "nowhere"), "nowhere")


def test_a_cache_that_cannot_be_written(tmp_path: Path, call, monkeypatch) -> None:
    root = layouts.digits(tmp_path / "data")
    monkeypatch.setenv("FEDHEAL_CACHE", "/dev/null/cache")
    assert_sentence(call("data", "prepare", "digits", "--data-root", root), "FEDHEAL_CACHE")


def test_an_empty_name_of_the_cache_is_no_name(tmp_path: Path, call, monkeypatch) -> None:
    root = layouts.digits(tmp_path / "data")
    monkeypatch.setenv("FEDHEAL_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert call("data", "prepare", "digits", "--data-root", root).code == 0
    assert [path.name for path in (tmp_path / "caches").iterdir()] == ["fedheal"]


def test_an_export_that_cannot_be_written(tmp_path: Path, call) -> None:
    root = layouts.digits(tmp_path / "data")
    small = ["samples_per_client=3", "clients_per_domain=2"]
    for out in ("/dev/null/x.export", tmp_path):
        assert_sentence(call("data", "export", "digits", "--data-root", root, "--out", out, *small))
    assert not list(tmp_path.parent.glob(".*.tmp"))
