"""Check settings that are no parameters of a method; a ValueError names the setting, its value and what is allowed."""

from fedheal.core.parameter import Parameter


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
