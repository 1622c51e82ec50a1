"""Bad input: refused in one sentence or left out as if it had never come, and never a model or a state half changed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedheal import Layout, Packed, Updates
from fedheal.aggregate import (
    Aggregator,
    AggregatorState,
    BadUpdate,
    Stage,
    State,
    afl,
    fedavg,
    fedfv,
    fedheal,
    fedpw,
    qffl,
    reduce,
    uniform,
)
from fedheal.aggregate.stage import chain, stateless

KERNELS = ["reference", "cpu"]
AGGREGATORS = {
    "fedavg": fedavg,
    "uniform": uniform,
    "fedheal": lambda **k: fedheal(tau=0.6, **k),
    "released": lambda **k: fedheal(tau=0.6, variant="released", **k),
    "fphl alone": lambda **k: fedheal(tau=0.6, fael=False, **k),
    "fael alone": lambda **k: fedheal(fphl=False, **k),
    "fael alone, released": lambda **k: fedheal(fphl=False, variant="released", **k),
    "exact": lambda **k: fedheal(tau=0.6, fael="exact", **k),
    "exact-reg": lambda **k: fedheal(tau=0.6, fael="exact-reg", **k),
    "exact without fphl": lambda **k: fedheal(fphl=False, fael="exact", **k),
    "afl": lambda **k: afl(gamma=0.3, **k),
    "afl, reset": lambda **k: afl(gamma=0.3, reset=True, **k),
    "qffl": qffl,
    "qfedavg": lambda **k: qffl(mode="qfedavg", **k),
    "reweight": lambda **k: qffl(mode="reweight", **k),
    "fedfv": lambda **k: fedfv(tau=2, **k),
    "fedpw": fedpw,
}
everyone = pytest.mark.parametrize("make", AGGREGATORS.values(), ids=AGGREGATORS)
# What is found before the stages run is the same for all of them.
FEW = ["fedavg", "fedheal", "released", "fedfv"]
few = pytest.mark.parametrize("make", [AGGREGATORS[name] for name in FEW], ids=FEW)
both_kernels = pytest.mark.parametrize("kernel", KERNELS)
NET = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))  # 2 + 1 + 1 + 1 parameters, 2 buffers, 1 counter
LAYOUT = Layout.of(NET)
G, B, C = 5, 2, 1


def make_model(seed=9, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    return Packed(
        torch.from_numpy(rng.normal(size=G)).to(dtype),
        torch.from_numpy(rng.random(B)).to(dtype),
        torch.tensor([4]),
    )


def make_updates(clients="abc", seed=0, **changes):
    """Return valid updates, whose values depend on the client's name and not on the other clients."""
    rng = {c: np.random.default_rng([seed, ord(c)]) for c in clients}
    fields = {
        "clients": list(clients),
        "deltas": np.array([rng[c].normal(size=G) for c in clients]).reshape(-1, G),
        "num_examples": [float(ord(c) - 90) for c in clients],
        "buffers": np.array([rng[c].random(B) for c in clients]).reshape(-1, B),
        "counters": np.array([rng[c].integers(5, 20, C) for c in clients]).reshape(-1, C),
        "metrics": {name: [rng[c].uniform(0.1, 2) for c in clients] for name in ("loss", "train_loss", "lr", "reach")},
    }
    return Updates(**(fields | changes))


def make_metrics(k):
    return {name: [1.0] * k for name in ("loss", "train_loss", "lr", "reach")}


def run_three_rounds(aggregator, clients="abc"):
    """Return the state after three rounds of positive updates, so that the mask drops negative entries."""
    state = aggregator.init(LAYOUT)
    for seed in range(3):
        updates = make_updates(clients, seed)
        state = aggregator.apply(make_model(), replace_fields(updates, deltas=updates.deltas.abs()), state).state
    return state


def replace_fields(updates, **changes):
    names = ("clients", "deltas", "num_examples", "buffers", "counters", "metrics", "refused")
    return Updates(**({name: getattr(updates, name) for name in names} | changes))


def state_to_bytes(state):
    arrays, json = state.to_arrays()
    return {name: (str(a.dtype), a.numpy().tobytes()) for name, a in arrays.items()}, json


def model_to_bytes(packed):
    return [getattr(packed, name).numpy().tobytes() for name in ("params", "buffers", "counters")]


def check_one_sentence(error):
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    return str(error)


