"""The types of a data set: one classification task in several domains.

Images stay uint8, channels first, until a batch is made, so a data set is small, exact and easy to fingerprint. `partition`
assigns the training images to clients.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import torch

__all__ = ["Domain", "Domains", "Split"]

JOINERS = "\u200c\u200d"  # no width, but letters of Persian words and of emoji


@dataclass(frozen=True)
class Split:
    """Images and their labels.

    Attributes:
        images: uint8 `[N, 3, H, W]`.
        labels: int64 `[N]`, indices into the classes of the data set.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Excerpt:
    """Marks a training split as an excerpt: the positions of its images in the full split, and the full split's labels."""

    positions: torch.Tensor  # int64 [N], ascending
    labels: torch.Tensor  # int64 [full size]


@dataclass(frozen=True)
class Domain:
    """One domain, e.g. photographs or sketches.

    Attributes:
        name: The name in tables and results.
        train: The training images.
        test: The test images.
        nominal: The number of training images of the full data set, if known.
        excerpt: Set if `train` holds only some of the training images.
    """

    name: str
    train: Split
    test: Split
    nominal: int = 0
    excerpt: Excerpt | None = None

    @property
    def labels(self) -> torch.Tensor:
        """The labels of all training images, including those that an excerpt leaves out."""
        return self.train.labels if self.excerpt is None else self.excerpt.labels

    def select(self, indices: torch.Tensor) -> Split:
        """Return the training images at these positions of the full training split."""
        if self.excerpt is not None:
            rows = torch.searchsorted(self.excerpt.positions, indices).clamp(max=len(self.train) - 1)
            if not torch.equal(self.excerpt.positions[rows], indices):
                raise ValueError(
                    f"domain '{self.name}': this experiment needs images that the exported file does not contain: "
                    "export again with its seed and its clients"
                )
            indices = rows
        return Split(self.train.images[indices], self.train.labels[indices])


@dataclass(frozen=True)
class Domains:
    """A data set: the same classes in several domains.

    Attributes:
        name: The name of the data set.
        classes: The names of the classes.
        domains: The domains, in the order of tables and results.
        clients_per_domain: How many clients each domain has by default.
        samples_per_client: Training images a client, by domain; 0 divides a domain's images evenly among its clients.
        identity: The fingerprint, if it is known without reading all images.
        notes: Notes for readers of a result, such as that a domain is missing.
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    clients_per_domain: tuple[int, ...]
    samples_per_client: tuple[int, ...]
    identity: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return names and numbers, without the images."""
        sizes = ", ".join(f"{d.name}: {len(d.train)} + {len(d.test)}" for d in self.domains)
        return f"Domains({self.name!r}, {len(self.classes)} classes, train + test images of {sizes})"

    def __getitem__(self, name: str) -> Domain:
        domains = {domain.name: domain for domain in self.domains}
        if name not in domains:
            raise KeyError(f"the data set {self.name} has no domain {name!r}; it has {', '.join(domains)}")
        return domains[name]


def check_domains(data: Domains, name: str) -> None:
    """Raise ValueError if a user's data set is inconsistent."""
    _check_name(data.name, f"data '{name}': name")
    for field in ("domains", "classes", "clients_per_domain", "samples_per_client"):
        _require_type(getattr(data, field), (tuple, list), f"data '{name}': {field}")
    for number, domain in enumerate(data.domains):
        _require_type(domain, (Domain,), f"data '{name}': domains[{number}]")
        _check_name(domain.name, f"data '{name}': domains[{number}].name")
        for part in ("train", "test"):
            _check_split(getattr(domain, part), f"data '{name}': {domain.name}/{part}", len(data.classes))
        _check_same_size(domain, f"data '{name}': {domain.name}")
    for number, label in enumerate(data.classes):
        _check_name(label, f"data '{name}': classes[{number}]")
        if label in data.classes[:number]:
            raise ValueError(f"data '{name}': two classes are called {label!r}: give each a name of its own")
    names = [domain.name for domain in data.domains]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"data '{name}': the domains are {names}; at least one is needed, with unique names")
    for field, minimum in (("clients_per_domain", 1), ("samples_per_client", 0)):
        numbers = getattr(data, field)
        if len(numbers) != len(names):
            raise ValueError(
                f"data '{name}': {field} has {len(numbers)} entries for {len(names)} domains: give one per domain"
            )
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, Integral) or number < minimum:
                raise ValueError(
                    f"data '{name}': the entries of {field} must be whole numbers of at least {minimum}, got {number!r}"
                )


