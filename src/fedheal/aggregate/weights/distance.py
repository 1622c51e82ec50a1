"""FAEL: clients whose models must move further get more weight, by a momentum rule on their update's squared norm.

Chen, Huang and Ye, CVPR 2024. With `s` the share of the (kept) squared norms and all clients present, the paper's rule is
`dp = (1-beta) dp + beta s`, `p = p + dp`, normalised. Two deviations make it right when clients are absent, and change
nothing when none is: a cohort redistributes only the weight it holds, and a late joiner's momentum is corrected for still
warming up. `per_step=True` is an extension: a distance also grows with the number of local steps, which lets the amount of
data in by the back door; it is divided by the square of `reach`, how far the client's steps go on a constant unit gradient.
`cumulative` follows the authors' code: un-squared norms summed over tensors, weights that add up for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedheal.aggregate.client_index import enrol, extended
from fedheal.aggregate.draft import Draft, Measured
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, Integers, normalised
from fedheal.core.state import Arrays, Json, State, expect, kind, read_columns, write_columns


@dataclass(frozen=True)
class Followed(State):
    """What a rule remembers of every unit ever seen."""

    clients: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """How weights follow distances, over units that are clients or, in `per_domain.py`, whole domains.

    `follow(state, units, joined, d) -> weights [k], state`: `joined [k]` are the examples that newcomers bring to each unit.
    """

    start: Followed
    follow: Callable[[State, tuple[str, ...], Floats, Floats], tuple[Floats, Followed]]
    distance: Callable[[Draft], Floats]
    needs: frozenset[str]


@kind("momentum")
@dataclass(frozen=True)
class MomentumState(Followed):
    """Per client ever seen: participations, examples when first seen, weight `p` (they sum to 1), momentum `dp`."""

    n: Integers
    examples: Floats
    p: Floats
    dp: Floats

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return write_columns(self, "n", "examples", "p", "dp"), {"clients": list(self.clients)}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> MomentumState:
        clients = tuple(json["clients"])
        return cls(clients, *read_columns(arrays, len(clients), "n", "examples", "p", "dp"))


@kind("cumulative")
@dataclass(frozen=True)
class CumulativeState(Followed):
    """Per client ever seen: participations, weight `w` that only grows, momentum `dp`."""

    n: Integers
    w: Floats
    dp: Floats

    def _write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return write_columns(self, "n", "w", "dp"), {"clients": list(self.clients)}

    @classmethod
    def _read(cls, arrays: Arrays, json: Json) -> CumulativeState:
        clients = tuple(json["clients"])
        return cls(clients, *read_columns(arrays, len(clients), "n", "w", "dp"))


def by_client(rule: Rule) -> Stage:
    """The rule over clients."""

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        before = expect(state, type(rule.start))
        new = [client not in before.clients for client in draft.clients]
        d = rule.distance(draft)
        weights, after = rule.follow(before, draft.clients, np.where(new, draft.num_examples, 0.0), d)
        return replace(draft, weights=weights, report=dict(draft.report) | told(draft, d)), after

    return Stage(lambda layout: rule.start, apply, rule.needs)


def momentum(beta: float, per_step: bool) -> Rule:
    """The paper's rule."""

    def follow(state: State, units: tuple[str, ...], joined: Floats, d: Floats) -> tuple[Floats, Followed]:
        before = expect(state, MomentumState)
        clients, slots = enrol(before.clients, units)
        n, examples = extended(before.n, len(clients)), extended(before.examples, len(clients))
        p, dp = extended(before.p, len(clients)), extended(before.dp, len(clients))
        examples[slots] += joined
        shares = normalised(examples)[slots] * (joined / examples[slots])
        p *= 1 - shares.sum()
        p[slots] += shares
        n[slots] += 1
        dp[slots] = (1 - beta) * dp[slots] + beta * relative(d)
        p[slots] = redistributed(p[slots], dp[slots], _warmth(beta, n[slots]))
        return p[slots], MomentumState(clients, n, examples, p, dp)

    def distance(draft: Draft) -> Floats:
        d = measured_distance(measured(draft), "paper")
        return d / draft.metric("reach") ** 2 if per_step else d

    return Rule(MomentumState((), *_empty(4)), follow, distance, _needs(per_step))


def redistributed(p: Floats, dp: Floats, warm: Floats) -> Floats:
    """The weight that a cohort holds, shared out anew by `p/P + g/K`, where `g` is `dp` corrected for warming up."""
    mass = p.sum()
    if not mass > 0:
        return p
    v = p / mass + warm.mean() * dp / warm / len(p)
    return np.asarray(mass * v / v.sum())


def cumulative(beta: float, per_step: bool) -> Rule:
    """The rule of the released code. Newcomers start at 1, whatever their examples."""

    def follow(state: State, units: tuple[str, ...], joined: Floats, d: Floats) -> tuple[Floats, Followed]:
        before = expect(state, CumulativeState)
        clients, slots = enrol(before.clients, units)
        n, dp = extended(before.n, len(clients)), extended(before.dp, len(clients))
        w = extended(before.w, len(clients), 1)
        n[slots] += 1
        dp[slots] = (1 - beta) * dp[slots] + beta * relative(d)
        w[slots] += dp[slots]
        # What an average client would hold after as many participations: 1 + sum_{k=1..n} (1 - (1-beta)^k).
        past = n[slots] - (1 - beta) * _warmth(beta, n[slots]) / beta if beta > 0 else np.zeros(len(slots))
        return w[slots] / (1 + past), CumulativeState(clients, n, w, dp)

    def distance(draft: Draft) -> Floats:
        d = measured_distance(measured(draft), "released")
        return d / draft.metric("reach") if per_step else d  # these are lengths, not squares

    return Rule(CumulativeState((), *_empty(3)), follow, distance, _needs(per_step))


def measured_distance(measured: Measured, variant: str) -> Floats:
    """`[k]`: the squared norm of what is kept; in the released code the norms themselves, summed over tensors."""
    return np.asarray((np.sqrt(measured.squares) if variant == "released" else measured.squares).sum(axis=1))


def relative(d: Floats) -> Floats:
    """Each client's distance relative to the cohort's mean: 1 for all when nobody moved."""
    return len(d) * normalised(d) if d.any() else np.ones_like(d)


def _warmth(beta: float, n: Integers) -> Floats:
    """`1 - (1-beta)^n`, without cancellation for small beta."""
    return -np.expm1(n * np.log1p(-beta)) if beta < 1 else np.ones(len(n))


def measured(draft: Draft) -> Measured:
    """What FPHL measured on the way, or a pass of our own."""
    if draft.measured is not None:
        return draft.measured
    found: Measured = draft.kernel.measure(draft.updates.deltas, draft.rows, draft.sizes.lengths)
    return found


def _needs(per_step: bool) -> frozenset[str]:
    return frozenset({"reach"}) if per_step else frozenset()


def told(draft: Draft, d: Floats) -> dict[str, Any]:
    return {"distance": dict(zip(draft.clients, d.tolist(), strict=True))}


def _empty(columns: int) -> list[Any]:
    return [np.zeros(0, np.int64), *(np.zeros(0) for _ in range(columns - 1))]
