"""FAEL's objective solved exactly, against other solvers, closed forms and the definition itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedheal import Layout, Updates
from fedheal.aggregate import Aggregator, fedheal, gram
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.weights.exact import compute_model_distances, solve_weights

SETTINGS = {  # ridge, towards uniform?, floor as a share of 1/K
    "exact": (1e-4, False, 0.0),
    "exact-reg": (1.0, True, 0.2),
    "nearly no ridge": (1e-8, False, 0.0),
    "half by floor": (1e-4, False, 0.5),
    "nearly all by floor": (1e-4, False, 0.999),
}


def make_problem(updates, setting, seed=0):
    """Return the arguments of `solve_weights`: the Gram matrix of the centred updates, reference, ridge and floor."""
    centred = updates - updates.mean(axis=0)
    gram, k = centred @ centred.T, len(updates)
    ridge, uniform, floor = SETTINGS[setting]
    examples = np.random.default_rng(seed).integers(1, 100, k).astype(float)
    return (gram + gram.T) / 2, np.full(k, 1 / k) if uniform else examples / examples.sum(), ridge, floor / k


def compute_objective(p, gram, reference, ridge):
    """Return `|C (a - 2 K p)|^2 / (M sbar^2) + ridge |p - reference|^2`, in long double precision."""
    unit = np.asarray(gram, np.longdouble) / np.diag(np.asarray(gram, np.longdouble)).mean()
    return float((np.diag(unit) - 2 * unit @ p).var() + ridge * ((p - reference) ** 2).sum())


def compute_residual(p, gram, reference, ridge, floor):
    """Return by how much p violates the KKT conditions: it is feasible, and no mass can move to a smaller derivative."""
    unit = np.asarray(gram, np.longdouble) / np.diag(np.asarray(gram, np.longdouble)).mean()
    away = np.diag(unit) - 2 * unit @ p
    gradient = -4 * unit @ (away - away.mean()) / len(p) + 2 * ridge * (p - reference)
    donors = p > floor + 1e-13
    downhill = gradient[donors].max() - gradient.min() if donors.any() else 0.0
    return float(max(abs(p.sum() - 1), (floor - p).max(), downhill))


def assert_solved(gram, reference, ridge, floor):
    p, reported_residual = solve_weights(gram, reference, ridge, floor)
    assert compute_residual(p, gram, reference, ridge, floor) <= 1e-8
    assert reported_residual <= 1e-8
    assert p.min() >= floor * (1 - 1e-12)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    return p


def project_to_simplex(v, floor):
    """Return the nearest point with sum 1 and all entries at least `floor`."""
    free = 1 - len(v) * floor
    ordered = np.sort(v)[::-1]
    threshold = (np.cumsum(ordered) - free - floor * np.arange(1, len(v) + 1)) / np.arange(1, len(v) + 1)
    count = np.flatnonzero(ordered - floor > threshold)[-1]
    return np.maximum(v - threshold[count], floor)


def run_projected_gradient(gram, reference, ridge, floor, steps=4000):
    """Minimise by accelerated projected gradient descent, independently of the least-squares solver."""
    unit, k = gram / np.diag(gram).mean(), len(gram)
    centred = unit - unit.mean(axis=0)
    step = 1 / (8 / k * np.linalg.norm(centred.T @ centred, 2) + 2 * ridge)
    p = ahead = project_to_simplex(reference, floor)
    t = 1.0
    for _ in range(steps):
        away = np.diag(unit) - 2 * unit @ ahead
        gradient = -4 * unit @ (away - away.mean()) / k + 2 * ridge * (ahead - reference)
        new = project_to_simplex(ahead - step * gradient, floor)
        after = (1 + np.sqrt(1 + 4 * t * t)) / 2
        ahead = new + (t - 1) / after * (new - p)
        p, t = new, after
    return p


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["exact", "exact-reg"])
@pytest.mark.parametrize("k", [2, 5, 20])
@pytest.mark.parametrize("length", [1, 40])
def test_against_a_long_projected_gradient_run(k, length, setting):
    rng = np.random.default_rng([k, length])
    gram, reference, ridge, floor = make_problem(rng.normal(size=(k, length)) * rng.uniform(0.5, 2, (k, 1)), setting)
    p = assert_solved(gram, reference, ridge, floor)
    other = run_projected_gradient(gram, reference, ridge, floor)
    best = compute_objective(p, gram, reference, ridge)
    assert best <= compute_objective(other, gram, reference, ridge) + 1e-14
    if compute_residual(other, gram, reference, ridge, floor) < 1e-9:
        np.testing.assert_allclose(p, other, atol=1e-5)


@pytest.mark.parametrize("setting", ["exact", "exact-reg"])
@pytest.mark.parametrize("k", [2, 4, 8, 14])
def test_against_a_general_solver(k, setting):
    rng = np.random.default_rng(k)
    gram, reference, ridge, floor = make_problem(rng.normal(size=(k, 30)) * rng.uniform(0.3, 2, (k, 1)), setting)
    p = assert_solved(gram, reference, ridge, floor)
    solution = minimize(
        compute_objective,
        np.full(k, 1 / k),
        (gram, reference, ridge),
        method="SLSQP",
        bounds=[(floor, 1)] * k,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert compute_objective(p, gram, reference, ridge) <= solution.fun + 1e-12
    np.testing.assert_allclose(p, solution.x, atol=2e-3)


@pytest.mark.parametrize("setting", ["exact", "exact-reg"])
def test_three_clients_against_every_point_of_a_grid(setting):
    gram, reference, ridge, floor = make_problem(np.array([[1.0, 0], [0, 2], [-3, 1]]), setting)
    best = compute_objective(assert_solved(gram, reference, ridge, floor), gram, reference, ridge)
    grid = [np.array([i, j, 60 - i - j]) / 60 for i in range(61) for j in range(61 - i)]
    values = [compute_objective(p, gram, reference, ridge) for p in grid if p.min() >= floor]
    assert best <= min(values)
    assert min(values) - best < 0.01


def test_orthogonal_updates_by_hand():
    # s = (M - 2) / sum 1/a = 1 / (1/2 + 1/3 + 1/4) = 12/13.   p = (1 - s/a)/2 = 7/26, 9/26, 10/26, which sum to 1.
    for reference in (np.full(3, 1 / 3), np.array([0.8, 0.1, 0.1])):
        p = assert_solved(np.diag([2.0, 3.0, 4.0]), reference, 1e-12, 0.0)
        np.testing.assert_allclose(p, np.array([7, 9, 10]) / 26, atol=1e-9)
        assert compute_model_distances(np.diag([2.0, 3.0, 4.0]), p).var() < 1e-15


@pytest.mark.parametrize("k", [3, 6, 20])
def test_orthogonal_updates_by_the_closed_form(k):
    a = np.random.default_rng(k).uniform(1.0, 1.05, k)
    s = (k - 2) / (1 / a).sum()
    closed = (1 - s / a) / 2
    assert closed.min() > 0
    p = assert_solved(np.diag(a), np.full(k, 1 / k), 1e-13, 0.0)
    np.testing.assert_allclose(p, closed, atol=1e-8)


def test_small_updates_are_silenced_which_is_the_objective_and_not_the_solver():
    p = assert_solved(np.diag([1.0] * 10 + [4.0] * 10), np.full(20, 0.05), 1e-8, 0.0)
    assert p[:10].tolist() == [0.0] * 10
    np.testing.assert_allclose(p[10:], 0.1, atol=1e-12)


def test_two_clients_meet_in_the_middle():
    # Any two models are equally far from their midpoint; the ridge pulls towards the reference.  With the centred updates
    # -x and x, |x|^2 = 1: K = [[1, -1], [-1, 1]], a - 2 K p = 1 -+ 2 (p - q), so the variance is 4 (p - q)^2.
    # p = 1/2 + e: 16 e^2 + 2 ridge (e - r)^2 with reference 1/2 + r: e = ridge r / (8 + ridge).
    p, _ = solve_weights(np.array([[1.0, -1], [-1, 1]]), np.array([0.9, 0.1]), 1.0, 0.0)
    np.testing.assert_allclose(p, [0.5 + 0.4 / 9, 0.5 - 0.4 / 9], rtol=1e-14)


@settings(max_examples=80, deadline=None)
@given(
    k=st.integers(2, 20),
    length=st.sampled_from([1, 2, 3, 10, 200]),
    spread=st.sampled_from([0.0, 0.5, 4.0, 12.0]),
    kind=st.sampled_from(["plain", "duplicates", "drift", "integers", "one mover"]),
    setting=st.sampled_from(sorted(SETTINGS)),
    seed=st.integers(0, 10**6),
)
def test_kkt_holds_on_whatever_comes(k, length, spread, kind, setting, seed):
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=(k, length)) * 10.0 ** rng.uniform(-spread, spread, (k, 1))
    if kind == "duplicates":
        updates = updates[rng.integers(0, max(k // 2, 1), k)]
    if kind == "drift":
        updates += 1e6 * rng.normal(size=length)
    if kind == "integers":
        updates = rng.integers(-1, 2, (k, min(length, 3))).astype(float)
    if kind == "one mover":
        updates[1:] = 0.0
    gram, reference, ridge, floor = make_problem(updates, setting, seed)
    if np.diag(gram).mean() > 0:
        assert_solved(gram, reference, ridge, floor)


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_ill_conditioned_gram_matrix(setting):
    for k in (5, 12, 20):
        hilbert = 1 / (np.arange(k)[:, None] + np.arange(k) + 1.0)  # condition number above 1e16 from k = 12
        assert_solved(hilbert, *make_problem(np.zeros((k, 1)), setting)[1:])


@pytest.mark.parametrize("setting", ["exact", "exact-reg"])
def test_duplicates_and_fewer_entries_than_clients(setting):
    rng = np.random.default_rng(0)
    for updates in (rng.normal(size=(9, 2)), rng.normal(size=(12, 1)), np.repeat(rng.normal(size=(3, 50)), 4, axis=0)):
        gram, reference, ridge, floor = make_problem(updates, setting)
        p = assert_solved(gram, reference, ridge, floor)
        if updates.shape[1] == 50 and setting == "exact":
            # Only the sum over duplicates matters to the distances: within them, the ridge keeps the reference's differences.
            for copies in np.split(np.arange(12), 3):
                on = copies[p[copies] > 0]
                np.testing.assert_allclose(np.ptp((p - reference)[on]) if len(on) else 0, 0, atol=1e-7)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("scale", [1e-30, 1e-300, 1e30, 1e290])
def test_the_scale_of_the_updates_changes_nothing(setting, scale):
    rng = np.random.default_rng(1)
    gram, *rest = make_problem(rng.normal(size=(7, 20)) * rng.uniform(0.3, 2, (7, 1)), setting)
    p = assert_solved(gram * scale, *rest)
    np.testing.assert_allclose(p, solve_weights(gram, *rest)[0], atol=1e-9)


@pytest.mark.parametrize("setting", ["exact", "exact-reg"])
@pytest.mark.parametrize(("k", "length", "copies"), [(300, 1000, 1), (300, 40, 5), (100, 3, 1)])
def test_many_clients(setting, k, length, copies):
    rng = np.random.default_rng(k)
    updates = np.repeat(rng.normal(size=(k // copies, length)) * rng.uniform(0.3, 2, (k // copies, 1)), copies, axis=0)
    assert_solved(*make_problem(updates, setting))


@pytest.mark.parametrize("setting", ["exact", "exact-reg"])
def test_the_order_of_clients_does_not_matter(setting):
    rng = np.random.default_rng(2)
    gram, reference, ridge, floor = make_problem(rng.normal(size=(8, 20)) * rng.uniform(0.3, 2, (8, 1)), setting)
    order = rng.permutation(8)
    p, _ = solve_weights(gram, reference, ridge, floor)
    shuffled, _ = solve_weights(gram[np.ix_(order, order)], reference[order], ridge, floor)
    np.testing.assert_allclose(shuffled, p[order], atol=1e-10)


def test_the_regularised_rule_keeps_everyone_above_the_floor():
    rng = np.random.default_rng(3)
    for k in (2, 5, 20):
        # One giant and many that hardly move: without floor and ridge most would get nothing.
        updates = rng.normal(size=(k, 30)) * np.array([10.0] + [0.1] * (k - 1))[:, None]
        p = assert_solved(*make_problem(updates, "exact-reg"))
        assert p.min() >= 0.2 / k - 1e-15
    four = np.repeat(np.eye(4) * [1, 2, 3, 4], 5, axis=0) @ rng.normal(size=(4, 500)) + 0.3 * rng.normal(size=(20, 500))
    assert (
        assert_solved(*make_problem(four, "exact-reg")) > 0.2 / 20
    ).sum() >= 15  # nearly all above it, none silenced


@pytest.mark.parametrize("below", [0.0, 1e-15, 1e-13, 1e-11, 1e-9, 1e-6])
def test_a_floor_of_an_equal_part_is_uniform_for_any_number_of_clients(below):
    rng = np.random.default_rng(8)
    for k in range(1, 65):
        aggregator = Aggregator(STAGES["fael-exact"](floor=1.0 - below))
        updates = Updates(range(k), rng.normal(size=(k, 50)), rng.integers(1, 90, k))
        out = aggregator.apply(np.zeros(50), updates, aggregator.init(Layout.flat(50)))
        np.testing.assert_allclose(out.weights, 1 / k, atol=1e-12 + below)


def test_the_exact_rule_beats_example_shares_and_uniform_on_its_own_objective():
    rng = np.random.default_rng(4)
    aggregator = fedheal(fael="exact", fphl=False)
    updates = Updates(range(6), rng.normal(size=(6, 50)) * rng.uniform(0.3, 2, (6, 1)), rng.integers(1, 99, 6))
    variance = aggregator.apply(np.zeros(50), updates, aggregator.init(Layout.flat(50))).report["variance"]
    assert variance["reached"] < min(variance["examples"], variance["uniform"])


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("fael", ["exact", "exact-reg"])
@pytest.mark.parametrize("fphl", [True, False])
def test_the_report_is_the_definition(kernel, fael, fphl, monkeypatch):
    """Var_m |sum_j p_j D_j - D_m|^2 over the kept entries, with the mask worked out here."""
    monkeypatch.setattr(gram, "BLOCK", 64)  # several blocks of columns, the last one short
    rng = np.random.default_rng(5)
    k, width, tau = 5, 1000, 0.6
    aggregator = fedheal(tau=tau, fael=fael, fphl=fphl, kernel=kernel)
    state, ups = aggregator.init(Layout.flat(width)), np.zeros((k, width))
    names, examples = [f"c{i}" for i in range(k)], rng.integers(1, 99, k)
    for n in (1, 2, 3):
        rows = rng.normal(size=(k, width)) * rng.uniform(0.3, 2, (k, 1)) + 0.5
        out = aggregator.apply(np.zeros(width), Updates(names, rows, examples), state)
        state = out.state
        ups += rows >= 0
        agree = np.where(rows >= 0, ups, n - ups)
        kept = rows * (5 * agree >= 3 * n) if fphl else rows
    assert not fphl or (kept == 0).mean() > 0.05
    centred = kept - kept.mean(axis=0)

    def compute_distances(p):
        return ((p @ centred - centred) ** 2).sum(axis=1)

    p = out.weights.numpy()
    shares, uniform = examples / examples.sum(), np.full(k, 1 / k)
    variance = out.report["variance"]
    np.testing.assert_allclose(list(out.report["distance"].values()), compute_distances(p), rtol=1e-11)
    scale = out.report["scale"] ** 2
    for name, weights in (("reached", p), ("examples", shares), ("uniform", uniform)):
        np.testing.assert_allclose(variance[name], compute_distances(weights).var(), rtol=1e-9, atol=1e-12 * scale)
    assert out.report["scale"] == pytest.approx((centred**2).sum(axis=1).mean(), rel=1e-12)
    assert out.report["kkt"] <= 1e-8
    ridge, towards_uniform, floor = SETTINGS[fael]
    reference = uniform if towards_uniform else shares
    assert compute_residual(p, centred @ centred.T, reference, ridge, floor / k) <= 1e-8


@pytest.mark.parametrize(("fael", "weights"), [("exact", [0.1, 0.3, 0.6]), ("exact-reg", [1 / 3] * 3)])
@pytest.mark.parametrize("value", [0.0, 0.1])
def test_updates_that_are_all_the_same_get_the_reference_weights(fael, weights, value):
    aggregator = fedheal(fael=fael)
    out = aggregator.apply(
        np.zeros(7), Updates("abc", np.full((3, 7), value), [1, 3, 6]), aggregator.init(Layout.flat(7))
    )
    np.testing.assert_allclose(out.weights, weights, rtol=1e-12)
    assert out.report["variance"]["reached"] == pytest.approx(0, abs=1e-30)


@pytest.mark.parametrize("fael", ["exact", "exact-reg"])
def test_one_client_gets_everything(fael):
    aggregator = fedheal(fael=fael)
    out = aggregator.apply(np.zeros(2), Updates("a", [[1.0, -2.0]], [5]), aggregator.init(Layout.flat(2)))
    assert out.weights.tolist() == [1.0]
    assert out.model.tolist() == [1, -2]


@pytest.mark.parametrize("fael", ["exact", "exact-reg"])
@pytest.mark.parametrize("scale", [1e-100, 1e-30, 1e30, 1e100])
def test_the_aggregator_does_not_mind_the_scale_either(fael, scale):
    rng = np.random.default_rng(6)
    rows, weights = rng.normal(size=(4, 20)) * rng.uniform(0.3, 2, (4, 1)), []
    for factor in (1.0, scale):
        aggregator = fedheal(fael=fael)
        updates = Updates(range(4), torch.from_numpy(rows * factor), [1, 2, 3, 4])
        out = aggregator.apply(torch.zeros(20, dtype=torch.float64), updates, aggregator.init(Layout.flat(20)))
        weights.append(out.weights.numpy())
    np.testing.assert_allclose(weights[1], weights[0], atol=1e-9)


def test_beta_is_ignored_and_nothing_is_remembered():
    rng = np.random.default_rng(7)
    updates = Updates(range(4), rng.normal(size=(4, 20)), [1, 2, 3, 4])
    results = []
    for beta in (0.0, 0.4, 1.0):
        aggregator = fedheal(fael="exact", beta=beta, fphl=False)
        state = aggregator.init(Layout.flat(20))
        for _ in range(2):
            out = aggregator.apply(np.zeros(20), updates, state)
            state = out.state
            results.append(out.weights.tolist())
    assert all(weights == results[0] for weights in results)


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_two_clients_whose_mean_is_the_reference_share_the_weight(floor):
    """The matrix of the least squares problem is exactly singular then, on some machines to the last digit."""
    for matrix in (np.eye(2), np.array([[3.0, 0.5], [0.5, 3.0]])):
        p, residual = solve_weights(matrix, np.full(2, 0.5), 1e-4, floor)
        assert p.tolist() == pytest.approx([0.5, 0.5], abs=1e-12)
        assert residual < 1e-12
