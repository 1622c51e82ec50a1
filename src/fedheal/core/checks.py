"""Check settings that are no parameters of a method; a ValueError names the setting, its value and what is allowed."""

from __future__ import annotations

from fedheal.core.parameter import Parameter


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a number from 0 to 1."""
    Parameter(name, default=0.0, ge=0, le=1).check(value)


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number that is not negative."""
    Parameter(name, default=0.0, ge=0).check(value)


def check_count(name: str, value: int) -> None:
    """Raise ValueError unless `value` is a whole number that is not negative."""
    Parameter(name, default=0, ge=0).check(value)


def check_switch(name: str, value: bool) -> None:
    """Raise ValueError unless `value` is True or False."""
    Parameter(name, default=False).check(value)


def check_among(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    Parameter(name, default=allowed[0], choices=allowed).check(value)
