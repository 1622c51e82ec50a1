"""Our numbers beside the paper's, and the difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedheal.report.conclusions import cautions
from fedheal.report.html_page import Extra
from fedheal.report.rows import EVENNESS, Row, by_data, data_notes, load_summary, rows
from fedheal.report.tables import in_a_cell, over_rounds, value
from fedheal.reproduce import paper
from fedheal.reproduce.plans import BESIDE, Claim, Entry, Planned, Recipe

MARK = "†"
KINDS = ("ours", "paper", "difference")


@dataclass(frozen=True)
class Line:
    """One row of the recipe. `ours`: mean and spread over seeds by column; `paper`: what it prints, over its `domains`."""

    entry: Entry
    ours: Mapping[str, tuple[float, float | None]]
    paper: Mapping[str, float]
    domains: Sequence[str]  # those the paper's AVG and STD are over, whether it prints them or not
    meant: bool  # whether ours mean anything

    @property
    def difference(self) -> dict[str, float]:
        """Ours less the paper's, where both are of the same domains."""
        if not self.meant:
            return {}
        alike = set(self.ours) - set(EVENNESS) == set(self.domains)
        shared = [c for c in self.paper if c in self.ours and (c not in EVENNESS or alike)]
        return {column: self.ours[column][0] - self.paper[column] for column in shared}


@dataclass(frozen=True)
class Beside:
    """A recipe's table on one data set."""

    title: str
    data: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    same_data: bool  # whether the paper has numbers for this very data


def found(planned: Planned) -> list[Row]:
    """The results of all runs, each once."""
    return rows(load_summary(job.folder) for job in planned.jobs)


def beside(recipe: Recipe, planned: Planned) -> Beside:
    """The finished runs of a recipe on one data set, beside the paper's numbers."""
    (own_rows,) = by_data(found(planned)).values()
    results = {str(row.summaries[0]["folder"]): row for row in own_rows}
    printed = paper.DOMAINS.get(BESIDE.get(planned.data, planned.data), ())
    lines = []
    for entry, jobs in planned.rows:
        own = [results[str(job.folder)] for job in jobs]
        columns = [*own[0].domains, *EVENNESS]
        numbers = {column: _spread([value(row, column) for row in own]) for column in columns}
        lines.append(Line(entry, numbers, _printed(entry, printed), printed, not planned.smoke))
    ours = [c for c in lines[0].ours if c not in EVENNESS]
    theirs = [c for c in printed if c not in ours and any(c in line.paper for line in lines)]
    absent = [d for d in printed if d not in ours and any(line.paper for line in lines)]
    same = planned.data in paper.DOMAINS
    rounds = frozenset(int(row.summaries[0]["averaged"]) for row in results.values())
    return Beside(
        recipe.title,
        planned.data,
        (*ours, *theirs, *EVENNESS),
        tuple(lines),
        (
            *_about(planned, rounds, absent, same),
            *cautions(own_rows),
            *_data_notes(own_rows),
            *_misprints(lines),
            *recipe.notes,
        ),
        same,
    )


def _spread(values: Sequence[float]) -> tuple[float, float | None]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _printed(entry: Entry, domains: Sequence[str]) -> dict[str, float]:
    names = ("AVG", "STD") if len(entry.published) == 2 else (*domains, "AVG", "STD")
    return dict(zip(names, entry.published, strict=True)) if entry.published else {}


def _about(planned: Planned, rounds: frozenset[int], absent: Sequence[str], same: bool) -> list[str]:
    seeds = sorted({len(jobs) for _, jobs in planned.rows})
    number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    spread = f", {number} seeds, ± standard deviation over them" if seeds[-1] > 1 else ", one seed"
    said = ["A smoke run: it shows that everything works, and its numbers mean nothing."] if planned.smoke else []
    said.append(f"Accuracy in percent, {over_rounds(rounds)}{spread}.")
    if not same:
        said.append(
            f"The paper has no {planned.data} data: its numbers on other data stand beside, and nothing is subtracted."
        )
    elif planned.smoke:
        said.append("The paper's numbers stand beside and are not subtracted.")
    elif absent:
        said.append(
            f"Our data has no {', '.join(absent)}: AVG and STD are over other domains than the paper's, and are not subtracted."
        )
    return said


