"""What a data set is here: one classification task seen in several domains.

Images are kept as bytes (uint8, channels first) until a batch is taken, so a data set is small, exact and easy
to fingerprint. Of clients these types only know how many a domain usually has; see `partition`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """Images and their classes."""

    images: torch.Tensor  # uint8 [N, 3, H, W]
    labels: torch.Tensor  # int64 [N]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Domain:
    """One source of images, e.g. photographs or sketches."""

    name: str
    train: Split
    test: Split


@dataclass(frozen=True)
class Domains:
    """A data set: the same classes in several domains, and the usual way its training data go to clients."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    clients_per_domain: tuple[int, ...]  # one entry per domain
    samples_per_client: tuple[int, ...]  # one entry per domain: every client of it holds this many

    def __getitem__(self, name: str) -> Domain:
        """The domain of that name."""
        for domain in self.domains:
            if domain.name == name:
                return domain
        known = ", ".join(domain.name for domain in self.domains)
        raise KeyError(f"The data set {self.name} has no domain {name!r}; it has {known}.")


def fingerprint(domains: Domains) -> str:
    """SHA-256 over names, classes, shapes, image bytes and labels: equal if and only if the data are.

    It depends neither on the platform (labels are hashed as little-endian 64-bit integers) nor on how samples
    are later given to clients.
    """
    digest = hashlib.sha256()
    digest.update("\n".join((domains.name, *domains.classes)).encode())
    for domain in domains.domains:
        for part, split in (("train", domain.train), ("test", domain.test)):
            shape = "x".join(str(size) for size in split.images.shape)
            digest.update(f"\n{domain.name}/{part} {shape}\n".encode())
            digest.update(split.images.to(torch.uint8).contiguous().numpy().tobytes())
            digest.update(split.labels.contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()
