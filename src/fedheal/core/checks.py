"""Check arguments that are no parameters of a method; the error names the argument, its value and what is allowed."""

import sys
import traceback
from pathlib import Path
from types import UnionType

from fedheal.core.errors import add_article
from fedheal.core.parameter import Parameter


def check_type(name: str, value: object, wanted: type | UnionType, remedy: str) -> None:
    """Raise TypeError with a remedy unless the value is of a wanted type.

    >>> check_type("layout", 5, str, "give a name")
    Traceback (most recent call last):
    TypeError: layout is an int: give a name
    """
    if not isinstance(value, wanted):
        raise TypeError(f"{name} is {add_article(type(value).__name__)}: {remedy}")


def check_main_guard(field: str, value: int) -> None:
    """Raise ValueError if new processes would run the calling script again, since it has no `if __name__ == "__main__":`.

    A process that is spawned imports the main script. A call at the top of that script would then start processes, too.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    frames = (frame for frame, _ in traceback.walk_stack(None))
    is_at_top = any(frame.f_globals is vars(main) and frame.f_code.co_name == "<module>" for frame in frames)
    if path is None or not is_at_top or Path(path).name == "__main__.py":  # processes do not import that one
        return
    if "__name__" not in Path(path).read_text(encoding="utf-8", errors="replace"):
        raise ValueError(
            f"{field} = {value}: each new process would run {Path(path).name} again; put what it does under "
            f'`if __name__ == "__main__":`, or use {field}=1'
        )


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless the value is a number from 0 to 1."""
    Parameter(name, 0.0, ge=0, le=1).check(value)


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError unless the value is a finite number from 0."""
    Parameter(name, 0.0, ge=0).check(value)


def check_count(name: str, value: int) -> None:
    """Raise ValueError unless the value is a whole number from 0."""
    Parameter(name, 0, ge=0).check(value)


def check_switch(name: str, value: bool) -> None:
    """Raise ValueError unless the value is True or False."""
    Parameter(name, False).check(value)


def check_text(name: str, value: object) -> None:
    """Raise ValueError unless the value is a string that is not empty.

    >>> check_text("data", 3)
    Traceback (most recent call last):
    ValueError: data = 3: use a string that is not empty
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} = {value!r}: use a string that is not empty")


def check_among(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless the value is one of the allowed values."""
    Parameter(name, allowed[0], choices=allowed).check(value)
