"""Camera traps (COCO Camera Traps format): a folder of images, and JSON files that say where and of what each one is.

The domains are locations. An image counts as the first of its annotations whose category is a class; others are left out.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fedheal.data.readers.folders import LabelledPaths, list_entries

MAX_BYTES = 1 << 30  # of one JSON file


class _Record(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)


class _Image(_Record):
    id: str
    file_name: str
    location: str


class _Annotation(_Record):
    image_id: str
    category_id: int


class _Category(_Record):
    id: int
    name: str


class _Annotations(_Record):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def list_location(location: str, images: Path, annotations: Sequence[Path], classes: tuple[str, ...]) -> LabelledPaths:
    """List the images of a location that are in the folder, sorted by class and name."""
    versions = tuple((path, path.stat().st_mtime_ns) for path in annotations)
    names = _read_locations(versions, classes).get(location, {})
    present = {name for name, is_folder in list_entries(images) if not is_folder}  # so no name leaves the folder
    return sorted((label, images / name) for name, label in names.items() if name in present)


@functools.lru_cache(maxsize=1)  # the domains of a data set share its files
def _read_locations(files: tuple[tuple[Path, int], ...], classes: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Return the class of each image of each location, by the image's file name."""
    locations: dict[str, dict[str, str]] = defaultdict(dict)
    for path, _ in files:
        read = _read_annotations(path)
        names = {category.id: category.name for category in read.categories}
        labels: dict[str, str] = {}
        for annotation in read.annotations:
            if names.get(annotation.category_id) in classes:
                labels.setdefault(annotation.image_id, names[annotation.category_id])
        for image in read.images:
            if image.id in labels:
                locations[image.location][image.file_name] = labels[image.id]
    return dict(locations)


def _read_annotations(path: Path) -> _Annotations:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes")
    try:
        return _Annotations.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path} is not a file of camera trap annotations ({place}: {first['msg']}): get the file again"
        ) from None