@everyone
@both_kernels
@pytest.mark.parametrize("donate", [False, True])
def test_a_number_that_is_not_finite_is_refused_and_the_state_stays_usable(make, kernel, donate):
    aggregator = make(kernel=kernel)
    state, twin = run_three_rounds(aggregator), run_three_rounds(aggregator)
    before = state_to_bytes(state)
    updates = make_updates(seed=5)
    for entry, value in itertools.product(
        (0, G - 1), (np.nan, np.inf, -np.inf)
    ):  # up is kept, down not, NaN is neither
        deltas = updates.deltas.clone()
        deltas[1, entry] = value
        with pytest.raises(BadUpdate, match="client 'b': its update holds NaN, infinity") as refused:
            aggregator.apply(make_model(), replace_fields(updates, deltas=deltas), state, donate=donate)
        assert "on_bad_update='skip'" in check_one_sentence(refused.value)
        assert list(refused.value.reasons) == ["b"]
        assert state_to_bytes(state) == before
    ours, theirs = (
        aggregator.apply(make_model(), updates, state, donate=donate),
        aggregator.apply(make_model(), updates, twin),
    )
    assert model_to_bytes(ours.model) == model_to_bytes(theirs.model)
    assert state_to_bytes(ours.state) == state_to_bytes(theirs.state)


@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_narrow_updates_are_searched_too(kernel, dtype, value):
    for make in AGGREGATORS.values():
        aggregator = make(kernel=kernel)
        deltas = make_updates().deltas.to(dtype)
        deltas[2, 3] = value
        with pytest.raises(BadUpdate, match="client 'c'"):
            aggregator.apply(make_model(), replace_fields(make_updates(), deltas=deltas), aggregator.init(LAYOUT))


@both_kernels
def test_nan_far_inside_a_long_update_is_found(kernel):
    width = 20_001  # several blocks of columns
    for make in AGGREGATORS.values():
        for entry in (0, 8191, 8192, width - 1):
            deltas = torch.ones(2, width)
            deltas[1, entry] = np.nan
            aggregator = make(kernel=kernel)
            updates = Updates("ab", deltas, [1, 1], metrics=make_metrics(2))
            with pytest.raises(BadUpdate, match="client 'b'"):
                aggregator.apply(torch.zeros(width), updates, aggregator.init(Layout.flat(width)))


def test_infinities_of_both_signs_do_not_cancel():
    for make in AGGREGATORS.values():
        aggregator = make()
        updates = Updates("abc", [[np.inf], [-np.inf], [1.0]], [1, 1, 1], metrics=make_metrics(3))
        with pytest.raises(BadUpdate) as refused:
            aggregator.apply(np.zeros(1), updates, aggregator.init(Layout.flat(1)))
        assert set(refused.value.reasons) == {"a", "b"}


SQUARING = [
    name for name in AGGREGATORS if name not in ("fedavg", "uniform", "fphl alone", "afl", "afl, reset", "reweight")
]


@both_kernels
@pytest.mark.parametrize("name", [*SQUARING, "fphl alone"])
@pytest.mark.parametrize("where", ["one entry", "one tensor", "across tensors"])
def test_numbers_too_large_to_square_are_refused(kernel, name, where):
    # 1.2e154 squared is 1.44e308: two of them exceed the largest float64, 1.8e308, whichever tensors they stand in.
    deltas = make_updates().deltas.clone()
    deltas[1] = 1.0
    if where == "one entry":
        deltas[1, 0] = 1e200
    else:
        deltas[1, [0, 1] if where == "one tensor" else [0, 4]] = 1.2e154
    aggregator = AGGREGATORS[name](kernel=kernel)
    with pytest.raises(BadUpdate, match=r"client 'b'.*too large to square"):
        aggregator.apply(make_model(), replace_fields(make_updates(), deltas=deltas), aggregator.init(LAYOUT))


@both_kernels
@pytest.mark.parametrize("name", ["fael alone", "fael alone, released", "fedheal", "released"])
def test_squares_whose_sum_over_clients_overflows_still_share_evenly(kernel, name):
    aggregator = AGGREGATORS[name](kernel=kernel)
    out = aggregator.apply(np.zeros(1), Updates("ab", [[1.2e154], [1.2e154]], [1, 1]), aggregator.init(Layout.flat(1)))
    assert out.weights.tolist() == [0.5, 0.5]
    out = aggregator.apply(np.zeros(1), Updates("ab", [[1.2e154], [1e154]], [1, 1]), aggregator.init(Layout.flat(1)))
    assert out.weights[0] > out.weights[1]


