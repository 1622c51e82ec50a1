"""What a method's parameter means and where its default comes from, beside the default itself.

    def fedprox(mu: Annotated[float, Parameter("pull towards the received model", "...")] = 0.01)

`described` reads it from there for `fedheal methods` and the documentation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints


class Parameter(NamedTuple):
    """`about`: what it does. `source`: who chose the default."""

    about: str
    source: str


def described(part: Callable[..., Any], silent: bool = False) -> Mapping[str, tuple[Any, Parameter]]:
    """The parameters of a function, with their defaults and what is said about them; silence must be allowed.

    >>> from typing import Annotated
    >>> def part(mu: Annotated[float, Parameter("pull", "ours")] = 0.01): ...
    >>> described(part)
    {'mu': (0.01, Parameter(about='pull', source='ours'))}
    """
    hints = get_type_hints(part, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(part).parameters.items():
        said = [one for one in getattr(hints.get(name), "__metadata__", ()) if isinstance(one, Parameter)]
        if not said and not silent:
            raise TypeError(
                f"{part.__name__}'s parameter '{name}' does not say what it means: annotate it with Parameter"
            )
        found[name] = (parameter.default, said[0] if said else Parameter("", ""))
    return found
