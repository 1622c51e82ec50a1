"""Write the page of results/ from the run folders there. Numbers from elsewhere are quoted with their source."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedheal.analysis.domain_changes import is_supported
from fedheal.analysis.paired_tests import Comparison
from fedheal.campaign.jobs import Job
from fedheal.core.metrics import LAST, fairness, last_mean
from fedheal.data import SPECS
from fedheal.report.conclusions import ALPHA, analyse_rows, conclude_findings
from fedheal.report.rows import FAIRNESS_COLUMNS, build_rows
from fedheal.report.tables import describe_averaging
from fedheal.reproduce.paper_comparison import compare_with_paper, count_claims
from fedheal.reproduce.plans import Recipe, RecipePlan, RecipeRow
from results_data import SECOND_FOLDER, Run, SecondRun, read_runs, read_second_runs

NOISE = 20  # evaluated rounds
WINDOWS = 50
SECOND_DATA = "digits"  # the only protocol of the second version
SECOND_EVERY = 20  # rounds
SECOND_SOURCE = (
    "`tools/second_version.py` is the same protocol written once more from its description alone: it shares no code with the "
    "package, reads the files itself and has its own split, network, training loop and average. Its records are in "
    f"`{SECOND_FOLDER}/`. "
)
BASES = ("FedAvg", "uniform weights")
TEST_COLUMNS = ("in", "mean", "95 % interval", "better in", "p", "smallest possible p")
# The rows that have several seeds, and the seeds planned for each: those of the confirmation (docs/search-plan.md) follow the
# first three, so that runs serve both.
HEADLINE = ("FedAvg", "uniform weights", "FedHEAL (released)", "FedHEAL (paper)")
PLANNED_SEEDS = {"digits": (0, 1, 2, *range(8, 13))}

# By row, the numbers of another program on the same data, one line per seed. Its seeds give another split and another first
# model than ours, so that no line is paired with a run of ours.
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
WITHOUT_STAND_IN = (
    "AVG, STD and worst over the other domains. The stand-in's clients trained these models, too; only its column is left out. "
    "This table was made after the results were known."
)
LIMITS = {"mnist": 5.0, "usps": 3.0, "svhn": 3.0}  # points; more is a bug until it is explained


def write_page(recipe: Recipe, data_sets: Iterable[tuple[str, Path, int]]) -> str:
    """Return the page as Markdown. `data_sets`: names, the folders of their runs, and the planned rounds."""
    parts = [
        "# Results",
        "Written by `make results` from the run folders here; a test says when it is out of date. A row's name leads to its "
        "folder: the complete description of the run (`experiment.toml`), every round (`rounds.jsonl`) and what came out "
        "(`result.json`). The rows are those of the recipe `headline` (`docs/reproduce.md`). The runs of "
        "`docs/search-plan.md` are in `search`, `confirmation` and `confirmation-scaffold`, runs with crossed seeds in "
        "`variance`, and repeated runs in `repeats`. The confirmations are at the end of this page; `docs/findings.md` and "
        "`docs/performance.md` have the numbers of the others.",
        "The paper's numbers and those of an independent implementation are quoted, and the latter have no records in this "
        "repository. Everything else is computed from what is in the folders.",
    ]
    for data, folder, planned_rounds in data_sets:
        parts += [f"## {data}", *_write_data_set(recipe, data, folder, planned_rounds)]
    return "\n\n".join(parts) + "\n"


def _write_data_set(recipe: Recipe, data: str, folder: Path, planned_rounds: int) -> list[str]:
    entries = recipe.list_rows(data)
    runs = read_runs(entries, data, folder, planned_rounds)
    parts = []
    if runs:
        parts += _tabulate_runs(runs, data)
        parts += _compare_to_paper(recipe, data, runs)
        parts += _subtract_bases(runs, data)
        parts += _test_differences(runs)
        parts += _leave_out_stand_ins(runs, data)
        parts += _measure_noise(runs, data)
        parts += _compare_to_independent(runs, data)
        parts += _compare_to_second(runs, data, folder.parent)
        parts += ["### What it ran on", list_machines(runs)]
    return [*parts, *_list_open_rows(entries, runs, data)]


def _tabulate_runs(runs: Sequence[Run], data: str) -> list[str]:
    columns = list_columns(runs)
    head = ["row", "method", "seed", *name_columns(columns, data), "s a round", "median", "rounds", "precision", "on"]
    lines = []
    for run in runs:
        seconds = [sum(record.seconds.values()) for record in run.records]
        name = f"[{run.label}]({run.folder.parent.name}/{run.folder.name}/)"
        times = (f"{np.mean(seconds):.2f}", f"{np.median(seconds):.2f}")
        facts = (str(run.summary[key]) for key in ("rounds", "precision", "hardware"))
        cells = _format_cells(run.numbers, columns)
        lines.append([name, f"`{run.summary['method']}`", str(run.experiment.seed), *cells, *times, *facts])
    averaged = describe_averaging(frozenset(int(run.summary["averaged"]) for run in runs))
    notes = [
        f"Accuracy in percent, {averaged}; STD is over domains (ddof = 1), worst is the worst domain. Seconds are those of "
        "training, aggregation and evaluation, mean and median over all rounds; the first round of a process compiles what the "
        "others use."
    ]
    other_lengths = dict.fromkeys(f"{run.entry.label} ({run.experiment.rounds})" for run in runs if not run.is_full)
    if other_lengths:
        notes.append(f"Not the protocol's {runs[0].planned_rounds} rounds: {', '.join(other_lengths)}.")
    notes += [f"**{note}.**" for note in describe_stand_ins(columns, data)]
    return [format_table(head, lines), format_list(notes)]


def _compare_to_paper(recipe: Recipe, data: str, runs: Sequence[Run]) -> list[str]:
    rows, other_lengths = [], []
    for label, group in group_by_label(runs).items():
        entry = group[0].entry
        if not group[0].is_full:  # shown without the paper's numbers, which are for all rounds
            entry = replace(entry, label=label, published=(), misprint=((), ""))
            other_lengths.append(label)
        rows.append((entry, [Job(run.experiment, run.folder) for run in group]))
    table = compare_with_paper(recipe, RecipePlan(data, rows))
    head, *lines = table.to_lines()
    notes = [*table.notes, *count_claims(recipe, table)]
    if other_lengths:
        notes.append(
            f"Not the protocol's {runs[0].planned_rounds} rounds, so that the paper's numbers do not stand beside: "
            f"{'; '.join(other_lengths)}."
        )
    return ["### Beside the paper", format_table([*head[:2], *name_columns(head[2:], data)], lines), format_list(notes)]


def _subtract_bases(runs: Sequence[Run], data: str) -> list[str]:
    """Subtract FedAvg and uniform weights from each row, by seed, between runs that differ by their methods alone."""
    tables, unpaired = [], []
    for label in BASES:
        table, rows = subtract_row(runs, label, data)
        tables += [table] if table else []
        unpaired += [f"{row} (beside {label})" for row in rows]
    if not tables:
        return []
    notes = [
        "In points; for STD less is better, for all others more. Only runs with the same settings and data are subtracted."
    ]
    if unpaired:
        notes.append(f"Settings or data differ, so that nothing is subtracted: {', '.join(unpaired)}.")
    return ["### Beside FedAvg and beside uniform weights", *tables, format_list(notes)]


def subtract_row(runs: Sequence[Run], label: str, data: str) -> tuple[str, list[str]]:
    """Subtract a row from the others, by seed; return the table, or "" without pairs, and the rows that have no pair."""
    columns = list_columns(runs)
    bases = [run for run in runs if run.entry.label == label]
    lines, unpaired = [], []
    for row, group in group_by_label(runs).items():
        pairs = [(run, base) for run in group for base in bases if run.settings == base.settings]
        if group[0].entry.label == label or not bases:
            continue
        if not pairs:
            unpaired.append(row)
            continue
        differences = {c: [a.numbers[c] - b.numbers[c] for a, b in pairs] for c in columns}
        lines.append([row, *(_format_mean(differences[c], sign="+") for c in columns), str(len(pairs))])
    return format_table([f"less {label}", *name_columns(columns, data), "seeds"], lines) if lines else "", unpaired


def tabulate_means(runs: Sequence[Run]) -> str:
    """Return a table with the mean of each row over its seeds, and their standard deviation."""
    columns = list_columns(runs)
    lines = [
        [label, f"`{group[0].summary['method']}`"]
        + [_format_mean([run.numbers[c] for run in group]) for c in columns]
        + [str(len(group))]
        for label, group in group_by_label(runs).items()
    ]
    return format_table(["row", "method", *columns, "seeds"], lines)


def _test_differences(runs: Sequence[Run], heading: str = "### What may be concluded") -> list[str]:
    """Compare the headline's rows with uniform weights by paired tests, as one family."""
    repeated = {label: group for label, group in group_by_label(runs).items() if len(group) > 1}
    groups = {label: group for label, group in repeated.items() if group[0].entry.label in HEADLINE}
    control = next((label for label, group in groups.items() if group[0].entry.label == BASES[1]), None)
    if control is None or len(groups) < 2:
        return []
    lines, notes = tabulate_tests(groups, control)
    head = ["less uniform weights", *TEST_COLUMNS]
    return [heading, format_table(head, lines), format_list(notes)]