@pytest.mark.parametrize("name", [name for name in AGGREGATORS if name not in ("qffl", "qfedavg")])
@both_kernels
def test_the_model_never_overflows(name, kernel):
    """q-FFL is left out, since it shrinks such a step."""
    aggregator = AGGREGATORS[name](kernel=kernel)
    state = aggregator.init(Layout.flat(2))
    before = state_to_bytes(state)
    with pytest.raises(ValueError, match=r"params overflow torch\.float32") as refused:
        aggregator.apply(
            torch.full((2,), 3e38), Updates("a", torch.full((1, 2), 3e38), [1], metrics=make_metrics(1)), state
        )
    check_one_sentence(refused.value)
    updates = Updates("a", torch.full((1, 2), 1e6), [1], metrics=make_metrics(1))
    with pytest.raises(ValueError, match=r"overflow torch\.float16"):
        aggregator.apply(torch.zeros(2, dtype=torch.float16), updates, state)
    assert state_to_bytes(state) == before


@both_kernels
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_who_makes_the_model_overflow_is_named(kernel, policy):
    """The update is finite, but not in the model's dtype: the round fails under either policy, as the stages have used it."""
    aggregator = fedavg(on_bad_update=policy, kernel=kernel)
    updates = Updates("abc", torch.tensor([[1.0, 1.0], [1.0, 1e100], [1.0, 1.0]], dtype=torch.float64), [1, 1, 1])
    message = r"params overflow torch\.float32; the models of 'b' do not fit it by themselves$"
    with pytest.raises(ValueError, match=message) as refused:
        aggregator.apply(torch.zeros(2), updates, aggregator.init(Layout.flat(2)))
    check_one_sentence(refused.value)


@everyone
def test_an_unsound_model_is_refused_before_a_donated_state_is_touched(make):
    aggregator = make()
    state = run_three_rounds(aggregator)
    before = state_to_bytes(state)
    start = make_model(dtype=torch.float32)
    start.params.fill_(np.nan)
    with pytest.raises(ValueError, match="model"):
        aggregator.apply(start, make_updates(seed=5), state, donate=True)
    assert state_to_bytes(state) == before


@everyone
def test_a_model_that_is_not_finite_is_refused(make):
    aggregator = make()
    for name in ("params", "buffers"):
        start = make_model()
        getattr(start, name)[0] = np.nan
        updates = make_updates() if name == "params" else replace_fields(make_updates(), buffers=None)
        with pytest.raises(ValueError, match=f"global model's {name} already hold NaN or infinity") as refused:
            aggregator.apply(start, updates, aggregator.init(LAYOUT))
        assert not isinstance(refused.value, BadUpdate)


FLAWS = {
    "NaN": ({"b": {"deltas": np.nan}}, "b", r"update holds NaN"),
    "infinity": ({"b": {"deltas": -np.inf}}, "b", r"update holds NaN, infinity"),
    "no examples": ({"b": {"num_examples": 0.0}}, "b", r"num_examples must be a positive number, got 0"),
    "minus zero": ({"b": {"num_examples": -0.0}}, "b", r"num_examples must be a positive number, got -0"),
    "negative": ({"b": {"num_examples": -3.0}}, "b", r"num_examples must be a positive number, got -3"),
    "NaN examples": ({"b": {"num_examples": np.nan}}, "b", r"num_examples must be a positive number, got nan"),
    "infinitely many": ({"b": {"num_examples": np.inf}}, "b", r"num_examples must be a positive number, got inf"),
    "buffers": ({"b": {"buffers": np.nan}}, "b", r"buffers hold NaN or infinity"),
    "infinite buffers": ({"b": {"buffers": np.inf}}, "b", r"buffers hold NaN or infinity"),
    "examples and buffers": (
        {"a": {"num_examples": 0.0, "buffers": np.nan}, "d": {"buffers": np.inf}},
        "ad",
        r"num_examples|buffers hold",
    ),
    "two": ({"a": {"num_examples": 0.0}, "d": {"deltas": np.nan}}, "ad", r"num_examples|update holds"),
    "first and last": ({"a": {"deltas": np.nan}, "d": {"deltas": np.inf}}, "ad", r"update holds"),
}


def spoil(updates, flaw):
    fields = {name: getattr(updates, name).clone() for name in ("deltas", "num_examples", "buffers")}
    for client, changes in FLAWS[flaw][0].items():
        row = updates.clients.index(client)
        for name, value in changes.items():
            target = fields[name]
            if target.ndim == 2:
                target[row, -1] = value
            else:
                target[row] = value
    return replace_fields(updates, **fields)


