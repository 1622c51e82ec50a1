"""Parts of error messages: what an exception says, and the name that a misspelt word may have meant."""

import difflib


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
