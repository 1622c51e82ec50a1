"""Average BatchNorm's running variances by the law of total variance.

The variance over all clients' data is the mean of their variances plus the variance of their means. The plain average
of running variances leaves out the second term, which is large where the domains' activations differ. With `u` the
weights, `mean = sum u mean_m` and `var = sum u var_m + sum u (mean_m - mean)^2`. The stage only says which buffers are
means and variances, by their names. The reducer averages them, since the weights are final only there.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage
from fedheal.core.arrays import Integers
from fedheal.core.layout import MEAN, VARIANCE, Layout
from fedheal.core.state import State, expect


@dataclass(frozen=True)
class RunningState(State, kind="running"):
    """The positions of running means and variances among the buffers, pair by pair."""

    means: Integers
    variances: Integers


def total_variance() -> Stage:
    """Average running variances by the law of total variance: the variance of the clients' means counts too."""

    def find_pairs(layout: Layout) -> State:
        places = {e.name: np.arange(e.start, e.stop) for e in layout.entries if e.kind == "buffer"}
        stems = [name.removesuffix(MEAN) for name in places if name.endswith(MEAN)]
        pairs = {tuple(places[stem + MEAN]): places[stem + VARIANCE] for stem in stems if stem + VARIANCE in places}
        means = [np.array(place, np.int64) for place in pairs]
        none = [np.zeros(0, np.int64)]
        return RunningState(np.concatenate(none + means), np.concatenate(none + list(pairs.values())))

    def apply(draft: Draft, state: State) -> tuple[Draft, State]:
        found = expect(state, RunningState)
        return replace(draft, running=(found.means, found.variances)), found

    return Stage(find_pairs, apply, gives=frozenset({"running"}))
