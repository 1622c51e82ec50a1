"""Export the images that some experiments use to one archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedheal.data.archive import ExportManifest, write_export
from fedheal.data.cache import prepare_data
from fedheal.data.domains import Domain, fingerprint
from fedheal.data.on_disk import OnDiskDataset, build_domains
from fedheal.data.partition import Client
from fedheal.data.splits import RawDomain, RawExcerpt
from fedheal.runs.folder import make_folder


def export_images(dataset: OnDiskDataset, clients: Sequence[Client], settings: Mapping[str, Any], out: Path) -> None:
    """Write the training images that any of the clients holds, and all test images, to `out`."""
    if dataset.export is not None:
        raise ValueError(f"{dataset.export} is already an export: copy it")
    prepared = prepare_data(dataset.inputs)
    data = build_domains(dataset, prepared)
    classes, raw_domains = dataset.inputs.read()
    excerpts = [
        _make_excerpt(raw, cached.dropped, clients)
        for raw, cached in zip(raw_domains, prepared.manifest.domains, strict=True)
    ]
    exported = replace(data, domains=tuple(_select_images(data[raw.name], raw) for raw in excerpts), identity="")
    manifest = ExportManifest(
        name=data.name,
        classes=classes,
        identity=data.identity,
        size=dataset.inputs.size,
        fingerprint=fingerprint(exported),
        settings=dict(settings),
        notes=data.notes,
    )
    make_folder(out.parent)
    write_export(out, manifest, excerpts)


def _make_excerpt(raw: RawDomain, dropped: Mapping[str, list[int]], clients: Sequence[Client]) -> RawDomain:
    """Keep the readable images: all for testing, and those for training that a client holds."""
    positions = np.unique(np.concatenate([client.indices.numpy() for client in clients if client.domain == raw.name]))
    train, test = (
        split.select(np.setdiff1d(np.arange(len(split)), dropped[part])) if dropped[part] else split
        for part, split in (("train", raw.train), ("test", raw.test))
    )
    return replace(raw, train=train.select(positions), test=test, excerpt=RawExcerpt(positions, train.labels))


def _select_images(domain: Domain, raw: RawDomain) -> Domain:
    assert raw.excerpt is not None
    return Domain(domain.name, domain.select(torch.from_numpy(raw.excerpt.positions)), domain.test)
