"""A method's name as text: parts joined by +, each with its parameters behind a colon.

    <part>[:key=value,...]{+<part>[:key=value,...]}         fedprox:mu=0.1+fedheal:tau=0.4

A part is a word of a table, or a function of your own by import path, `package.module:function`. Either way its parameters
are those of a function, and their types those of its defaults.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedheal.core.errors import suggestion, worded
from fedheal.core.import_path import imported

OWN = re.compile(r"(?P<path>[A-Za-z_][\w.]*:[A-Za-z_]\w*)(:(?P<listed>.*))?")


@dataclass(frozen=True)
class Part:
    """One part of a name: the function that makes it, and what it was given."""

    name: str
    make: Callable[..., Any]
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether it is a user's, by import path."""
        return ":" in self.name

    @property
    def defaults(self) -> dict[str, Any]:
        return {key: parameter.default for key, parameter in inspect.signature(self.make).parameters.items()}

    def taking(self, key: str, text: str) -> Part:
        """With one parameter more, read as the type of its default."""
        return replace(self, given={**self.given, key: self._value(key, text)})

    def made(self) -> Any:
        """What the function returns; a `ValueError` of its own says what is wrong with a parameter."""
        try:
            return self.make(**self.given)
        except ValueError:
            raise
        except Exception as error:
            if not self.own:
                raise
            raise ValueError(f"the method's function {self.name!r} ended with {worded(error)}") from error

    def spelled(self, everything: bool) -> str:
        """The part as text: all of its parameters, or those that differ from their defaults."""
        shown = {
            key: value
            for key, default in self.defaults.items()
            if (value := self.given.get(key, default)) != default or everything
        }
        return _spelled(self.name, shown)

    def _value(self, key: str, text: str) -> Any:
        """`fael` may be a name or false."""
        defaults = self.defaults
        if key not in defaults:
            raise ValueError(
                f"'{self.name}' has no parameter '{key}'{suggestion(key, list(defaults))}; it has {sorted(defaults)}"
            )
        if text.lower() in ("true", "false") and (isinstance(defaults[key], bool) or key == "fael"):
            return text.lower() == "true"
        if isinstance(defaults[key], bool):
            raise ValueError(f"{key} = {text}: use true or false")
        if isinstance(defaults[key], (float, int)):
            return _number(key, text, whole=isinstance(defaults[key], int))
        return text


def parts_of(name: str, table: Mapping[str, Callable[..., Any]]) -> list[Part]:
    """The parts that a name has, of a table or the user's own."""
    return [_read(text.strip(), table) for text in divided(name)]


def without(name: str, keys: Collection[str], table: Mapping[str, Callable[..., Any]]) -> str:
    """The name, as if it did not say these parameters; what else it says stays, defaults too.

    >>> without("fedprox:mu=0.1,preset=ours", {"mu"}, {"fedprox": lambda mu=0.01, preset="ours": None})
    'fedprox:preset=ours'
    """
    parts = parts_of(name, table)
    return "+".join(_spelled(p.name, {key: value for key, value in p.given.items() if key not in keys}) for p in parts)


def divided(name: str) -> list[str]:
    """
    >>> divided("fael-exact:ridge=1e+2+fphl")  # the + of a number divides nothing
    ['fael-exact:ridge=1e+2', 'fphl']
    """
    return re.split(r"\+(?!\d)", name)


def _read(text: str, table: Mapping[str, Callable[..., Any]]) -> Part:
    word, _, listed = text.partition(":")
    if word in table:
        part = Part(word, table[word])
    elif found := OWN.fullmatch(text):
        part, listed = _own(found["path"]), found["listed"] or ""
    else:
        raise ValueError(
            f"there is no method part '{word}'{suggestion(word, list(table))}; `fedheal methods` lists them, and "
            "one of your own is named by import path, package.module:function"
        )
    for item in listed.split(",") if listed else []:
        key, equals, value = (one.strip() for one in item.partition("="))
        if not equals or key in part.given:
            raise ValueError(f"'{item}' in '{text}' should be key=value, each key once")
        part = part.taking(key, value)
    return part


def _own(path: str) -> Part:
    """What a name says must make the same thing again, so everything a function takes has to have a way to be said."""
    part = Part(path, imported("method", path))
    try:
        defaults = part.defaults
    except (TypeError, ValueError) as error:
        raise ValueError(f"the method {path!r} does not say which parameters it takes: {worded(error)}") from error
    for key, default in defaults.items():
        if not isinstance(default, (bool, int, float, str)) or set(str(default)) & set(",+"):
            raise ValueError(
                f"the method {path!r}: give its parameter '{key}' a default that is a number, a word, True or False"
            )
    return part


def _number(key: str, text: str, whole: bool) -> float:
    """`2.0` is a whole number too."""
    needed = ValueError(f"{key} = {text}: a {'whole ' if whole else ''}number is needed")
    try:
        number = float(text)
    except ValueError:
        raise needed from None
    if whole and not number.is_integer():
        raise needed
    return int(number) if whole else number


def _spelled(name: str, given: Mapping[str, Any]) -> str:
    return name + (":" if given else "") + ",".join(f"{key}={_text(value)}" for key, value in given.items())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
