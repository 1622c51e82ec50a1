"""Edit valid inputs: bytes, words, and values of JSON. A strategy draws the edits, so that a seed repeats them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

# Texts that break parsers, paths, terminals and tables.
ODD_TEXTS = (
    "", " ", "\t", "\n", "\x00", "\x1b[2J", "\udcff", "é", "\U0001f642", "\u202e", "../../escape", "..", ".", "-", "--", "=",
    "a=b", ":", "+", ",", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30, "9" * 5000, "-1", "0x10", "1_000", "true", "null",
    "[", "]", "{}", "[" * 5000, '"', "'", "\\", "%s", "%n", "{0}", "$HOME", "~", "CON", "a" * 300, "a" * 5000, "2024-01-01",
    "[[]]", "{a = 1}",
)  # fmt: skip
EDGE_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30)
EDGE_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-320, 1e-12, 1e12, 1.8e308, float("inf"), float("-inf"), float("nan"))

# There is no slash in it, so that a path stays in its folder.
ALPHABET = "abcxyzATN0123459 ._-+:=,;#@!?*()[]{}<>|&%$'\"\\\n\té\u0301\ufffd\U0001f642"
texts = st.one_of(st.sampled_from(ODD_TEXTS), st.text(ALPHABET, max_size=12))
numbers = st.one_of(st.sampled_from(EDGE_NUMBERS), st.integers(-10, 300))
floats = st.one_of(st.sampled_from(EDGE_FLOATS), st.floats(-2, 2))
leaves = st.one_of(st.none(), st.booleans(), numbers, floats, texts)
json_values = st.one_of(
    leaves,
    st.lists(leaves, max_size=3),
    st.dictionaries(texts, leaves, max_size=3),
    st.just([]),
    st.just({}),
    st.just([[[]]]),
)

BYTE_EDITS = ("flip", "set", "insert", "delete", "truncate", "repeat", "swap", "zero", "grow")
byte_edits = st.lists(
    st.tuples(st.sampled_from(BYTE_EDITS), st.integers(0, 2**31), st.integers(0, 2**31), st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)


def edit_bytes(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """Apply edits. Half of the positions are among the first 256 bytes, where headers are."""
    changed = bytearray(data)
    for kind, place, other, value in edits:
        size = len(changed)
        start = (place // 2) % max(1, min(256, size) if place % 2 else size)
        end = min(size, start + 1 + other % 64)
        if kind == "flip" and size:
            changed[start] ^= 1 << other % 8
        elif kind == "set" and size:
            changed[start : start + len(value)] = value
        elif kind == "insert":
            changed[start:start] = value
        elif kind == "delete":
            del changed[start:end]
        elif kind == "truncate":
            del changed[start:]
        elif kind == "repeat":
            changed[end:end] = changed[start:end] * (1 + other % 5)
        elif kind == "swap":
            far = other % max(1, size)
            changed[start : start + 8], changed[far : far + 8] = changed[far : far + 8], changed[start : start + 8]
        elif kind == "zero":
            changed[start:end] = bytes(end - start)
        elif kind == "grow":
            changed += value * (1 + other % 100)
    return bytes(changed)


word_edits = st.lists(
    st.tuples(
        st.sampled_from(("replace", "insert", "delete", "double", "swap", "cut", "join")), st.integers(0, 999), texts
    ),
    max_size=3,
)


def edit_words(words: list[str], edits: list[tuple[str, int, str]]) -> list[str]:
    """Apply edits to the words of a command or the parts of a text."""
    changed = list(words)
    for kind, place, text in edits:
        at = place % max(1, len(changed))
        if kind == "insert" or not changed:
            changed.insert(at, text)
        elif kind == "replace":
            changed[at] = text
        elif kind == "delete":
            del changed[at]
        elif kind == "double":
            changed.insert(at, changed[at])
        elif kind == "swap":
            changed[at], changed[-1] = changed[-1], changed[at]
        elif kind == "cut":
            changed[at] = changed[at][: place % (len(changed[at]) + 1)]
        elif kind == "join":
            middle = place % (len(changed[at]) + 1)
            changed[at] = changed[at][:middle] + text + changed[at][middle:]
    return changed


json_edits = st.lists(
    st.tuples(st.sampled_from(("replace", "delete", "add", "nest")), st.integers(0, 2**16), texts, json_values),
    min_size=1,
    max_size=3,
)


def edit_json(value: Any, edits: list[tuple[str, int, str, Any]]) -> Any:
    """Apply edits to the leaves and branches of a JSON value."""
    changed = copy.deepcopy(value)
    for kind, place, key, drawn_value in edits:
        new = copy.deepcopy(drawn_value)  # later edits must not change the drawn value
        spots = list(_list_spots(changed))
        if not spots:
            return new
        parent, name = spots[place % len(spots)]
        if kind == "delete":
            del parent[name]
        elif kind == "add" and isinstance(parent, dict):
            parent[key] = new
        elif kind == "nest":
            parent[name] = [parent[name]]
        else:
            parent[name] = new
    return changed


def _list_spots(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield value, name
        yield from _list_spots(item)
