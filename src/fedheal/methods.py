"""The table of methods: a name is local training and server stages, put together; never a class.

    <local>[:key=value,...]{+<stage>[:key=value,...]}         fedavg+fedheal:tau=0.4,variant=released

A stage alone is short for `fedavg+` it. Keys given beside a name go to the part that has them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedheal.aggregate import Aggregator, chain
from fedheal.aggregate.presets import reducer
from fedheal.aggregate.stages import STAGES


def fedavg() -> None:
    """McMahan et al. 2017: every client minimises its own loss from the global model."""


LOCAL: dict[str, Callable[..., Any]] = {"fedavg": fedavg}


@dataclass(frozen=True)
class Method:
    """A whole algorithm as a value. `name` is canonical and leaves defaults out; `spelled` has every parameter."""

    name: str
    aggregator: Aggregator
    local: str = "fedavg"
    spelled: str = ""


def get(name: str, **keys: Any) -> Method:
    """The method of that name, with these parameters.

    >>> get("fedheal", tau=0.4).name
    'fedavg+fedheal:tau=0.4'
    >>> get("fael+fphl").name
    'fedavg+fedheal'
    """
    parts = [_parse(part) for part in name.split("+")]
    if parts[0][0] not in LOCAL:
        parts.insert(0, ("fedavg", {}))
    for key, value in keys.items():
        _give(parts, key, value, name)
    (local, _), *stages = parts
    stages = _merged(stages, name)
    try:
        stage = chain(*(STAGES[part](**given) for part, given in stages))
    except ValueError as error:
        raise ValueError(f"method '{name}': {error}") from None
    variants = {given.get("variant", "paper") for part, given in stages if "variant" in _defaults(part)}
    if len(variants) > 1:
        raise ValueError(f"method '{name}': its parts follow different variants {sorted(variants)}; give both the same")
    aggregator = Aggregator(stage, reducer(*variants or {"paper"}))
    return Method(_spell(parts[:1] + stages, False), aggregator, local, _spell(parts[:1] + stages, True))


def names() -> list[str]:
    """Every local method, alone and with every stage."""
    return [name for local in LOCAL for name in (local, *(f"{local}+{stage}" for stage in STAGES))]


def parameters(name: str) -> dict[str, Any]:
    """The parameters that a method's parts take, with their values in this name."""
    return {k: v for part in get(name).spelled.split("+") for k, v in _parse(part)[1].items()}


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    part, _, listed = text.strip().partition(":")
    if part not in LOCAL | STAGES:
        raise ValueError(
            f"there is no method part '{part}'{suggestion(part, [*LOCAL, *STAGES])}; `fedheal methods` lists them"
        )
    given: dict[str, Any] = {}
    for item in listed.split(",") if listed else []:
        key, equals, value = item.partition("=")
        if not equals or key.strip() in given:
            raise ValueError(f"'{item}' in '{text}' should be key=value, each key once")
        given[key.strip()] = _value(part, key.strip(), value.strip())
    return part, given


def _give(parts: list[tuple[str, dict[str, Any]]], key: str, value: Any, name: str) -> None:
    takers = [given for part, given in parts if key in _defaults(part)]
    owners = [part for part, _ in parts if key in _defaults(part)]
    if not takers:
        known = sorted({k for part, _ in parts for k in _defaults(part)})
        has = f"it has {known}" if known else "it has no parameters"
        raise ValueError(f"method '{name}' has no parameter '{key}'{suggestion(key, known)}; {has}")
    if len(takers) > 1:
        raise ValueError(
            f"parameter '{key}' belongs to several parts of '{name}' ({', '.join(owners)}): write it behind one"
        )
    value = _value(owners[0], key, value) if isinstance(value, str) else value
    if key in takers[0] and takers[0][key] != value:
        raise ValueError(f"{key} = {value} contradicts '{name}', which says {key} = {takers[0][key]}")
    takers[0][key] = value


def _merged(stages: list[tuple[str, dict[str, Any]]], name: str) -> list[tuple[str, dict[str, Any]]]:
    """`fphl+fael` is `fedheal`: one name for one method."""
    by_name = dict(stages)
    if len(stages) != len(by_name):
        raise ValueError(f"method '{name}' names a part twice")
    if set(by_name) != {"fphl", "fael"}:
        return stages
    mask, weights = by_name["fphl"], by_name["fael"]
    if mask.get("variant", "paper") != weights.get("variant", "paper"):
        raise ValueError(f"method '{name}': its parts follow different variants; give both the same")
    return [("fedheal", mask | weights)]


def _defaults(part: str) -> dict[str, Any]:
    return {k: p.default for k, p in inspect.signature((LOCAL | STAGES)[part]).parameters.items()}


def _value(part: str, key: str, text: str) -> Any:
    """`text` as the type of the parameter's default; `fael` may be a name or false."""
    defaults = _defaults(part)
    if key not in defaults:
        raise ValueError(
            f"'{part}' has no parameter '{key}'{suggestion(key, list(defaults))}; it has {sorted(defaults)}"
        )
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if isinstance(defaults[key], float):
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{key} = {text}: a number is needed") from None
    return text


def _spell(parts: list[tuple[str, dict[str, Any]]], everything: bool) -> str:
    def one(part: str, given: dict[str, Any]) -> str:
        defaults = _defaults(part)
        values = {k: given.get(k, default) for k, default in defaults.items()}
        shown = {k: v for k, v in values.items() if everything or v != defaults[k]}
        return part + (":" if shown else "") + ",".join(f"{k}={_text(v)}" for k, v in shown.items())

    return "+".join(one(part, given) for part, given in parts)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def suggestion(word: str, known: list[str]) -> str:
    """', did you mean ...?' where something is close.

    >>> suggestion("taw", ["tau", "beta"])
    " (did you mean 'tau'?)"
    """
    close = difflib.get_close_matches(word, known, 1, 0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