FOUND_BY_KERNELS = ["NaN", "infinity", "two", "first and last"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel", "flaw"),
    [(name, kernel, flaw) for name in AGGREGATORS for kernel in KERNELS for flaw in ("NaN", "two")]
    + [(name, "cpu", flaw) for name in AGGREGATORS for flaw in ("infinity", "first and last", "buffers")]
    + [(name, "cpu", flaw) for name in FEW for flaw in FLAWS if flaw not in (*FOUND_BY_KERNELS, "buffers")],
)
def test_a_skipped_client_is_as_absent(name, kernel, flaw):
    aggregator = AGGREGATORS[name](kernel=kernel, on_bad_update="skip")
    _, skipped, reason = FLAWS[flaw]
    remaining = "".join(c for c in "abcd" if c not in skipped)
    ours, theirs = run_three_rounds(aggregator, "abc"), run_three_rounds(aggregator, "abc")
    for seed in (5, 6):  # 'd' is new in the first
        for donate in (False, True):
            out = aggregator.apply(make_model(), spoil(make_updates("abcd", seed), flaw), ours, donate=donate)
            alone = aggregator.apply(make_model(), make_updates(remaining, seed), theirs)
            assert model_to_bytes(out.model) == model_to_bytes(alone.model)
            assert state_to_bytes(out.state) == state_to_bytes(alone.state)
            assert out.weights[["abcd".index(c) for c in remaining]].tolist() == alone.weights.tolist()
            assert out.weights[["abcd".index(c) for c in skipped]].tolist() == [0.0] * len(skipped)
            assert set(out.report["skipped"]) == set(skipped)
            assert {k: v for k, v in out.report.items() if k != "skipped"} == {
                k: v for k, v in alone.report.items() if k != "skipped"
            }
            assert any(re.search(reason, why) for why in out.report["skipped"].values())
            ours, theirs = out.state, alone.state


def test_a_users_reducer_never_sees_buffers_that_are_not_finite():
    def reduce_finite(draft, weights):
        assert draft.view_rows(draft.updates.buffers).isfinite().all()
        return reduce.mean(draft, weights)

    aggregator = Aggregator(chain(), reduce=reduce_finite, on_bad_update="skip")
    out = aggregator.apply(make_model(), spoil(make_updates("abcd"), "buffers"), aggregator.init(LAYOUT))
    assert out.report["skipped"] == {"b": "its buffers hold NaN or infinity"}


def test_all_bad_clients_are_named_together():
    aggregator = fedavg()
    with pytest.raises(BadUpdate) as refused:
        aggregator.apply(make_model(), spoil(make_updates("abcd"), "examples and buffers"), aggregator.init(LAYOUT))
    assert list(refused.value.reasons) == ["a", "d"]
    assert "num_examples" in refused.value.reasons["a"]


@few
@pytest.mark.parametrize("flaw", [*(flaw for flaw in FLAWS if flaw.endswith("examples")), "negative", "buffers"])
def test_a_bad_client_is_named_with_what_would_do(make, flaw):
    aggregator = make()
    state = aggregator.init(LAYOUT)
    with pytest.raises(BadUpdate, match=f"client 'b': .*{FLAWS[flaw][2]}") as refused:
        aggregator.apply(make_model(), spoil(make_updates("abcd"), flaw), state)
    assert "on_bad_update='skip'" in check_one_sentence(refused.value)


@everyone
def test_both_of_two_equal_ids_are_skipped(make):
    updates = replace_fields(make_updates("abcd"), clients=["a", "b", "c", "b"])
    strict, lenient = make(), make(on_bad_update="skip")
    with pytest.raises(BadUpdate, match=r"client 'b': its id occurs 2 times"):
        strict.apply(make_model(), updates, strict.init(LAYOUT))
    out = lenient.apply(make_model(), updates, lenient.init(LAYOUT))
    alone = lenient.apply(make_model(), make_updates("ac"), lenient.init(LAYOUT))
    assert model_to_bytes(out.model) == model_to_bytes(alone.model)
    assert state_to_bytes(out.state) == state_to_bytes(alone.state)
    assert out.weights.tolist() == [alone.weights[0], 0, alone.weights[1], 0]
    assert list(out.report["skipped"]) == ["b"]


@few
@pytest.mark.parametrize("flaw", ["NaN", "no examples"])
def test_too_few_usable_updates_leave_model_and_state(make, flaw):
    aggregator = replace(make(on_bad_update="skip"), min_updates=4)
    state, updates = run_three_rounds(aggregator), spoil(make_updates("abcd"), flaw)
    before, model = state_to_bytes(state), make_model()
    out = aggregator.apply(model, updates, state)
    assert model_to_bytes(out.model) == model_to_bytes(model)
    assert state_to_bytes(out.state) == before
    assert out.weights.tolist() == [0, 0, 0, 0]
    reason = "only 3 updates of this round can be used, fewer than min_updates = 4 (in a federation min_replies)"
    assert [out.report["skipped"][c] for c in "acd"] == [reason] * 3
    assert re.search(FLAWS[flaw][2], out.report["skipped"]["b"])
    enough = replace(aggregator, min_updates=3)
    assert enough.apply(model, updates, state).weights.count_nonzero() == 3


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "3"])
def test_a_minimum_that_is_no_number_of_updates_is_refused(value):
    with pytest.raises(ValueError, match=r"^min_updates = .*: use a whole number of at least 1$"):
        replace(fedavg(), min_updates=value)


