"""Who is left behind in a federation, since when, and how the aggregation treated them: from a run folder alone.

A run folder of a real federation may lack much: what is needed is `rounds.jsonl` with weights; accuracy by domain or client,
kept fractions, distances and the clients' domains are used where they are there.

Whoever is judged, or said to belong to a domain, is a unit (a client, or as a part of its domain) whether it ever took part or
not: those left out are who one looks for. A unit is *under-served* where its accuracy, averaged over the last evaluated rounds,
lies more than `GAP` points below the mean of all units; *since* is the first evaluated round from which it has been so in every
one to the last, if there is such a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedheal.core.metrics import LAST
from fedheal.report import palette
from fedheal.report.figures import PAGE, by_round, saved
from fedheal.report.rounds import rounds_of
from fedheal.report.series import Floats, mean_of
from fedheal.runs.folder import read_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = 5.0  # points below the mean
COLUMNS = (
    "accuracy",
    "to the mean",
    "under-served since",
    "weight",
    "x equal share",
    "kept",
    "distance",
    "rounds present",
)


@dataclass(frozen=True)
class Unit:
    """A domain or client by round; NaN where nothing was recorded."""

    name: str
    clients: int
    accuracy: Floats
    weight: Floats  # of its clients together, of those present
    fair: Floats  # what its clients' weight would be if all present weighed the same
    kept: Floats
    distance: Floats
    present: int  # rounds in which any of its clients took part


@dataclass(frozen=True)
class Diagnosis:
    """All units of one kind, `what` they are, and the rounds."""

    what: str
    rounds: Floats
    units: tuple[Unit, ...]

    @cached_property
    def gaps(self) -> Floats:
        """By unit and round, accuracy less the mean of all units."""
        accuracy = np.array([unit.accuracy for unit in self.units])
        return accuracy - mean_of(accuracy)

    def lag(self, number: int) -> float:
        """How far a unit is from the mean, over the last evaluated rounds."""
        return _last(self.gaps[number])

    def under_served(self, number: int) -> bool:
        """Whether a unit is too far behind, on average over the last evaluated rounds."""
        return self.lag(number) < -GAP

    def since(self, number: int) -> int | None:
        """The round from which an under-served unit was behind in every evaluated one; `None` if it was not in the last."""
        start = None
        gaps = self.gaps[number]
        for i in np.flatnonzero(np.isfinite(gaps))[::-1] if self.under_served(number) else ():
            if gaps[i] >= -GAP:
                break
            start = int(self.rounds[i])
        return start


def diagnose(folder: Path, what: str | None = None) -> Diagnosis:
    """The units of a run: domains where the clients' are known, else clients; `what` asks for one kind."""
    records = rounds_of(folder)
    if not records:
        raise ValueError(f"{folder} holds no rounds: name a run folder with a rounds.jsonl")
    summary = read_result(folder) if (folder / "result.json").is_file() else {}
    client_domains = _homes(records, summary)
    if what is None:
        what = "domain" if client_domains and len(set(client_domains.values())) > 1 else "client"
    if what not in ("domain", "client"):
        raise ValueError(f"by = {what}: use domain or client")
    if what == "domain" and not client_domains:
        raise ValueError(f"{folder} does not say which domain a client belongs to: ask for clients instead")
    judged = "domains" if what == "domain" else "clients"
    groups: dict[str, list[str]] = {name: [] for record in reversed(records) for name in record.get(judged) or {}}
    for client in sorted(_everyone(records) | client_domains.keys()):
        groups.setdefault(client_domains.get(client, "?") if what == "domain" else client, []).append(client)
    return Diagnosis(
        what,
        np.array([record["round"] for record in records], np.float64),
        tuple(_unit(name, clients, records, judged) for name, clients in groups.items()),
    )


