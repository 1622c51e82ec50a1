"""Check arguments that are no parameters of a method; the error names the argument, its value and what is allowed."""

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


def check_share(name: str, value: float) -> None:
    Parameter(name, 0.0, ge=0, le=1).check(value)


def check_not_negative(name: str, value: float) -> None:
    Parameter(name, 0.0, ge=0).check(value)


def check_count(name: str, value: int) -> None:
    Parameter(name, 0, ge=0).check(value)


def check_switch(name: str, value: bool) -> None:
    Parameter(name, False).check(value)


def check_among(name: str, value: object, allowed: tuple[object, ...]) -> None:
    Parameter(name, allowed[0], choices=allowed).check(value)
