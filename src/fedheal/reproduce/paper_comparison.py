"""Our numbers compared with the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedheal.report.comparability import list_cautions
from fedheal.report.rows import FAIRNESS_COLUMNS, Row, build_rows, collect_data_notes, group_by_data, load_summary
from fedheal.report.tables import Cell, align_columns, describe_averaging, join_markdown, summarise_seeds
from fedheal.reproduce import paper
from fedheal.reproduce.plans import PAPER_DATA, Recipe, RecipePlan, RecipeRow

MISPRINT = "†"


@dataclass(frozen=True)
class ComparisonRow:
    """One row of a recipe: our mean and spread over seeds by column, and the paper's numbers."""

    recipe_row: RecipeRow
    ours: Mapping[str, Cell]
    paper: Mapping[str, float]
    paper_domains: Sequence[str]  # that the paper's AVG and STD are over, whether it prints them or not
    is_meaningful: bool  # False for a smoke run

    @property
    def difference(self) -> dict[str, float]:
        """Ours minus the paper's, where both are over the same domains."""
        if not self.is_meaningful:
            return {}
        has_same_domains = set(self.ours) - set(FAIRNESS_COLUMNS) == set(self.paper_domains)
        common = [c for c in self.paper if c in self.ours and (c not in FAIRNESS_COLUMNS or has_same_domains)]
        return {column: self.ours[column].mean - self.paper[column] for column in common}


@dataclass(frozen=True)
class PaperComparison:
    """A recipe's table on one data set."""

    title: str
    data: str
    columns: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]
    has_same_data: bool  # whether the paper has numbers for this data set

    def to_lines(self) -> list[list[str]]:
        """Return the table as words, its head first: up to three lines per row (ours, paper, difference)."""
        lines = [["", "", *self.columns]]
        for row in self.rows:
            label, doubtful = row.recipe_row.label, row.recipe_row.misprint[0]
            numbers = {
                "ours": {c: cell.format() for c, cell in row.ours.items()},
                "paper": {c: f"{x:.2f}" + (MISPRINT if c in doubtful else "") for c, x in row.paper.items()},
                "difference": {c: f"{x:+.2f}" for c, x in row.difference.items()},
            }
            for kind, by_column in numbers.items():
                if by_column:
                    lines.append([label, kind, *(by_column.get(c, "") for c in self.columns)])
                    label = ""
        return lines

    def to_text(self) -> str:
        """Return a plain table and the notes."""
        head, *body = align_columns(self.to_lines(), left=2)
        lines = [head.rstrip(), "-" * len(head), *(line.rstrip() for line in body)]
        return "\n".join([f"{self.title}: {self.data}", "", *lines, "", *self.notes])

    def to_markdown(self) -> str:
        """Return a Markdown table and the notes."""
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"## {self.title}: {self.data}", "", join_markdown(self.to_lines()), "", *notes])

    def to_json(self) -> dict[str, Any]:
        """Return everything for other programs."""
        rows = [
            {
                "label": row.recipe_row.label,
                "method": row.recipe_row.method,
                "ours": {c: cell.mean for c, cell in row.ours.items()},
                "spread": {c: cell.sd for c, cell in row.ours.items() if cell.sd is not None},
                "paper": dict(row.paper),
                "difference": row.difference,
            }
            for row in self.rows
        ]
        return {"title": self.title, "data": self.data, "notes": list(self.notes), "rows": rows}


def load_rows(plan: RecipePlan) -> list[Row]:
    """Return the results of all runs of a plan, each once."""
    return build_rows(load_summary(job.folder) for job in plan.jobs)


