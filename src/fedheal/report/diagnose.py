"""Find who is left behind in a federation, since when, and how the aggregation treated them, from a run folder alone.

`rounds.jsonl` with weights is required. Accuracies, kept fractions, distances and the clients' domains are used if they
are there. A unit is a domain or a client, even if it never took part. It is *under-served* if its accuracy, averaged
over the last evaluated rounds, is more than `GAP` points below the mean of all units. *Since* is the first evaluated
round from which the unit was that far below in every evaluated round up to the last, if there is such a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedheal.analysis.standard_error import sampling_error
from fedheal.core.arrays import Floats
from fedheal.core.deprecated_paths import warn_of_renames
from fedheal.core.errors import format_count
from fedheal.core.metrics import count_averaged
from fedheal.report import palette
from fedheal.report.figure_text import shorten_name
from fedheal.report.figures import PAGE, add_legend, label_rounds
from fedheal.report.last_rounds import note_stale_accuracies
from fedheal.report.plain_text import escape_controls
from fedheal.report.rows import check_runs_exist
from fedheal.report.series import mean_ignoring_nan, read_complete_rounds
from fedheal.runs.folder import read_result
from fedheal.runs.schema import RoundRecord

__all__ = ["Diagnosis", "Unit", "diagnose_run", "explain_diagnosis", "format_diagnosis"]

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

GAP = 5.0  # points below the mean
COLUMNS = (
    "accuracy", "test images", "standard error", "to the mean", "under-served since", "weight", "x equal share", "kept",
    "distance", "rounds present",
)  # fmt: skip

__getattr__ = warn_of_renames(
    __name__, {"diagnose": "diagnose_run", "lines": "format_diagnosis", "sentences": "explain_diagnosis"}
)


@dataclass(frozen=True)
class Unit:
    """A domain or client by round; NaN where nothing was recorded.

    Attributes:
        name: The domain or the client.
        clients: The number of its clients.
        accuracy: The accuracy by round.
        weight: The weight of its clients together, by round.
        equal_share: Its clients' weight if all present weighed the same, by round.
        kept: The kept fraction of its clients' updates, by round.
        distance: The mean distance of its clients, by round.
        rounds_present: The number of rounds in which any of its clients took part.
        test_images: The number of its test images; 0 if it is not known.
    """

    name: str
    clients: int
    accuracy: Floats
    weight: Floats
    equal_share: Floats
    kept: Floats
    distance: Floats
    rounds_present: int
    test_images: int = 0

    @property
    def standard_error(self) -> float:
        """The error of the accuracy that comes from the number of test images; NaN if that is not known."""
        accuracy = _average_last(self.accuracy)
        return float(sampling_error(accuracy, self.test_images)) if self.test_images else float("nan")


@dataclass(frozen=True)
class Diagnosis:
    """How a run served its domains or clients, by round.

    Attributes:
        kind: "domain" or "client".
        rounds: The numbers of the rounds.
        units: The domains or clients.
    """

    kind: str
    rounds: Floats
    units: tuple[Unit, ...]

    @cached_property
    def gaps(self) -> Floats:
        """Accuracy minus the mean of all units, by unit and round."""
        accuracy = np.array([unit.accuracy for unit in self.units])
        return accuracy - mean_ignoring_nan(accuracy)

    @cached_property
    def under_served(self) -> list[int]:
        """The numbers of the under-served units."""
        return [i for i in range(len(self.units)) if self.get_gap(i) < -GAP]

    def get_gap(self, number: int) -> float:
        """Return a unit's distance from the mean, averaged over the last evaluated rounds."""
        return _average_last(self.gaps[number])

    def find_start(self, number: int) -> int | None:
        """Return the round from which an under-served unit was behind in every evaluated one; None if not in the last."""
        start = None
        for i in np.flatnonzero(np.isfinite(self.gaps[number]))[::-1] if number in self.under_served else ():
            if self.gaps[number, i] >= -GAP:
                break
            start = int(self.rounds[i])
        return start


