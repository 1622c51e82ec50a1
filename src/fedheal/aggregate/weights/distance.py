"""FAEL: clients whose models must move further get more weight, by a momentum rule on their update's squared norm.

Chen, Huang and Ye, CVPR 2024. With `s` the share of the (kept) squared norms, the paper's rule is
`dp = (1-beta) dp + beta s`, `p = p + dp`, normalised. There are two deviations: a cohort redistributes only the weight
it holds, and a late joiner's momentum is corrected for its bias. If all clients are present, they change nothing.
`per_step=True` is an extension. Distances grow with the number of local steps, so they are divided by the square of
`reach`, how far the client's steps go on a constant unit gradient. `cumulative_rule` follows the authors' code: norms
without squares, summed over tensors, and weights that are never normalised.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.client_index import extend_column, index_clients
from fedheal.aggregate.draft import Draft, UpdateNorms
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, Integers, normalise_weights
from fedheal.core.state import State, expect


@dataclass(frozen=True)
class RuleState(State):
    """What a rule remembers of every unit ever seen."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """How weights follow distances, over units that are clients or, in `per_domain.py`, whole domains.

    `update(state, units, joined, d) -> weights [k], state`: `joined [k]` are the examples that newcomers bring to a unit.
    """

    start: RuleState
    update: Callable[[State, tuple[str, ...], Floats, Floats], tuple[Floats, RuleState]]
    variant: str
    per_step: bool

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reach"} if self.per_step else ())

    def measure(self, draft: Draft) -> Floats:
        """Return each client's distance. In the released rule distances are lengths, not squares."""
        d = compute_distances(draft.measure_norms(), self.variant)
        return d / draft.metric("reach") ** (1 if self.variant == "released" else 2) if self.per_step else d


@dataclass(frozen=True, kw_only=True)
class MomentumState(RuleState, kind="momentum"):
    """Per client ever seen: participations, examples when first seen, weight `p` (they sum to 1), momentum `dp`."""

    n: Integers
    examples: Floats
    p: Floats
    dp: Floats


@dataclass(frozen=True, kw_only=True)
class CumulativeState(RuleState, kind="cumulative"):
    """Per client ever seen: participations, weight `w` that only grows, momentum `dp`."""

    n: Integers
    w: Floats
    dp: Floats


def distance_weights(rule: Rule) -> Stage:
    """Return the stage that applies a rule to clients."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, type(rule.start))
        new = [client not in before.clients for client in draft.clients]
        d = rule.measure(draft)
        weights, after = rule.update(before, draft.clients, np.where(new, draft.num_examples, 0.0), d)
        return replace(draft, weights=weights, report={**draft.report, "distance": draft.key_by_client(d)}), after

    return Stage(lambda layout: rule.start, apply, rule.needs)


def momentum_rule(beta: float, per_step: bool) -> Rule:
    """Return the paper's rule."""

    def update(state: State, units: tuple[str, ...], joined: Floats, d: Floats) -> tuple[Floats, RuleState]:
        before = expect(state, MomentumState)
        clients, slots = index_clients(before.clients, units)
        n, examples = extend_column(before.n, len(clients)), extend_column(before.examples, len(clients))
        p, dp = extend_column(before.p, len(clients)), extend_column(before.dp, len(clients))
        examples[slots] += joined
        shares = normalise_weights(examples)[slots] * (joined / examples[slots])
        p *= 1 - shares.sum()
        p[slots] += shares
        n[slots] += 1
        dp[slots] = (1 - beta) * dp[slots] + beta * scale_to_mean(d)
        p[slots] = redistribute(p[slots], dp[slots], bias_correction(beta, n[slots]))
        return p[slots], MomentumState(clients, n=n, examples=examples, p=p, dp=dp)

    none = np.zeros(0)
    start = MomentumState((), n=np.zeros(0, np.int64), examples=none, p=none, dp=none)
    return Rule(start, update, "paper", per_step)


def redistribute(p: Floats, dp: Floats, correction: Floats) -> Floats:
    """Share out the weight that a cohort holds anew, by `p/P + g/K`, where `g` is `dp` corrected for its bias."""
    mass = p.sum()
    if not mass > 0:
        return p
    v = p / mass + correction.mean() * dp / correction / len(p)
    return np.asarray(mass * v / v.sum())


def cumulative_rule(beta: float, per_step: bool) -> Rule:
    """Return the rule of the released code. Newcomers start at 1, whatever their examples."""

    def update(state: State, units: tuple[str, ...], joined: Floats, d: Floats) -> tuple[Floats, RuleState]:
        before = expect(state, CumulativeState)
        clients, slots = index_clients(before.clients, units)
        n, dp = extend_column(before.n, len(clients)), extend_column(before.dp, len(clients))
        w = extend_column(before.w, len(clients), 1)
        n[slots] += 1
        dp[slots] = (1 - beta) * dp[slots] + beta * scale_to_mean(d)
        w[slots] += dp[slots]
        # What an average client would hold after as many participations: 1 + sum_{k=1..n} (1 - (1-beta)^k).
        past = n[slots] - (1 - beta) * bias_correction(beta, n[slots]) / beta if beta > 0 else np.zeros(len(slots))
        return w[slots] / (1 + past), CumulativeState(clients, n=n, w=w, dp=dp)

    start = CumulativeState((), n=np.zeros(0, np.int64), w=np.zeros(0), dp=np.zeros(0))
    return Rule(start, update, "released", per_step)


def compute_distances(norms: UpdateNorms, variant: str) -> Floats:
    """Return `[k]`: the squared norms of the masked updates or, as released, their norms summed over tensors."""
    return np.asarray((np.sqrt(norms.squares) if variant == "released" else norms.squares).sum(axis=1))


def scale_to_mean(d: Floats) -> Floats:
    """Return each client's distance relative to the cohort's mean: 1 for all if nobody moved."""
    return len(d) * normalise_weights(d) if d.any() else np.ones_like(d)


def bias_correction(beta: float, n: Integers) -> Floats:
    """Return `1 - (1-beta)^n`, without cancellation for small beta."""
    return -np.expm1(n * np.log1p(-beta)) if beta < 1 else np.ones(len(n))
