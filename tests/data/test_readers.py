"""Files as they are distributed: what is read is what was written, label conventions included."""

from __future__ import annotations

import bz2
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

import layouts
from fedheal.data.catalogue.digits import SVHN_NAMES
from fedheal.data.readers.idx import read_idx_array, read_idx_images
from fedheal.data.readers.libsvm import read_libsvm_images
from fedheal.data.readers.mat import MatNames, read_mat_images


def test_idx_with_and_without_gzip(tmp_path: Path) -> None:
    array = layouts.pixels(0, 5, 28, 28)
    (tmp_path / "plain").write_bytes(layouts.idx(array))
    (tmp_path / "zipped.gz").write_bytes(gzip.compress(layouts.idx(array)))
    assert np.array_equal(read_idx_array(tmp_path / "plain", 3), array)
    assert np.array_equal(read_idx_array(tmp_path / "zipped.gz", 3), array)


def test_idx_images_and_labels_belong_together(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(layouts.idx(layouts.pixels(0, 5, 28, 28)))
    (tmp_path / "labels").write_bytes(layouts.idx(layouts.labels(5)))
    split = read_idx_images(tmp_path / "images", tmp_path / "labels", 10)
    assert split.labels.tolist() == [0, 1, 2, 3, 4]
    assert split.image(3).mode == "L"
    (tmp_path / "labels").write_bytes(layouts.idx(layouts.labels(6)))
    with pytest.raises(ValueError, match="5 images, but labels has 6 labels"):
        read_idx_images(tmp_path / "images", tmp_path / "labels", 10)


def test_usps_labels_count_from_one_and_values_run_from_minus_one_to_one(tmp_path: Path) -> None:
    """-1 is black, 1 is white, and 0 is 127: (0 + 1) / 2 * 255 = 127.5, cut off. What is not named is black."""
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b"10 1:-1 2:1 3:0 256:0.5\n1 2:-0.5\n"))
    split = read_libsvm_images(tmp_path / "usps.bz2", 10)
    assert split.labels.tolist() == [9, 0]
    assert split.array.shape == (2, 16, 16)
    assert split.array[0, 0, :4].tolist() == [0, 255, 127, 0]
    assert split.array[0, 15, 15] == 191
    assert split.array[1].sum() == 63


def test_svhn_writes_ten_for_zero_and_has_the_images_last(tmp_path: Path) -> None:
    cube = layouts.pixels(0, 32, 32, 3, 4)
    savemat(tmp_path / "train_32x32.mat", {"X": cube, "y": np.array([[10], [1], [9], [10]], np.uint8)})
    split = read_mat_images(tmp_path / "train_32x32.mat", 10, SVHN_NAMES)
    assert split.labels.tolist() == [0, 1, 9, 0]
    assert np.array_equal(np.asarray(split.image(2)), cube[:, :, :, 2])


def test_syn_labels_are_the_digits(tmp_path: Path) -> None:
    savemat(tmp_path / "s.mat", {"X": layouts.pixels(0, 32, 32, 3, 3), "y": np.array([[0.0, 9.0, 5.0]])})
    assert read_mat_images(tmp_path / "s.mat", 10, MatNames()).labels.tolist() == [0, 9, 5]


def make_lying_idx(*sizes: int) -> bytes:
    return struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes) + b"\0" * 100


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (make_lying_idx(60000, 28, 28), "ends after 100 of 47,040,000 expected bytes"),
        (make_lying_idx(2**32 - 1, 2**32 - 1, 2**32 - 1), "invalid header"),
        (make_lying_idx(0, 28, 28), "invalid header"),
        (make_lying_idx(1, 2, 3), "more than the 6 bytes that its header states"),
        (make_lying_idx(100), "with 3 dimension"),
        (b"\0\0\x0d\x03" + b"\0" * 40, "not an idx file of unsigned bytes"),
        (b"\0\0", "ends after 2 of 4 expected bytes"),
        (b"", "ends after 0 of 4 expected bytes"),
    ],
)
def test_idx_headers_that_lie(tmp_path: Path, data: bytes, sentence: str) -> None:
    for name, written in (("plain", data), ("zipped.gz", gzip.compress(data))):
        (tmp_path / name).write_bytes(written)
        with pytest.raises(ValueError, match=sentence):
            read_idx_array(tmp_path / name, 3)