def test_an_integer_and_its_name_are_the_same_id():
    aggregator = fedavg()
    with pytest.raises(BadUpdate, match=r"client '7': its id occurs 2 times"):
        aggregator.apply(np.zeros(1), Updates([7, "7"], [[1.0], [2.0]], [1, 1]), aggregator.init(Layout.flat(1)))


WHOLE = {
    "short": ({"deltas": np.ones((3, G - 1))}, r"length 4; the model has 5 parameters"),
    "long": ({"deltas": np.ones((3, G + 1))}, r"length 6; the model has 5 parameters"),
    "integers": (
        {"deltas": np.ones((3, G), np.int64)},
        r"must be float32, float64, bfloat16 or float16, got torch.int64",
    ),
    "complex": ({"deltas": np.ones((3, G), np.complex64)}, r"must be float32, .*got torch.complex64"),
    "long buffers": ({"buffers": np.ones((3, B + 1))}, r"buffers have length 3; the model has 2"),
    "integer buffers": ({"buffers": np.ones((3, B), np.int64)}, r"buffers are torch.int64"),
    "float counters": ({"counters": np.ones((3, C))}, r"counters are torch.float64"),
    "long counters": ({"counters": np.ones((3, C + 1), np.int64)}, r"counters have length 2; the model has 1"),
}


@few
@pytest.mark.parametrize("flaw", WHOLE)
def test_a_matrix_that_does_not_fit_is_refused_and_skipping_everyone_changes_nothing(make, flaw):
    changes, reason = WHOLE[flaw]
    strict, lenient = make(), make(on_bad_update="skip")
    with pytest.raises(BadUpdate, match=reason) as refused:
        strict.apply(make_model(), replace_fields(make_updates(), **changes), strict.init(LAYOUT))
    assert "(and 2 more)" in check_one_sentence(refused.value)
    state = run_three_rounds(lenient)
    before = state_to_bytes(state)
    out = lenient.apply(make_model(), replace_fields(make_updates(), **changes), state, donate=True)
    assert model_to_bytes(out.model) == model_to_bytes(make_model())
    assert state_to_bytes(out.state) == before
    assert out.weights.tolist() == [0, 0, 0]
    assert set(out.report["skipped"]) == set("abc")


@everyone
@both_kernels
def test_a_cohort_emptied_by_skipping_changes_nothing_and_the_next_round_goes_on(make, kernel):
    aggregator = make(kernel=kernel, on_bad_update="skip")
    state, twin = run_three_rounds(aggregator), run_three_rounds(aggregator)
    updates = make_updates(seed=5)
    out = aggregator.apply(make_model(), replace_fields(updates, deltas=torch.full((3, G), np.nan)), state, donate=True)
    assert model_to_bytes(out.model) == model_to_bytes(make_model())
    assert state_to_bytes(out.state) == state_to_bytes(twin)
    assert out.weights.tolist() == [0, 0, 0]
    assert set(out.report["skipped"]) == set("abc")
    ours, theirs = aggregator.apply(make_model(), updates, out.state), aggregator.apply(make_model(), updates, twin)
    assert model_to_bytes(ours.model) == model_to_bytes(theirs.model)
    assert state_to_bytes(ours.state) == state_to_bytes(theirs.state)


@everyone
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_nobody_came(make, policy):
    aggregator = make(on_bad_update=policy)
    state = run_three_rounds(aggregator)
    before, start = state_to_bytes(state), make_model()
    for nobody in (make_updates(""), Updates([], [], [])):
        out = aggregator.apply(start, nobody, state)
        assert model_to_bytes(out.model) == model_to_bytes(start)
        assert state_to_bytes(out.state) == before
        assert (len(out.weights), out.report["skipped"]) == (0, {})
    out.model.params.fill_(7)
    assert model_to_bytes(start) == model_to_bytes(make_model())


@everyone
def test_nobodys_updates_are_on_no_device(make):
    """As in a round on a GPU to which nobody replies; here a model without parameters is on the device `meta`."""
    aggregator = make()
    elsewhere = Packed(torch.zeros(0, device="meta"), torch.ones(2), torch.tensor([4]))
    state = aggregator.init(Layout.of(nn.BatchNorm1d(1, affine=False)))
    out = aggregator.apply(elsewhere, Updates.collect([]), state)
    assert (out.model.params.device.type, out.model.counters.tolist()) == ("meta", [4])
    with pytest.raises(ValueError, match="the model is on meta, the updates are on cpu"):
        aggregator.apply(elsewhere, Updates("a", torch.zeros(1, 0), [1], metrics=make_metrics(1)), state)


