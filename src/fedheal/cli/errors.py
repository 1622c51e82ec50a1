"""Errors of the command line: one sentence and an exit code for what a user can fix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import typer

INTERRUPTED = 130
RESUMING = ("fedheal compare", "fedheal demo", "fedheal sweep")  # without an option
NO_MEMORY = "can't allocate memory"  # in torch's RuntimeError, which has no type of its own on a CPU


def describe_usage_error(error: click.ClickException) -> str:
    """Return what is wrong with the words of a command, and where to look them up."""
    context, message = getattr(error, "ctx", None), error.format_message().rstrip(".")
    command, hint = context.command_path if context else "fedheal", ""
    if isinstance(error, click.NoSuchOption) and not error.possibilities and command != "fedheal":
        hint = f"a field is written {error.option_name.strip('-').replace('-', '_')}=VALUE; "
        if error.option_name == "--resume" and command in RESUMING:
            hint = "run the same command again to resume it; "
    return f"{message} ({hint}see {command} --help)"


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error that a user can fix as one sentence, and exit."""
    try:
        yield
    except ValueError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        typer.echo(f"fedheal: {error}{notes}", err=True)
    except OSError as error:
        typer.echo(f"fedheal: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}", err=True)
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition(". GPU")[0].partition("\n")[0] or "it cannot hold what this command needs"
        if type(error).__name__ == "OutOfMemoryError":  # torch's
            place = "a GPU"
        elif isinstance(error, MemoryError) or NO_MEMORY in reason:
            place = "this machine"
        else:
            raise
        remedy = "use fewer runs at a time (--jobs), a smaller batch_size or a smaller model"
        typer.echo(f"fedheal: {place} has too little memory ({reason}); {remedy}", err=True)
    except KeyboardInterrupt:
        typer.echo("fedheal: stopped; rerun the command to resume (fedheal run needs --resume)", err=True)
        sys.exit(INTERRUPTED)
    else:
        return
    sys.exit(2)
