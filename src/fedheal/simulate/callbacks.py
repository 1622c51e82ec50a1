"""What a run calls as it goes: the base class of loggers and progress displays."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from fedheal.runs.schema import RoundRecord


class Callback:
    """Hooks that a logger may override. A run enters the callback as a context manager and leaves it at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        """Called before the first round, with the records of the rounds that a resumed run already has."""

    def round(self, record: RoundRecord) -> None:
        """Called after every round."""

    def finished(self, result: Mapping[str, Any]) -> None:
        """Called at the end, with the contents of `result.json`."""