def diagnose_run(folder: str | Path, by: str | None = None) -> Diagnosis:
    """Return how a run, finished or not, served its domains or clients.

    Args:
        folder: A run folder with `rounds.jsonl`.
        by: "domain" or "client"; by default domains if those of the clients are known, else clients.

    Raises:
        ValueError: If there is no such folder, or if it holds no rounds or no domains of clients.
    """
    folder = Path(folder)
    check_runs_exist(folder)
    records = read_complete_rounds(folder)
    if not records:
        runs = [str(file.parent) for file in sorted(folder.glob("*/rounds.jsonl"))]
        more = f" or another of its {len(runs)} runs" if len(runs) > 2 else ""
        advice = f"name {' or '.join(runs[:2])}{more}" if runs else "name a run folder with a rounds.jsonl"
        raise ValueError(f"{folder} holds no rounds: {advice}")
    summary = read_result(folder) if (folder / "result.json").is_file() else {}
    client_domains = _find_client_domains(records, summary)
    by = by or ("domain" if len(set(client_domains.values())) > 1 else "client")
    if by not in ("domain", "client"):
        raise ValueError(f"by = {by}: use domain or client")
    if by == "domain" and not client_domains:
        raise ValueError(f"{folder} does not say which domain a client belongs to: use --by client")
    key = f"{by}s"  # of the accuracies in a record
    groups: dict[str, list[str]] = {name: [] for record in reversed(records) for name in getattr(record, key) or {}}
    for client in sorted(_list_clients(records) | client_domains.keys()):
        groups.setdefault(client_domains.get(client, "?") if by == "domain" else client, []).append(client)
    sizes = {domain: int(size) for domain, size in summary.get("test_sizes", {}).items()}
    if by == "client":
        sizes = _divide_test_sets(sizes, client_domains) if (folder / "experiment.toml").is_file() else {}
    units = tuple(_build_unit(name, clients, records, key, sizes.get(name, 0)) for name, clients in groups.items())
    return Diagnosis(by, np.array([record.round for record in records], np.float64), units)


def _divide_test_sets(sizes: Mapping[str, int], client_domains: Mapping[str, str]) -> dict[str, int]:
    """Return the number of each client's test images: a simulation deals out those of a domain to its clients in turn."""
    shares: dict[str, int] = {}
    for domain, size in sizes.items():
        members = sorted(client for client, home in client_domains.items() if home == domain)
        shares |= {client: len(range(i, size, len(members))) for i, client in enumerate(members)}
    return shares


def _list_clients(records: Sequence[RoundRecord]) -> set[str]:
    return {client for record in records for client in (*record.weights, *(record.clients or {}))}


