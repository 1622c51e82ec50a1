"""FedPW: drop small entries, stress what clients agree on, and weigh clients by loss and by alignment.

Guan et al., "Rethinking Fair Federated Learning from Parameter and Client View", NeurIPS 2025, and the authors' code.
`F_m` is the mean loss over the mini-batches of local training (the metric `train_loss`), `D_m` the update, `K = D D^T`.

1. There are two weights by FAEL's momentum rule: p follows the shares of `F`, and q the shares of `K 1`, the inner
   products with the sum of all updates. Their coefficients fade as training settles: `beta F / F_0`,
   `beta |mean D|^2 / |mean D_0|^2`, with the cohort's mean F and the first round's values below the line. Mixed by
   their spread: `u = r p + (1-r) q`, `r = sd(p) / (sd(p) + sd(q))`.
2. From the second round on, client m's smallest entries of every tensor are dropped: a share `rho K (1/F_m) / sum 1/F`,
   at most all. Clients that fit well lose more.
3. The step is the plain sum `sum_m u_m D_m` of what is left, not normalised per entry. In every tensor, the share `rho`
   of entries that clients agree on most is multiplied by `1 + a/b` if that is below 2. `a` is the mean size of what was
   dropped, `b` that of the step on these entries. For the agreement, every client's tensor is scaled to length 1, and
   then every entry's column over clients. The smaller the standard deviation over clients, the better. For a column z
   that is `(1 - (sum z)^2 / (K sum z^2)) / (K - 1)` squared, so two sums over clients are enough.

Deviations. Absent clients: FAEL's cohort rule applies (`distance.py`), with shares over the cohort and its correction
for late joiners (each client's `1 - prod (1 - b)` is stored). Newcomers start at `1/M`. `|mean D|^2` replaces the mean
of `K 1`, which would depend on the size of the cohort. p and q start uniform, and at 0 in the authors' code. The
difference fades over the first rounds. Negative alignments count as 0 and the coefficients stay at most 1. `a` is taken
over all dropped entries and `b` over all agreed ones. (The code takes every tenth of each.) `a` is averaged over the
clients that dropped any. If none did, or with one client alone, no entry is multiplied. 1e-10 is added to the losses.
Buffers are averaged with u and not dropped.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedheal.aggregate.client_index import extend_column, extend_shares, index_clients
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.gram import compute_gram
from fedheal.aggregate.kernels.drop import add_undropped
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.weights.distance import redistribute, scale_to_mean
from fedheal.core.arrays import Floats, Integers, normalise_weights
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import State, expect

TINY = 1e-10
ROUNDING = 1e-9  # so that a share of entries that is whole but for rounding counts as whole
SOURCE = "Guan et al. 2025, released code"
FEDPW_BETA = Parameter("beta", 0.3, "how fast weights follow loss and alignment", SOURCE, ge=0, le=1)
FEDPW_RHO = Parameter("rho", 0.3, "mean share of entries dropped, and stressed", SOURCE, ge=0, le=1)


@dataclass(frozen=True)
class FadingState(State, kind="fading"):
    """One weight rule. Per client ever seen: weight, momentum, its bias correction; and the first level of what it follows."""

    p: Floats
    dp: Floats
    correction: Floats
    first: float


@dataclass(frozen=True)
class FedPWState(State, kind="fedpw"):
    """Rounds done, and the two weight rules over all clients ever seen."""

    rounds: int
    clients: tuple[str, ...]
    by_loss: FadingState
    by_alignment: FadingState

    def __post_init__(self) -> None:
        for rule in (self.by_loss, self.by_alignment):
            for column in (rule.p, rule.dp, rule.correction):
                if column.shape != (len(self.clients),):
                    raise ValueError(f"weights of shape {column.shape} do not belong to {len(self.clients)} clients")


@declare_parameters(FEDPW_BETA, FEDPW_RHO)
def fedpw_stage(beta: float = FEDPW_BETA.default, rho: float = FEDPW_RHO.default) -> Stage:
    """Guan et al. 2025, FedHEAL's successor: weights by loss and alignment, small entries dropped, agreed ones stressed."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, FedPWState)
        clients, slots = index_clients(before.clients, draft.clients)
        loss = draft.metric("train_loss") + TINY
        matrix = compute_gram(draft)
        largest = float(np.diag(matrix).max()) or 1.0
        alignment = (matrix / largest).mean(axis=1)
        by_loss = update_rule(before.by_loss, len(clients), slots, loss, float(loss.mean()), beta)
        level = max(float(alignment.mean()), 0.0) * largest
        by_alignment = update_rule(before.by_alignment, len(clients), slots, np.maximum(alignment, 0), level, beta)
        p, q = normalise_weights(by_loss.p[slots]), normalise_weights(by_alignment.p[slots])
        spread = float(p.std() + q.std())
        r = float(p.std()) / spread if spread > 0 else 0.5
        weights = r * p + (1 - r) * q
        rates = compute_drop_rates(loss, rho) if before.rounds > 0 else np.zeros(len(slots))
        step = np.empty(draft.sizes.params)
        ends = np.cumsum(draft.sizes.lengths).tolist()
        for length, end in zip(draft.sizes.lengths, ends, strict=True):
            if length:
                step[end - length : end] = compute_step(draft, slice(end - length, end), weights, rates, rho)
        draft = replace(draft, weights=weights, unnormalised_weights=len(slots) * weights, step=torch.from_numpy(step))
        draft = replace(draft, report={**draft.report, "dropped": draft.key_by_client(rates)})
        return draft, FedPWState(before.rounds + 1, clients, by_loss, by_alignment)

    nothing = FadingState(np.zeros(0), np.zeros(0), np.zeros(0), 0.0)
    gives = frozenset({"weights", "mask"})
    return Stage(lambda layout: FedPWState(0, (), nothing, nothing), apply, frozenset({"train_loss"}), gives)


