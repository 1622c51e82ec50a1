"""FedPW: drop small entries, stress what clients agree on, and weigh clients by loss and by alignment.

Guan et al., "Rethinking Fair Federated Learning from Parameter and Client View", NeurIPS 2025, and the authors' code.
`F_m` is the mean loss over the mini-batches of local training (the metric `train_loss`), `D_m` the update, `K = D D^T`.

1. Two weights by FAEL's momentum rule: p follows the shares of `F`, q those of `K 1`, the inner products with the sum of
   all updates. Their coefficients fade as training settles: `beta F / F_0`, `beta |mean D|^2 / |mean D_0|^2`, with the
   cohort's mean F and the first round's values below the line. Mixed by their spread: `u = r p + (1-r) q`,
   `r = sd(p) / (sd(p) + sd(q))`.
2. From the second round on, client m's smallest entries of every tensor are dropped, a share `rho K (1/F_m) / sum 1/F` of
   them (at most all): clients that fit well lose more.
3. The step is the plain sum `sum_m u_m D_m` of what is left, not normalised per entry. In every tensor, the share `rho` of
   entries that clients agree on most is multiplied by `1 + a/b` if that is below 2: `a` the mean size of what was dropped,
   `b` that of the step on these entries. Agreement: every client's tensor scaled to length 1, then every entry's column
   over clients as well; the smaller the standard deviation over clients, the better. For a column z that is
   `(1 - (sum z)^2 / (K sum z^2)) / (K - 1)` squared, so two sums over clients are enough.

Deviations. Absent clients: the cohort rule of FAEL (`distance.py`), with shares over the cohort, its correction for late
joiners (the coefficients change, so each client's `1 - prod (1 - b)` is stored), newcomers at `1/M`; `|mean D|^2` instead of
the mean of `K 1`, which is K times that and would depend on the size of the cohort. p and q start uniform; the authors'
code starts them at nothing, so that its first weights are the shares themselves: the difference fades over the first
rounds. Negative alignments count as 0 and the coefficients stay at most 1. `a` is taken over all dropped entries (the code
takes every tenth), averaged over the clients that dropped any; without any, or with one client alone, nothing is stressed.
1e-10 is added to the losses. Buffers are averaged with u and not dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.aggregate.client_index import enrol, extended, uniform_start
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.inner_products import gram_matrix
from fedheal.aggregate.kernels.drop import add_undropped
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.weights.distance import redistributed, relative
from fedheal.core.arrays import Floats, Integers, normalised
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import Arrays, Json, State, expect, kind, nested, read_columns, unnested, write_columns

TINY = 1e-10
ROUNDING = 1e-9  # so that a share of entries that is whole but for rounding counts as whole
FEDPW_BETA = Parameter(
    "beta",
    description="how fast weights follow loss and alignment",
    source="Guan et al. 2025, released code",
    default=0.3,
    ge=0,
    le=1,
)
FEDPW_RHO = Parameter(
    "rho",
    description="mean share of entries dropped, and stressed",
    source="Guan et al. 2025, released code",
    default=0.3,
    ge=0,
    le=1,
)


@kind("fading")
@dataclass(frozen=True)
class FadingState(State):
    """One weight rule. Per client ever seen: weight, momentum, how warm that is; and the first level of what it follows."""

    p: Floats
    dp: Floats
    warm: Floats
    first: float

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return write_columns(self, "p", "dp", "warm"), {"first": self.first}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> FadingState:
        p, dp, warm = read_columns(arrays, len(arrays["p"]), "p", "dp", "warm")
        return cls(p, dp, warm, json["first"])


@kind("fedpw")
@dataclass(frozen=True)
class FedPWState(State):
    rounds: int
    clients: tuple[str, ...]
    by_loss: FadingState
    by_alignment: FadingState

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays, json = nested({"by_loss": self.by_loss, "by_alignment": self.by_alignment})
        return arrays, {"rounds": self.rounds, "clients": list(self.clients), **json}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> FedPWState:
        clients, rules = tuple(json["clients"]), [unnested(name, arrays, json) for name in ("by_loss", "by_alignment")]
        for rule in rules:
            if len(expect(rule, FadingState).p) != len(clients):
                raise ValueError(f"weights of {len(rule.p)} clients do not belong to {len(clients)} clients")
        return cls(json["rounds"], clients, *rules)


@declare_parameters(FEDPW_BETA, FEDPW_RHO)
def parameter_wise(beta: float = FEDPW_BETA.default, rho: float = FEDPW_RHO.default) -> Stage:
    """Guan et al. 2025, FedHEAL's successor: weights by loss and alignment, small entries dropped, agreed ones stressed."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedPWState)
        clients, slots = enrol(before.clients, draft.clients)
        loss = draft.metric("train_loss") + TINY
        matrix = gram_matrix(draft)
        largest = float(np.diag(matrix).max()) or 1.0
        alignment = (matrix / largest).mean(axis=1)
        by_loss = followed(before.by_loss, len(clients), slots, loss, float(loss.mean()), beta)
        level = max(float(alignment.mean()), 0.0) * largest
        by_alignment = followed(before.by_alignment, len(clients), slots, np.maximum(alignment, 0), level, beta)
        weights = mixed(normalised(by_loss.p[slots]), normalised(by_alignment.p[slots]))
        rates = drop_rates(loss, rho) if before.rounds > 0 else np.zeros(len(slots))
        step = np.empty(draft.sizes.params)
        for columns in _tensors(draft):
            step[columns] = stressed(draft, columns, weights, rates, rho)
        told = {"dropped": dict(zip(draft.clients, rates.tolist(), strict=True))}
        draft = replace(draft, weights=weights, unnormalised_weights=len(slots) * weights, step=torch.from_numpy(step))
        draft = replace(draft, report=dict(draft.report) | told)
        return draft, FedPWState(before.rounds + 1, clients, by_loss, by_alignment)

    nothing = FadingState(np.zeros(0), np.zeros(0), np.zeros(0), 0.0)
    gives = frozenset({"weights", "mask"})
    return Stage(lambda layout: FedPWState(0, (), nothing, nothing), apply, frozenset({"train_loss"}), gives)


