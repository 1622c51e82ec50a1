"""Domains as distributed, put together: one list of classes for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedheal.data.splits import Excerpt, Labels, Raw, RawDomain

CHOICES = ("intersection", "union")


def classes_of(domains: Sequence[RawDomain], fixed: tuple[str, ...], choice: str, name: str) -> tuple[str, ...]:
    """The classes of a data set: its own list, or those that all domains have, or those that any has."""
    if fixed:
        return fixed
    sets = [set(domain.classes) for domain in domains]
    classes = sorted(set.intersection(*sets) if choice == "intersection" else set.union(*sets))
    if len(classes) < 2:
        raise ValueError(
            f"data '{name}': the domains {', '.join(d.name for d in domains)} have {len(classes)} class(es) as their "
            f"{choice}; at least two are needed"
        )
    return tuple(classes)


def aligned(domain: RawDomain, classes: tuple[str, ...]) -> RawDomain:
    """The same domain with labels that count `classes`; images of other classes are left out."""
    number = {name: i for i, name in enumerate(classes)}
    table = np.array([number.get(name, -1) for name in domain.classes], dtype=np.int64)
    if domain.excerpt is not None and (table < 0).any():
        raise ValueError(f"domain '{domain.name}' of the export has other classes than {', '.join(classes)}")
    excerpt = domain.excerpt and Excerpt(domain.excerpt.positions, table[domain.excerpt.labels])
    return replace(
        domain, classes=classes, train=_kept(domain.train, table), test=_kept(domain.test, table), excerpt=excerpt
    )


def _kept(split: Raw, table: Labels) -> Raw:
    labels = table[split.labels]
    if (labels < 0).any():
        positions = np.flatnonzero(labels >= 0)
        return split.only(positions).relabelled(labels[positions])
    return split.relabelled(labels)
