"""Parse JSON and TOML that others wrote: text that is nested too deeply is an error like any other."""

import json
import tomllib
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return what JSON text holds. Raise ValueError if it is not JSON.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """Return what TOML text holds. Raise ValueError if it is not TOML."""
    return _parse(tomllib.loads, text)  # type: ignore[no-any-return]


def _parse(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
