"""Parts of messages: what an exception says, who raised it, counts, how to install what is missing, and likely spellings."""

import difflib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class CustomPartError(ValueError):
    """A user's own part of a method returned something wrong or raised an exception, then the cause of this one."""


def name_part(what: str, name: str) -> str:
    """Return how an error calls a part of a method: a user's own by its name.

    >>> name_part("stage", "mine:trim"), name_part("stage", "")
    ('your stage `mine:trim`', 'a stage')
    """
    return f"your {what} `{name}`" if name else f"a {what}"


def add_article(word: str) -> str:
    """Return a word behind its indefinite article.

    >>> add_article("OrderedDict"), add_article("list")
    ('an OrderedDict', 'a list')
    """
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def name_value(field: str, value: object) -> str:
    """Return a field with its value if that is a number, else with its type, since others may fill pages.

    >>> name_value("data", 3), name_value("data", [0] * 1000)
    ('data = 3', 'data is a list')
    """
    return f"{field} = {value}" if isinstance(value, int | float) else f"{field} is {add_article(type(value).__name__)}"


def check_returned(part: str, value: object, *types: type) -> Any:
    """Return what a part returned, as a tuple. Raise `CustomPartError` unless it has these types.

    >>> check_returned("your stage `mine:trim`", [1, 2], dict, int)
    Traceback (most recent call last):
    fedheal.core.errors.CustomPartError: your stage `mine:trim` must return a dict and an int, got a list
    """
    values = value if isinstance(value, tuple) else (value,)
    if len(values) != len(types) or not all(map(isinstance, values, types)):
        expected = " and ".join(add_article(kind.__name__) for kind in types)
        actual = " and ".join(add_article(type(item).__name__) for item in values) or "an empty tuple"
        raise CustomPartError(f"{part} must return {expected}, got {actual}")
    return values


def name_callable(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, or of the class of another callable.

    >>> name_callable(str.upper), name_callable(difflib.SequenceMatcher().ratio)
    ('str.upper', 'SequenceMatcher.ratio')
    """
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def name_if_custom(function: Callable[..., Any]) -> str:
    """Return "module:function" for a function that is not fedheal's, else "".

    >>> name_if_custom(difflib.ndiff), name_if_custom(name_if_custom)
    ('difflib:ndiff', '')
    """
    module = getattr(function, "__module__", None) or type(function).__module__
    if module.partition(".")[0] == "fedheal":
        return ""
    return f"{module}:{name_callable(function)}"


def frame_error(what: str, name: str, error: BaseException) -> CustomPartError:
    """Return an error that names the user's part which raised `error`, and the line."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(line.filename).name}, line {line.lineno}"
    return CustomPartError(f"{name_part(what, name)} raised {format_error(error)} ({where})")


def format_error(error: BaseException) -> str:
    """Return an exception's type and the first line of its message.

    >>> format_error(KeyError("height"))
    "KeyError: 'height'"
    """
    reason = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def format_count(number: int, noun: str) -> str:
    """Return a number and its noun.

    >>> format_count(1, "class"), format_count(1200, "run"), format_count(2, "class")
    ('1 class', '1,200 runs', '2 classes')
    """
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


def explain_install(extra: str) -> str:
    """Return how to install an optional part of fedheal.

    >>> explain_install("flower")
    "run pip install '.[flower]' in a checkout of fedheal"
    """
    return f"run pip install '.[{extra}]' in a checkout of fedheal"


# Beginnings of pydantic's types of errors -> what is allowed.
_ALLOWED = {
    "int_": "a whole number",
    "float_": "a number",
    "finite_": "a finite number",
    "bool_": "true or false",
    "string_": "a string",
    "list_": "a list",
    "tuple_": "a list",
    "dict_": "a dictionary",
    "model_": "a dictionary",
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number below {lt}",
    "literal_": "{expected}",
}


def describe_allowed(problem: Mapping[str, Any]) -> str:
    """Return what a field may be, from one of the errors of a pydantic `ValidationError`.

    >>> describe_allowed({"type": "int_parsing"}), describe_allowed({"type": "less_than", "ctx": {"lt": 1.0}})
    ('a whole number', 'a number below 1')
    """
    for beginning, allowed in _ALLOWED.items():
        if problem["type"].startswith(beginning):
            bounds = {key: f"{x:.0f}" if x in (0.0, 1.0) else x for key, x in problem.get("ctx", {}).items()}
            return allowed.format(**bounds)
    return str(problem["msg"]).removeprefix("Input should be ")


def suggest(word: str, known: Sequence[str] | Mapping[str, str]) -> str:
    """Return " (did you mean ...?)" with the closest of the known words, or what it stands for, or "" if none is close.

    >>> suggest("taw", ["tau", "beta"]), suggest("FedHEAL", ["fedheal"])
    (" (did you mean 'tau'?)", " (did you mean 'fedheal'?)")
    >>> suggest("fedhael", {"fedheal": "fedavg+fedheal"})
    " (did you mean 'fedavg+fedheal'?)"
    """
    meanings = known if isinstance(known, Mapping) else dict(zip(known, known, strict=True))
    by_lower_case = {name.lower(): meaning for name, meaning in reversed([*meanings.items()])}
    close = difflib.get_close_matches(word.lower(), by_lower_case, 1, 0.6)
    return f" (did you mean '{by_lower_case[close[0]]}'?)" if close else ""


def shorten_list(items: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Join the first items, and say how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
