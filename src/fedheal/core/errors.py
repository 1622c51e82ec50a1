"""Parts of error messages: what an exception says, and what a misspelt word may have meant."""

from __future__ import annotations

import difflib


def worded(error: Exception) -> str:
    """An error's kind and its first line: a KeyError says no more than the key.

    >>> worded(KeyError("height"))
    "KeyError: 'height'"
    """
    reason = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def suggestion(word: str, known: list[str]) -> str:
    """', did you mean ...?' where something is close.

    >>> suggestion("taw", ["tau", "beta"])
    " (did you mean 'tau'?)"
    """
    close = difflib.get_close_matches(word, known, 1, 0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