def followed(rule: FadingState, length: int, slots: Integers, signal: Floats, level: float, beta: float) -> FadingState:
    """The rule after a round in which the cohort's `signal` had this mean `level`."""
    first = rule.first or level
    b = min(beta * level / first, 1.0) if first > 0 else beta
    p, dp, warm = uniform_start(rule.p, length), extended(rule.dp, length), extended(rule.warm, length)
    dp[slots] = (1 - b) * dp[slots] + b * relative(signal)
    warm[slots] += b * (1 - warm[slots])
    if warm[slots].all():  # else nothing has been followed yet
        p[slots] = redistributed(p[slots], dp[slots], warm[slots])
    return FadingState(p, dp, warm, first)


def mixed(p: Floats, q: Floats) -> Floats:
    """`r p + (1-r) q`: the weights with the larger spread count for more.

    >>> mixed(np.array([0.5, 0.5]), np.array([0.25, 0.75])).tolist()
    [0.25, 0.75]
    """
    spread = float(p.std() + q.std())
    r = float(p.std()) / spread if spread > 0 else 0.5
    return np.asarray(r * p + (1 - r) * q)


def drop_rates(loss: Floats, rho: float) -> Floats:
    """The share of entries that each client loses; rho on average, unless someone has none left to lose.

    >>> drop_rates(np.array([1.0, 3.0]), 0.5).tolist()  # 1/F = 1, 1/3: three quarters and a quarter of 2 * 0.5
    [0.75, 0.25]
    """
    return np.minimum(1, rho * len(loss) * normalised(loss.min() / loss))


def stressed(draft: Draft, columns: slice, weights: Floats, rates: Floats, rho: float) -> Floats:
    """One tensor's step: the weighted sum of what the clients' drops leave, larger where they agree."""
    size = columns.stop - columns.start
    step, z, zz = np.zeros(size), np.zeros(size), np.zeros(size)
    lost = []
    for i in range(len(draft.rows)):
        row = draft.rows[i : i + 1]
        delta = draft.kernel.masked(draft.updates.deltas, row, None, columns.start, columns.stop)[0].cpu().numpy()
        number = _number(rates[i], size)
        dropped = add_undropped(delta, number, weights[i], step, z, zz)
        if number:
            lost.append(dropped)
    if not lost or len(draft.rows) == 1:
        return step
    # Entries that nobody has left are last in line.
    disagreement = np.where(zz > 0, -z * z / np.where(zz > 0, zz, 1.0), np.inf)
    consensus = smallest(disagreement, _number(rho, size))
    b = float(np.abs(step[consensus]).mean()) if consensus.any() else 0.0
    a = float(np.mean(lost))
    if a < b:
        step[consensus] *= 1 + a / b
    return step


def smallest(values: Floats, number: int) -> NDArray[np.bool_]:
    """A mask of the `number` smallest values, of equal ones the first.

    >>> smallest(np.array([2.0, 1.0, 2.0, 3.0]), 2).tolist()
    [True, True, False, False]
    """
    if number == 0:
        return np.zeros(len(values), bool)
    limit = np.partition(values, number - 1)[number - 1]
    chosen = np.asarray(values < limit)
    chosen[np.flatnonzero(values == limit)[: number - int(chosen.sum())]] = True
    return chosen


def _number(share: float, size: int) -> int:
    return min(math.floor(share * size + ROUNDING), size)


def _tensors(draft: Draft) -> Iterator[slice]:
    start = 0
    for length in draft.sizes.lengths:
        if length:
            yield slice(start, start + length)
        start += length