def _leave_out_stand_ins(runs: Sequence[Run], data: str) -> list[str]:
    """Repeat the headline's means and tests without the columns of stand-ins."""
    reduced = drop_stand_ins([run for run in runs if run.entry.label in HEADLINE], data)
    tests = _test_differences(reduced, "### Without the stand-in")
    if not tests:
        return []
    heading, *rest = tests
    return [heading, WITHOUT_STAND_IN, tabulate_means(reduced), *rest]


def drop_stand_ins(runs: Sequence[Run], data: str) -> list[Run]:
    """Return the runs without the columns of stand-ins, or an empty list if no run has one."""
    stand_ins = _find_stand_ins(data)
    if not any(domain in stand_ins for run in runs for domain in run.summary["domains"]):
        return []
    reduced = []
    for run in runs:
        domains, sizes = (
            {domain: value for domain, value in run.summary[key].items() if domain not in stand_ins}
            for key in ("domains", "test_sizes")
        )
        reduced.append(
            replace(run, summary={**run.summary, "domains": domains, "test_sizes": sizes, **fairness(domains)})
        )
    return reduced


def tabulate_tests(groups: Mapping[str, Sequence[Run]], control: str) -> tuple[list[list[str]], list[str]]:
    """Compare rows with a control by paired tests in AVG and STD, as one family; return the table's lines and notes."""
    labels = {str(group[0].summary["method"]): label for label, group in groups.items()}
    rows = build_rows(run.summary for group in groups.values() for run in group)
    findings = analyse_rows(rows, str(groups[control][0].summary["method"]))
    lines = []
    for c in findings.metrics:
        column, sign = c.metric.upper(), 1 if c.metric == "avg" else -1
        of_control = {run.experiment.seed: run.numbers[column] for run in groups[control]}
        paired = [run for run in groups[labels[c.a]] if run.experiment.seed in of_control]
        better = sum(sign * (run.numbers[column] - of_control[run.experiment.seed]) > 0 for run in paired)
        interval = "" if c.low is None or c.high is None else f"{c.low:+.2f} to {c.high:+.2f}"  # one seed has none
        numbers = [f"{c.mean:+.2f}", interval, f"{better} of {c.n}"]
        lines.append([labels[c.a], column, *numbers, f"{c.p_adjusted:.3f}", f"{c.smallest_p_adjusted:.3f}"])
    notes = [
        f"p is that of a two-sided paired test over the seeds that both have, after Holm's correction over "
        f"{len(lines)} comparisons (docs/statistics.md). Below 0.05 a difference is shown. A larger p is no evidence of "
        "equality. The smallest possible p is what the clearest differences in all comparisons would give with these numbers "
        "of seeds.",
        "Intervals hold one at a time. Below 8 seeds they assume near-normal differences (docs/statistics.md). The conclusion "
        "follows the test.",
        *conclude_findings(replace(findings, metrics=_leave_out_undecided(findings.metrics)), rows),
    ]
    return lines, notes