def _everyone(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """All clients that took part in any round or were judged after it."""
    return {client for record in records for key in ("weights", "clients") for client in record.get(key) or {}}


def _homes(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, str]:
    """Clients' domains, as the rounds say them and at last the result."""
    said: dict[str, Any] = {}
    for record in records:
        said |= record.get("client_domains") or {}
    said |= summary.get("trained", {})
    found = {client: str(home) for client, home in said.items() if home}
    # A simulation names clients after their domains, and its rounds and result tell no domain of those that did not train.
    domains = next((set(record["domains"]) for record in reversed(records) if record.get("domains")), set())
    others = _everyone(records) - said.keys()
    named = {client: client.rpartition("-")[0] for client in others if client.rpartition("-")[0] in domains}
    return found | named if len(named) == len(others) else found


def _unit(name: str, clients: Sequence[str], records: Sequence[Mapping[str, Any]], judged: str) -> Unit:
    def by_round(get: Any, how: Any) -> Floats:
        found = np.full(len(records), np.nan)
        for i, record in enumerate(records):
            numbers = [get(record)[c] for c in clients if c in (get(record) or {}) and get(record)[c] is not None]
            if numbers:
                found[i] = how(numbers)
        return found

    def told(key: str) -> Any:
        return lambda record: (record.get("report") or {}).get(key)

    accuracy = np.array([(record.get(judged) or {}).get(name, np.nan) for record in records], np.float64)
    present = [[c for c in clients if c in (record.get("weights") or {})] for record in records]
    fair = [len(here) / max(len(record.get("weights") or {}), 1) for here, record in zip(present, records, strict=True)]
    return Unit(
        name,
        len(clients),
        accuracy,
        by_round(lambda record: record.get("weights"), np.sum),
        np.where(np.array([len(here) for here in present]) > 0, np.array(fair), np.nan),
        by_round(told("kept"), np.mean),
        by_round(told("distance"), np.mean),
        sum(bool(here) for here in present),
    )


def _last(values: Floats) -> float:
    """Over the last rounds that have a number; NaN if none has."""
    found = values[np.isfinite(values)][-LAST:]
    return float(found.mean()) if len(found) else float("nan")


def lines(found: Diagnosis) -> list[list[str]]:
    """A table, its head first, the worst-served unit on top."""
    body = []
    for i, unit in sorted(enumerate(found.units), key=lambda pair: (np.isnan(found.lag(pair[0])), found.lag(pair[0]))):
        since = found.since(i)
        behind = "on average" if since is None else f"round {since}"
        relative = unit.weight / unit.fair
        body.append(
            [
                unit.name + (f" ({_clients(unit.clients)})" if found.what == "domain" else ""),
                _number(_last(unit.accuracy), ".1f"),
                _number(found.lag(i), "+.1f"),
                behind if found.under_served(i) else "-",
                _number(_last(unit.weight), ".1%"),
                _number(_last(relative), ".2f"),
                _number(_last(unit.kept), ".1%"),
                _number(_last(unit.distance), ".3g"),
                f"{unit.present}/{len(found.rounds)}",
            ]
        )
    return [[found.what, *COLUMNS], *body]


def _clients(number: int) -> str:
    return "1 client" if number == 1 else f"{number} clients"


def _number(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"


def sentences(found: Diagnosis) -> list[str]:
    """What the table says, in words."""
    last = min(LAST, int(np.isfinite(found.gaps).any(axis=0).sum()))
    if not last:
        return [
            f"No accuracy by {found.what} was recorded, so nobody can be called under-served; weights are as shown."
        ]
    behind = [i for i in range(len(found.units)) if found.under_served(i)]
    if not behind:
        return [f"No {found.what} lies more than {GAP:g} points below the mean of all {found.what}s."]
    return [_behind(found, number, last) for number in behind]


def _behind(found: Diagnosis, number: int, last: int) -> str:
    unit, since = found.units[number], found.since(number)
    weight, ratio, kept = _last(unit.weight), _last(unit.weight / unit.fair), _last(unit.kept)
    said = f"{unit.name} is {-found.lag(number):.1f} points below the mean, "
    if since is None:
        said += f"on average over the last {last} evaluated rounds, though not more than {GAP:g} in the last of them"
    else:
        said += f"more than {GAP:g} since round {since}"
    if not unit.present:
        # It may have dropped out or been left out; of pooled data, one machine trained for all.
        said += f"; {'its clients' if found.what == 'domain' else 'it'} had no weight in any round"
    if np.isfinite(ratio):
        less = "less than" if ratio < 0.95 else "more than" if ratio > 1.05 else "about"
        holds = "its clients hold" if found.what == "domain" else "it holds"
        said += f"; {holds} {weight:.1%} of the weight, {less} an equal share ({ratio:.2f} of it)"
    if np.isfinite(kept):
        said += f", and {kept:.0%} of {'their' if found.what == 'domain' else 'its'} entries were kept"
    return said + "."


def picture(found: Diagnosis) -> Figure | None:
    """Accuracy against the mean, weight against an equal share, and what was kept, by round; the under-served in colour."""
    from matplotlib.figure import Figure

    gaps = found.gaps
    panels = [
        ("accuracy less the mean, points", list(gaps), 0.0),
        ("weight, x equal share", [unit.weight / unit.fair for unit in found.units], 1.0),
        ("kept entries", [unit.kept for unit in found.units], None),
    ]
    panels = [panel for panel in panels if any(np.isfinite(values).any() for values in panel[1])]
    if not panels:
        return None
    behind = [i for i in range(len(found.units)) if found.under_served(i)]
    every = found.what == "domain" and len(found.units) <= len(palette.DOMAINS)
    figure = Figure(figsize=(PAGE, 2.1))
    for axes, (label, values, level) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if level is not None:
            axes.axhline(level, color="#999999", lw=0.6)
        for i, (unit, line) in enumerate(zip(found.units, values, strict=True)):
            marked = i in behind
            there = np.isfinite(line)
            axes.plot(
                found.rounds[there],
                line[there],
                color=palette.domain(i if every else behind.index(i)) if marked or every else "#BBBBBB",
                lw=1.8 if marked else 0.9,
                label=f"{unit.name}{' (under-served)' if marked else ''}" if marked or every else None,
                zorder=3 if marked else 2,
            )
        axes.set_title(label, fontsize=7)
        by_round(axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(handles), 5))
    return figure


def write_picture(found: Diagnosis, path: Path) -> list[Path]:
    """The picture under `path` with every format's ending."""
    return saved(path, lambda: picture(found))
