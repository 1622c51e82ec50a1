"""The grammar of a method's name: parts joined by +, each with its parameters behind a colon.

    <part>[:key=value,...]{+<part>[:key=value,...]}         fedprox:mu=0.1+fedheal:tau=0.4

A part is a name in a table of constructors, or a function by import path, `package.module:function`. Its parameters are
those that the constructor declares, or those of its signature.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedheal.core.errors import format_error, suggest
from fedheal.core.import_path import import_function
from fedheal.core.parameter import Parameter, get_parameters

IMPORT_PATH = re.compile(r"(?P<path>[A-Za-z_][\w.]*:[A-Za-z_]\w*)(:(?P<assignments>.*))?")
CALL = re.compile(r"(?P<path>[\w.:-]+)\((?P<arguments>[^()]*)\)")  # as in Python, which a name is not
BOUNDS = ("standalone", "centralised", "leave-one-domain-out")  # `report.rows` describes them


def describe_unknown_parameter(key: str, known: Collection[str]) -> str:
    """Say that there is no such parameter, and which there are.

    >>> describe_unknown_parameter("tua", ["tau", "beta"])
    "has no parameter 'tua' (did you mean 'tau'?); it has beta, tau"
    """
    has = ", ".join(sorted(known)) or "no parameters"
    return f"has no parameter '{key}'{suggest(key, list(known))}; it has {has}"


@dataclass(frozen=True)
class Part:
    """One part of a name: its constructor, and the values that the name gives to parameters."""

    name: str
    constructor: Callable[..., Any]
    explicit: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_custom(self) -> bool:
        """Whether it is a user's own, by import path."""
        return ":" in self.name

    @property
    def parameters(self) -> dict[str, Parameter]:
        return get_parameters(self.constructor)

    @property
    def values(self) -> dict[str, Any]:
        """The value of every parameter: the one that the name gives, or the default."""
        return {key: self.explicit.get(key, parameter.default) for key, parameter in self.parameters.items()}

    def set(self, key: str, text: str) -> Part:
        """Return the part with one more parameter, read from text."""
        parameters = self.parameters
        if key not in parameters:
            raise ValueError(f"'{self.name}' {describe_unknown_parameter(key, parameters)}")
        return replace(self, explicit={**self.explicit, key: parameters[key].parse(text)})

    def unset(self, keys: Collection[str]) -> Part:
        """Return the part with the defaults of these parameters."""
        return replace(self, explicit={key: value for key, value in self.explicit.items() if key not in keys})

    def build(self) -> Any:
        """Return what the constructor makes; raise ValueError if a parameter is out of range or a user's function fails."""
        try:
            return self.constructor(**self.explicit)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            if not self.is_custom:
                raise
            raise ValueError(f"the method's function {self.name!r} raised {format_error(error)}") from error

    def format(self, defaults: bool) -> str:
        """Return the part as text, with all parameters or only with those that differ from their defaults."""
        values = self.values
        return _format(
            self.name, {k: values[k] for k, p in self.parameters.items() if defaults or values[k] != p.default}
        )

    def format_explicit(self) -> str:
        """Return the part as text, with the parameters that the name gives."""
        return _format(self.name, self.explicit)


def parse_parts(name: str, table: Mapping[str, Callable[..., Any]]) -> list[Part]:
    """Return the parts of a name, from a table of constructors or by import path.

    >>> [part.format_explicit() for part in parse_parts("a:ridge=1e+2+b", {"a": lambda ridge=1.0: 0, "b": lambda: 0})]
    ['a:ridge=100.0', 'b']
    """
    texts = [text.strip() for text in re.split(r"\+(?!\d)", name)]  # 1e+2 is a number
    if not all(texts):
        problem = "ends with '+'" if not texts[-1] else "has a '+' without a part before it"
        problem = problem if any(texts) else "is empty"
        raise ValueError(f"method '{name}' {problem}: name the part that belongs there, as in 'fedprox+fedheal'")
    return [_parse_part(text, table) for text in texts]


def _parse_part(text: str, table: Mapping[str, Callable[..., Any]]) -> Part:
    word, _, assignments = text.partition(":")
    if word in table:
        part = Part(word, table[word])
    elif match := IMPORT_PATH.fullmatch(text):
        part, assignments = _import_part(match["path"]), match["assignments"] or ""
    elif word in BOUNDS:
        alone = f"name it alone, as in `fedheal compare fedavg {word}`"
        raise ValueError(f"'{word}' is a bound, which takes no parts or parameters: {alone}")
    else:
        _explain_call(text, table)
        known = "`fedheal methods` lists them, and one of your own is named by import path, package.module:function"
        has_values = not assignments or re.match(r"\w+=", assignments)  # else what is behind the colon is no parameter
        unknown = word if has_values else text
        raise ValueError(f"there is no method part '{unknown}'{suggest(word, list(table))}; {known}")
    for assignment in assignments.split(",") if assignments else []:
        key, equals, value = (word.strip() for word in assignment.partition("="))
        if not equals or key in part.explicit:
            raise ValueError(f"'{assignment}' in '{text}' should be key=value, each key once")
        part = part.set(key, value)
    return part


def _explain_call(text: str, table: Mapping[str, Callable[..., Any]]) -> None:
    """Raise ValueError with the right spelling if a part is written as a Python call."""
    call = CALL.fullmatch(text)
    if call is None or not (call["path"] in table or IMPORT_PATH.fullmatch(call["path"])):
        return
    path = call["path"]
    part = Part(path, table[path]) if path in table else _import_part(path)
    arguments = [argument.strip() for argument in call["arguments"].split(",") if argument.strip()]
    by_key = [a if "=" in a else f"{key}={a}" for key, a in zip(part.parameters, arguments, strict=False)]
    spelling = path + (":" if by_key else "") + ",".join(by_key)
    raise ValueError(f"there is no method part '{text}': write it without parentheses, as '{spelling}'")


def _import_part(path: str) -> Part:
    """Return a user's part. The name must make the same method again, so every parameter needs a default that is text."""
    part = Part(path, import_function("method", path))
    try:
        parameters = part.parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"the parameters of the method {path!r} cannot be read: {format_error(error)}") from error
    for key, parameter in parameters.items():
        if not isinstance(parameter.default, bool | int | float | str) or set(str(parameter.default)) & set(",+"):
            needed = "a default that is a number, a word, True or False"
            raise ValueError(f"the method {path!r}: give its parameter '{key}' {needed}")
    return part


def _format(name: str, values: Mapping[str, Any]) -> str:
    assignments = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items())
    return name + (":" if values else "") + ",".join(assignments)
