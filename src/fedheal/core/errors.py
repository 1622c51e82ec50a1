"""Parts of error messages: what an exception says, who raised it, and the name that a misspelt word may have meant."""

import difflib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CustomPartError(ValueError):
    """A user's own stage, reducer or term raised an exception, which is the cause of this one."""


def name_if_custom(function: Callable[..., Any]) -> str:
    """Return "module:function" for a function that is not fedheal's, else "".

    >>> name_if_custom(difflib.ndiff), name_if_custom(name_if_custom)
    ('difflib:ndiff', '')
    """
    module = getattr(function, "__module__", None) or type(function).__module__
    if module.partition(".")[0] == "fedheal":
        return ""
    return f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def frame_error(what: str, name: str, error: Exception) -> CustomPartError:
    """Return an error that names the user's part which raised `error`, and the line."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(line.filename).name}, line {line.lineno}"
    return CustomPartError(f"your {what} `{name}` raised {format_error(error)} ({where})")


def format_error(error: Exception) -> str:
    """Return an exception's type and the first line of its message.

    >>> format_error(KeyError("height"))
    "KeyError: 'height'"
    """
    reason = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def suggest(word: str, known: list[str]) -> str:
    """Return " (did you mean ...?)" with the closest of the known words, or "" if none is close.

    >>> suggest("taw", ["tau", "beta"])
    " (did you mean 'tau'?)"
    """
    close = difflib.get_close_matches(word, known, 1, 0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
