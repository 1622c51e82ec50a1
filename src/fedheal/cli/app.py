"""The program `fedheal`: its commands, and how it starts and ends. Bad input gets one sentence and exit code 2.

A command checks its options, imports the library, calls it and shows the result. The import comes late because PyTorch takes
seconds to import, and `fedheal --help` does without it.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedheal.cli import campaigns, method_list, paper_results, reports, single_run
from fedheal.cli.errors import INTERRUPTED, describe_usage_error, report_errors
from fedheal.cli.parsing import Command
from fedheal.simulate.interrupts import stop_on_terminate
from fedheal.version import __version__

# In the order of `fedheal --help`.
COMMANDS: dict[str, Callable[..., None]] = {
    "run": single_run.run_command,
    "demo": campaigns.demo,
    "compare": campaigns.compare,
    "sweep": campaigns.sweep_command,
    "report": reports.report,
    "reproduce": paper_results.reproduce,
    "methods": method_list.methods,
}


class DataGroup(TyperGroup):
    """The group `fedheal data`. Its module is imported when one of its commands is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        del self.commands

    @functools.cached_property
    def commands(self) -> Any:  # type: ignore[override]
        from fedheal.cli.data import data_app

        return typer.main.get_group(data_app).commands


app = typer.Typer(
    name="fedheal",
    help="Fair federated learning under domain skew: FedHEAL and the methods it is compared with.",
    no_args_is_help=True,
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
DATA_HELP = "List, check, show, fetch, prepare and export data sets."
app.add_typer(typer.Typer(cls=DataGroup, help=DATA_HELP, no_args_is_help=True), name="data")
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± must not fail
    stop_on_terminate()
    with report_errors():
        _find_own_modules()
        try:
            code = app(prog_name="fedheal", standalone_mode=False)
        except click.exceptions.Abort:
            raise KeyboardInterrupt from None
        except click.exceptions.NoArgsIsHelpError:  # which has printed it
            sys.exit(2)
        except click.exceptions.ClickException as error:
            raise ValueError(describe_usage_error(error)) from None
        if code == INTERRUPTED:  # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)


def _find_own_modules() -> None:
    """Let Python find the user's own models, data sets and methods in the current folder."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise ValueError("the current folder was removed: change to one that exists (cd), and try again") from None
    if here not in sys.path:
        sys.path.insert(0, here)


@app.callback(invoke_without_command=True)
def _show_version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"fedheal {__version__}")
        raise typer.Exit