@everyone
@both_kernels
def test_inputs_are_never_changed(make, kernel):
    aggregator = make(kernel=kernel, on_bad_update="skip")
    state, start, updates = run_three_rounds(aggregator), make_model(), spoil(make_updates("abcd", 5), "NaN")

    def copy_inputs():
        parts = (updates.deltas, updates.num_examples, updates.buffers, updates.counters)
        return state_to_bytes(state), model_to_bytes(start), [t.numpy().tobytes() for t in parts]

    before = copy_inputs()
    out = aggregator.apply(start, updates, state)
    for name in ("params", "buffers", "counters"):
        getattr(out.model, name).fill_(3)
    assert copy_inputs() == before


def make_weights_stage(*weights):
    def apply(draft):
        return replace(draft, weights=np.array(weights, np.float64))

    return stateless(apply)


@both_kernels
def test_weights_that_are_all_zero_leave_the_model(kernel):
    start = make_model()
    out = (aggregator := Aggregator(chain(make_weights_stage(0, 0, 0)), kernel=kernel)).apply(
        start, make_updates(), aggregator.init(LAYOUT)
    )
    assert model_to_bytes(out.model) == model_to_bytes(start)
    assert out.weights.tolist() == [0, 0, 0]


@both_kernels
def test_a_client_with_weight_zero_does_not_count_but_must_be_finite(kernel):
    aggregator = Aggregator(chain(make_weights_stage(1, 0, 1)), kernel=kernel)
    out = aggregator.apply(
        np.zeros(2), Updates("abc", [[1.0, 2], [50, 50], [3, 4]], [1, 1, 1]), aggregator.init(Layout.flat(2))
    )
    assert out.model.tolist() == [2, 3]
    bad = Updates("abc", [[1.0, 2], [np.inf, 50], [3, 4]], [1, 1, 1])
    with pytest.raises(BadUpdate, match="client 'b'"):
        aggregator.apply(np.zeros(2), bad, aggregator.init(Layout.flat(2)))


@pytest.mark.parametrize("weights", [(1, -1, 1), (np.nan, 1, 1), (np.inf, 1, 1), (1, 1), (1, 1, 1, 1)])
def test_weights_that_are_no_weights_are_the_stages_fault(weights):
    aggregator = Aggregator(chain(make_weights_stage(*weights)))
    with pytest.raises(
        ValueError, match=r"your stage `.*make_weights_stage.*` must give 3 finite, non-negative weights, got"
    ) as refused:
        aggregator.apply(make_model(), make_updates(), aggregator.init(LAYOUT))
    assert not isinstance(refused.value, BadUpdate)


def test_enormous_weights_and_example_counts_do_not_overflow():
    updates = Updates("ab", [[1.0], [3.0]], [1e308, 1e308])
    for make in (
        fedavg,
        uniform,
        fedheal,
        lambda: fedheal(fael="exact"),
        lambda: Aggregator(chain(make_weights_stage(1e308, 1e308))),
    ):
        aggregator = make()
        out = aggregator.apply(np.zeros(1), updates, aggregator.init(Layout.flat(1)))
        assert out.weights.sum() == pytest.approx(1, rel=1e-12)
        assert 1 < out.model[0] < 3


@pytest.mark.parametrize("name", ["tau", "beta"])
@pytest.mark.parametrize("value", [-0.1, 1.0000001, float("nan"), float("inf"), True, False, "0.3", None, 1j])
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_tau_and_beta_are_numbers_from_0_to_1(name, value, variant):
    with pytest.raises(ValueError, match=rf"{name} = .*: use a number from 0 to 1"):
        fedheal(**{name: value}, variant=variant)
    for sound in (0, 1, 0.0, 1.0, np.float64(0.5)):
        fedheal(**{name: sound}, variant=variant)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "Paper"}, r"variant = 'Paper': use one of .*released"),
        ({"variant": None}, r"variant = None: use one of"),
        ({"fael": "exactly"}, r"fael = 'exactly': use one of .*exact-reg"),
        ({"fael": True}, r"fael = True: use one of"),
        ({"fael": None}, r"fael = None: use one of"),
        ({"fphl": "no"}, r"fphl = 'no': use True or False"),
        ({"fphl": 1}, r"fphl = 1: use True or False"),
        ({"on_bad_update": "drop"}, r"on_bad_update = 'drop': use 'raise' or 'skip'"),
        ({"kernel": "gpu"}, r"kernel = 'gpu': use 'auto' or one of .*reference"),
    ],
)
def test_unknown_settings_are_refused_with_the_known_ones(settings, message):
    with pytest.raises(ValueError, match=message) as refused:
        fedheal(**settings)
    check_one_sentence(refused.value)


