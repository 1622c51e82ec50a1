"""FedHEAL's extensions: by hand, against an independent reading, and as reductions to what they extend."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedheal import Layout, Packed, Updates
from fedheal.aggregate import BadUpdate, fedavg, fedheal
from fedheal.aggregate.kernels import reference
from fedheal.core.state import State
from fedheal.core.updates import Reply
from oracle_extensions import ExtendedOracle

from .test_oracle import make_cohorts, make_layout

ROUNDS = 25
DOMAINS = {f"client-{m}": "abc"[m % 3] for m in range(9)}


def apply_rounds(aggregator, rounds, clients=("a", "b"), domains=None):
    """Apply rounds of (rows, examples) to a model of zeros; return each round's result."""
    size = len(rounds[0][0][0])
    model, state, results = torch.zeros(size, dtype=torch.float64), aggregator.init(Layout.flat(size)), []
    for rows, examples in rounds:
        updates = Updates(
            clients,
            torch.tensor(rows, dtype=torch.float64),
            examples,
            domains=None if domains is None else list(domains),
        )
        out = aggregator.apply(model, updates, state)
        results.append(out)
        model, state = out.model, out.state
    return results


# Soft masks


def test_a_soft_mask_by_hand() -> None:
    # tau 0, examples 1 and 3, weights 1/4 and 3/4 (fael off). Round 1: everything agrees with itself.
    # Round 2: a goes (-4, 2) after (1, 1): c = 1/2, 1.  b goes (8, 2) after (1, -1): c = 1, 1/2.
    #   entry 1: (1/4 * 1/2 * -4 + 3/4 * 8) / (1/8 + 3/4) = 5.5 / 0.875 = 44/7
    #   entry 2: (1/4 * 2 + 3/4 * 1/2 * 2) / (1/4 + 3/8) = 2, as both say 2
    aggregator = fedheal(tau=0.0, soft=True, fael=False)
    first, second = apply_rounds(aggregator, [([[1, 1], [1, -1]], [1, 3]), ([[-4, 2], [8, 2]], [1, 3])])
    assert first.model.tolist() == pytest.approx([1, -0.5], rel=1e-15)
    assert (second.model - first.model).tolist() == pytest.approx([44 / 7, 2], rel=1e-14)
    assert second.report["kept"] == {"a": 1.0, "b": 1.0}


def test_a_soft_mask_still_leaves_out_what_is_below_tau() -> None:
    # tau 0.6: 1/2 goes, as from a hard mask. Entry 1 is b's alone, entry 2 a's alone.
    aggregator = fedheal(tau=0.6, soft=True, fael=False)
    first, second = apply_rounds(aggregator, [([[1, 1], [1, -1]], [1, 3]), ([[-4, 5], [8, 2]], [1, 3])])
    assert (second.model - first.model).tolist() == pytest.approx([8, 5], rel=1e-15)
    assert second.report["kept"] == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("variant", "distances"),
    [
        # Round 2: c = 1/2 and 1 for a, 1 and 1 for b: |(-3, 4) * c|^2 = 2.25 + 16, |(1, 1)|^2 = 2.
        ("paper", {"a": 18.25, "b": 2.0}),
        # Of the round before alone: c = 0 and 1 for a. Lengths: |(0, 4)| = 4, |(1, 1)| = sqrt 2.
        ("released", {"a": 4.0, "b": 2**0.5}),
    ],
)
def test_fael_follows_what_counts_of_an_update(variant: str, distances: dict[str, float]) -> None:
    aggregator = fedheal(tau=0.0, soft=True, variant=variant)
    _, second = apply_rounds(aggregator, [([[1, 1], [1, 1]], [1, 1]), ([[-3, 4], [1, 1]], [1, 1])])
    assert second.report["distance"] == pytest.approx(distances, rel=1e-14)


