"""Errors of the command line: one sentence and an exit code for what a user can fix."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import click
import typer

from fedheal.cli.parsing import find_option, restore_argument_help

INTERRUPTED = 130
RESUMING = ("fedheal compare", "fedheal demo", "fedheal reproduce", "fedheal sweep")  # without an option
TOO_MANY = re.compile(r"Got unexpected extra arguments? \((.*)\)")  # click's sentence
NO_MEMORY = "can't allocate memory"  # in torch's RuntimeError, which has no type of its own on a CPU


def describe_usage_error(error: click.ClickException) -> str:
    """Return what is wrong with the words of a command, and where to look them up."""
    context, message = getattr(error, "ctx", None), error.format_message().rstrip(".")
    command, hint = context.command_path if context else "fedheal", ""
    too_many = TOO_MANY.fullmatch(message)
    if isinstance(error, click.NoSuchOption):
        message, hint = _describe_unknown_option(error)
    elif isinstance(error, click.MissingParameter) and context:
        restore_argument_help(context.command)
        text = str(getattr(error.param, "help", None) or "").rstrip(".")
        message += f": {text[:1].lower()}{text[1:]}" if text else ""
    elif too_many and context:
        key, equals, value = too_many[1].partition("=")
        is_option = bool(equals) and find_option(context.command, f"--{key}") is not None
        message = f"{command} cannot take '{too_many[1]}': {f'use --{key} {value}' if is_option else 'leave it out'}"
    return f"{message} ({hint}see {command} --help)"


def _describe_unknown_option(error: click.NoSuchOption) -> tuple[str, str]:
    """Return a message and a hint: how to resume, the option that was likely meant, or how a field is written."""
    option, command = error.option_name, error.ctx.command if error.ctx else None
    message = f"No such option '{option}'"
    if option == "--resume" and error.ctx and error.ctx.command_path in RESUMING:
        return message, "run the same command again to resume it; "
    # click takes the dashes for likeness, and offers --help for --lr.
    names = {name.lstrip("-"): name for name in error.possibilities or ()}
    close = get_close_matches(option.lstrip("-"), names, 1, 0.6)
    if close:
        return f"{message}. Did you mean '{names[close[0]]}'?", ""
    if command and any("key=value" in (param.metavar or "") for param in command.params):
        return message, f"a field is written {option.strip('-').replace('-', '_')}=VALUE; "
    return message, ""


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
