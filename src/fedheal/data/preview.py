"""Draw contact sheets of the domains, and the label distribution of the clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from fedheal.data.domains import Domain, Domains
from fedheal.data.partition import Client

COLUMNS = 12
MAX_CLASSES = 40  # on a sheet
TILE = 96  # pixels; small images are enlarged by an integer factor, large ones are reduced
MARGIN = 110  # for the class names


def draw_contact_sheet(domain: Domain, classes: Sequence[str]) -> Image.Image:
    """Draw a row for each class: its name and its first training images."""
    side = domain.train.images.shape[-1]
    tile = side * (TILE // side) if side <= TILE else TILE
    resampling = Image.Resampling.NEAREST if side <= TILE else Image.Resampling.BILINEAR
    labels = domain.train.labels
    rows = [c for c in range(len(classes)) if (labels == c).any()][:MAX_CLASSES]
    sheet = Image.new("RGB", (MARGIN + COLUMNS * (tile + 2), 24 + len(rows) * (tile + 2)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((4, 6), f"{domain.name}: {len(domain.train):,} training, {len(domain.test):,} test images", fill="black")
    for row, label in enumerate(rows):
        top = 24 + row * (tile + 2)
        examples = torch.nonzero(labels == label).flatten()
        draw.text((4, top + tile // 2 - 12), classes[label][:18], fill="black")
        draw.text((4, top + tile // 2), f"{len(examples):,}", fill="gray")
        for column, index in enumerate(examples[:COLUMNS].tolist()):
            picture = Image.fromarray(domain.train.images[index].numpy().transpose(1, 2, 0))
            sheet.paste(picture.resize((tile, tile), resampling), (MARGIN + column * (tile + 2), top))
    return sheet


def count_labels(data: Domains, clients: Sequence[Client]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the number of samples of each class that each client holds, `[clients, classes]`."""
    labels = [data[client.domain].labels[client.indices].numpy() for client in clients]
    return np.stack([np.bincount(own, minlength=len(data.classes)) for own in labels])


def plot_clients(data: Domains, clients: Sequence[Client]) -> Figure:
    """Draw a bar of samples for each client, coloured by class and grouped by domain."""
    counts = count_labels(data, clients)
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(clients)), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20"](np.linspace(0, 1, max(len(data.classes), 2)))
    names = [domain.name for domain in data.domains]
    positions = np.array([i + 0.6 * names.index(c.domain) for i, c in enumerate(clients)])  # a gap between domains
    left = np.zeros(len(clients))
    for number, name in enumerate(data.classes):
        axes.barh(positions, counts[:, number], left=left, color=colours[number], label=name, height=0.85)
        left += counts[:, number]
    for position, total in zip(positions, left, strict=True):
        axes.text(total, position, f" {int(total)}", va="center", fontsize=8)
    axes.set_yticks(positions, [c.id for c in clients], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("training samples")
    axes.set_xlim(0, 1.07 * left.max())
    if len(data.classes) <= 20:
        axes.legend(title="class", fontsize=8, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    return figure
