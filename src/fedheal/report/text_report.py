"""Reports as text, Markdown and LaTeX: a table for each data set, what may be concluded from it, and notes on the data."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedheal.report import class_table, conclusions, rows, tables, variance_table
from fedheal.report.comparability import check_reference, list_cautions, list_seed_cautions
from fedheal.report.plain_text import escape_controls, escape_markdown


def format_report(runs: Sequence[rows.Row], form: str, reference: str | None = None, width: int | None = None) -> str:
    """Return a table for each data set, what may be concluded from it, and notes on the data; text fits into the width."""
    check_reference(runs, reference)
    bullet = {"text": "", "markdown": "- ", "latex": "% "}[form]
    parts = []
    for table, group in zip(tables.build_tables(runs), rows.group_by_data(runs).values(), strict=True):
        sentences = list_cautions(group, reference) + list_seed_cautions(group)
        sentences += conclusions.conclude(group, reference)
        sentences += format_data_notes(summary for row in group for summary in row.summaries)
        parts += [f"{table.data}: {table.about}", _format_table(table, form, width), _join_notes(sentences, bullet)]
        parts += _format_components(group, reference, form, width, bullet)
        for inner in class_table.build_domain_tables(group, ["ece"]):
            parts += [inner.title, _format_lines(inner.lines, form, width)]
    parts = [part for part in parts if part]
    if form == "latex":
        parts = [part if part.startswith(("\\", "%")) else f"% {part}" for part in parts]
    return "\n\n".join(parts)


def _join_notes(sentences: Iterable[str], bullet: str) -> str:
    escape = escape_markdown if bullet == "- " else escape_controls
    return "\n".join(f"{bullet}{escape(sentence)}" for sentence in sentences)


def _format_components(
    group: Sequence[rows.Row], reference: str | None, form: str, width: int | None, bullet: str
) -> list[str]:
    """Return the variance components of crossed runs: a title, a table and notes; only notes if there are none."""
    lines = variance_table.decompose_rows(group, reference)
    notes = _join_notes(variance_table.explain_components(group, lines), bullet)
    if not lines:
        return [notes]
    table = _format_lines(variance_table.format_components(lines), form, width, left=2)
    return [variance_table.title_components(lines), table, notes]


def _format_lines(lines: Sequence[Sequence[str]], form: str, width: int | None, left: int = 1) -> str:
    """Return a table whose first `left` columns are words, the head first; LaTeX has it as a comment."""
    if form == "markdown":
        return tables.join_markdown(lines)
    text = "\n".join(tables.align_columns(lines, left))
    if width is not None and len(text.split("\n")[0]) > width:
        merged = [[escape_controls(word) for word in (", ".join(line[:left]), *line[left:])] for line in lines]
        text = format_blocks(["", *merged[0][1:]], merged[1:], width)
    return "\n".join(f"% {line}" for line in text.split("\n")) if form == "latex" else text


def _format_table(table: tables.ResultTable, form: str, width: int | None) -> str:
    text = tables.FORMATS[form](table)
    if form != "text" or width is None or max(map(len, text.splitlines())) <= width:
        return text
    head, *body = [[escape_controls(word) for word in line] for line in tables.format_lines(table, "{}*")]
    legend = [tables.LEGEND] if "*" in text else []
    return "\n".join([format_blocks(head, body, width), *legend])


def format_blocks(head: Sequence[str], body: Iterable[Sequence[str]], width: int, prose: bool = False) -> str:
    """Return a block of lines for each row: its name, then every other column with its heading, wrapped to the width."""
    blocks = []
    for name, *cells in body:
        pairs = [f"{word}{':' if prose else ''} {cell}" for word, cell in zip(head[1:], cells, strict=True) if cell]
        # Numbers share lines, but none is parted from its heading: textwrap does not break at \xa0.
        texts = pairs if prose else ["  ".join(pair.replace(" ", "\xa0") for pair in pairs)]
        wrapped = [
            textwrap.fill(
                t, width, initial_indent="  ", subsequent_indent="    " if prose else "  ", break_on_hyphens=False
            )
            for t in texts
        ]
        blocks.append("\n".join([name, *wrapped]).replace("\xa0", " "))
    return "\n".join(blocks)


def format_data_notes(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the notes on the runs' data, each once."""
    return [f"Note: {note}." for note in rows.collect_data_notes(summaries)]
