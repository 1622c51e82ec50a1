"""The class of all commands: typer's, with help on arguments, and sentences about words that typer would misread."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_type_hints

import click
from typer.core import TyperCommand
from typer.models import ArgumentInfo

UNKNOWN_FIELD = re.compile(r"unknown field '(\w+)'")  # the beginning of an error of `Experiment`


class Command(TyperCommand):
    """A command that explains its arguments, and refuses empty words and options that are written as fields."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help, its paragraphs as wide as the terminal and not as the source."""
        restore_argument_help(self)
        _unwrap_defaults(self)
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of a command. Raise ValueError if one is empty, often a variable that the shell does not know."""
        if not ctx.resilient_parsing:
            _check_for_empty_words(self, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raise ValueError with the right spelling if an option was given as a field."""
        try:
            return super().invoke(ctx)
        except ValueError as error:
            unknown = UNKNOWN_FIELD.match(str(error))
            option = unknown and find_option(self, f"--{unknown[1]}")
            if not unknown or option is None:
                raise
            usage = f"--{unknown[1]}" if option.is_flag else f"--{unknown[1]} VALUE"
            raise ValueError(f"'{unknown[1]}' is an option, not a field: use {usage}") from error


def find_option(command: click.Command, name: str) -> click.Option | None:
    """Return the option of a command that has this name, such as --out."""
    options = (param for param in command.params if isinstance(param, click.Option))
    return next((option for option in options if name in option.opts), None)


def restore_argument_help(command: click.Command) -> None:
    """Give a command's arguments the help that typer 0.20 loses with click 8.5."""
    if command.callback is None:
        return
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for param in command.params:
        infos = [
            info for info in getattr(hints.get(param.name or ""), "__metadata__", ()) if isinstance(info, ArgumentInfo)
        ]
        if infos and not getattr(param, "help", None):
            param.help = infos[0].help


def _unwrap_defaults(command: click.Command) -> None:
    """Let the help show a default that is a text as it is: typer puts it into parentheses, as in [default: (8)]."""
    for param in command.params:
        if isinstance(param, click.Option) and isinstance(param.show_default, str):
            param.default, param.show_default = param.show_default, True


def _check_for_empty_words(command: click.Command, words: Sequence[str]) -> None:
    for before, word in pairwise(["", *words]):
        is_assignment = word.startswith("--") and word.endswith("=")  # --out=
        option = find_option(command, word[:-1] if is_assignment else before)
        has_value = option is not None and not option.is_flag
        if (word and not is_assignment) or (is_assignment and not has_value):
            continue
        if option is None or not has_value:
            raise ValueError("one of the words is empty: leave it out, or write what belongs there")
        if option.default != "":
            raise ValueError(f"{option.opts[0]} is empty: give it a value, or leave it out")