def _leave_out_undecided(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the differences that are shown, and those that these numbers of seeds cannot show: the table has the others."""
    return [c for c in comparisons if is_supported(c, ALPHA) or c.smallest_p_adjusted > ALPHA]


def _add_evenness(domains: Mapping[str, float]) -> dict[str, float]:
    evenness = fairness(domains)
    return dict(domains) | {column: evenness[key] for column, key in FAIRNESS_COLUMNS.items()}


def _measure_noise(runs: Sequence[Run], data: str) -> list[str]:
    columns = list_columns(runs)
    lines, ranges, longer = [], [], []
    for run in runs:
        accuracies = run.accuracies
        seed = str(run.experiment.seed)
        values = [_add_evenness(domains) for domains in accuracies[-NOISE:]]
        if len(values) > 1:
            spread = {c: float(np.std([v[c] for v in values], ddof=1)) for c in columns}
            lines.append([run.label, seed, *_format_cells(spread, columns), str(len(values))])
        tail = accuracies[-WINDOWS:]
        if len(tail) > LAST:
            means = [_add_evenness(last_mean(tail[: i + LAST], LAST)) for i in range(len(tail) - LAST + 1)]
            reach = [f"{min(m[c] for m in means):.1f} to {max(m[c] for m in means):.1f}" for c in columns]
            ranges.append([run.label, seed, *reach, str(len(tail))])
            mean = _add_evenness(last_mean(tail, len(tail)))
            longer.append([run.label, seed, *_format_cells(mean, columns), str(len(tail))])
    if not lines:
        return []
    notes = (
        f"Standard deviation over the last {NOISE} evaluated rounds of a run, or as many as there are, in points: a first "
        "measure of noise. What another seed would change is not in it."
    )
    head = ["row", "seed", *name_columns(columns, data), "rounds"]
    parts = ["### How much the last rounds move", format_table(head, lines), notes]
    if ranges:
        parts += [
            format_table(head, ranges),
            f"Lowest and highest mean of {LAST} rounds in a row within the last {WINDOWS}: where a result might have ended.",
            format_table(head, longer),
            f"Mean of the last {WINDOWS} rounds: less luck is in it than in the last {LAST}; it lags where a model improves.",
        ]
    return parts


def _compare_to_independent(runs: Sequence[Run], data: str) -> list[str]:
    independent = INDEPENDENT.get(data, {})
    lines, flags = [], []
    for run in runs:
        if run.entry.label not in independent or run.experiment.seed or not run.is_full:
            continue
        theirs = [dict(zip(INDEPENDENT_COLUMNS, line, strict=True)) for line in independent[run.entry.label]]
        shared = [c for c in INDEPENDENT_COLUMNS if c in run.numbers]
        differences = {c: [run.numbers[c] - line[c] for line in theirs] for c in shared}
        first = {c: values[0] for c, values in differences.items()}
        excess = {c: x for c, x in first.items() if abs(x) > LIMITS.get(c, float("inf"))}
        flags += [f"{run.entry.label} on {c} ({x:+.1f})" for c, x in excess.items()]
        lines.append([run.entry.label, "ours", *_format_cells(run.numbers, INDEPENDENT_COLUMNS)])
        for number, line in enumerate(theirs):
            name = "theirs, another seed" if number else "theirs"
            lines.append(["", name, *_format_cells(line, INDEPENDENT_COLUMNS, 1)])
        marked = {c: f"**{x:+.1f}**" if c in excess else f"{x:+.1f}" for c, x in first.items()}
        lines.append(["", "difference", *(marked.get(c, "") for c in INDEPENDENT_COLUMNS)])
        if len(theirs) > 1:
            nearest = {c: f"{min(values, key=abs):+.1f}" for c, values in differences.items()}
            cells = [nearest.get(c, "") for c in INDEPENDENT_COLUMNS]
            lines.append(["", "difference to the nearest, by column", *cells])
    if not lines:
        return []
    limits = ", ".join(f"{limit:g} on {column}" for column, limit in LIMITS.items())
    notes = [
        INDEPENDENT_SOURCE,
        f"Bold is a flag: ours is further from its first line than {limits} (points). Flagged: "
        f"{', '.join(flags) or 'nothing'}. [The findings](../docs/findings.md#an-independent-implementation) discuss what is "
        "flagged.",
    ]
    table = format_table(["row", "", *name_columns(INDEPENDENT_COLUMNS, data)], lines)
    return ["### Beside an independent implementation", table, format_list(notes)]


def _compare_to_second(runs: Sequence[Run], data: str, results: Path) -> list[str]:
    second_runs = read_second_runs(results) if data == SECOND_DATA else []
    if not second_runs:
        return []
    columns = [domain for domain in list_columns(runs) if domain not in FAIRNESS_COLUMNS]
    machines = ", ".join(dict.fromkeys(run.hardware for run in second_runs))
    notes = f"{SECOND_SOURCE}bf16, {machines}. Accuracy in percent, mean of the {LAST} rounds up to the one named."
    head = ["row", "after round", "", *name_columns(columns, data)]
    return ["### Beside a second version", format_table(head, tabulate_second_runs(second_runs, runs, columns)), notes]


def tabulate_second_runs(
    second_runs: Sequence[SecondRun], runs: Sequence[Run], columns: Sequence[str]
) -> list[list[str]]:
    """Return its accuracies every twenty rounds and at its end, each followed by ours after as many rounds."""
    table = []
    for second in second_runs:
        ours = [run for run in runs if run.entry.label == second.row and run.is_full]
        for end in sorted({*range(SECOND_EVERY, len(second.rounds) + 1, SECOND_EVERY), len(second.rounds)}):
            theirs = last_mean(second.rounds[:end], LAST)
            cells = _format_cells(theirs, columns, 1)
            table.append([second.row, str(end), f"second version, seed {second.seed}", *cells])
            records = {run.experiment.seed: run.records[:end] for run in ours}
            means = {
                seed: last_mean([r.domains for r in rounds if r.domains], LAST) for seed, rounds in records.items()
            }
            table += [["", "", f"ours, seed {seed}", *_format_cells(mean, columns, 1)] for seed, mean in means.items()]
            if means:
                mean = {c: float(np.mean([values[c] for values in means.values()])) for c in columns}
                differences = [f"{theirs[c] - mean[c]:+.1f}" for c in columns]
                table.append(["", "", "second version less the mean of ours", *differences])
    return table


def list_machines(runs: Sequence[Run]) -> str:
    """Say on which machines and versions the runs were made, on how many kinds of data, and how long they took."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.summary["versions"].items())
        groups.setdefault(f"{run.summary['hardware']}; {versions}", []).append(run.label)
    is_one = len(groups) == 1
    lines = [machine if is_one else f"{machine}: {', '.join(dict.fromkeys(rows))}" for machine, rows in groups.items()]
    prints = {run.summary["data_fingerprint"] for run in runs}
    same = "the same" if len(prints) == 1 else f"**not the same ({len(prints)} kinds)**"
    facts = [f"The data of all runs are {same}, by their fingerprints.", describe_time(runs)]
    return format_list([*lines, *facts])


def describe_time(runs: Sequence[Run]) -> str:
    """Say how long the rounds of all runs took."""
    minutes = sum(sum(record.seconds.values()) for run in runs for record in run.records) / 60
    count = f"{len(runs)} run" + "s" * (len(runs) > 1)
    took = "a minute" if round(minutes) == 1 else f"{minutes:,.0f} minutes"
    return f"The rounds of {count} took {took} by their records. Runs that shared a GPU count in full."


def _list_open_rows(entries: Sequence[RecipeRow], runs: Sequence[Run], data: str) -> list[str]:
    """List what is not run yet, with the commands: rows, rounds, and seeds of the headline's rows."""
    command = f"python tools/results.py run --data {data} --rows"
    lines = []
    for entry in entries:
        own = [run for run in runs if run.entry == entry]
        seeds = {run.experiment.seed for run in own if run.is_full}
        quoted = shlex.quote(entry.label)
        planned = PLANNED_SEEDS.get(data, ()) if entry.label in HEADLINE else ()
        if not seeds:
            reached = sorted({run.experiment.rounds for run in own})
            so_far = f" (so far with {' and '.join(map(str, reached))} rounds)" if reached else ""
            lines.append(f"{entry.label}{so_far}: `{command} {quoted}`")
        elif missing := [str(seed) for seed in planned if seed not in seeds]:
            words = f"{'seed' if len(missing) == 1 else 'seeds'} {', '.join(missing)}"
            seed_option = ",".join(missing) if len(missing) > 1 else f"{missing[0]}-{missing[0]}"
            lines.append(f"{entry.label}, {words}: `{command} {quoted} --seeds {seed_option}`")
    if not lines:
        return ["### Open", "Nothing: every row of the recipe was run."]
    note = "Not run yet, or with fewer rounds than planned; with what would run it (then `python tools/results.py collect`):"
    return ["### Open", note, format_list(lines)]


def group_by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def list_columns(runs: Sequence[Run]) -> list[str]:
    return [*dict.fromkeys(domain for run in runs for domain in run.summary["domains"]), *FAIRNESS_COLUMNS]


def name_columns(columns: Iterable[str], data: str) -> list[str]:
    """Return the head of a table, where a domain that stands in for another is marked."""
    originals = _find_stand_ins(data)
    return [f"{c} (stand-in for {originals[c]})" if c in originals else c for c in columns]


def describe_stand_ins(columns: Iterable[str], data: str) -> list[str]:
    originals = {c: original for c, original in _find_stand_ins(data).items() if c in columns}
    return [
        f"{c} is a stand-in for {original}: its column is no result on {original}, and AVG, STD and worst are over other "
        "domains than the paper's"
        for c, original in originals.items()
    ]


def _find_stand_ins(data: str) -> dict[str, str]:
    sources = SPECS[data].domains if data in SPECS else ()
    return {source.stand_in.name: source.name for source in sources if source.stand_in}


def _format_cells(numbers: Mapping[str, float], columns: Iterable[str], digits: int = 2) -> list[str]:
    return [f"{numbers[c]:.{digits}f}" if c in numbers else "" for c in columns]


def _format_mean(values: Sequence[float], sign: str = "") -> str:
    mean = f"{np.mean(values):{sign}.2f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.2f}"


def format_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def format_list(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)
