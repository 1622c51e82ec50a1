"""Import a user's function by its path, "package.module:function", and our kernels where they can run."""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from fedheal.core.errors import format_error


def import_function(what: str, path: str) -> Callable[..., Any]:
    """Return the function of that path; raise ValueError, naming `what` it is for, if it cannot be imported.

    >>> import_function("model", "math:hypot")(3, 4)
    5.0
    >>> import_function("model", "math:hypo")
    Traceback (most recent call last):
    ValueError: the model 'math:hypo' cannot be imported: 'math' has no function 'hypo'
    """
    module, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"the {what} {path!r} cannot be imported: {format_error(error)}") from error
    if not callable(function):
        raise ValueError(f"the {what} {path!r} cannot be imported: {module!r} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


@cache
def import_triton_kernels(module: str, device_type: str) -> ModuleType | None:
    """Return a module of Triton kernels, or None if the device is not a GPU or torch comes without Triton."""
    try:
        return importlib.import_module(module) if device_type == "cuda" else None
    except ImportError:
        return None
