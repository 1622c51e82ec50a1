"""Import a user's function by its path, "package.module:function", and our kernels where they can run."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from fedheal.core.errors import add_article, format_error


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
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        is_file = module.endswith(".py") and isinstance(error, ImportError)
        remedy = f"; leave out .py: {module.removesuffix('.py').replace('/', '.')}:{attribute}" if is_file else ""
        raise ValueError(f"the {what} {path!r} cannot be imported: {format_error(error)}{remedy}") from error
    function = getattr(imported, attribute, None)
    if not callable(function):
        kind = f"{attribute!r} is {add_article(type(function).__name__)}, not a function"
        problem = kind if function is not None else f"{module!r} has no function {attribute!r}"
        raise ValueError(f"the {what} {path!r} cannot be imported: {problem}")
    return function  # type: ignore[no-any-return]


def is_importable(module: str) -> bool:
    """Return whether Python finds a module of that name. Packages that it is in are imported, the module is not.

    >>> is_importable("importlib.util"), is_importable("importlib.utils"), is_importable("nn")
    (True, False, False)
    """
    try:
        return importlib.util.find_spec(module) is not None
    except (Exception, SystemExit):  # a user's package may raise anything
        return False


@cache
def import_triton_kernels(module: str, device_type: str) -> ModuleType | None:
    """Return a module of Triton kernels, or None if the device is not a GPU or torch comes without Triton."""
    try:
        return importlib.import_module(module) if device_type == "cuda" else None
    except ImportError:
        return None
