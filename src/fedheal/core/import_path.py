"""What users bring themselves, by import path: "package.module:function"."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fedheal.core.errors import worded


def imported(what: str, path: str) -> Callable[..., Any]:
    """The function of that path; a `ValueError` says in one sentence why there is none.

    >>> imported("model", "math:hypot")(3, 4)
    5.0
    >>> imported("model", "math:hypo")
    Traceback (most recent call last):
    ValueError: the model 'math:hypo' cannot be imported: 'math' has no function 'hypo'
    """
    module, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever somebody's module may raise
        raise ValueError(f"the {what} {path!r} cannot be imported: {worded(error)}") from error
    if not callable(function):
        raise ValueError(f"the {what} {path!r} cannot be imported: {module!r} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]
