"""What parameters may be: one sentence that names the parameter, its value and what would do."""

from __future__ import annotations

import math


def check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {value!r}: use a number from 0 to 1")


def check_part(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{name} = {value!r}: use a number from 0 to 1, but less than 1")


def check_not_negative(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} = {value!r}: use a finite number that is not negative")


def check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} = {value!r}: use a finite number above 0")


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} = {value!r}: use a whole number that is not negative")


def check_switch(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: use True or False")


def check_among(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(isinstance(value, type(one)) and value == one for one in allowed):
        raise ValueError(f"{name} = {value!r}: use one of {allowed}")
