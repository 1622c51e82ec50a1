"""Declare a method's parameter once: what it means, where its default comes from and which values it takes.

A declaration stands beside the function or class that takes the parameter::

    MU = Parameter("mu", 0.01, "pull towards the received model", "Li et al. 2020", ge=0)

    @declare_parameters(MU)
    def make_term(mu: float = MU.default) -> Term: ...

Every call of the decorated function or class then checks its arguments. Names of methods, `fedheal methods`, the
reference page and the contract tests read the same declarations.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar, cast

__all__ = ["Parameter", "declare_parameters", "get_parameters"]

Constructor = TypeVar("Constructor", bound=Callable[..., Any])

LARGEST = 1e30  # of a value: it still fits into float32, and torch raises for a larger one


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method. It has the type of its default, and numbers must be finite.

    Args:
        name: the keyword.
        default: the default, which stands nowhere else.
        description: what the parameter does, for `fedheal methods` and the reference page.
        source: where the default comes from.
        ge, gt, le, lt: bounds of the value: at least, above, at most, below.
        choices: the values that are allowed, where they are few.
    """

    name: str
    default: Any
    description: str = ""
    source: str = ""
    _: KW_ONLY
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()

    @property
    def allowed(self) -> str:
        """The allowed values in words.

        >>> Parameter("tau", default=0.3, ge=0, le=1).allowed, Parameter("alpha", default=0.1, gt=0).allowed
        ('a number from 0 to 1', 'a finite number above 0')
        >>> Parameter("share", default=0.5, gt=0, le=1).allowed
        'a number above 0 and at most 1'
        """
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        if isinstance(self.default, bool):
            return "True or False"
        if isinstance(self.default, str):
            return "a string"
        number = "a whole number" if isinstance(self.default, int) else "a number"
        if self.ge is not None and self.le is not None:
            return f"{number} from {self.ge} to {self.le}"
        if self.ge is not None and self.lt is not None:
            return f"{number} of at least {self.ge} and below {self.lt}"
        words = {"above": self.gt, "of at least": self.ge, "at most": self.le, "below": self.lt}
        bounds = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
        if self.le is None and self.lt is None:
            number = number.replace("a number", "a finite number")
        return f"{number} {bounds}".strip() if self.ge != 0 else f"{number} that is not negative"

    def check(self, value: Any) -> None:
        """Raise ValueError if `value` is not allowed.

        >>> Parameter("tau", default=0.3, ge=0, le=1).check(1.5)
        Traceback (most recent call last):
        ValueError: tau = 1.5: use a number from 0 to 1
        """
        if not self._allows(value):
            raise ValueError(f"{self.name} = {value!r}: use {self.allowed}")
        if isinstance(value, int | float) and abs(value) > LARGEST:
            raise ValueError(f"{self.name} = {value!r}: use a number of at most {LARGEST:g}")

    def parse(self, text: str) -> Any:
        """Return the value that `text` stands for, of the type of the default; raise ValueError if there is none."""
        is_switch = any(isinstance(value, bool) for value in (self.default, *self.choices))
        if is_switch and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if isinstance(self.default, str):
            return text
        try:
            number = math.nan if isinstance(self.default, bool) else float(text)
        except ValueError:
            number = None
        if isinstance(self.default, float) and number is not None:
            return number
        if number is None or not number.is_integer():
            allowed = "true or false" if isinstance(self.default, bool) else self.allowed  # as in text
            raise ValueError(f"{self.name} = {text}: use {allowed}")
        return int(number)

    def _allows(self, value: Any) -> bool:
        if self.choices:  # True == 1 in Python, but a switch is no number here
            return any(
                value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in self.choices
            )
        if isinstance(self.default, bool | str):
            return isinstance(value, type(self.default))
        kinds = int if isinstance(self.default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


def declare_parameters(*declared: Parameter) -> Callable[[Constructor], Constructor]:
    """Return a decorator that checks the arguments of a function or class against these declarations.

    Args:
        *declared: The parameters, each an argument of the function or class with the same default.

    >>> @declare_parameters(Parameter("mu", default=0.01, ge=0))
    ... def double(mu=0.01):
    ...     return 2 * mu
    >>> double(mu=-1)
    Traceback (most recent call last):
    ValueError: mu = -1: use a finite number that is not negative
    """

    def decorate(constructor: Constructor) -> Constructor:
        target: Any = constructor
        call: Callable[..., Any] = target.__init__ if isinstance(constructor, type) else target
        signature = inspect.signature(call)
        for parameter in declared:
            argument = signature.parameters.get(parameter.name)
            if argument is None or argument.default != parameter.default:
                raise TypeError(f"{target.__name__} needs an argument {parameter.name}={parameter.default!r}")
            if parameter.default is not None:  # None may stand for "off"
                try:
                    parameter.check(parameter.default)
                except ValueError as error:
                    raise ValueError(
                        f"the default of a parameter of {target.__name__} is not allowed: {error}"
                    ) from None

        @functools.wraps(call)
        def check_and_call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            for parameter in declared:
                if parameter.name in arguments:
                    parameter.check(arguments[parameter.name])
            return call(*args, **kwargs)

        if isinstance(constructor, type):
            target.__init__ = check_and_call
        else:
            target = check_and_call
        target.declared_parameters = declared
        return cast(Constructor, target)

    return decorate


def get_parameters(constructor: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function or class by name: those it declares, or else those of its signature.

    Args:
        constructor: A function or class that makes a term or a stage.

    >>> get_parameters(lambda mu=0.01: mu)["mu"].default
    0.01
    """
    declared = getattr(constructor, "__dict__", {}).get("declared_parameters")  # a subclass declares its own
    if declared is None:
        signature = inspect.signature(constructor).parameters.values()
        declared = [Parameter(argument.name, default=argument.default) for argument in signature]
    return {parameter.name: parameter for parameter in declared}
