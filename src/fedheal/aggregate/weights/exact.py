"""FAEL's objective solved exactly: the weights that make the global model equally far from all clients.

Let `K = D D^T` and `d_m = |sum_j p_j D_j - D_m|^2`. The variance of `d` over clients is `|C (a - 2 K p)|^2 / M`, with
`a` the diagonal of K and C the centring matrix. This is a convex quadratic in p. We minimise, on the simplex with
`p >= floor`,

    |C (a - 2 K p)|^2 / (M sbar^2) + ridge |p - reference|^2,       sbar = mean(a).

On the simplex every target can be folded into the matrix (`b = b 1^T x`). What is left is the point of smallest norm in
the hull of the matrix's columns. This is a non-negative least squares problem: if y minimises `|B y|^2 + (1^T y - 1)^2`
over `y >= 0`, then `y / sum y` minimises `|B x|^2` over the simplex. scipy solves it exactly.
"""

from dataclasses import replace

import numpy as np
import scipy

from fedheal.aggregate.draft import Draft
from fedheal.aggregate.gram import compute_gram
from fedheal.aggregate.stage import Stage, stateless
from fedheal.core.arrays import Floats, normalise_weights
from fedheal.core.parameter import Parameter, declare_parameters

TOLERANCE = 1e-8
ROUNDING = 1e-12  # what rounding may leave of the free weight where the floors take all of it
EXACT_RIDGE = Parameter("ridge", 1e-4, "pull towards the reference weights, which makes them unique", "ours", gt=0)
TOWARDS = ("examples", "uniform")
EXACT_TOWARDS = Parameter(
    "towards", "examples", "the reference: examples or uniform", "ours: FedAvg's weights", choices=TOWARDS
)
EXACT_FLOOR = Parameter("floor", 0.0, "least weight, as a share of 1/K", "ours: none", ge=0, le=1)


@declare_parameters(EXACT_RIDGE, EXACT_TOWARDS, EXACT_FLOOR)
def exact_weights(
    ridge: float = EXACT_RIDGE.default, towards: str = EXACT_TOWARDS.default, floor: float = EXACT_FLOOR.default
) -> Stage:
    """Give the weights that make the global model equally far from all clients; `floor` is a share of `1/K`.

    The report has their variance and that of others. With FPHL, the masked updates' Gram matrix is a surrogate.
    """

    def apply(draft: Draft) -> Draft:
        k = len(draft.rows)
        candidates = {"examples": normalise_weights(draft.num_examples), "uniform": np.full(k, 1 / k)}
        matrix = compute_gram(draft, centre=True)  # a common drift cancels in the objective anyway
        weights, residual = solve_weights(matrix, candidates[towards], ridge, floor / k)
        scale = float(np.diag(matrix).mean())
        unit = matrix / scale if scale > 0 else matrix
        variance = {
            name: float(compute_model_distances(unit, p).var()) * scale * scale
            for name, p in {"reached": weights, **candidates}.items()
        }
        distance = draft.key_by_client(compute_model_distances(matrix, weights))
        report = {"variance": variance, "scale": scale, "kkt": residual, "distance": distance}
        return replace(draft, weights=weights, unnormalised_weights=k * weights, report={**draft.report, **report})

    return stateless(apply)


def compute_model_distances(gram: Floats, p: Floats) -> Floats:
    """Return `|sum_j p_j D_j - D_m|^2` for every m. The objective is the variance of these distances to the global model."""
    return np.asarray(p @ gram @ p - 2 * gram @ p + np.diag(gram))


def solve_weights(gram: Floats, reference: Floats, ridge: float, floor: float) -> tuple[Floats, float]:
    """Return the minimiser and its KKT residual.

    >>> p, residual = solve_weights(np.diag([1.0, 1.0, 1.0, 4.0, 4.0, 4.0]), np.full(6, 1 / 6), 1e-8, 0.0)
    >>> p.round(4).tolist()  # small updates get no weight: that is the objective, no fault of the solver
    [0.0, 0.0, 0.0, 0.3333, 0.3333, 0.3333]
    """
    m = len(gram)
    free = 1 - m * floor
    scale = np.diag(gram).mean()
    if scale == 0 or m == 1 or free <= ROUNDING:  # all weights are equally good, or the floors take everything
        return floor + max(free, 0.0) * reference if floor else reference.copy(), 0.0
    centre = np.eye(m) - 1 / m
    unit = gram / scale
    rows = np.vstack([2 * centre @ unit, np.sqrt(ridge * m) * np.eye(m)]) / np.sqrt(m)
    target = np.concatenate([centre @ np.diag(unit), np.sqrt(ridge * m) * reference]) / np.sqrt(m)
    # p = floor + free * x with x on the simplex, so rows @ p - target = (free * rows + (rows @ floor - target) 1^T) x.
    hull = free * rows + (rows.sum(axis=1) * floor - target)[:, None]
    y, _ = scipy.optimize.nnls(np.vstack([hull, np.ones(m)]), np.append(np.zeros(len(hull)), 1.0), maxiter=30 * m)
    p = floor + free * _polish(hull, y / y.sum())
    residual = compute_kkt_residual(rows, target, p, floor)
    if not residual <= TOLERANCE:
        raise RuntimeError(f"the equal-distance weights were not found to {TOLERANCE:g} (KKT residual {residual:.1e})")
    return p, residual


def _polish(hull: Floats, x: Floats) -> Floats:
    """Solve exactly on the support, to regain the digits that the soft sum constraint has cost."""
    support = np.flatnonzero(x > 0)
    r = np.asarray(np.linalg.qr(hull[:, support], mode="r"), np.float64)
    try:
        z = np.linalg.solve(r, np.linalg.solve(r.T, np.ones(len(support))))
    except np.linalg.LinAlgError:  # the objective reaches 0, as it does for two equal clients: x is exact already
        return x
    z /= z.sum()
    if not (np.isfinite(z).all() and (z > 0).all()):
        return x
    polished = np.zeros_like(x)
    polished[support] = z
    return polished


def compute_kkt_residual(rows: Floats, target: Floats, p: Floats, floor: float) -> float:
    """Return how far p is from optimal: its infeasibility, or the slope that a feasible move could still follow downhill."""
    gradient = 2 * rows.T @ (rows @ p - target)
    free = p > floor
    level = float(gradient[free].mean()) if free.any() else float(gradient.min())
    slope = np.where(free, np.abs(gradient - level), np.maximum(level - gradient, 0))
    return float(max(abs(p.sum() - 1), (floor - p).max(), slope.max()))