def run(aggregator, updates=None, start=None):
    return aggregator.apply(start or make_model(), updates or make_updates(), aggregator.init(LAYOUT))


@pytest.mark.parametrize("no", [0, np.False_, 0.0])
def test_another_kind_of_false_for_fael_is_refused_or_means_false(no):
    try:
        actual = run(fedheal(fael=no)).weights.tolist()
    except ValueError:
        actual = None
    assert actual in (None, run(fedheal(fael=False)).weights.tolist())


def make_needing_aggregator(*metrics):
    return Aggregator(chain(replace(make_weights_stage(1, 1, 1), needs=frozenset(metrics))), on_bad_update="raise")


def test_a_metric_that_is_needed_and_not_there_is_the_callers_mistake():
    for policy in ("raise", "skip"):
        aggregator = replace(make_needing_aggregator("loss"), on_bad_update=policy)
        with pytest.raises(
            ValueError, match=r"needs the client metric 'loss'; the updates have \['steps'\]"
        ) as refused:
            run(aggregator, make_updates(metrics={"steps": [1, 2, 3]}))
        assert not isinstance(refused.value, BadUpdate)


def test_a_metric_that_cannot_be_is_that_clients_flaw():
    for name, value, needed in (
        ("loss", -0.5, "not be negative"),
        ("accuracy_without", -0.5, "not be negative"),
        ("reach", 0.0, "be at least 1e-100"),
        ("reach", 1e-200, "be at least 1e-100"),
        ("lr", -1.0, "be at least 1e-100"),
    ):
        updates = make_updates(metrics={name: [1, value, 2]})
        with pytest.raises(BadUpdate, match=f"client 'b': its metric '{name}' must {needed}, got {value:g}"):
            run(make_needing_aggregator(name), updates)
    run(make_needing_aggregator("loss"), make_updates(metrics={"loss": [1, 0, 2]}))


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_the_smallest_reach_leaves_weights_finite(variant):
    updates = make_updates(metrics={"reach": [1.0, 1e-100, 2.0]})
    out = run(fedheal(per_step=True, variant=variant), updates)
    assert out.report["skipped"] == {}
    assert out.weights.isfinite().all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_needed_metric_that_is_not_finite_is_that_clients_flaw_and_others_are_nobodys(value):
    updates = make_updates(metrics={"loss": [1, value, 2], "steps": [np.nan] * 3})
    with pytest.raises(BadUpdate, match=f"client 'b': its metric 'loss' is {value}"):
        run(make_needing_aggregator("loss"), updates)
    aggregator_of_two = Aggregator(
        chain(Stage(make_weights_stage().init, make_weights_stage(1, 1).apply, frozenset({"loss"}))),
        on_bad_update="skip",
    )
    assert set(run(aggregator_of_two, updates).report["skipped"]) == {"b"}
    assert run(make_needing_aggregator(), updates).report["skipped"] == {}


def list_state_kinds(json):
    """Return the kind and sign of a state, and those of the states inside it."""
    inner = [list_state_kinds(part) for part in json.values() if isinstance(part, dict) and "kind" in part]
    return json["kind"], json.get("sign"), inner


@everyone
def test_the_state_of_another_aggregator_is_refused(make):
    aggregator = make()
    state = run_three_rounds(aggregator)
    for other in AGGREGATORS.values():
        theirs = run_three_rounds(other())
        before = state_to_bytes(theirs)
        if list_state_kinds(before[1]) == list_state_kinds(state_to_bytes(state)[1]):
            continue  # the same kind of memory: both can use it
        with pytest.raises(ValueError, match="give a state ") as refused:
            aggregator.apply(make_model(), make_updates(seed=5), theirs)
        check_one_sentence(refused.value)
        assert state_to_bytes(theirs) == before


@everyone
def test_what_is_no_state_is_refused(make):
    aggregator = make()
    for wrong in (None, {}, aggregator.init(LAYOUT).stage, 3):
        with pytest.raises((TypeError, ValueError), match="state"):
            aggregator.apply(make_model(), make_updates(), wrong)