def test_a_soft_mask_of_the_released_rule_by_hand() -> None:
    # The history excludes this round. After (+, +) and (+, -), a goes (3, 3): c = 2/2 and 1/2.  b always goes up: c = 1.
    # Weights 1/2 each: entry 1 (3 + 1) / 2 = 2; entry 2 (1/2 * 3 + 1) / (1/2 + 1) = 5/3.
    aggregator = fedheal(tau=0.3, soft=True, variant="released", fael=False)
    rounds = [([[1, 1], [1, 1]], [1, 1]), ([[1, -1], [1, 1]], [1, 1]), ([[3, 3], [1, 1]], [1, 1])]
    *_, second, third = apply_rounds(aggregator, rounds)
    assert (third.model - second.model).tolist() == pytest.approx([2, 5 / 3], rel=1e-14)


@pytest.mark.parametrize("forget", [0.0, 0.2])
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("fael", ["momentum", "exact", False])
def test_where_histories_are_of_one_mind_soft_is_hard(variant: str, fael: object, forget: float) -> None:
    rng = np.random.default_rng(3)
    signs = np.sign(rng.normal(size=(3, 40)))
    rounds = [((signs * rng.uniform(0.1, 2, (3, 40))).tolist(), [5, 1, 9]) for _ in range(6)]
    ends = [
        apply_rounds(fedheal(tau=0.4, variant=variant, fael=fael, soft=soft, forget=forget), rounds, "abc")[-1]
        for soft in (False, True)
    ]
    assert torch.allclose(ends[0].model, ends[1].model, rtol=0, atol=1e-6 if forget else 1e-13)
    assert torch.allclose(ends[0].weights, ends[1].weights, rtol=1e-6 if forget else 1e-12)


# Counts that fade


def test_faded_counts_by_hand() -> None:
    # gamma 1/2. Signs + + -: n = 1, 3/2, 7/4; pos = 1, 3/2, 3/4. The last goes down: (7/4 - 3/4) / (7/4) = 4/7 agree,
    # where plain counts say 1/3. So at tau 0.5 it is kept here and not there.
    rounds = [([[1.0]], [1]), ([[1.0]], [1]), ([[-8.0]], [1])]
    *_, faded = apply_rounds(fedheal(tau=0.5, forget=0.5, fael=False), rounds, ("a",))
    *_, plain = apply_rounds(fedheal(tau=0.5, fael=False), rounds, ("a",))
    assert (faded.model.item(), plain.model.item()) == (-6.0, 2.0)
    stored = faded.state.stage.states[0]
    assert (stored.n.tolist(), stored.counts[0].tolist()) == ([1.75], [0.75])


def test_a_tie_with_tau_is_kept_by_the_paper_and_not_by_the_released_code() -> None:
    # gamma 0.1, signs + and -: of n = 1.9 the second has 1 to agree with, itself.
    tie = 1 / 1.9
    rounds = [([[1.0]], [1]), ([[-1.0]], [1])]
    for tau, kept in ((tie, 1.0), (tie + 1e-5, 1.0), (tie + 4e-5, 0.0)):
        assert apply_rounds(fedheal(tau=tau, forget=0.1, fael=False), rounds, ("a",))[-1].report["kept"] == {"a": kept}
    # Released: of + and -, faded to 0.9 and 1 of 1.9, a third - agrees with 1/1.9.
    rounds.append(([[-1.0]], [1]))
    for tau, kept in ((tie, 0.0), (tie - 1e-5, 0.0), (tie - 4e-5, 1.0)):
        out = apply_rounds(fedheal(tau=tau, forget=0.1, fael=False, variant="released"), rounds, ("a",))[-1]
        assert out.report["kept"] == {"a": kept}


