"""q-FFL: weights that grow with a power of the loss.

Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020: minimise
`sum_m F_m^(q+1) / (q+1)`, whose gradient weighs client m by `F_m^q`. Their q-FedAvg, with `L` the inverse step size, is

    W + (sum_m F_m^q D_m) / (sum_m F_m^q (1 + q L |D_m|^2 / F_m)),

a mean weighted by `F^q`, shrunk by an estimate of the curvature. `F_m` is the metric `loss`, that of the received model
on the client's own training data, plus 1e-10. The modes differ in L:

- `"qfedavg_eff"` (default): `L = 1/reach`. `reach` is the effective step of all local steps, how far they go on a
  constant unit gradient. For one step without momentum this is the paper's L.
- `"qfedavg"`: the paper's `L = 1/lr`. After many local steps it all but stops training (a factor of 0.01 at lr 0.001,
  |D| 0.3, F 1 and q 1).
- `"reweight"`: no curvature term (L = 0), which is not the published update.

Between quadratic clients of curvature H that each cover a share `a` of the way to their own optimum, a round multiplies
the error by `1 - a (1 + 2q) / (1 + 2q a^2 L / H)`. `reweight` oscillates without end for `a (1 + 2q) > 2`; q <= 1/2 is
safe. `qfedavg` settles for every q, `qfedavg_eff` for q <= 1/2, and for q = 1 where `H reach < 4`.

Deviations: the paper samples clients in proportion to their examples; here all clients of a cohort count evenly.
Clients that differ in `reach` enter the shrinkage with their own L. With FPHL, `|D_m|^2` is that of the kept entries.
Buffers are not shrunk.
"""

from dataclasses import replace

import numpy as np

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.stage import Stage, stateless
from fedheal.aggregate.weights.afl import report_loss
from fedheal.aggregate.weights.distance import compute_distances
from fedheal.core.arrays import Floats, normalise_weights
from fedheal.core.parameter import Parameter, declare_parameters

TINY = 1e-10
STEP = {"qfedavg_eff": "reach", "qfedavg": "lr", "reweight": None}  # mode -> the metric that is 1/L
QFFL_Q = Parameter("q", 1.0, "the power of the loss; 0 is uniform", "MarsFL; Li et al. 2020 use 0.001 to 5", ge=0)
QFFL_MODE = Parameter(
    "mode",
    "qfedavg_eff",
    "1/L: effective step (qfedavg_eff) or lr (qfedavg); reweight: L = 0, which oscillates where clients cover more than "
    "2/(1 + 2q) of the way to their own optimum",
    "ours: with L = 1/lr many local steps stall",
    choices=tuple(STEP),
)


@declare_parameters(QFFL_Q, QFFL_MODE)
def qffl_weights(q: float = QFFL_Q.default, mode: str = QFFL_MODE.default) -> Stage:
    """Li et al. 2020: weights by `loss^q`, and a shrunk step unless `mode="reweight"`. `q=0` is uniform averaging."""
    step = STEP[mode]

    def apply(draft: Draft) -> Draft:
        loss = draft.metric("loss") + TINY
        weights, report = np.asarray((loss / loss.max()) ** q), report_loss(draft)  # scaled, so that nothing overflows
        with np.errstate(over="ignore", under="ignore"):
            powers = np.clip(loss**q, 1e-200, 1e200)  # comparable between rounds; bounded, so that sums do not overflow
        draft = replace(draft, weights=weights, unnormalised_weights=powers, report=report)
        if step is None:
            return draft
        d = compute_distances(draft.measure_norms(), "paper")
        scale = compute_shrinkage(normalise_weights(weights), loss, d, draft.metric(step), q)
        return replace(draft, scale=scale, report=report | {"scale": scale})

    return stateless(apply, frozenset({"loss"} | ({step} if step else set())))


def compute_shrinkage(share: Floats, loss: Floats, d: Floats, step: Floats, q: float) -> float:
    """Return `sum F^q / sum F^q (1 + q L d / F)`, with `L = 1/step` and `share` the normalised `F^q`; 0 if L d overflows."""
    if q == 0:
        return 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        excess = float(q * share @ (d / step / loss))
    return 1 / (1 + excess) if np.isfinite(excess) else 0.0
