"""What a reply must hold, and what is left of it once it was checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedheal.core.parameter import Parameter
from fedheal.federation.reply_limits import escape_text
from fedheal.local.term import Arrays

AUTO = "auto"  # as max_norm: leave out norms far above the median of the round


class RejectedReply(ValueError):
    """A reply that cannot count, with the reason, which may hold the client's own words."""

    def __init__(self, reason: str) -> None:
        super().__init__(escape_text(reason))


class MissingRequirement(RejectedReply):
    """A reply without what the method needs from every client. `needed` says what: if no reply has it, the app is wrong."""

    def __init__(self, reason: str, needed: str) -> None:
        super().__init__(reason)
        self.needed = needed


@dataclass(frozen=True)
class ReplyRequirements:
    """What a reply must hold. `needs`: metrics; `terms`: the local terms it must have been trained with."""

    arrays_key: str = "arrays"
    examples_key: str = "num-examples"
    max_examples: float = 1e9
    max_norm: float | str | None = None
    max_reply_bytes: int | None = None
    needs: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    masked: bool = False  # the clients mask their own updates

    def __post_init__(self) -> None:
        Parameter("max_examples", 1.0, gt=0).check(self.max_examples)
        if self.max_norm not in (None, AUTO):
            try:
                Parameter("max_norm", 1.0, gt=0).check(self.max_norm)
            except ValueError as error:
                raise ValueError(f"{error}, '{AUTO}' or None") from None
        if self.max_reply_bytes is not None:
            Parameter("max_reply_bytes", 1, ge=1).check(self.max_reply_bytes)

    @property
    def skips_diverged(self) -> bool:
        """Whether updates of diverged training are skipped. A number as `max_norm` replaces this check."""
        return self.max_norm in (None, AUTO)


@dataclass(frozen=True)
class TrainReply:
    """A checked training reply; its arrays may be views of the message's bytes."""

    client: str
    domain: str
    arrays: Mapping[str, NDArray[Any]]
    num_examples: float
    metrics: Mapping[str, float]
    messages: tuple[Arrays, ...] = ()  # of the local terms to the server
    mask: NDArray[np.uint8] | None = None
    is_difference: bool = False  # whether the parameters are local minus global; buffers and counters are local values


@dataclass(frozen=True)
class EvaluateReply:
    """A checked evaluation reply; `accuracy` is from 0 to 1, None if the client sent none."""

    client: str
    domain: str
    num_examples: float
    accuracy: float | None
