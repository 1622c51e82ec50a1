r"""Draw contact sheets of the domains, and the label distribution of the clients.

Names are drawn with fonts that have their characters. A character that no installed font has is written as `\uXXXX`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from fedheal.core.fonts import escape_letters, find_families, find_font_file
from fedheal.data.domains import Domain, Domains
from fedheal.data.partition import Client

COLUMNS = 12
MAX_CLASSES = 40  # on a sheet
FONT_SIZE = 11
TILE = 96  # pixels; small images are enlarged by an integer factor, large ones are reduced
COLOURS = colormaps["tab20"].resampled(20)  # more classes cannot be told apart by colour
MAX_LABELS = 400  # on an axis
Counts = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def draw_contact_sheet(domain: Domain, classes: Sequence[str]) -> Image.Image:
    """Draw a row for each class: its name and its first training images."""
    side = domain.train.images.shape[-1]
    tile = side * (TILE // side) if side <= TILE else TILE
    resampling = Image.Resampling.NEAREST if side <= TILE else Image.Resampling.BILINEAR
    labels = domain.train.labels
    present = [c for c in range(len(classes)) if (labels == c).any()]
    rows = present[:MAX_CLASSES]
    names = [_choose_font(classes[label]) for label in rows]
    margin = 12 + max((math.ceil(font.getlength(name)) for name, font in names), default=0)
    sheet = Image.new("RGB", (margin + COLUMNS * (tile + 2), 24 + len(rows) * (tile + 2)), "white")
    draw = ImageDraw.Draw(sheet)
    shown = f", the first {len(rows)} of {len(present)} classes" if len(rows) < len(present) else ""
    title, font = _choose_font(
        f"{domain.name}: {len(domain.train):,} training, {len(domain.test):,} test images{shown}"
    )
    draw.text((4, 6), title, fill="black", font=font)
    for row, (label, (name, font)) in enumerate(zip(rows, names, strict=True)):
        top = 24 + row * (tile + 2)
        examples = torch.nonzero(labels == label).flatten()
        draw.text((4, top + tile // 2 - 14), name, fill="black", font=font)
        draw.text((4, top + tile // 2), f"{len(examples):,}", fill="gray", font=_choose_font("0")[1])
        for column, index in enumerate(examples[:COLUMNS].tolist()):
            picture = Image.fromarray(domain.train.images[index].numpy().transpose(1, 2, 0))
            sheet.paste(picture.resize((tile, tile), resampling), (margin + column * (tile + 2), top))
    return sheet


def count_labels(data: Domains, clients: Sequence[Client]) -> Counts:
    """Return the number of samples of each class that each client holds, `[clients, classes]`."""
    labels = [data[client.domain].labels[client.indices].numpy() for client in clients]
    return np.stack([np.bincount(own, minlength=len(data.classes)) for own in labels])


def plot_clients(data: Domains, clients: Sequence[Client]) -> Figure:
    """Draw each client's samples of each class, grouped by domain: stacked bars, or a matrix if there are many classes."""
    counts = count_labels(data, clients)
    names = [domain.name for domain in data.domains]
    groups = np.array([names.index(client.domain) for client in clients])
    if len(data.classes) <= COLOURS.N:
        figure = Figure(
            figsize=(9, min(200, 1.2 + max(0.24 * len(clients), 0.19 * len(data.classes)))), layout="constrained"
        )
        positions = np.arange(len(clients)) + 0.6 * groups  # a gap between domains
        _plot_bars(figure.subplots(), counts, positions, data.classes)
    else:
        width, height = 3 + 0.15 * len(data.classes), 2 + 0.2 * len(clients)
        figure = Figure(figsize=(min(60, width), min(200, height)), layout="constrained")
        positions = np.arange(float(len(clients)))
        _plot_matrix(figure.subplots(), counts, np.flatnonzero(np.diff(groups)) + 0.5, data.classes)
    _label_axis(figure.axes[0], "y", positions, [client.id for client in clients])
    return figure


def _plot_bars(axes: Axes, counts: Counts, positions: Any, classes: Sequence[str]) -> None:
    left, bars = np.zeros(len(counts)), []
    for number, own in enumerate(counts.T):
        bars.append(axes.barh(positions, own, left=left, color=COLOURS(number), height=0.85))
        left += own
    for position, total in zip(positions, left, strict=True):
        axes.text(total, position, f" {int(total)}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("training samples")
    axes.set_xlim(0, 1.07 * left.max())
    # Names are set afterwards: a legend leaves out those that begin with "_".
    legend = axes.legend(bars, ["?"] * len(bars), title="class", bbox_to_anchor=(1.0, 1.0), loc="upper left")
    labels, style = _prepare_text(classes)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set(text=label, **style)


def _plot_matrix(axes: Axes, counts: Counts, boundaries: Any, classes: Sequence[str]) -> None:
    image = axes.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.hlines(boundaries, -0.5, len(classes) - 0.5, colors="black", linewidth=1)
    axes.figure.colorbar(image, label="training samples", pad=0.01, aspect=30)
    _label_axis(axes, "x", np.arange(len(classes)), classes, rotation=90)
    axes.set_xlabel("class")


def _label_axis(axes: Axes, axis: str, positions: Any, names: Sequence[str], **keys: Any) -> None:
    step = math.ceil(len(names) / MAX_LABELS)  # beyond that they would overlap
    axes.set(**{f"{axis}ticks": positions[::step]})
    labels, style = _prepare_text(names[::step])
    getattr(axes, f"set_{axis}ticklabels")(labels, **style, **keys)


def _prepare_text(names: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return names with escapes, and keywords for text that may be in any script and is not to be parsed as mathematics."""
    families = find_families("".join(names))
    style = {"fontsize": 8, "fontfamily": families, "parse_math": False}
    return [escape_letters(name, families) for name in names], style


def _choose_font(text: str) -> tuple[str, ImageFont.FreeTypeFont]:
    """Return the first font that has all letters of a text, or the usual one and the text with escapes."""
    families = find_families(text)
    family = next((name for name in families if escape_letters(text, [name]) == text), families[0])
    return escape_letters(text, [family]), ImageFont.truetype(find_font_file(family), FONT_SIZE)
