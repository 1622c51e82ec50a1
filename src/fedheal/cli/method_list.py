"""The command `fedheal methods`."""

from __future__ import annotations

from typing import Annotated

import typer


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to show its parameters and their defaults.")] = None,
) -> None:
    """List the parts that methods are made of, or the parameters of one method.

    Example: fedheal methods fedprox+fedheal
    """
    from fedheal.cli import display

    if name is not None:
        display.show_parameters(name)
        return
    display.show_parts()
    typer.echo("fedheal methods NAME explains the parameters and where their defaults come from.")
