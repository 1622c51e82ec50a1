"""FPHL at the clients: two sums give the model the server would have made from all updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedheal import Layout, Updates
from fedheal.aggregate import BadUpdate, State, client_share, combine, fedheal

NET = Layout.of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))  # 12 + 4 + 20 + 5 = 41 parameters in four tensors
G = NET.sizes().params


def make_cohorts(number=12, clients=7, dtype=torch.float64, seed=0):
    """Yield cohorts of random clients; each client drifts its own way, so that masks differ, and some entries are 0."""
    rng = np.random.default_rng(seed)
    drift = rng.normal(size=(clients, G))
    for t in range(number):
        present = [m for m in range(clients) if rng.random() < 0.6 or m == t % clients]
        rows = drift[present] + 1.5 * rng.normal(size=(len(present), G))
        rows[rng.random(rows.shape) < 0.05] = 0.0
        examples = rng.integers(1, 90, len(present))
        yield Updates([f"c{m}" for m in present], torch.from_numpy(rows).to(dtype), examples)


def run_client_round(model, updates, u, states, tau, variant):
    """Run a round with masks on the clients and a server that sees only sums."""
    numerator = torch.zeros(G, dtype=torch.float64)
    denominator, shares = torch.zeros_like(numerator), {}
    for i, client in enumerate(updates.clients):
        share, states[client] = client_share(updates.deltas[i], states.get(client), tau, variant, NET)
        numerator += u[i] * share.masked.to(torch.float64)
        denominator += u[i] * share.kept
        shares[client] = share
    return combine(model, numerator, denominator), shares


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("tau", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("fael", [False, "momentum"])
def test_the_same_model_as_the_server_makes(variant, tau, fael):
    server = fedheal(tau=tau, variant=variant, fael=fael, kernel="reference")
    state, states = server.init(NET), {}
    theirs = ours = torch.zeros(G, dtype=torch.float64)
    unkept = 0.0
    for updates in make_cohorts():
        out = server.apply(theirs, updates, state)
        theirs, state = out.model, out.state
        u = updates.num_examples if fael is False else 7.25 * out.weights  # any multiple of the weights will do
        ours, shares = run_client_round(ours, updates, u, states, tau, variant)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        unkept = max(unkept, *(1 - float(share.kept.double().mean()) for share in shares.values()))
        if fael:
            for client, distance in out.report["distance"].items():
                assert shares[client].distance == pytest.approx(distance, rel=1e-12)
    assert (unkept > 0.1) == (tau >= 0.3 or variant == "released")
    assert bool(theirs.abs().min() > 0)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)])
def test_narrow_updates(variant, dtype, tolerance):
    server = fedheal(tau=0.5, variant=variant, fael=False)
    state, states = server.init(NET), {}
    theirs = ours = torch.zeros(G)
    for updates in make_cohorts(dtype=dtype):
        out = server.apply(theirs, updates, state)
        theirs, state = out.model, out.state
        ours, shares = run_client_round(ours, updates, updates.num_examples, states, 0.5, variant)
        assert all(share.masked.dtype == dtype for share in shares.values())
        assert ours.dtype == torch.float32
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_a_client_may_store_its_state_between_rounds(variant):
    plain, stored = None, None
    for updates in make_cohorts(number=6):
        share, plain = client_share(updates.deltas[0], plain, 0.5, variant)
        again, state = client_share(updates.deltas[0], stored, 0.5, variant)
        assert torch.equal(share.kept, again.kept)
        assert torch.equal(share.masked, again.masked)
        arrays, json = state.to_arrays()
        stored = State.from_arrays({name: array.clone() for name, array in arrays.items()}, json)


def test_three_rounds_by_hand():
    # tau 0.6, paper. Entry 1: +, +, -: 1 of 1, 2 of 2, then down with 1 of 3 = 0.33: dropped. Entry 2: -, 0, +. A zero counts
    # as up: 1 of 1 down, then up with 1 of 2 = 0.5: dropped, then up with 2 of 3 = 0.67: kept.
    state, kept, distances = None, [], []
    for delta in ([1.0, -2.0], [3.0, 0.0], [-5.0, 4.0]):
        share, state = client_share(np.array(delta), state, tau=0.6)
        kept.append(share.kept.tolist())
        distances.append(share.distance)
        assert share.masked.tolist() == [x * k for x, k in zip(delta, share.kept.tolist(), strict=True)]
    assert kept == [[True, True], [True, False], [False, True]]
    assert distances == [5, 9, 16]


def test_three_rounds_of_the_released_code_by_hand():
    # History before the round only, strictly more than tau = 0.5 of it, a zero of D counts with the decreases.
    # Entry 1: +, +, -: all; 1 of 1; down 0 of 2: dropped.  Entry 2: 0, -, +: all; down 1 of 1; up 0 of 2: dropped.
    state, kept, distances = None, [], []
    for delta in ([3.0, 0.0], [3.0, -4.0], [-3.0, 4.0]):
        share, state = client_share(np.array(delta), state, tau=0.5, variant="released")
        kept.append(share.kept.tolist())
        distances.append(share.distance)
    assert kept == [[True, True], [True, True], [False, False]]
    assert distances == [3, 5, 0]  # norms, not squares


def test_the_released_distance_is_summed_over_the_layouts_tensors():
    # Linear(1, 1): weight 3, bias 4.  One tensor each: 3 + 4 = 7;  as one vector: 5.
    delta = np.array([3.0, 4.0])
    assert client_share(delta, variant="released", layout=Layout.of(nn.Linear(1, 1)))[0].distance == 7
    assert client_share(delta, variant="released")[0].distance == 5
    assert client_share(delta, layout=Layout.of(nn.Linear(1, 1)))[0].distance == 25


def test_the_state_given_is_not_changed():
    _, state = client_share(np.array([1.0, -1.0]))
    before = {name: array.clone() for name, array in state.to_arrays()[0].items()}
    first, _ = client_share(np.array([-1.0, -1.0]), state, tau=0.6)
    second, _ = client_share(np.array([-1.0, -1.0]), state, tau=0.6)
    assert first.kept.tolist() == second.kept.tolist() == [False, True]
    assert all(torch.equal(before[name], array) for name, array in state.to_arrays()[0].items())


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_one_client_one_entry(variant):
    share, state = client_share(np.array([-2.0]), variant=variant)
    assert (share.masked.tolist(), share.kept.tolist()) == ([-2.0], [True])
    model = combine(torch.tensor([1.0]), 3 * share.masked, 3.0 * share.kept)
    assert model.tolist() == [-1]
    share, _ = client_share(np.array([2.0]), state, tau=1.0, variant=variant)
    assert share.kept.tolist() == [False]
    assert combine(model, 3 * share.masked, 3.0 * share.kept).tolist() == [-1]


def test_a_zero_update_is_kept_and_has_no_distance():
    share, _ = client_share(np.zeros(3), tau=1.0)
    assert share.kept.tolist() == [True] * 3
    assert share.distance == 0


def test_combine_does_not_change_what_it_is_given_nor_the_dtype():
    model, numerator, denominator = torch.ones(2), torch.tensor([3.0, 0.0]).double(), torch.tensor([2.0, 0.0]).double()
    combined = combine(model, numerator, denominator)
    assert (combined.tolist(), combined.dtype) == ([2.5, 1.0], torch.float32)
    assert (model.tolist(), numerator.tolist(), denominator.tolist()) == ([1, 1], [3, 0], [2, 0])


def test_combine_rounds_once_as_the_server_does():
    # bfloat16 has steps of 2^-7 above 1 and of 2^-15 above 2^-8.  1 + 0.003907 is beyond the middle, 1 + 2^-8: up to 1 + 2^-7.
    # Rounding the update first would give 2^-8, and 1 + 2^-8 goes to the even neighbour 1.
    model = torch.ones(1, dtype=torch.bfloat16)
    server = fedheal(fael=False)
    theirs = server.apply(model, Updates("a", torch.tensor([[0.003907]]), [1]), server.init(Layout.flat(1))).model
    assert theirs.item() == 1 + 2**-7
    assert combine(model, torch.tensor([0.003907]), torch.ones(1)).item() == theirs.item()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
def test_an_update_that_is_not_finite_is_refused(bad):
    _, state = client_share(np.array([1.0, 1.0]))
    before = state.counts.tolist()
    with pytest.raises(BadUpdate, match="NaN, infinity or numbers too large"):
        client_share(np.array([1.0, bad]), state)
    assert state.counts.tolist() == before


@pytest.mark.parametrize("tau", [-0.1, 1.1, float("nan"), True, "0.3"])
def test_tau_is_a_number_from_0_to_1(tau):
    with pytest.raises(ValueError, match=r"tau = .*: use a number from 0 to 1"):
        client_share(np.ones(2), tau=tau)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match=r"variant = 'other': use one of .*released"):
        client_share(np.ones(2), variant="other")


@pytest.mark.parametrize(("first", "second"), [(5, 3), (3, 5)])
def test_the_state_of_another_length_is_refused(first, second):
    _, state = client_share(np.ones(first))
    with pytest.raises(ValueError, match=rf"{first}.*{second}|{second}.*{first}"):
        client_share(np.ones(second), state)


def test_the_state_of_the_other_variant_is_refused():
    _, state = client_share(np.ones(2))
    with pytest.raises(ValueError, match="other variant"):
        client_share(np.ones(2), state, variant="released")


@pytest.mark.parametrize("length", [3, 7])
def test_a_layout_that_does_not_fit_is_refused(length):
    with pytest.raises(ValueError, match=rf"{length}.*5|5.*{length}"):
        client_share(np.ones(5), layout=Layout.flat(length))


@pytest.mark.parametrize("delta", [np.ones((2, 2)), np.ones(0), np.array(["a"]), None, np.ones(2, np.complex64)])
def test_what_is_no_vector_of_numbers_is_refused(delta):
    with pytest.raises((TypeError, ValueError)):
        client_share(delta)