def _check_name(name: object, where: str) -> None:
    """Raise ValueError unless a name is text that tables and file names can show."""
    if not isinstance(name, str):
        raise ValueError(f"{where} = {name!r} must be text, got {type(name).__name__}: give it as a string")
    if not name.strip() or not all(c.isprintable() or unicodedata.category(c) == "Zs" or c in JOINERS for c in name):
        raise ValueError(f"{where} = {name!r}: give a name that is not empty and has no control characters")


def _check_same_size(domain: Domain, where: str) -> None:
    """Raise ValueError if the training and test images of a domain differ in height or width."""
    train, test = (" x ".join(map(str, split.images.shape[2:])) for split in (domain.train, domain.test))
    if len(domain.train) and len(domain.test) and train != test:
        raise ValueError(
            f"{where}: the training images are {train} and the test images {test} pixels: bring them to one size"
        )


def _check_split(split: Split, where: str, classes: int) -> None:
    _require_type(split, (Split,), where)
    images, labels = split.images, split.labels
    _require_type(images, (torch.Tensor,), f"{where}.images")
    _require_type(labels, (torch.Tensor,), f"{where}.labels")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(
            f"{where}: images must be uint8 [N, 3, H, W], got {images.dtype} of shape {tuple(images.shape)}"
        )
    if labels.dtype != torch.int64 or labels.shape != (len(images),):
        raise ValueError(
            f"{where}: labels must be int64 [{len(images)}], got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"{where}: labels must be 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}")


def _require_type(value: object, types: tuple[type, ...], where: str) -> None:
    if not isinstance(value, types):
        wanted, actual = (
            t.__name__ if t.__module__ == "builtins" else f"{t.__module__}.{t.__name__}"
            for t in (types[0], type(value))
        )
        raise ValueError(f"{where} must be {wanted}, got {actual}")


def fingerprint(domains: Domains) -> str:
    """Return the SHA-256 of names, classes, shapes, image bytes and labels: the same on every platform, for any clients."""
    if domains.identity:
        return domains.identity
    digest = hashlib.sha256("\n".join((domains.name, *domains.classes)).encode())
    for domain in domains.domains:
        for part, split in (("train", domain.train), ("test", domain.test)):
            shape = "x".join(str(size) for size in split.images.shape)
            digest.update(f"\n{domain.name}/{part} {shape}\n".encode())
            _update_digest(digest, split)
    return digest.hexdigest()


def fingerprint_used(train: Mapping[str, Split], test: Mapping[str, Split]) -> str:
    """Return the SHA-256 of each client's images and the test sets: the same for a data set and an export of it."""
    digest = hashlib.sha256()
    for part, splits in (("train", train), ("test", test)):
        for name in sorted(splits):
            digest.update(f"\n{part}/{name} {len(splits[name])}\n".encode())
            _update_digest(digest, splits[name])
    return digest.hexdigest()


def _update_digest(digest: hashlib._Hash, split: Split) -> None:
    for start in range(0, len(split), 4096):  # in chunks, since the images may be a mapped file
        digest.update(split.images[start : start + 4096].cpu().contiguous().numpy().data)
    digest.update(split.labels.cpu().contiguous().numpy().astype("<i8").tobytes())