def update_rule(
    rule: FadingState, length: int, slots: Integers, signal: Floats, level: float, beta: float
) -> FadingState:
    """Return the rule after a round in which the cohort's `signal` had this mean `level`."""
    first = rule.first or level
    b = min(beta * level / first, 1.0) if first > 0 else beta
    p, dp = extend_shares(rule.p, length), extend_column(rule.dp, length)
    correction = extend_column(rule.correction, length)
    dp[slots] = (1 - b) * dp[slots] + b * scale_to_mean(signal)
    correction[slots] += b * (1 - correction[slots])
    if correction[slots].all():  # else there is no momentum yet
        p[slots] = redistribute(p[slots], dp[slots], correction[slots])
    return FadingState(p, dp, correction, first)


def compute_drop_rates(loss: Floats, rho: float) -> Floats:
    """Return the share of entries that each client loses; rho on average, unless a client loses all."""
    return np.minimum(1, rho * len(loss) * normalise_weights(loss.min() / loss))


def compute_step(draft: Draft, columns: slice, weights: Floats, rates: Floats, rho: float) -> Floats:
    """Return one tensor's step: the weighted sum of the entries that clients do not drop, larger where they agree."""
    size = columns.stop - columns.start
    step, z, zz = np.zeros(size), np.zeros(size), np.zeros(size)
    dropped_sizes = []
    for i in range(len(draft.rows)):
        row = draft.rows[i : i + 1]
        delta = draft.kernel.mask_block(draft.updates.deltas, row, None, columns.start, columns.stop)[0].cpu().numpy()
        number = _count_share(rates[i], size)
        dropped_size = add_undropped(delta, number, weights[i], step, z, zz)
        if number:
            dropped_sizes.append(dropped_size)
    if not dropped_sizes or len(draft.rows) == 1:
        return step
    # Entries that every client dropped come last.
    disagreement = np.where(zz > 0, -z * z / np.where(zz > 0, zz, 1.0), np.inf)
    consensus = mark_smallest(disagreement, _count_share(rho, size))
    b = float(np.abs(step[consensus]).mean()) if consensus.any() else 0.0
    a = float(np.mean(dropped_sizes))
    if a < b:
        step[consensus] *= 1 + a / b
    return step


def mark_smallest(values: Floats, number: int) -> NDArray[np.bool_]:
    """Return a mask of the `number` smallest values, of equal ones the first."""
    if number == 0:
        return np.zeros(len(values), bool)
    limit = np.partition(values, number - 1)[number - 1]
    chosen = np.asarray(values < limit)
    chosen[np.flatnonzero(values == limit)[: number - int(chosen.sum())]] = True
    return chosen


def _count_share(share: float, size: int) -> int:
    return min(math.floor(share * size + ROUNDING), size)
