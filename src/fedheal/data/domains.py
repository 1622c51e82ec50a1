"""The types of a data set: one classification task in several domains.

Images stay uint8, channels first, until a batch is made, so a data set is small, exact and easy to fingerprint. `partition`
assigns the training images to clients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import torch


@dataclass(frozen=True)
class Split:
    """Images and their labels.

    Args:
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

    Args:
        name: The name in tables and results.
        train: Training images, or an excerpt of them.
        test: Test images.
        nominal: Number of training images of the full data set, if known; 0 otherwise.
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
    """A data set: the same classes in several domains, and the default numbers of clients and of samples per client.

    Args:
        name: The name of the data set.
        classes: The names of the classes.
        domains: The domains, in the order of tables and results.
        clients_per_domain: One number per domain.
        samples_per_client: One number per domain; 0 divides the training images evenly among the domain's clients.
        identity: The fingerprint, if it is known without reading all images.
        notes: Remarks for readers of a result, e.g. that a domain is missing.
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    clients_per_domain: tuple[int, ...]
    samples_per_client: tuple[int, ...]
    identity: str = ""
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Domain:
        """Return the domain of that name."""
        for domain in self.domains:
            if domain.name == name:
                return domain
        known = ", ".join(domain.name for domain in self.domains)
        raise KeyError(f"the data set {self.name} has no domain {name!r}; it has {known}")


def check_domains(data: Domains, name: str) -> None:
    """Raise ValueError if a user's data set is inconsistent."""
    _check_types(data, name)
    names = [domain.name for domain in data.domains]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"data '{name}': the domains are {names}; at least one is needed, with unique names")
    for field in ("clients_per_domain", "samples_per_client"):
        if len(getattr(data, field)) != len(names):
            raise ValueError(f"data '{name}': {field} has {len(getattr(data, field))} entries for {len(names)} domains")
        minimum = 0 if field == "samples_per_client" else 1
        for number in getattr(data, field):
            if isinstance(number, bool) or not isinstance(number, Integral) or number < minimum:
                raise ValueError(f"data '{name}': the entries of {field} must be int >= {minimum}, got {number!r}")
    for domain in data.domains:
        for part, split in (("train", domain.train), ("test", domain.test)):
            where = f"data '{name}': {domain.name}/{part}"
            images, labels = split.images, split.labels
            if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
                raise ValueError(
                    f"{where}: images must be uint8 [N, 3, H, W], got {images.dtype} of shape {tuple(images.shape)}"
                )
            if labels.dtype != torch.int64 or labels.shape != (len(images),):
                raise ValueError(
                    f"{where}: labels must be int64 [{len(images)}], got {labels.dtype} of shape {tuple(labels.shape)}"
                )
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(data.classes):
                raise ValueError(
                    f"{where} has labels from {int(labels.min())} to {int(labels.max())} for {len(data.classes)} classes"
                )


def _check_types(data: Domains, name: str) -> None:
    for field in ("domains", "classes", "clients_per_domain", "samples_per_client"):
        _require_type(getattr(data, field), (tuple, list), f"data '{name}': {field}")
    for number, domain in enumerate(data.domains):
        _require_type(domain, (Domain,), f"data '{name}': domains[{number}]")
        for part, split in (("train", domain.train), ("test", domain.test)):
            where = f"data '{name}': {domain.name}/{part}"
            _require_type(split, (Split,), where)
            _require_type(split.images, (torch.Tensor,), f"{where}.images")
            _require_type(split.labels, (torch.Tensor,), f"{where}.labels")


def _require_type(value: object, types: tuple[type, ...], where: str) -> None:
    if not isinstance(value, types):
        raise ValueError(f"{where} must be {_qualify(types[0])}, got {_qualify(type(value))}")


def _qualify(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def fingerprint(domains: Domains) -> str:
    """Return the SHA-256 of names, classes, shapes, image bytes and labels.

    It depends neither on the platform (labels are hashed as little-endian 64-bit integers) nor on the clients.
    """
    if domains.identity:
        return domains.identity
    digest = hashlib.sha256()
    digest.update("\n".join((domains.name, *domains.classes)).encode())
    for domain in domains.domains:
        for part, split in (("train", domain.train), ("test", domain.test)):
            shape = "x".join(str(size) for size in split.images.shape)
            digest.update(f"\n{domain.name}/{part} {shape}\n".encode())
            _update_digest(digest, split)
    return digest.hexdigest()


def fingerprint_used(train: Mapping[str, Split], test: Mapping[str, Split]) -> str:
    """Return the SHA-256 of the data that an experiment used: each client's images and the test sets.

    It is the same for a data set and for an export of it.
    """
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
