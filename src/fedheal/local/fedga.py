"""FedGA: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023.

A client evaluates the model it received (`val_received`) and the model it sends (`val_sent`) on examples that it holds
out of its own training data. The aggregation uses the difference of the losses. These examples are no part of the run's
validation score.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedheal.core.layout import Packed
from fedheal.local.term import Context, Term


@dataclass(frozen=True)
class FedGA(Term):
    """The validation losses that FedGA's aggregation needs."""

    validates: ClassVar[bool] = True

    def metrics(self, ctx: Context, local: Packed) -> Mapping[str, float]:
        progress = max(ctx.round - 2, 0) / ctx.rounds  # the gap is the previous round's: the first step is s0
        received, sent = ctx.validate(ctx.received)[0], ctx.validate(local)[0]
        return {"val_received": received, "val_sent": sent, "progress": progress}
