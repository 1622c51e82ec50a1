"""Pictures of a data set: a contact sheet for each domain, and what each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from fedheal.data.domains import Domain, Domains
from fedheal.data.partition import Client
from fedheal.runs.folder import make_folder

COLUMNS = 12
MOST_CLASSES = 40  # on a sheet
TILE = 96  # pixels: small images are enlarged by a whole number, large ones made smaller
MARGIN = 110  # for the class's name


def contact_sheet(domain: Domain, classes: Sequence[str]) -> Image.Image:
    """A row for each class: its name, and the first training images of it."""
    side = domain.train.images.shape[-1]
    tile = side * (TILE // side) if side <= TILE else TILE
    filter_ = Image.Resampling.NEAREST if side <= TILE else Image.Resampling.BILINEAR
    labels = domain.train.labels
    shown = [c for c in range(len(classes)) if (labels == c).any()][:MOST_CLASSES]
    sheet = Image.new("RGB", (MARGIN + COLUMNS * (tile + 2), 24 + len(shown) * (tile + 2)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((4, 6), f"{domain.name}: {len(domain.train):,} training, {len(domain.test):,} test images", fill="black")
    for row, number in enumerate(shown):
        top = 24 + row * (tile + 2)
        examples = torch.nonzero(labels == number).flatten()
        draw.text((4, top + tile // 2 - 12), classes[number][:18], fill="black")
        draw.text((4, top + tile // 2), f"{len(examples):,}", fill="gray")
        for column, index in enumerate(examples[:COLUMNS].tolist()):
            picture = Image.fromarray(domain.train.images[index].numpy().transpose(1, 2, 0))
            sheet.paste(picture.resize((tile, tile), filter_), (MARGIN + column * (tile + 2), top))
    return sheet


def sheets(data: Domains, folder: Path) -> list[Path]:
    """A PNG for each domain."""
    make_folder(folder)
    paths = [folder / f"{data.name}-{domain.name}.png" for domain in data.domains]
    for path, domain in zip(paths, data.domains, strict=True):
        contact_sheet(domain, data.classes).save(path)
    return paths


def label_counts(data: Domains, clients: Sequence[Client]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """How many samples of each class each client holds, `[clients, classes]`."""
    return np.stack(
        [np.bincount(data[c.domain].labels[c.indices].numpy(), minlength=len(data.classes)) for c in clients]
    )


def client_plot(data: Domains, clients: Sequence[Client]) -> Figure:
    """A bar for each client: as long as it has samples, coloured by class; clients of a domain stand together."""
    counts = label_counts(data, clients)
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(clients)), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20"](np.linspace(0, 1, max(len(data.classes), 2)))
    names = [domain.name for domain in data.domains]
    places = np.array([i + 0.6 * names.index(c.domain) for i, c in enumerate(clients)])  # a gap between domains
    left = np.zeros(len(clients))
    for number, name in enumerate(data.classes):
        axes.barh(places, counts[:, number], left=left, color=colours[number], label=name, height=0.85)
        left += counts[:, number]
    for place, total in zip(places, left, strict=True):
        axes.text(total, place, f" {int(total)}", va="center", fontsize=8)
    axes.set_yticks(places, [c.id for c in clients], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("training samples")
    axes.set_xlim(0, 1.07 * left.max())
    if len(data.classes) <= 20:
        axes.legend(title="class", fontsize=8, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    return figure