def _find_client_domains(records: Sequence[RoundRecord], summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the clients' domains from the rounds and the result, which has the last word."""
    stated: dict[str, Any] = {}
    for record in records:
        stated |= record.client_domains or {}
    stated |= summary.get("trained", {})
    client_domains = {client: str(domain) for client, domain in stated.items() if domain}
    # A simulation names clients after their domains, and does not record the domains of those that did not train.
    domains = next((set(record.domains) for record in reversed(records) if record.domains), set())
    others = _list_clients(records) - stated.keys()
    from_names = {client: client.rpartition("-")[0] for client in others if client.rpartition("-")[0] in domains}
    return client_domains | from_names if len(from_names) == len(others) else client_domains


def _build_unit(name: str, clients: Sequence[str], records: Sequence[RoundRecord], key: str, test_images: int) -> Unit:
    weights = [record.weights for record in records]
    present = np.array([sum(client in by_client for client in clients) for by_client in weights])
    everyone = np.array([max(len(by_client), 1) for by_client in weights])

    def combine(by_round: Sequence[Mapping[str, Any]], function: Callable[[list[float]], Any]) -> Floats:
        values = np.full(len(records), np.nan)
        for i, by_client in enumerate(by_round):
            numbers = [by_client[c] for c in clients if by_client.get(c) is not None]
            if numbers:
                values[i] = function(numbers)
        return values

    return Unit(
        name=escape_controls(name),
        clients=len(clients),
        accuracy=np.array([(getattr(record, key) or {}).get(name, np.nan) for record in records], np.float64),
        weight=combine(weights, np.sum),
        equal_share=np.where(present > 0, present / everyone, np.nan),
        kept=combine([record.report.get("kept") or {} for record in records], np.mean),
        distance=combine([record.report.get("distance") or {} for record in records], np.mean),
        rounds_present=int((present > 0).sum()),
        test_images=test_images,
    )


def _average_last(values: Floats) -> float:
    """Return the mean over the last rounds that have a number; NaN if none has."""
    numbers = values[np.isfinite(values)]
    return float(numbers[-count_averaged(len(numbers)) :].mean()) if len(numbers) else float("nan")


def format_diagnosis(diagnosis: Diagnosis) -> list[list[str]]:
    """Return a table as lines of words: the head, then one line per unit, the worst-served first.

    Args:
        diagnosis: What `diagnose_run` returned.
    """
    body = []
    gaps = [diagnosis.get_gap(i) for i in range(len(diagnosis.units))]
    for i in sorted(range(len(gaps)), key=lambda i: (np.isnan(gaps[i]), gaps[i])):
        unit, start = diagnosis.units[i], diagnosis.find_start(i)
        since = "on average" if start is None else f"round {start}"
        clients = f" ({format_count(unit.clients, 'client')})"
        share = unit.weight / unit.equal_share
        words = [
            unit.name + (clients if diagnosis.kind == "domain" else ""),
            _format_last(unit.accuracy, ".1f"),
            str(unit.test_images or "-"),
            _format_last(np.array([unit.standard_error]), ".1f"),
            _format_last(diagnosis.gaps[i], "+.1f"),
            since if i in diagnosis.under_served else "-",
            *map(_format_last, (unit.weight, share, unit.kept, unit.distance), (".1%", ".2f", ".1%", ".3g")),
            f"{unit.rounds_present}/{len(diagnosis.rounds)}",
        ]
        body.append(words)
    return [[diagnosis.kind, *COLUMNS], *body]


def _format_last(values: Floats, form: str) -> str:
    value = _average_last(values)
    return format(value, form) if np.isfinite(value) else "-"


def explain_diagnosis(diagnosis: Diagnosis) -> list[str]:
    """Return one sentence per under-served unit, or one that says why there is none, and one on accuracies of earlier models.

    Args:
        diagnosis: What `diagnose_run` returned.
    """
    return [*_explain_units(diagnosis), *_explain_rounds(diagnosis)]


def _explain_rounds(diagnosis: Diagnosis) -> list[str]:
    """Say which units were not evaluated in the last evaluated round."""
    evaluated = {unit.name: diagnosis.rounds[np.isfinite(unit.accuracy)] for unit in diagnosis.units}
    note = note_stale_accuracies({name: int(rounds[-1]) for name, rounds in evaluated.items() if len(rounds)})
    return [f"{note[0].upper()}{note[1:]}."] if note else []


def _explain_units(diagnosis: Diagnosis) -> list[str]:
    kind = diagnosis.kind
    if not np.isfinite(diagnosis.gaps).any():
        return [f"No accuracy by {kind} was recorded, so no {kind} can be called under-served; weights are as shown."]
    if not diagnosis.under_served:
        return [f"No {kind} lies more than {GAP:g} points below the mean of all {kind}s."]
    return [_explain_unit(diagnosis, number) for number in diagnosis.under_served]


def _explain_unit(diagnosis: Diagnosis, number: int) -> str:
    unit, start = diagnosis.units[number], diagnosis.find_start(number)
    weight, kept = _average_last(unit.weight), _average_last(unit.kept)
    ratio = _average_last(unit.weight / unit.equal_share)
    subject, verb, their = ("its clients", "hold", "their") if diagnosis.kind == "domain" else ("it", "holds", "its")
    gap, error = -diagnosis.get_gap(number), unit.standard_error
    tested = f" (standard error {error:.1f} from {format_count(unit.test_images, 'test image')})"
    images = tested if np.isfinite(error) else ""
    sentence = f"{unit.name} is {gap:.1f} points below the mean{images}, "
    if start is not None:
        sentence += f"more than {GAP:g} since round {start}"
    else:
        averaged = count_averaged(int(np.isfinite(unit.accuracy).sum()))
        sentence += f"on average over the last {averaged} rounds, though not more than {GAP:g} in the last of them"
    if not unit.rounds_present:
        # It may have dropped out or been left out; with pooled data, one machine trained for all.
        sentence += f"; {subject} had no weight in any round"
    if np.isfinite(ratio):
        relation = "less than" if ratio < 0.95 else "more than" if ratio > 1.05 else "about"
        sentence += f"; {subject} {verb} {weight:.1%} of the weight, {relation} an equal share ({ratio:.2f} of it)"
    if np.isfinite(kept):
        sentence += f", and {kept:.0%} of {their} entries were kept"
    return sentence + "."


def draw_diagnosis(diagnosis: Diagnosis) -> Figure | None:
    """Draw accuracy against the mean, weight against an equal share, and kept fractions by round; under-served in colour."""
    from matplotlib.figure import Figure

    units = diagnosis.units
    panels = [
        ("accuracy less the mean, points", list(diagnosis.gaps), 0.0),
        ("weight, x equal share", [unit.weight / unit.equal_share for unit in units], 1.0),
        ("kept entries", [unit.kept for unit in units], None),
    ]
    panels = [panel for panel in panels if any(np.isfinite(values).any() for values in panel[1])]
    if not panels:
        return None
    behind = diagnosis.under_served
    colour_all = diagnosis.kind == "domain" and len(units) <= len(palette.DOMAINS)
    figure = Figure(figsize=(PAGE, 2.1))
    legend: dict[int, tuple[Artist, str]] = {}
    for axes, (title, lines, level) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if level is not None:
            axes.axhline(level, color="#999999", lw=0.6)
        for i, (unit, values) in enumerate(zip(units, lines, strict=True)):
            is_behind, has_number = i in behind, np.isfinite(values)
            look: dict[str, Any] = {"lw": 1.8, "zorder": 3} if is_behind else {"lw": 0.9, "zorder": 2}
            look["color"] = "#BBBBBB"
            if is_behind or colour_all:
                look["color"] = palette.domain_colour(i if colour_all else behind.index(i))
            (line,) = axes.plot(diagnosis.rounds[has_number], values[has_number], **look)
            if is_behind or colour_all:
                legend[i] = (line, f"{shorten_name(unit.name)}{' (under-served)' if is_behind else ''}")
        axes.set_title(title, fontsize=7)
        label_rounds(axes)
    if legend:
        add_legend(figure, [line for line, _ in legend.values()], [label for _, label in legend.values()])
    return figure
