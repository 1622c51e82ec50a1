"""The command `fedheal report`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

REPORT_FORMATS = ("text", "markdown", "latex", "csv", "parquet")
REPORT_SUFFIXES = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".parquet": "parquet"}
FigureFolder = Annotated[Path | None, typer.Option(help="A folder for figures as SVG, PDF and PNG, fit for a paper.")]
HTML_HELP = "Write one page with tables and figures, to --out NAME.html or to report.html in the first folder."
DIAGNOSE_HELP = "Show which domains or clients of one run are under-served, since which round, with which weight."


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of them.")],
    form: Annotated[
        str | None,
        typer.Option("--format", "-f", help="text, markdown, latex, csv or parquet; default: by the ending of --out."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write to this file instead of the screen, such as NAME.csv; NAME.html stands for --html."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The method the others are compared with; default: FedAvg or the first.")
    ] = None,
    html: Annotated[bool, typer.Option("--html", help=HTML_HELP)] = False,
    figures: FigureFolder = None,
    diagnose: Annotated[bool, typer.Option("--diagnose", help=DIAGNOSE_HELP)] = False,
    by: Annotated[str | None, typer.Option(help="With --diagnose: domain or client.")] = None,
) -> None:
    """Show tables of finished runs: mean and spread over seeds, the best of each column, and what may be concluded.

    Example: fedheal report runs/compare-embedded --html
    """
    html = html or _is_page(out)
    has_format, form = form is not None, form or _find_report_format(out, html)
    _check_report_options(form, has_format, out, reference, html, figures, diagnose)
    from fedheal import methods as method_table
    from fedheal.cli import display
    from fedheal.report import figures as drawing
    from fedheal.report import rows
    from fedheal.runs.folder import check_folder

    if figures is not None:
        check_folder(figures)  # before a page is written
    if diagnose:
        display.show_diagnosis(folders, by, figures)
        return
    if by is not None:
        raise ValueError(f"by = {by}: --by needs --diagnose; add --diagnose or leave out --by")
    runs = rows.find_rows(folders)
    if not runs:
        raise ValueError(f"there is no finished run in {', '.join(map(str, folders))}: {rows.explain_no_runs(folders)}")
    with suppress(ValueError):  # the report refuses unknown names
        reference = reference and method_table.get(reference).name
    if html:
        folder = folders[0] if folders[0].is_dir() else folders[0].parent
        typer.echo(display.write_page(runs, out or folder / "report.html", reference=reference))
    if figures is not None:
        typer.echo(f"{len(drawing.write_figures(runs, figures, reference))} files in {figures}")
    if not html and figures is None:
        display.write_report(runs, form, out, reference)


def _is_page(out: Path | None) -> bool:
    return out is not None and out.suffix.lower() in (".html", ".htm")


def _find_report_format(out: Path | None, html: bool) -> str:
    """Return the format that the ending of a file's name stands for. Raise ValueError if it stands for none."""
    suffix = "" if out is None or html else out.suffix.lower()
    if suffix in ("", ".txt"):
        return "text"
    if suffix not in REPORT_SUFFIXES:
        known = ", ".join((".txt", *REPORT_SUFFIXES))
        raise ValueError(f"out = {out}: no format has the ending {suffix}; use one of {known}, .html, or give --format")
    return REPORT_SUFFIXES[suffix]


def _check_report_options(
    form: str,
    has_format: bool,
    out: Path | None,
    reference: str | None,
    html: bool,
    figures: Path | None,
    diagnose: bool,
) -> None:
    """Raise ValueError if one option of a report would make another useless."""
    if form not in REPORT_FORMATS:
        raise ValueError(f"format = {form}: use one of {', '.join(REPORT_FORMATS)}")
    used = {"--html": html, "--format": has_format, "--out": out is not None, "--reference": reference is not None}
    option = next((option for option, is_used in used.items() if is_used), None)
    has_figures = figures is not None
    stands_for = REPORT_SUFFIXES.get(out.suffix.lower(), form) if out is not None and has_format else form
    no_comparisons = used["--reference"] and form in ("csv", "parquet")
    for is_wrong, problem in (
        (diagnose and option, f"--diagnose writes its own table and figure: leave out {option}"),
        (
            html and has_format,
            f"format = {form}: --html writes a page with tables in all formats; leave out --format",
        ),
        (
            has_figures and has_format,
            f"format = {form}: --figures writes SVG, PDF and PNG, not tables; leave out --format",
        ),
        (html and out and out.suffix and not _is_page(out), f"out = {out}: the name of a page ends in .html"),
        (
            stands_for != form,
            f"format = {form}: the ending of {out} stands for {stands_for}; leave out --format, or give another name",
        ),
        (has_figures and out and not html, f"out = {out}: --figures already names a folder; leave out --out"),
        (no_comparisons, f"reference = {reference}: {form} has no comparisons; leave out --reference"),
        (form == "parquet" and out is None, "Parquet cannot be printed: name a file with --out"),
    ):
        if is_wrong:
            raise ValueError(problem)