def test_a_lying_idx_header_allocates_nothing(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "lying").write_bytes(make_lying_idx(2**30 // 784, 28, 28))
    tracemalloc.start()
    with pytest.raises(ValueError, match="ends after"):
        read_idx_array(tmp_path / "lying", 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"11 1:0", "labels from 11 to 11; labels must be 1 to 10"),
        (b"0 1:0", "labels from 0 to 0"),
        (b"1 257:0", "not LIBSVM text of up to 256 values a line"),
        (b"1 0:0.5", "not LIBSVM text of up to 256 values a line"),
        (b"1 1:2", "not between -1 and 1"),
        (b"1 1:nan", "not between -1 and 1"),
        (b"1 one:0", "not LIBSVM text"),
        (b"nan 1:0", "labels from nan to nan"),
        (b"1e999 1:0", "labels from inf to inf"),
        (b"\xff\xfe", "not LIBSVM text"),
        (b"1.5 1:0", "labels from 1.5 to 1.5"),
        (b"1 99999999999999999999:0", "not LIBSVM text"),
    ],
)
def test_usps_lines_that_are_wrong(tmp_path: Path, line: bytes, sentence: str) -> None:
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(line + b"\n"))
    with pytest.raises(ValueError, match=sentence):
        read_libsvm_images(tmp_path / "usps.bz2", 10)


def test_an_empty_usps_file_and_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b""))
    with pytest.raises(ValueError, match="has no lines"):
        read_libsvm_images(tmp_path / "usps.bz2", 10)
    monkeypatch.setattr("fedheal.data.readers.libsvm.MAX_BYTES", 1000)
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b"1" * 1001))
    with pytest.raises(ValueError, match="more than 1,000 bytes of text"):
        read_libsvm_images(tmp_path / "usps.bz2", 10)


def test_short_lines_of_usps_that_would_become_too_many_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedheal.data.readers.libsvm.MAX_LINES", 99)
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b"1\n" * 100))
    with pytest.raises(ValueError, match="has more than 99 lines"):
        read_libsvm_images(tmp_path / "usps.bz2", 10)


