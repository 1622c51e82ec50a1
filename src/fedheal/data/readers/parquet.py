"""Image data sets as the Hugging Face hub stores them: Parquet files.

A table has a column `image` (the encoded bytes), one with the label, and a column `domain` if it holds several domains. Needs
pyarrow (the extra `hub`). The files are looked for below `hub/<owner>--<name>/` in the data root, where
`fedheal data fetch` puts them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.core.errors import explain_install
from fedheal.core.nested_text import parse_json
from fedheal.data.readers.images import UnreadableImageError
from fedheal.data.splits import EncodedImages, Labels, RawDomain, find_training_images

TEST_PREFIXES = ("test", "val")  # of the names of files or folders with test images
LABEL_COLUMNS, DOMAIN_COLUMNS = ("label", "labels", "digit"), ("domain", "domains")
IMAGE_COLUMN = "image"
MAX_ROWS = 2_000_000  # of a file; a constant column of any length takes some bytes
MAX_BYTES = 1 << 29  # of a column in a group of rows, which is unpacked as a whole


@dataclass(frozen=True)
class LabelTable:
    """Some rows of a file: the images' names (`file#row`), their labels, and the names of the classes."""

    names: tuple[str, ...]
    labels: Labels
    classes: tuple[str, ...]
    has_words: bool  # the column holds class names, so the file only knows the classes that occur in it


def find_parquet_files(folder: Path, patterns: Sequence[str]) -> tuple[Path, ...]:
    """Return the Parquet files below a folder whose relative path matches a pattern."""
    paths = [path for path in sorted(folder.rglob("*.parquet")) if path.is_file()]
    return tuple(p for p in paths if any(fnmatch(p.relative_to(folder).as_posix(), pattern) for pattern in patterns))


def read_parquet_domain(name: str, paths: Sequence[Path], domain: str, classes: tuple[str, ...]) -> RawDomain:
    """Return a domain. Without test files, the first eight of every ten images, sorted by class, are for training."""
    tables = _unify_classes([_read_table(path, domain) for path in paths])
    if len({table.classes for table in tables}) != 1:
        raise ValueError(f"the tables in {paths[0].parent} do not name the same classes")
    classes = tables[0].classes or classes
    if not classes:
        raise ValueError(f"{paths[0]} does not name its classes")
    splits: dict[bool, list[LabelTable]] = {}
    for path, table in zip(paths, tables, strict=True):
        if len(table.labels) and not 0 <= table.labels.min() <= table.labels.max() < len(classes):
            low, high = table.labels.min(), table.labels.max()
            raise ValueError(f"{path} has labels from {low} to {high} for {len(classes)} classes")
        is_test = path.name.startswith(TEST_PREFIXES) or path.parent.name.startswith(TEST_PREFIXES)
        splits.setdefault(is_test, []).append(table)
    read_image = _make_image_reader()
    images = [
        EncodedImages(
            [name for table in splits[is_test] for name in table.names],
            np.concatenate([table.labels for table in splits[is_test]]),
            read_image,
        )
        for is_test in sorted(splits)
    ]
    if len(images) == 1:
        order = np.argsort(images[0].labels, kind="stable")
        is_train = find_training_images(len(order))
        images = [images[0].select(order[is_train]), images[0].select(order[~is_train])]
    train, test = images
    return RawDomain(name, classes, train, test)


def _read_table(path: Path, domain: str) -> LabelTable:
    """Read labels and row numbers of one domain, without the images."""
    parquet = _import_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            _check_size(file.metadata)
            columns = file.schema_arrow.names
            label, where = (next((c for c in known if c in columns), None) for known in (LABEL_COLUMNS, DOMAIN_COLUMNS))
            rows = file.read(columns=[column for column in (label, where) if column])
            metadata = file.schema_arrow.metadata
    except Exception as error:  # pyarrow raises all kinds of errors on damaged bytes
        raise ValueError(f"{path} is not a readable Parquet file ({error})") from error
    if label is None or IMAGE_COLUMN not in columns:
        raise ValueError(f"{path} has the columns {', '.join(columns)}; image and label are required")
    labels, classes, has_words = _read_labels(path, label, rows[label], _get_class_names(metadata, label))
    positions = np.arange(len(labels))
    if domain:
        if where is None:
            raise ValueError(
                f"{path} has the columns {', '.join(columns)}; a column domain is required to select '{domain}'"
            )
        domains = _read_domains(path, rows[where], _get_class_names(metadata, where))
        wanted = domain.lower().replace("_", " ")
        positions = np.flatnonzero([name.lower().replace("_", " ") == wanted for name in domains])
    return LabelTable(tuple(f"{path}#{row}" for row in positions), labels[positions], classes, has_words)