def compare_with_paper(recipe: Recipe, plan: RecipePlan) -> PaperComparison:
    """Compare the finished runs of a recipe on one data set with the paper's numbers."""
    (results,) = group_by_data(load_rows(plan)).values()
    by_folder = {result.folder: result for result in results}
    paper_domains = paper.DOMAINS.get(PAPER_DATA.get(plan.data, plan.data), ())
    rows = []
    for row, jobs in plan.rows:
        seeds = [by_folder[str(job.folder)] for job in jobs]
        columns = [*seeds[0].domains, *FAIRNESS_COLUMNS]
        ours = {column: summarise_seeds([result.get_value(column) for result in seeds]) for column in columns}
        names = (*paper_domains, "AVG", "STD")[-len(row.published) :]
        published = dict(zip(names, row.published, strict=True)) if row.published else {}
        rows.append(ComparisonRow(row, ours, published, paper_domains, is_meaningful=not plan.smoke))
    domains = list(results[0].domains)
    missing = [domain for domain in paper_domains if domain not in domains and any(row.paper for row in rows)]
    notes = [
        *_describe_numbers(plan, results, missing),
        *list_cautions(results),
        *(f"About the data: {note}." for note in collect_data_notes(result.summaries[0] for result in results)),
        *_describe_misprints(rows),
        *recipe.notes,
    ]
    return PaperComparison(
        title=recipe.title,
        data=plan.data,
        columns=(*domains, *(c for c in missing if any(c in row.paper for row in rows)), *FAIRNESS_COLUMNS),
        rows=tuple(rows),
        notes=tuple(notes),
        has_same_data=plan.data in paper.DOMAINS,
    )


def _describe_numbers(plan: RecipePlan, results: Sequence[Row], missing: Sequence[str]) -> list[str]:
    averaged = frozenset(int(result.summaries[0]["averaged"]) for result in results)
    seeds = sorted({len(jobs) for _, jobs in plan.rows})
    count = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    spread = f", {count} seeds, ± standard deviation over them" if seeds[-1] > 1 else ", one seed"
    notes = ["A smoke run: it shows that everything works, and its numbers mean nothing."] if plan.smoke else []
    notes.append(f"Accuracy in percent, {describe_averaging(averaged)}{spread}.")
    if plan.data not in paper.DOMAINS:
        no_results = f"The paper has no results on {plan.data}"
        notes.append(f"{no_results}: its numbers are for other data, and no differences are given.")
    elif plan.smoke:
        notes.append("The paper's numbers are shown, and no differences are given.")
    elif missing:
        over = "AVG and STD are over other domains than the paper's"
        notes.append(f"Our data has no {', '.join(missing)}: {over}, and their differences are not given.")
    return notes


def _describe_misprints(rows: Sequence[ComparisonRow]) -> list[str]:
    misprints = {row.recipe_row.label: row.recipe_row.misprint[1] for row in rows}
    return [f"{MISPRINT} {label}: {reason}" for label, reason in misprints.items() if reason]


def count_claims(recipe: Recipe, comparison: PaperComparison) -> list[str]:
    """Say how often each claim of the recipe holds in our numbers, and in the paper's."""
    by_label = {row.recipe_row.label: row for row in comparison.rows}
    sentences = []
    for claim in recipe.list_claims():
        pairs = [(by_label[a], by_label[b]) for a, b in claim.pairs if a in by_label and b in by_label]
        if pairs:
            ours = [tuple({c: cell.mean for c, cell in row.ours.items()} for row in pair) for pair in pairs]
            theirs = [(a.paper, b.paper) for a, b in pairs if a.paper and b.paper]
            in_paper = f"paper: {_count_wins(theirs)}" if theirs else "not in the paper"
            sentences.append(f"{claim.text}: {_count_wins(ours)} ({in_paper}).")
    return sentences


def _count_wins(pairs: Sequence[Sequence[Mapping[str, float]]]) -> str:
    higher = sum(a["AVG"] > b["AVG"] for a, b in pairs)
    lower = sum(a["STD"] < b["STD"] for a, b in pairs)
    return f"AVG higher in {higher} of {len(pairs)}, STD lower in {lower} of {len(pairs)}"
