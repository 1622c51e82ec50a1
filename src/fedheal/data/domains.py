"""What a data set is here: one classification task seen in several domains.

Images are kept as bytes (uint8, channels first) until a batch is taken, so a data set is small, exact and easy
to fingerprint. Of clients these types only know how many a domain usually has; see `partition`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import torch


@dataclass(frozen=True)
class Split:
    """Images and their classes."""

    images: torch.Tensor  # uint8 [N, 3, H, W]
    labels: torch.Tensor  # int64 [N]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Excerpt:
    """Says that a training split holds only some images of the whole: where they stand in it, and the labels of all."""

    positions: torch.Tensor  # int64 [N], ascending
    labels: torch.Tensor  # int64 [whole]


@dataclass(frozen=True)
class Domain:
    """One source of images, e.g. photographs or sketches."""

    name: str
    train: Split
    test: Split
    nominal: int = 0  # training images of the whole set, if it is known and more than what is on disk
    excerpt: Excerpt | None = None

    @property
    def labels(self) -> torch.Tensor:
        """The classes of all training images: what clients are given is decided by these."""
        return self.train.labels if self.excerpt is None else self.excerpt.labels

    def taken(self, indices: torch.Tensor) -> Split:
        """The training images at these positions of the whole."""
        if self.excerpt is not None:
            places = torch.searchsorted(self.excerpt.positions, indices).clamp(max=len(self.train) - 1)
            if not torch.equal(self.excerpt.positions[places], indices):
                raise ValueError(
                    f"domain '{self.name}': this experiment needs images that the exported file does not hold: "
                    "export again with its seed and its clients"
                )
            indices = places
        return Split(self.train.images[indices], self.train.labels[indices])


@dataclass(frozen=True)
class Domains:
    """A data set: the same classes in several domains, and the usual way its training data go to clients."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    clients_per_domain: tuple[int, ...]  # one entry per domain
    samples_per_client: tuple[int, ...]  # one entry per domain: every client of it holds this many; 0: its share of all
    identity: str = ""  # the fingerprint, where it is known without reading everything
    notes: tuple[str, ...] = ()  # what whoever reads a result should know, e.g. that a domain is missing

    def __getitem__(self, name: str) -> Domain:
        """The domain of that name."""
        for domain in self.domains:
            if domain.name == name:
                return domain
        known = ", ".join(domain.name for domain in self.domains)
        raise KeyError(f"The data set {self.name} has no domain {name!r}; it has {known}.")


def check(data: Domains, name: str) -> None:
    """What a data set of one's own may have wrong, each in a sentence."""
    _check_kinds(data, name)
    names = [domain.name for domain in data.domains]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"data '{name}': its domains are {names}; at least one is needed, each with a name of its own")
    for field in ("clients_per_domain", "samples_per_client"):
        if len(getattr(data, field)) != len(names):
            raise ValueError(f"data '{name}': {field} has {len(getattr(data, field))} entries for {len(names)} domains")
        least = 0 if field == "samples_per_client" else 1
        for number in getattr(data, field):
            if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
                raise ValueError(
                    f"data '{name}': {field} has the entry {number!r}; an int of {least} or more is needed"
                )
    for domain in data.domains:
        for part, split in (("train", domain.train), ("test", domain.test)):
            where = f"data '{name}': {domain.name}/{part}"
            images, labels = split.images, split.labels
            if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
                raise ValueError(
                    f"{where} has {images.dtype} images of shape {tuple(images.shape)}; uint8 [N, 3, H, W] is needed"
                )
            if labels.dtype != torch.int64 or labels.shape != (len(images),):
                raise ValueError(
                    f"{where} has {labels.dtype} labels of shape {tuple(labels.shape)}; int64 [{len(images)}] is needed"
                )
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(data.classes):
                raise ValueError(
                    f"{where} has labels {int(labels.min())} to {int(labels.max())} for {len(data.classes)} classes"
                )


def _check_kinds(data: Domains, name: str) -> None:
    """Whatever else is asked of a data set, asks this of it first."""
    for field in ("domains", "classes", "clients_per_domain", "samples_per_client"):
        _must_be((tuple, list), getattr(data, field), f"data '{name}': {field}")
    for number, domain in enumerate(data.domains):
        _must_be((Domain,), domain, f"data '{name}': domains[{number}]")
        for part, split in (("train", domain.train), ("test", domain.test)):
            where = f"data '{name}': {domain.name}/{part}"
            _must_be((Split,), split, where)
            _must_be((torch.Tensor,), split.images, f"{where}.images")
            _must_be((torch.Tensor,), split.labels, f"{where}.labels")


def _must_be(kinds: tuple[type, ...], value: object, where: str) -> None:
    if not isinstance(value, kinds):
        found, wanted = type(value), kinds[0]
        raise ValueError(f"{where} is of the kind {_named(found)}; {_named(wanted)} is needed")


def _named(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def fingerprint(domains: Domains) -> str:
    """SHA-256 over names, classes, shapes, image bytes and labels: equal if and only if the data are.

    It depends neither on the platform (labels are hashed as little-endian 64-bit integers) nor on how samples
    are later given to clients.
    """
    if domains.identity:
        return domains.identity
    digest = hashlib.sha256()
    digest.update("\n".join((domains.name, *domains.classes)).encode())
    for domain in domains.domains:
        for part, split in (("train", domain.train), ("test", domain.test)):
            shape = "x".join(str(size) for size in split.images.shape)
            digest.update(f"\n{domain.name}/{part} {shape}\n".encode())
            _feed(digest, split)
    return digest.hexdigest()


def fingerprint_of_used(train: Mapping[str, Split], test: Mapping[str, Split]) -> str:
    """SHA-256 over what an experiment really used: the images of each client and the test sets of the domains.

    Runs on the whole of a data set and on an export of it have this in common.
    """
    digest = hashlib.sha256()
    for part, splits in (("train", train), ("test", test)):
        for name in sorted(splits):
            digest.update(f"\n{part}/{name} {len(splits[name])}\n".encode())
            _feed(digest, splits[name])
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, split: Split) -> None:
    for start in range(0, len(split), 4096):  # a little at a time: the images may be a mapped file
        digest.update(split.images[start : start + 4096].cpu().contiguous().numpy().data)
    digest.update(split.labels.cpu().contiguous().numpy().astype("<i8").tobytes())