def test_who_is_away_forgets_nothing() -> None:
    aggregator = fedheal(forget=0.25, fael=False)
    state = aggregator.init(Layout.flat(1))
    for clients in ("ab", "b", "b", "ab"):
        updates = Updates(clients, torch.ones(len(clients), 1), [1] * len(clients))
        state = aggregator.apply(torch.zeros(1), updates, state).state
    stored = state.stage.states[0]
    # a: 1, then 1.75. b: 1, 1.75, 2.3125, 2.734375.
    assert dict(zip(stored.clients, stored.n.tolist(), strict=True)) == {"a": 1.75, "b": 2.734375}
    assert stored.counts[:2, 0].tolist() == [1.75, 2.734375]


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_nothing_forgotten_is_plain_to_the_bit(variant: str) -> None:
    cohorts = list(make_cohorts(5, 6, 12, 9, 2, 2))
    ends = []
    for keys in ({}, {"forget": 0.0, "soft": False, "per_domain": False}):
        aggregator, state = fedheal(variant=variant, **keys), None
        layout = make_layout([4, 5], 2, 2)
        model, state = (
            Packed(torch.zeros(9).double(), torch.zeros(2).double(), torch.zeros(2).long()),
            aggregator.init(layout),
        )
        for cohort in cohorts:
            names = sorted(cohort)
            columns = list(zip(*(cohort[name] for name in names), strict=True))
            updates = Updates(names, *(np.stack(c) for c in (columns[0], columns[3], columns[1], columns[2])))
            out = aggregator.apply(model, updates, state)
            model, state = out.model, out.state
        ends.append((model.params, model.buffers, out.weights))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("soft", [False, True])
def test_a_little_forgetting_is_nearly_plain(variant: str, soft: bool) -> None:
    """gamma 1e-6 over ten rounds: thresholds at 0.45 are far from any tie of ten rounds."""
    rng = np.random.default_rng(0)
    rounds = [(rng.normal(size=(3, 200)).tolist(), [1, 2, 3]) for _ in range(10)]
    faded, plain = (
        apply_rounds(fedheal(tau=0.45, variant=variant, soft=soft, forget=g), rounds, "abc")[-1] for g in (1e-6, 0.0)
    )
    assert faded.report["kept"] == plain.report["kept"]
    assert torch.allclose(faded.model, plain.model, atol=1e-4)


def test_a_round_that_fails_leaves_faded_counts_alone() -> None:
    aggregator = fedheal(forget=0.5)
    state = aggregator.apply(
        torch.zeros(2), Updates("ab", torch.ones(2, 2), [1, 1]), aggregator.init(Layout.flat(2))
    ).state
    bad = Updates("ab", torch.tensor([[1.0, 1.0], [1.0, torch.inf]]), [1, 1])
    with pytest.raises(BadUpdate, match="client 'b'"):
        aggregator.apply(torch.zeros(2), bad, state, donate=True)
    assert state.stage.states[0].counts[:2].tolist() == [[1, 1], [1, 1]]
    skipping = fedheal(forget=0.5, on_bad_update="skip")
    out = skipping.apply(torch.zeros(2), bad, state, donate=True)
    assert out.state.stage.states[0].counts[:2].tolist() == [[1.5, 1.5], [1, 1]]
    assert out.state.stage.states[0].n.tolist() == [1.5, 1]