GOOD = {"X": layouts.pixels(0, 32, 32, 3, 4), "y": np.ones((4, 1), np.uint8)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"X": layouts.pixels(0, 32, 32, 3)}, "X of 32 x 32 x 3 in uint8"),
        ({"X": layouts.pixels(0, 4, 3, 32, 32)}, "X of 4 x 3 x 32 x 32"),
        ({"X": np.zeros((32, 32, 3, 4))}, "in double"),
        ({"X": layouts.pixels(0, 100, 32, 3, 4)}, "at most 64 x 64"),
        ({"X": np.array([{"a": 1}], dtype=object)}, "in cell"),
        ({"X": {"field": 1}}, "in struct"),
        ({"y": np.ones((5, 1), np.uint8)}, "y of 5 x 1"),
        ({"y": np.array([["one"]], dtype=object)}, "y of 1 x 1 in cell"),
        ({"y": np.full((4, 1), 11, np.uint8)}, "labels from 11 to 11"),
        ({"y": np.zeros((4, 1), np.uint8)}, "labels from 0 to 0"),
        ({"y": np.full((4, 1), np.nan)}, "labels from nan"),
        ({"y": np.full((4, 1), 1.5)}, "labels from 1.5"),
        ({"y": "text"}, "in char"),
    ],
)
def test_matlab_files_that_hold_something_else(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    savemat(tmp_path / "f.mat", GOOD | change)
    with pytest.raises(ValueError, match=sentence):
        read_mat_images(tmp_path / "f.mat", 10, SVHN_NAMES)


@pytest.mark.parametrize("missing", ["X", "y"])
def test_matlab_files_that_lack_a_variable(tmp_path: Path, missing: str) -> None:
    savemat(tmp_path / "f.mat", {key: value for key, value in GOOD.items() if key != missing} | {"z": 1})
    with pytest.raises(ValueError, match=f"no variable {missing}"):
        read_mat_images(tmp_path / "f.mat", 10, SVHN_NAMES)


CELL_NAMES = MatNames("d{0,0}", "d{0,1}", "nchw", kinds=("uint8", "double"))
CELLS = np.empty((1, 2), dtype=object)
CELLS[0, 0], CELLS[0, 1] = layouts.pixels(0, 4, 1, 28, 28), np.eye(10)[:4]


def test_images_in_cells_with_one_hot_labels(tmp_path: Path) -> None:
    savemat(tmp_path / "f.mat", {"before": "text", "d": CELLS})
    split = read_mat_images(tmp_path / "f.mat", 10, CELL_NAMES)
    assert np.array_equal(split.array, CELLS[0, 0][:, 0])
    assert split.labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (np.full((4, 1, 8, 8), 2.0**9), np.eye(10)[:4], "pixels must be 0 to 1, or 0 to 255"),
        (np.full((4, 1, 8, 8), np.nan), np.eye(10)[:4], "pixels must be 0 to 1, or 0 to 255"),
        (CELLS[0, 0], np.ones((4, 10)), "not one-hot"),
        (CELLS[0, 0], np.ones((4, 9)), r"has d\{0,1\} of 4 x 9 in double; it must be 4 x 1 or 4 x 10 numbers"),
        (
            layouts.pixels(0, 4, 2, 8, 8),
            np.eye(10)[:4],
            r"d\{0,0\} of 4 x 2 x 8 x 8 in uint8; it must be N x 3 x height x",
        ),
    ],
)
def test_cells_that_hold_something_else(tmp_path: Path, images: object, labels: object, sentence: str) -> None:
    cells = np.empty((1, 2), dtype=object)
    cells[0, 0], cells[0, 1] = images, labels
    savemat(tmp_path / "f.mat", {"d": cells})
    with pytest.raises(ValueError, match=sentence):
        read_mat_images(tmp_path / "f.mat", 10, CELL_NAMES)


def test_too_many_cells(tmp_path: Path) -> None:
    cells = np.empty((1, 17), dtype=object)
    cells[:] = 1
    savemat(tmp_path / "f.mat", {"d": cells})
    with pytest.raises(ValueError, match="d of 1 x 17 in cell; at most 16 cells are expected"):
        read_mat_images(tmp_path / "f.mat", 10, CELL_NAMES)


@pytest.mark.parametrize(
    ("arrays", "names", "zipped"),
    [(GOOD, SVHN_NAMES, True), (GOOD, SVHN_NAMES, False), ({"d": CELLS}, CELL_NAMES, False)],
)
def test_matlab_files_cut_off_or_flipped_anywhere_are_a_sentence_or_read(
    tmp_path: Path, arrays: dict[str, object], names: MatNames, zipped: bool
) -> None:
    """Damage raises ValueError and never crashes the reader."""
    path = tmp_path / "f.mat"
    savemat(path, arrays, do_compression=zipped)
    whole = path.read_bytes()
    chance = np.random.default_rng(0)
    refused = 0
    for cut in chance.integers(0, len(whole), 25):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"f\.mat"):
            read_mat_images(path, 10, names)
    for _ in range(150):
        broken = bytearray(whole)
        place = chance.integers(0, min(400, len(whole)))  # headers; further in lie pixels
        broken[place] ^= 1 << int(chance.integers(0, 8))
        path.write_bytes(broken)
        try:
            read_mat_images(path, 10, names)
        except ValueError as error:
            refused += "f.mat" in str(error)
    assert refused > 20


def test_a_matlab_file_of_the_newest_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.mat").write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\x89HDF\r\n\x1a\n" * 20)
    with pytest.raises(ValueError, match=r"MATLAB 7\.3"):
        read_mat_images(tmp_path / "f.mat", 10, SVHN_NAMES)