@everyone
def test_the_state_of_another_model_is_refused(make):
    aggregator = make()
    with pytest.raises(ValueError, match=r"the model's params have shape \(5,\); this aggregator's state has 4"):
        aggregator.apply(
            make_model().params,
            replace_fields(make_updates(), buffers=None, counters=None),
            aggregator.init(Layout.flat(4)),
        )


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_damaged_checkpoint_whose_counts_do_not_fit_the_model_is_refused(variant, change):
    aggregator = fedheal(variant=variant)
    arrays, json = run_three_rounds(aggregator).to_arrays()
    (name,) = (name for name in arrays if name.endswith("counts"))
    counts = arrays[name]
    arrays[name] = torch.zeros(len(counts), counts.shape[1] + change, dtype=counts.dtype)
    with pytest.raises(ValueError, match="counts"):
        aggregator.apply(make_model(), make_updates(), State.from_arrays(arrays, json))


def test_a_damaged_checkpoint_is_refused_in_a_sentence():
    arrays, json = run_three_rounds(fedheal()).to_arrays()
    with pytest.raises(ValueError, match=r"unknown; this version knows .*aggregator"):
        AggregatorState.from_arrays(arrays, json | {"kind": "else"})
    for name in arrays:
        with pytest.raises(ValueError, match=r"damaged|belong"):
            AggregatorState.from_arrays({k: v for k, v in arrays.items() if k != name}, json)
    with pytest.raises(ValueError, match="damaged"):
        AggregatorState.from_arrays(arrays, {k: v for k, v in json.items() if k != "sizes"})


@everyone
def test_models_that_do_not_fit(make):
    aggregator, updates = make(), make_updates()
    state = aggregator.init(LAYOUT)
    for start, message in [
        (make_model().params, r"updates carry buffers or counters but the model is a flat vector: give a Packed"),
        (replace(make_model(), params=torch.zeros(4, dtype=torch.float64)), r"params have shape \(4,\).*has 5"),
        (replace(make_model(), buffers=torch.zeros(3)), r"buffers have shape \(3,\).*has 2"),
        (replace(make_model(), counters=torch.zeros(0, dtype=torch.int64)), r"counters have shape \(0,\).*has 1"),
        (replace(make_model(), params=torch.zeros(1, 5)), r"params have shape \(1, 5\)"),
        (replace(make_model(), params=torch.zeros(5, dtype=torch.int64)), r"int64, not floating point"),
    ]:
        with pytest.raises(ValueError, match=message) as refused:
            aggregator.apply(start, updates, state)
        check_one_sentence(refused.value)
    for start in ([0.0] * G, None, {"w": 1}):
        with pytest.raises(TypeError, match=r"model is a .*: give a Packed"):
            aggregator.apply(start, updates, state)


@everyone
def test_without_buffers_in_the_updates_those_of_the_model_stay(make):
    aggregator, start = make(), make_model()
    with pytest.warns(UserWarning, match="running statistics"):
        out = aggregator.apply(
            start, replace_fields(make_updates(), buffers=None, counters=None), aggregator.init(LAYOUT)
        )
    assert model_to_bytes(out.model)[1:] == model_to_bytes(start)[1:]
    assert model_to_bytes(out.model)[0] != model_to_bytes(start)[0]


@pytest.mark.parametrize("how", ["read-only", "backwards", "big-endian", "strided"])
def test_any_numpy_vector_will_do_as_a_model_and_comes_back_as_one(how):
    values = np.array([1.0, 2.0, 3.0])
    model_forms = {
        "read-only": np.frombuffer(values.tobytes()),
        "backwards": values[::-1].copy()[::-1],
        "big-endian": values.astype(">f8"),
        "strided": np.repeat(values, 2)[::2],
    }[how]
    aggregator = fedavg()
    out = aggregator.apply(model_forms, Updates("a", [[1.0, 1.0, 1.0]], [1]), aggregator.init(Layout.flat(3)))
    assert isinstance(out.model, np.ndarray)
    assert out.model.tolist() == [2, 3, 4]
    assert model_forms.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int16, torch.int32])
def test_counters_of_any_integer_type(dtype):
    counters = torch.tensor([[1], [0], [1]]).to(dtype)
    for make in (fedavg, fedheal):
        assert run(make(), make_updates(counters=counters)).model.counters.tolist() == [1]


def test_a_module_without_parameters_has_its_buffers_averaged():
    layout = Layout.of(nn.BatchNorm1d(1, affine=False))
    start = Packed(torch.zeros(0), torch.zeros(2), torch.tensor([0]))
    updates = Updates("ab", torch.zeros(2, 0), [1, 1], buffers=[[1.0, 2.0], [3.0, 4.0]], counters=[[5], [6]])
    for make in (fedavg, fedheal, lambda: fedheal(fael="exact")):
        aggregator = make()
        out = aggregator.apply(start, updates, aggregator.init(layout))
        assert (out.model.buffers.tolist(), out.model.counters.tolist()) == ([2, 3], [6])