def test_memory_stays_bounded_by_column_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks give the same model, so nothing needs the whole width at once."""
    rng = np.random.default_rng(0)
    rounds = [(rng.normal(size=(3, 1000)).tolist(), [1, 2, 3]) for _ in range(4)]
    whole = apply_rounds(fedheal(soft=True, forget=0.1), rounds, "abc")[-1]
    monkeypatch.setattr(reference, "BLOCK", 64)
    parts = apply_rounds(fedheal(soft=True, forget=0.1), rounds, "abc")[-1]
    assert torch.allclose(whole.model, parts.model, rtol=0, atol=1e-12)


# Weights per domain


def test_domains_by_hand() -> None:
    # a, b in x and c in y; examples 10, 30, 40. Domains hold 1/2 each. d = 1, 3 and 6: means 2 and 6, r = 1/2 and 3/2.
    # beta 0.4: dp = 0.2 and 0.6; v = 1/2 + dp/2 = 0.6 and 0.8, over 1.4. In x, a has 1/4 and b 3/4.
    rows = [[1.0, 0, 0], [1, 1, 1], [2, 1, 1]]
    (out,) = apply_rounds(fedheal(fphl=False, per_domain=True), [(rows, [10, 30, 40])], "abc", list("xxy"))
    assert out.weights.tolist() == pytest.approx([0.25 * 3 / 7, 0.75 * 3 / 7, 4 / 7], rel=1e-15)
    assert out.report["domain_weights"] == pytest.approx({"x": 3 / 7, "y": 4 / 7}, rel=1e-15)
    assert out.report["distance"] == pytest.approx({"a": 1, "b": 3, "c": 6})


def test_domains_of_the_released_rule_by_hand() -> None:
    # Lengths 1, 3 and 6: means 2 and 6, r = 1/2, 3/2; dp = 0.2, 0.6; w = 1.2, 1.6, both over 1.4: 3/7 and 4/7, whatever
    # the examples of a domain. Within x by examples: 1/4 and 3/4.
    (out,) = apply_rounds(
        fedheal(fphl=False, per_domain=True, variant="released"), [([[1.0], [3], [6]], [10, 30, 4000])], "abc", "xxy"
    )
    assert out.weights.tolist() == pytest.approx([0.25 * 3 / 7, 0.75 * 3 / 7, 4 / 7], rel=1e-15)


def test_a_domain_counts_in_full_by_those_who_came_and_newcomers_bring_their_share() -> None:
    # Round 1 (beta 0.4): equal distances, so r = 1 and x, y keep 1/2 each. Round 2: of x only b comes, of y c.
    #   Distances equal again: x still has 1/2, all of it b's.
    # Round 3: d joins y with 80 of now 160 examples: y = 1/4 + 1/2, x = 1/4. Only b and d come, distances equal:
    #   g is the same for both, mean warmth 1 - 0.6^3 = 0.784: v = 1/4 + 0.392 and 3/4 + 0.392, over 1.784.
    aggregator = fedheal(fphl=False, per_domain=True)
    state, seen = aggregator.init(Layout.flat(1)), []
    for clients, domains, examples in (("abc", "xxy", [10, 30, 40]), ("bc", "xy", [30, 40]), ("bd", "xy", [30, 80])):
        updates = Updates(
            clients, torch.ones(len(clients), 1), examples, domains=None if domains is None else list(domains)
        )
        out = aggregator.apply(torch.zeros(1), updates, state)
        state = out.state
        seen.append(out.weights.tolist())
    assert seen[0] == pytest.approx([0.125, 0.375, 0.5], rel=1e-15)
    assert seen[1] == pytest.approx([0.5, 0.5], rel=1e-15)
    assert seen[2] == pytest.approx([0.642 / 1.784, 1.142 / 1.784], rel=1e-14)


def test_a_domain_of_which_nobody_comes_keeps_its_weight() -> None:
    aggregator = fedheal(fphl=False, per_domain=True)
    state = aggregator.init(Layout.flat(1))
    for clients, domains in (("abc", "xyz"), ("ab", "xy"), ("ab", "xy"), ("a", "x")):
        rows = torch.arange(1.0, 1 + len(clients))[:, None]
        updates = Updates(clients, rows, [1] * len(clients), domains=None if domains is None else list(domains))
        out = aggregator.apply(torch.zeros(1), updates, state)
        before, state = state, out.state
        if clients != "abc":
            assert state.stage.states[0].rule.p[2] == before.stage.states[0].rule.p[2]
            assert state.stage.states[0].rule.n[2] == 1
    assert state.stage.states[0].rule.p.sum() == pytest.approx(1, rel=1e-15)


def test_a_client_belongs_to_the_domain_that_it_named_first() -> None:
    aggregator = fedheal(fphl=False, per_domain=True)
    state = aggregator.init(Layout.flat(1))
    for domains in ("xxy", "xyy"):
        out = aggregator.apply(
            torch.zeros(1),
            Updates("abc", torch.ones(3, 1), [1, 1, 2], domains=None if domains is None else list(domains)),
            state,
        )
        state = out.state
    assert out.report["domain_weights"] == pytest.approx({"x": 0.5, "y": 0.5})


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("keys", [{}, {"soft": True}, {"fphl": False}], ids=str)
def test_one_client_a_domain_is_fael_itself(variant: str, keys: dict[str, bool]) -> None:
    cohorts = list(make_cohorts(11, 7, 30, 6, 0, 0))
    ends = []
    for per_domain in (False, True):
        aggregator = fedheal(variant=variant, per_domain=per_domain, **keys)
        model, state, weights = torch.zeros(6, dtype=torch.float64), aggregator.init(Layout.flat(6)), []
        for cohort in cohorts:
            names = sorted(cohort)
            deltas, _, _, examples = zip(*(cohort[name] for name in names), strict=True)
            updates = Updates(names, np.stack(deltas), examples, domains=[f"home of {name}" for name in names])
            out = aggregator.apply(model, updates, state)
            model, state = out.model, out.state
            weights.append(out.weights)
        ends.append((model, torch.cat(weights)))
    for first, other in zip(*ends, strict=True):
        torch.testing.assert_close(first, other, rtol=1e-13, atol=1e-13)


def test_a_hundred_equal_clients_in_four_domains_stay_equal_under_partial_participation() -> None:
    aggregator, rng = fedheal(fphl=False, per_domain=True), np.random.default_rng(0)
    state = aggregator.init(Layout.flat(1))
    for _ in range(300):
        here = sorted(rng.choice(100, 10, replace=False).tolist())
        updates = Updates(here, torch.ones(10, 1), [7] * 10, domains=["abcd"[m % 4] for m in here])
        state = aggregator.apply(torch.zeros(1), updates, state, donate=True).state
    p = state.stage.states[0].rule.p
    assert p.max() / p.min() < 1.0 + 1e-3  # newcomers of the first rounds come in at different times


def test_domains_that_are_not_known_are_refused() -> None:
    aggregator = fedheal(per_domain=True)
    with pytest.raises(ValueError, match="needs the domain of each client"):
        aggregator.apply(torch.zeros(1), Updates("ab", torch.ones(2, 1), [1, 1]), aggregator.init(Layout.flat(1)))
    some = Updates.collect([Reply("a", torch.ones(1), 1, domain="x"), ("b", torch.ones(1), 1)])
    assert some.domains == ("x", "")
    with pytest.raises(BadUpdate, match="client 'b': it does not say which domain it belongs to"):
        aggregator.apply(torch.zeros(1), some, aggregator.init(Layout.flat(1)))
    out = fedheal(per_domain=True, on_bad_update="skip").apply(torch.zeros(1), some, aggregator.init(Layout.flat(1)))
    assert out.weights.tolist() == [1, 0]
    with pytest.raises(ValueError, match="client 'a': its domain = 3 is not a name"):
        Updates.collect([Reply("a", torch.ones(1), 1, domain=3)])
    with pytest.raises(ValueError, match="domains has 1 names for 2 clients"):
        Updates("ab", torch.ones(2, 1), [1, 1], domains=["x"])
    with pytest.raises(TypeError, match="domains = 'x'"):
        Updates(["a"], torch.ones(1, 1), [1], domains="x")


# All of them at once


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    variant=st.sampled_from(["paper", "released"]),
    soft=st.booleans(),
    forget=st.sampled_from(["0", "0.05", "0.1", "0.5", "0.9"]),
    per_domain=st.booleans(),
    fael=st.booleans(),
    tau=st.sampled_from(["0", "0.25", "0.3", "0.5", "0.7", "1"]),
    beta=st.sampled_from([0.0, 0.2, 0.4, 1.0]),
    clients=st.integers(1, 7),
    tensors=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
@example(1200, "released", False, "0.05", False, False, "0.3", 0.0, 5, [1, 3])
@example(1, "released", False, "0.9", False, False, "0", 0.0, 1, [1, 3])
@example(644, "paper", False, "0.9", False, False, "1", 0.0, 7, [1])  # rounds long past that add up to nearly 1e-5
def test_random_federations_match_the_independent_reading(
    seed, variant, soft, forget, per_domain, fael, tau, beta, clients, tensors
) -> None:
    per_domain = per_domain and fael
    oracle = ExtendedOracle(tensors, 2, 2, tau, beta, variant, fael=fael, soft=soft, forget=forget)
    oracle.client_domains = DOMAINS if per_domain else None
    keys = {"soft": soft, "forget": float(forget), "per_domain": per_domain}
    aggregator = fedheal(float(tau), beta, variant, True, "momentum" if fael else False, **keys)
    rng, layout = np.random.default_rng(seed), make_layout(tensors, 2, 2)
    model = Packed(torch.from_numpy(rng.normal(size=sum(tensors))), torch.zeros(2).double(), torch.zeros(2).long())
    state, loose = aggregator.init(layout), 1e-6 if float(forget) else 1e-11  # float32 counts
    for t, cohort in enumerate(make_cohorts(seed, clients, ROUNDS, sum(tensors), 2, 2)):
        names = [str(name) for name in rng.permutation(sorted(cohort))]
        columns = list(zip(*(cohort[name] for name in names), strict=True))
        parts = (np.stack(c) for c in (columns[0], columns[3], columns[1], columns[2]))
        updates = Updates(names, *parts, domains=[DOMAINS[name] for name in names])
        theirs, weights = oracle.step((model.params.tolist(), model.buffers.tolist(), model.counters.tolist()), cohort)
        if float(forget) and oracle.nearest < 1e-6:
            return  # more than float32 can tell
        out = aggregator.apply(model, updates, state, donate=bool(t % 2))
        np.testing.assert_allclose(
            out.weights.numpy(), [weights[m] for m in names], rtol=1e-4 if float(forget) else 1e-11
        )
        np.testing.assert_allclose(out.model.params.numpy(), theirs[0], rtol=loose * 100, atol=loose * 100)
        np.testing.assert_allclose(out.model.buffers.numpy(), theirs[1], rtol=loose * 100, atol=loose * 100)
        assert np.abs(out.model.counters.numpy() - theirs[2]).max() <= (1 if float(forget) and soft else 0)
        model, state = out.model, out.state
        if t == ROUNDS // 2:  # and it survives being saved
            arrays, described = state.to_arrays()
            arrays = load(save({key: value.contiguous() for key, value in arrays.items()}))
            state = State.from_arrays(arrays, json.loads(json.dumps(described)))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"soft": True, "fphl": False}, "soft = True with fphl = False: there is no mask to soften"),
        ({"forget": 0.1, "fphl": False}, r"forget = 0\.1 with fphl = False: there are no sign counts"),
        ({"per_domain": True, "fael": "exact"}, "per_domain = True with fael = 'exact'"),
        ({"per_domain": True, "fael": False}, "per_domain = True with fael = False"),
        ({"forget": 1.0}, r"forget = 1\.0: use a number of at least 0 and below 1"),
        ({"forget": -0.1}, r"forget = -0\.1"),
        ({"forget": True}, "forget = True"),
        ({"soft": 1}, "soft = 1: use True or False"),
        ({"per_domain": "yes"}, "per_domain = 'yes': use True or False"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(keys: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        fedheal(**keys)


@pytest.mark.parametrize(
    "keys", [{"tau": 0.0, "beta": 0.0}, {"tau": 0.0, "beta": 0.0, "forget": 0.5, "per_domain": True}]
)
def test_without_mask_and_momentum_it_is_still_fedavg(keys: dict[str, object]) -> None:
    rng = np.random.default_rng(2)
    rounds = [(rng.normal(size=(3, 9)).tolist(), [1, 5, 2]) for _ in range(4)]
    ours, theirs = (apply_rounds(a, rounds, "abc", list("xxy"))[-1] for a in (fedheal(**keys), fedavg()))
    assert torch.allclose(ours.model, theirs.model, rtol=0, atol=1e-12)


def test_a_damaged_state_is_refused() -> None:
    aggregator = fedheal(forget=0.5, per_domain=True)
    updates = Updates("ab", torch.ones(2, 1), [1, 1], domains=["x", "y"])
    state = aggregator.apply(torch.zeros(1), updates, aggregator.init(Layout.flat(1))).state
    arrays, described = state.to_arrays()
    for key in arrays:
        with pytest.raises(ValueError, match=r"damaged|belong|shape"):
            State.from_arrays({**arrays, key: arrays[key][:1]}, described)
    with pytest.raises(ValueError, match="give a state that it made itself"):
        fedheal(forget=0.5, variant="released").apply(torch.zeros(1), updates, state)
