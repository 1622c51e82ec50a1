"""The fast kernel against its obvious twin: identical masks and counts, sums within rounding, no dependence on order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedheal import Layout, Updates
from fedheal.aggregate import fedavg, fedheal
from fedheal.aggregate.draft import CountMask
from fedheal.aggregate.kernels import cpu, reference
from fedheal.aggregate.kernels.drop import add_undropped

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_random_updates(k, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(k, width, generator=generator, dtype=torch.float64)
    deltas[torch.rand(k, width, generator=generator) < 0.05] = 0.0
    return deltas.to(dtype)


def make_random_case(k, width, dtype, counts_dtype, seed):
    rng = np.random.default_rng(seed)
    deltas = make_random_updates(k, width, dtype, seed)
    counts = torch.from_numpy(rng.integers(0, 9, (k + 2, width))).to(counts_dtype)
    slots = rng.permutation(k + 2)[:k].astype(np.int64)
    rows = rng.permutation(k).astype(np.int64)
    at_least, below = rng.integers(0, 9, k).astype(np.int64), rng.integers(0, 10, k).astype(np.int64)
    weights = rng.random(k)
    return deltas, rows, counts, slots, at_least, below, weights / weights.sum()


@settings(max_examples=30, deadline=None)
@given(
    k=st.integers(1, 11),
    tensors=st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    counts_dtype=st.sampled_from([torch.uint8, torch.uint16, torch.uint32]),
    sign=st.sampled_from([1, -1]),
    seed=st.integers(0, 10**6),
)
def test_the_kernels_agree(k, tensors, dtype, counts_dtype, sign, seed):
    deltas, rows, counts, slots, at_least, below, u = make_random_case(k, sum(tensors), dtype, counts_dtype, seed)
    zeros = torch.zeros(sum(tensors), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    results = []
    for kernel in (reference, cpu):
        mine = counts.clone()
        mask = CountMask(counts=mine, slots=slots, at_least=at_least, below=below, sign=sign)
        measured = kernel.observe(deltas, rows, tensors, mask)
        results.append((mine, measured, *kernel.average(zeros, deltas, rows, u, mask)))
        plain = kernel.measure(deltas, rows, tensors)
        assert plain.kept.tolist() == [tensors] * k
    (counts_a, measured_a, update_a, unkept_a), (counts_b, measured_b, update_b, unkept_b) = results
    assert torch.equal(counts_a.to(torch.int64), counts_b.to(torch.int64))
    assert np.array_equal(measured_a.kept, measured_b.kept)
    assert unkept_a == unkept_b
    np.testing.assert_allclose(measured_a.squares, measured_b.squares, rtol=1e-12)
    masked = reference.mask_block(deltas, rows, mask, 0, sum(tensors)).numpy()
    for which in (mask, None):
        for start, stop in ((0, sum(tensors)), (sum(tensors) // 3, sum(tensors) // 2)):
            blocks = [kernel.mask_block(deltas, rows, which, start, stop) for kernel in (reference, cpu)]
            assert torch.equal(*blocks)
            assert blocks[1].dtype == torch.float64
    share = u[:, None] * np.stack(
        [reference.compute_mask(mask, i, deltas[r].double(), 0, sum(tensors)) for i, r in enumerate(rows)]
    )
    bound = (u[:, None] * np.abs(masked)).sum(axis=0) / np.maximum(share.sum(axis=0), 1e-300)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert np.all(np.abs((update_a - update_b).double().numpy()) <= tolerance * bound + 1e-300)
    plain_a, plain_b = (kernel.average(zeros, deltas, rows, u, None)[0].double().numpy() for kernel in (reference, cpu))
    whole = (u[:, None] * np.abs(deltas[rows].double().numpy())).sum(axis=0)
    assert np.all(np.abs(plain_a - plain_b) <= tolerance * whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [fedavg, fedheal, lambda **k: fedheal(variant="released", **k)])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_the_order_of_clients_changes_no_bit(make, dtype, kernel):
    aggregator = make(kernel=kernel)
    rng = np.random.default_rng(0)
    names, examples = [f"client {i}" for i in range(9)], rng.integers(1, 50, 9)
    finals = []
    for order in (range(9), reversed(range(9)), rng.permutation(9)):
        order = [int(i) for i in order]
        model, state = torch.zeros(5000, dtype=torch.float64 if dtype == torch.float64 else torch.float32), None
        state = aggregator.init(Layout.flat(5000))
        for t in range(4):
            deltas = make_random_updates(9, 5000, dtype, seed=t)[order]
            out = aggregator.apply(model, Updates([names[i] for i in order], deltas, examples[order]), state)
            model, state = out.model, out.state
        finals.append((model, out.weights[torch.tensor(order).argsort()]))
    assert all(torch.equal(model, finals[0][0]) and torch.equal(w, finals[0][1]) for model, w in finals)
    assert bool(model.abs().max() > 0)


def test_the_number_of_threads_changes_no_bit():
    deltas = make_random_updates(20, 300_000, torch.float32)
    aggregator, before, finals = fedheal(kernel="cpu"), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            model, state = torch.zeros(300_000), aggregator.init(Layout.flat(300_000))
            for sign in (1, -1):
                out = aggregator.apply(model, Updates(range(20), sign * deltas, range(1, 21)), state)
                model, state = out.model, out.state
            finals.append((model, out.weights))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(finals[0][0], finals[1][0])
    assert torch.equal(finals[0][1], finals[1][1])


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("how", ["transposed", "every second column", "rows apart"])
def test_updates_that_are_not_contiguous(kernel, how):
    base = make_random_updates(6, 700, torch.float32)
    strided = {
        "transposed": base.T.contiguous().T,
        "every second column": base.repeat_interleave(2, dim=1)[:, ::2],
        "rows apart": torch.cat([base, base], dim=1)[:, :700],
    }[how]
    assert not strided.is_contiguous()
    aggregator = fedheal(kernel=kernel)
    state = aggregator.init(Layout.flat(700))
    ours, theirs = (aggregator.apply(torch.zeros(700), Updates(range(6), d, [1] * 6), state) for d in (strided, base))
    assert torch.equal(ours.model, theirs.model)
    assert torch.equal(ours.weights, theirs.weights)


def test_column_chunks_of_converted_updates_change_nothing(monkeypatch):
    deltas = make_random_updates(5, 20_000, torch.bfloat16)
    aggregator = fedheal(kernel="cpu")
    state = aggregator.init(Layout.flat(20_000))
    whole = aggregator.apply(torch.zeros(20_000), Updates(range(5), deltas, [1] * 5), state)
    monkeypatch.setattr(cpu, "CONVERT", 3000)
    parts = aggregator.apply(torch.zeros(20_000), Updates(range(5), deltas, [1] * 5), state)
    assert torch.equal(whole.model, parts.model)
    assert torch.equal(whole.weights, parts.weights)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_counts_widen_before_they_overflow(kernel, variant):
    """After the 255th and the 65,535th participation the mask is still that of exact arithmetic."""
    aggregator = fedheal(tau=0.5, variant=variant, fael=False, kernel=kernel)
    state = aggregator.init(Layout.flat(2))
    dtypes = {1: torch.uint8}
    up = 1.0 if variant == "paper" else -1.0
    for n in range(1, 270):
        out = aggregator.apply(np.zeros(2), Updates("a", [[up, -up]], [1]), state, donate=True)
        state = out.state
        dtypes[n] = state.stage.states[0].counts.dtype
        assert state.stage.states[0].counts[0].tolist() == [n, 0]
        assert out.model.tolist() == [up, -up]
    assert dtypes[254] == torch.uint8
    assert dtypes[255] == torch.uint16
    consistency = state.stage.states[0]
    consistency.n[:] = 65_533
    consistency.counts[0] = torch.tensor([65_533, 0], dtype=torch.uint16)
    for n in range(65_534, 65_540):
        out = aggregator.apply(np.zeros(2), Updates("a", [[up, up]], [1]), state, donate=True)
        state = out.state
        assert state.stage.states[0].counts[0].tolist() == [n, n - 65_533]
        assert out.model.tolist() == [up, 0.0]  # the second entry was down 65,533 times
    assert state.stage.states[0].counts.dtype == torch.uint32


@pytest.mark.parametrize("donate", [False, True])
def test_donation_changes_no_result(donate):
    aggregator = fedheal()
    model, state = torch.zeros(50), aggregator.init(Layout.flat(50))
    reference_model, reference_state = model, state
    rng = np.random.default_rng(1)
    for t in range(8):
        here = [str(m) for m in range(1 + t)]  # one more client each round: the slab grows
        updates = Updates(here, rng.normal(size=(len(here), 50)).astype(np.float32), [1] * len(here))
        out = aggregator.apply(model, updates, state, donate=donate)
        model, state = out.model, out.state
        counts_before = reference_state.stage.states[0].counts.clone()
        again = aggregator.apply(reference_model, updates, reference_state)
        assert torch.equal(reference_state.stage.states[0].counts, counts_before)
        reference_model, reference_state = again.model, again.state
        assert torch.equal(model, reference_model)


def test_donation_reuses_the_slab_and_growth_is_amortised():
    aggregator = fedheal()
    state = aggregator.init(Layout.flat(1000))
    slabs = set()
    for t in range(60):
        here = [str(m) for m in range(t + 1)]
        state = aggregator.apply(
            torch.zeros(1000), Updates(here, torch.ones(t + 1, 1000), [1] * (t + 1)), state, True
        ).state
        slabs.add(state.stage.states[0].counts.data_ptr())
    assert len(slabs) < 15


@pytest.mark.slow
def test_sign_counts_of_twenty_resnets_fit_in_two_hundred_megabytes():
    aggregator = fedheal()
    deltas = torch.zeros(1, 4_903_242).expand(20, -1)
    out = aggregator.apply(
        torch.zeros(4_903_242), Updates(range(20), deltas, [1] * 20), aggregator.init(Layout.flat(4_903_242))
    )
    assert out.state.stage.states[0].counts.nbytes <= 200e6


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 9000),
    share=st.floats(0, 1),
    values=st.sampled_from(["float32", "ties", "zeros", "tiny", "huge"]),
    seed=st.integers(0, 10**6),
)
def test_dropping_the_smallest_entries_agrees_with_sorting_them(size, share, values, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size).astype(np.float32).astype(np.float64)
    x = {
        "float32": x,
        "ties": np.round(x),
        "zeros": np.where(rng.random(size) < 0.9, rng.choice([0.0, -0.0], size), x),
        "tiny": x * 5e-324,
        "huge": x * 1e300,
    }[values]
    number = int(share * size)
    order = np.argsort(np.abs(x), kind="stable")  # of equal ones the first
    remaining = x.copy()
    remaining[order[:number]] = 0.0
    step, z, zz = np.ones(size), np.zeros(size), np.zeros(size)
    with np.errstate(over="ignore"):  # a norm beyond all numbers: the engine refuses such updates before
        lost = add_undropped(x.copy(), number, 0.25, step, z, zz)
        norm = np.sqrt((remaining**2).sum()) or 1.0
    assert lost == pytest.approx(np.abs(x[order[:number]]).mean() if number else 0.0, rel=1e-9, abs=1e-300)
    np.testing.assert_array_equal(step, 1 + 0.25 * remaining)
    np.testing.assert_allclose(z, remaining / norm, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(zz, (remaining / norm) ** 2, rtol=1e-9, atol=1e-300)