def _check_size(metadata: Any) -> None:
    """Raise ValueError if a file states more than this module would hold in memory."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
    if rows > MAX_ROWS:
        raise ValueError(f"it has {rows:,} rows, more than {MAX_ROWS:,}")
    largest = max((g.column(j).total_uncompressed_size for g in groups for j in range(g.num_columns)), default=0)
    if largest > MAX_BYTES:
        raise ValueError(f"a column of a row group has {largest:,} bytes, more than {MAX_BYTES:,}")


def _read_labels(path: Path, column: str, array: Any, classes: tuple[str, ...]) -> tuple[Labels, tuple[str, ...], bool]:
    """Return a column of numbers or words as numbers, the names of the classes, and whether the column held words."""
    values = array.to_pylist()
    if None in values:
        raise ValueError(f"{path}#{values.index(None)} has no {column}: remove the row, or fill it in")
    if values and all(isinstance(value, str) for value in values):
        classes = tuple(sorted(set(values)))
        number = {name: i for i, name in enumerate(classes)}
        return np.array([number[value] for value in values], dtype=np.int64), classes, True
    if not all(isinstance(value, int) or (isinstance(value, float) and value.is_integer()) for value in values):
        raise ValueError(f"{path} has a column {column} of type {array.type}; it must hold whole numbers or words")
    return np.array(values, dtype=np.int64), classes, False


def _read_domains(path: Path, array: Any, names: tuple[str, ...]) -> list[str]:
    """Return the domain of each row: a name, a number as text, or "" if there is none."""
    values = array.to_pylist()
    numbers = [value for value in values if isinstance(value, int)]
    if names and numbers and not 0 <= min(numbers) <= max(numbers) < len(names):
        raise ValueError(f"{path} has domains from {min(numbers)} to {max(numbers)} for {len(names)} names")
    named = [names[value] if names and isinstance(value, int) else value for value in values]
    return ["" if name is None else str(name) for name in named]


def _unify_classes(tables: list[LabelTable]) -> list[LabelTable]:
    """Number class names by those of all files together, since one file may lack some classes."""
    if not any(table.has_words for table in tables) or not all(table.has_words for table in tables if table.names):
        return tables
    classes = tuple(sorted({name for table in tables for name in table.classes}))
    number = {name: i for i, name in enumerate(classes)}
    return [
        replace(t, labels=np.array([number[t.classes[i]] for i in t.labels], dtype=np.int64), classes=classes)
        for t in tables
    ]


def _import_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"reading Parquet files requires pyarrow: {explain_install('hub')}") from None
    return parquet


def _get_class_names(metadata: Any, column: str) -> tuple[str, ...]:
    """Return the names that the numbers of a column stand for, if the hub's library wrote them into the file."""
    try:
        names = parse_json(metadata[b"huggingface"])["info"]["features"][column]["names"]
    except (TypeError, KeyError, ValueError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _make_image_reader() -> Callable[[str], bytes]:
    """Return a function that reads an image by `file#row`. It caches row groups: the next image is mostly in the same one."""
    parquet = _import_parquet()

    @functools.lru_cache(maxsize=4)
    def read_offsets(path: str) -> Labels:
        with parquet.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        return np.concatenate([[0], np.cumsum(sizes)])

    @functools.lru_cache(maxsize=2)
    def read_group(path: str, number: int) -> Any:
        with parquet.ParquetFile(path) as file:
            return file.read_row_group(number, columns=[IMAGE_COLUMN])[IMAGE_COLUMN]

    def read_image(name: str) -> bytes:
        path, _, row = name.rpartition("#")
        try:
            offsets = read_offsets(path)
            number = int(np.searchsorted(offsets, int(row), side="right")) - 1
            value = read_group(path, number)[int(row) - int(offsets[number])].as_py()
            return bytes(value["bytes"] if isinstance(value, dict) else value)
        except Exception as error:  # as above
            raise UnreadableImageError(f"{name} cannot be read ({error})") from error

    return read_image