def _data_notes(found: Iterable[Row]) -> list[str]:
    return [f"About the data: {note}." for note in data_notes(row.summaries[0] for row in found)]


def _misprints(lines: Sequence[Line]) -> list[str]:
    return [f"{MARK} {line.entry.label}: {line.entry.misprint[1]}" for line in lines if line.entry.misprint[1]]


def cells(table: Beside) -> list[list[str]]:
    """The table as words, its head first: three lines a row, or one where the paper has nothing."""
    made = [["", "", *table.columns]]
    for line in table.lines:
        difference = line.difference
        shown = {
            "ours": {c: f"{m:.2f}" + (f" ± {sd:.2f}" if sd is not None else "") for c, (m, sd) in line.ours.items()},
            "paper": {c: f"{x:.2f}" + (MARK if c in line.entry.misprint[0] else "") for c, x in line.paper.items()},
            "difference": {c: f"{x:+.2f}" for c, x in difference.items()},
        }
        for i, kind in enumerate(kind for kind in KINDS if shown[kind]):
            made.append([line.entry.label if i == 0 else "", kind, *(shown[kind].get(c, "") for c in table.columns)])
    return made


def text(table: Beside) -> str:
    """Columns of equal width, then the notes."""
    made = cells(table)
    widths = [max(len(line[i]) for line in made) for i in range(len(made[0]))]
    body = [
        "  ".join(
            word.ljust(w) if i < 2 else word.rjust(w) for i, (word, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in made
    ]
    head = f"{table.title}: {table.data}"
    return "\n".join(
        [head, "", body[0].rstrip(), "-" * len(body[0]), *(line.rstrip() for line in body[1:]), "", *table.notes]
    )


def markdown(table: Beside) -> str:
    made = cells(table)
    lines = [f"| {' | '.join(map(in_a_cell, line))} |" for line in made]
    notes = "\n".join(f"- {note}" for note in table.notes)
    return "\n".join(
        [f"## {table.title}: {table.data}", "", lines[0], "|---" * len(made[0]) + "|", *lines[1:], "", notes]
    )


def extra(table: Beside, said: Sequence[str]) -> Extra:
    """The table as a section of the HTML page."""
    return Extra(f"{table.data} beside the paper", [*said, *table.notes], cells(table))


def tidy(table: Beside) -> dict[str, Any]:
    """All of it for other programs."""
    return {
        "title": table.title,
        "data": table.data,
        "notes": list(table.notes),
        "rows": [
            {
                "label": line.entry.label,
                "method": line.entry.method,
                "ours": {c: mean for c, (mean, _) in line.ours.items()},
                "spread": {c: sd for c, (_, sd) in line.ours.items() if sd is not None},
                "paper": dict(line.paper),
                "difference": line.difference,
            }
            for line in table.lines
        ],
    }


def claims(recipe: Recipe, table: Beside) -> list[str]:
    """How often what the recipe claims holds in our numbers, and in the paper's."""
    by_label = {line.entry.label: line for line in table.lines}
    said = []
    for claim in recipe.claims():
        here = [(by_label[a], by_label[b]) for a, b in claim.pairs if a in by_label and b in by_label]
        if here:
            said.append(_held(claim, here))
    return said


def _held(claim: Claim, pairs: Sequence[tuple[Line, Line]]) -> str:
    ours = [({c: m for c, (m, _) in a.ours.items()}, {c: m for c, (m, _) in b.ours.items()}) for a, b in pairs]
    theirs = [(a.paper, b.paper) for a, b in pairs if a.paper and b.paper]
    in_paper = f" (paper: {_counts(theirs)})" if theirs else " (not in the paper)"
    return f"{claim.words}: {_counts(ours)}{in_paper}."


def _counts(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> str:
    higher = sum(a["AVG"] > b["AVG"] for a, b in pairs)
    lower = sum(a["STD"] < b["STD"] for a, b in pairs)
    return f"AVG higher in {higher} of {len(pairs)}, STD lower in {lower} of {len(pairs)}"
