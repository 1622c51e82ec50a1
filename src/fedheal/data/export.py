"""Make an archive of just the images that some experiments use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedheal.data import archive, cache
from fedheal.data.domains import Domain, fingerprint
from fedheal.data.on_disk import Opened, domains_of
from fedheal.data.splits import Excerpt, Labels, Raw, RawDomain
from fedheal.runs.folder import make_folder


def export(found: Opened, positions: Mapping[str, Labels], settings: Mapping[str, Any], out: Path) -> None:
    """Write `out` with the training images at these positions of each domain, and all test images."""
    if found.packed is not None:
        raise ValueError(f"{found.packed} is an export already: copy it")
    prepared = cache.prepare(found.recipe)
    whole = domains_of(found, prepared)
    classes, raws = found.recipe.read()
    packed = [
        _excerpt(raw, said["dropped"], np.unique(positions[raw.name]))
        for raw, said in zip(raws, prepared.manifest["domains"], strict=True)
    ]
    decoded = replace(whole, domains=tuple(_taken(whole[raw.name], raw) for raw in packed), identity="")
    contents = archive.Manifest(
        name=whole.name,
        classes=classes,
        identity=whole.identity,
        size=found.recipe.size,
        fingerprint=fingerprint(decoded),
        settings=dict(settings),
        notes=whole.notes,
    )
    make_folder(out.parent)
    archive.write(out, contents, packed)


def used(clients: Mapping[str, list[torch.Tensor]]) -> dict[str, Labels]:
    """The positions that any of a domain's clients holds."""
    return {domain: np.unique(torch.cat(held).numpy()) for domain, held in clients.items()}


def _excerpt(raw: RawDomain, dropped: Mapping[str, list[int]], positions: Labels) -> RawDomain:
    train, test = _readable(raw.train, dropped["train"]), _readable(raw.test, dropped["test"])
    return replace(raw, train=train.only(positions), test=test, excerpt=Excerpt(positions, train.labels))


def _readable(split: Raw, dropped: list[int]) -> Raw:
    if not dropped:
        return split
    return split.only(np.setdiff1d(np.arange(len(split)), dropped))


def _taken(domain: Domain, raw: RawDomain) -> Domain:
    assert raw.excerpt is not None
    return Domain(domain.name, domain.taken(torch.from_numpy(raw.excerpt.positions)), domain.test)
