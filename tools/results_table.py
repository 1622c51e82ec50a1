"""The page of results/, made from the run folders there; numbers from elsewhere stand beside them with their source."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedheal.campaign.jobs import Job
from fedheal.core.metrics import LAST, fairness, last_mean
from fedheal.data import DESCRIPTIONS
from fedheal.report.rows import EVENNESS
from fedheal.report.tables import over_rounds
from fedheal.reproduce import paper_comparison as beside
from fedheal.reproduce.plans import Entry, Planned, Recipe
from results_kept import Run, found
from results_second import DATA as SECOND_DATA
from results_second import SOURCE as SECOND_SOURCE
from results_second import lines as second_lines
from results_second import read_all

NOISE = 20  # evaluated rounds
WINDOWS = 50
BASES = ("FedAvg", "uniform weights")

# Not ours and not the paper's: by row, what another program found on the same data, a line a seed. Its seeds are its own: with
# the same number it splits the data and begins its model otherwise than we do, so that no line is paired with a run of ours.
INDEPENDENT = {
    "digits": {
        "FedAvg": ((91.6, 91.6, 81.6, 23.0, 71.9, 33.0), (95.3, 92.1, 80.8, 22.9, 72.8, 33.8)),
        "uniform weights": ((90.7, 91.4, 80.0, 29.8, 73.0, 29.3),),
        "FedHEAL (released)": ((86.0, 91.0, 81.3, 32.8, 72.8, 26.9),),
        "FedHEAL (paper)": ((92.0, 94.1, 78.9, 26.4, 72.8, 31.7),),
    }
}
INDEPENDENT_COLUMNS = ("mnist", "usps", "svhn", "syn_standin", "AVG", "STD")
INDEPENDENT_SOURCE = (
    "An independent throw-away implementation of the same protocol, written apart from this one: same data, bf16, means of the "
    "last five of 200 rounds, one seed a line. It has its own split and first model, so that some of a difference "
    "comes from that alone. Its numbers are quoted: there are no records of its runs here."
)
LIMITS = {"mnist": 5.0, "usps": 3.0, "svhn": 3.0}  # points; more is a bug until it is explained


def page(recipe: Recipe, sets: Iterable[tuple[str, Path, int]]) -> str:
    """The page as Markdown, from data sets, where the runs of each are kept, and the rounds that they should have."""
    parts = [
        "# Results",
        "Written by `make results` from the run folders here; a test says when it is out of date. A row's name leads to its "
        "folder: the complete description of the run (`experiment.toml`), every round (`rounds.jsonl`) and what came out "
        "(`result.json`). The rows are those of the recipe `headline` (`docs/reproduce.md`).",
        "The paper's numbers and those of an independent implementation are quoted, and the latter have no records in this "
        "repository. Everything else is computed from what is in the folders.",
    ]
    for data, folder, usual in sets:
        parts += [f"## {data}", *_about(recipe, data, folder, usual)]
    return "\n\n".join(parts) + "\n"


def _about(recipe: Recipe, data: str, folder: Path, usual: int) -> list[str]:
    entries = recipe.entries(data)
    runs = found(entries, data, folder, usual)
    parts = []
    if runs:
        parts += _numbers(runs, data)
        parts += _paper(recipe, data, runs)
        parts += _differences(runs, data)
        parts += _noise(runs, data)
        parts += _independent(runs, data)
        parts += _second(runs, data, folder.parent)
        parts += _machines(runs)
    return [*parts, *_open(entries, runs, data)]


def _numbers(runs: Sequence[Run], data: str) -> list[str]:
    columns = columns_of(runs)
    head = ["row", "method", "seed", *heads(columns, data), "s a round", "median", "rounds", "precision", "on"]
    lines = []
    for run in runs:
        seconds = [sum(record["seconds"].values()) for record in run.records]
        where = f"{run.folder.parent.name}/{run.folder.name}/"
        lines.append(
            [
                f"[{run.label}]({where})",
                f"`{run.summary['method']}`",
                str(run.experiment.seed),
                *_cells(run.numbers, columns),
                f"{np.mean(seconds):.2f}",
                f"{np.median(seconds):.2f}",
                str(run.summary["rounds"]),
                str(run.summary["precision"]),
                str(run.summary["hardware"]),
            ]
        )
    averaged = over_rounds(frozenset(int(run.summary["averaged"]) for run in runs))
    said = [
        f"Accuracy in percent, {averaged}; STD is over domains (ddof = 1), worst is the worst domain. Seconds are those of "
        "training, aggregation and evaluation, mean and median over all rounds; the first round of a process compiles what the "
        "others use."
    ]
    others = [f"{run.entry.label} ({run.experiment.rounds})" for run in runs if not run.full]
    if others:
        said.append(f"Not the protocol's {runs[0].usual} rounds: {', '.join(others)}.")
    said += [f"**{note}.**" for note in stand_ins(columns, data)]
    return [grid(head, lines), bullets(said)]


def _paper(recipe: Recipe, data: str, runs: Sequence[Run]) -> list[str]:
    rows, other = [], []
    for label, group in by_label(runs).items():
        entry = group[0].entry
        if not group[0].full:  # shown, but the paper's numbers are of another length
            entry = replace(entry, label=label, published=(), misprint=((), ""))
            other.append(label)
        rows.append((entry, [Job(run.experiment, run.folder) for run in group]))
    table = beside.beside(recipe, Planned(data, rows))
    head, *lines = beside.cells(table)
    said = [*table.notes, *beside.claims(recipe, table)]
    if other:
        said.append(
            f"Not the protocol's {runs[0].usual} rounds, so that the paper's numbers do not stand beside: "
            f"{'; '.join(other)}."
        )
    return ["### Beside the paper", grid([*head[:2], *heads(head[2:], data)], lines), bullets(said)]


def _differences(runs: Sequence[Run], data: str) -> list[str]:
    """Each row less FedAvg and less uniform weights, by seed, between runs that differ by their methods alone."""
    columns = columns_of(runs)
    parts = ["### Beside FedAvg and beside uniform weights"]
    unlike: dict[str, None] = {}
    for label in BASES:
        bases = [run for run in runs if run.entry.label == label]
        lines = []
        for row, group in by_label(runs).items():
            pairs = [(run, base) for run in group for base in bases if run.settings == base.settings]
            if group[0].entry.label == label or not bases:
                continue
            if not pairs:
                unlike |= {f"{row} (beside {label})": None}
                continue
            apart = {c: [a.numbers[c] - b.numbers[c] for a, b in pairs] for c in columns}
            lines.append([row, *(_spread(apart[c], sign="+") for c in columns), str(len(pairs))])
        parts += [grid([f"less {label}", *heads(columns, data), "seeds"], lines)] if lines else []
    if len(parts) == 1:
        return []
    said = [
        "In points; for STD less is better, for all others more. Only runs with the same settings and data are subtracted."
    ]
    if unlike:
        said.append(f"Settings or data differ, so that nothing is subtracted: {', '.join(unlike)}.")
    return [*parts, bullets(said)]


def _with_evenness(domains: Mapping[str, float]) -> dict[str, float]:
    evenness = fairness(domains)
    return dict(domains) | {column: evenness[key] for column, key in EVENNESS.items()}


def _noise(runs: Sequence[Run], data: str) -> list[str]:
    columns = columns_of(runs)
    lines, ranges, longer = [], [], []
    for run in runs:
        judged = [r["domains"] for r in run.records if r["domains"] is not None]
        seed = str(run.experiment.seed)
        values = [_with_evenness(domains) for domains in judged[-NOISE:]]
        if len(values) > 1:
            spread = {c: float(np.std([v[c] for v in values], ddof=1)) for c in columns}
            lines.append([run.label, seed, *_cells(spread, columns), str(len(values))])
        tail = judged[-WINDOWS:]
        if len(tail) > LAST:
            means = [_with_evenness(last_mean(tail[: i + LAST])) for i in range(len(tail) - LAST + 1)]
            reach = [f"{min(m[c] for m in means):.1f} to {max(m[c] for m in means):.1f}" for c in columns]
            ranges.append([run.label, seed, *reach, str(len(tail))])
            whole = _with_evenness(last_mean(tail, len(tail)))
            longer.append([run.label, seed, *_cells(whole, columns), str(len(tail))])
    if not lines:
        return []
    said = (
        f"Standard deviation over the last {NOISE} evaluated rounds of a run, or as many as there are, in points: a first "
        "measure of noise. What another seed would change is not in it."
    )
    head = ["row", "seed", *heads(columns, data), "rounds"]
    found = ["### How much the last rounds move", grid(head, lines), said]
    if ranges:
        reach = f"Lowest and highest mean of {LAST} rounds in a row within the last {WINDOWS}: where a result might have ended."
        mean = f"Mean of the last {WINDOWS} rounds: less luck is in it than in the last {LAST}; it lags where a model improves."
        found += [grid(head, ranges), reach, grid(head, longer), mean]
    return found


def _independent(runs: Sequence[Run], data: str) -> list[str]:
    known = INDEPENDENT.get(data, {})
    lines, beyond = [], []
    for run in runs:
        if run.entry.label not in known or run.experiment.seed or not run.full:
            continue
        theirs = [dict(zip(INDEPENDENT_COLUMNS, line, strict=True)) for line in known[run.entry.label]]
        each = {c: [run.numbers[c] - line[c] for line in theirs] for c in INDEPENDENT_COLUMNS if c in run.numbers}
        apart = {c: differences[0] for c, differences in each.items()}
        over = {c: x for c, x in apart.items() if abs(x) > LIMITS.get(c, float("inf"))}
        beyond += [f"{run.entry.label} on {c} ({x:+.1f})" for c, x in over.items()]
        lines.append([run.entry.label, "ours", *_cells(run.numbers, INDEPENDENT_COLUMNS)])
        for number, line in enumerate(theirs):
            lines.append(["", "theirs, another seed" if number else "theirs", *_cells(line, INDEPENDENT_COLUMNS, 1)])
        shown = {c: f"**{x:+.1f}**" if c in over else f"{x:+.1f}" for c, x in apart.items()}
        lines.append(["", "difference", *(shown.get(c, "") for c in INDEPENDENT_COLUMNS)])
        if len(theirs) > 1:
            nearest = {c: f"{min(differences, key=abs):+.1f}" for c, differences in each.items()}
            lines.append(
                ["", "difference to the nearest, by column", *(nearest.get(c, "") for c in INDEPENDENT_COLUMNS)]
            )
    if not lines:
        return []
    limits = ", ".join(f"{limit:g} on {column}" for column, limit in LIMITS.items())
    said = [
        INDEPENDENT_SOURCE,
        f"Bold is a flag: ours is further from its first line than {limits} (points). What is flagged counts as a bug, in "
        f"either of the two, until it is explained. Flagged: {', '.join(beyond) or 'nothing'}.",
    ]
    return [
        "### Beside an independent implementation",
        grid(["row", "", *heads(INDEPENDENT_COLUMNS, data)], lines),
        bullets(said),
    ]


def _second(runs: Sequence[Run], data: str, results: Path) -> list[str]:
    seconds = read_all(results) if data == SECOND_DATA else []
    if not seconds:
        return []
    columns = [domain for domain in columns_of(runs) if domain not in EVENNESS]
    machines = ", ".join(dict.fromkeys(second.hardware for second in seconds))
    said = f"{SECOND_SOURCE}bf16, {machines}. Accuracy in percent, mean of the {LAST} rounds up to the one named."
    head = ["row", "after round", "", *heads(columns, data)]
    return ["### Beside a second version", grid(head, second_lines(seconds, runs, columns)), said]


def _machines(runs: Sequence[Run]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.summary["versions"].items())
        groups.setdefault(f"{run.summary['hardware']}; {versions}", []).append(run.label)
    every = len(groups) == 1
    lines = [words if every else f"{words}: {', '.join(dict.fromkeys(rows))}" for words, rows in groups.items()]
    prints = {run.summary["data_fingerprint"] for run in runs}
    same = "the same" if len(prints) == 1 else f"**not the same ({len(prints)} kinds)**"
    return ["### What it ran on", bullets([*lines, f"The data of all runs are {same}, by their fingerprints."])]


def _open(entries: Sequence[Entry], runs: Sequence[Run], data: str) -> list[str]:
    done = {run.entry for run in runs if run.full}
    left = [entry for entry in entries if entry not in done]
    if not left:
        return ["### Open", "Nothing: every row of the plan was run."]
    lines = []
    for entry in left:
        reached = sorted({run.experiment.rounds for run in runs if run.entry == entry})
        so_far = f" (so far with {' and '.join(map(str, reached))} rounds)" if reached else ""
        command = f"python tools/results.py run --data {data} --rows {shlex.quote(entry.label)}"
        lines.append(f"{entry.label}{so_far}: `{command}`")
    return [
        "### Open",
        "Not run yet, or with fewer rounds than planned; with what would run it (then `python tools/results.py collect`):",
        bullets(lines),
    ]


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def columns_of(runs: Sequence[Run]) -> list[str]:
    return [*dict.fromkeys(domain for run in runs for domain in run.summary["domains"]), *EVENNESS]


def heads(columns: Iterable[str], data: str) -> list[str]:
    """Columns as a table's head: a domain that stands in for another says so."""
    instead = _instead(data)
    return [f"{c} (stand-in for {instead[c]})" if c in instead else c for c in columns]


def stand_ins(columns: Iterable[str], data: str) -> list[str]:
    instead = _instead(data)
    return [
        f"{c} is a stand-in for {instead[c]}: its column is no result on {instead[c]}, and AVG, STD and worst are over other "
        "domains than the paper's"
        for c in columns
        if c in instead
    ]


def _instead(data: str) -> dict[str, str]:
    sources = DESCRIPTIONS[data].sources if data in DESCRIPTIONS else ()
    return {source.stand_in.name: source.name for source in sources if source.stand_in}


def _cells(numbers: Mapping[str, float], columns: Iterable[str], digits: int = 2) -> list[str]:
    return [f"{numbers[c]:.{digits}f}" if c in numbers else "" for c in columns]


def _spread(values: Sequence[float], sign: str = "") -> str:
    mean = f"{np.mean(values):{sign}.2f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.2f}"


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
