"""Hold the weights of other stages: a power of them, a mixture with equal weights, a moving average over rounds.

With `w` the cohort's weights and `k` its size, `v = (1 - uniform) w^power / sum w^power + uniform / k`. No weight is
then less than `uniform / k`. With `last > 0` the weights are a moving average, `p <- last p + (1 - last) v`, which
starts from equal weights. So they go from uniform to fair, and a stage that jumps from round to round is smoothed. As
in AFL, a cohort redistributes only the weight it holds, and a newcomer starts with `1/M` of the M clients ever seen.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.client_index import extend_shares, index_clients
from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Floats, normalise_weights
from fedheal.core.parameter import Parameter, declare_parameters
from fedheal.core.state import Nothing, State, expect

OURS = "ours"
MIX_UNIFORM = Parameter("uniform", 0.5, "share of equal weights in the mixture", OURS, ge=0, le=1)
MIX_POWER = Parameter("power", 1.0, "power of the weights before they are mixed; 0.5 is a root", OURS, ge=0, le=1)
MIX_LAST = Parameter("last", 0.0, "share of the last weights in a moving average", "ours: none", ge=0, lt=1)
GIVES = frozenset({"mixture"})


@dataclass(frozen=True)
class MixState(State, kind="mix"):
    """Per client ever seen: its weight in the moving average; they sum to 1."""

    clients: tuple[str, ...]
    weights: Floats


@declare_parameters(MIX_UNIFORM, MIX_POWER, MIX_LAST)
def mix_weights(
    uniform: float = MIX_UNIFORM.default, power: float = MIX_POWER.default, last: float = MIX_LAST.default
) -> Stage:
    """Mix the weights of other stages with equal ones. `uniform=0` leaves them as they are, `uniform=1` is uniform."""

    def mix(weights: Floats) -> Floats:
        powers = weights**power
        return np.asarray((1 - uniform) * powers + uniform * powers.mean())

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        weights = draft.num_examples if draft.weights is None else draft.weights
        if last == 0:
            unnormalised = weights if draft.unnormalised_weights is None else draft.unnormalised_weights
            return replace(draft, weights=mix(weights), unnormalised_weights=mix(unnormalised)), expect(state, Nothing)
        before = expect(state, MixState)
        clients, slots = index_clients(before.clients, draft.clients)
        average = extend_shares(before.weights, len(clients))
        held = average[slots]
        if (shares := normalise_weights(mix(weights))).any():
            average[slots] = last * held + (1 - last) * held.sum() * shares
        return replace(draft, weights=average[slots], unnormalised_weights=None), MixState(clients, average)

    return Stage(lambda layout: MixState((), np.zeros(0)) if last else Nothing(), apply, gives=GIVES)
