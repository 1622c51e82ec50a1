"""What every aggregator must do, run over all of them: a new one joins by a line in the table."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from fedheal import Layout, Packed, Updates
from fedheal.aggregate import Aggregator, Stage, afl, chain, fedavg, fedfv, fedheal, fedpw, qffl, uniform
from fedheal.aggregate.registry import STAGES
from fedheal.core.state import State
from tiny_runs import is_same

AGGREGATORS = {
    "fedavg": fedavg,
    "uniform": uniform,
    "fedheal": fedheal,
    "fedheal:released": lambda **k: fedheal(variant="released", **k),
    "fphl": lambda **k: fedheal(fael=False, **k),
    "fphl:released": lambda **k: fedheal(fael=False, variant="released", **k),
    "fael": lambda **k: fedheal(fphl=False, **k),
    "fael:released": lambda **k: fedheal(fphl=False, variant="released", **k),
    "fedheal:exact": lambda **k: fedheal(fael="exact", **k),
    "fedheal:exact-reg": lambda **k: fedheal(fael="exact-reg", **k),
    "fael-exact": lambda **k: fedheal(fphl=False, fael="exact", **k),
    "fedheal:per_step": lambda **k: fedheal(per_step=True, **k),
    "fael:released,per_step": lambda **k: fedheal(fphl=False, variant="released", per_step=True, **k),
    "fedheal:soft": lambda **k: fedheal(soft=True, **k),
    "fedheal:soft,tau=0": lambda **k: fedheal(soft=True, tau=0.0, **k),
    "fedheal:soft,released": lambda **k: fedheal(soft=True, variant="released", **k),
    "fedheal:soft,exact": lambda **k: fedheal(soft=True, fael="exact", **k),
    "fedheal:forget": lambda **k: fedheal(forget=0.1, **k),
    "fphl:forget,released": lambda **k: fedheal(forget=0.5, variant="released", fael=False, **k),
    "fedheal:per_domain": lambda **k: fedheal(per_domain=True, **k),
    "fael:per_domain,released": lambda **k: fedheal(per_domain=True, fphl=False, variant="released", **k),
    "fedheal:everything": lambda **k: fedheal(soft=True, forget=0.2, per_domain=True, per_step=True, **k),
    "afl": afl,
    "afl:gamma=1": lambda **k: afl(gamma=1.0, **k),
    "afl:reset": lambda **k: afl(reset=True, **k),
    "qffl": qffl,
    "qffl:reweight": lambda **k: qffl(mode="reweight", **k),
    "qffl:qfedavg": lambda **k: qffl(mode="qfedavg", **k),
    "mix": lambda **k: Aggregator(STAGES["mix"](), **k),
    "mix:last": lambda **k: Aggregator(STAGES["mix"](last=0.9), **k),
    "afl+mix": lambda **k: Aggregator(chain(STAGES["afl"](gamma=1.0), STAGES["mix"](0.25, 0.5, 0.5)), **k),
    "total-variance": lambda **k: Aggregator(STAGES["total-variance"](), **k),
    "fedfv": fedfv,
    "fedfv:tau=3": lambda **k: fedfv(tau=3, **k),
    "fedpw": fedpw,
}
NO_MEAN = {"qffl", "qffl:qfedavg", "fedpw"}  # their step is more, or less, than a mean of the updates
every = pytest.mark.parametrize("name", AGGREGATORS)
MODULE = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
LAYOUT = Layout.of(MODULE)
SIZES = LAYOUT.sizes()


def make_model(dtype=torch.float32):
    packed = LAYOUT.pack(MODULE.state_dict())
    return Packed(packed.params.to(dtype), packed.buffers.to(dtype), packed.counters)


def make_cohort(clients, seed, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    k = len(clients)

    def draw_floats(width):
        return torch.from_numpy(rng.normal(size=(k, width))).to(dtype)

    counters = torch.from_numpy(rng.integers(seed, seed + 9, (k, SIZES.counters)))
    columns = draw_floats(SIZES.params), rng.integers(1, 99, k), draw_floats(SIZES.buffers).abs(), counters
    return Updates(clients, *columns, make_metrics(k, rng), domains=assign_domains(clients))


def assign_domains(clients):
    """Return each client's domain, one of two."""
    return ["vowels" if client in "ae" else "consonants" for client in clients]


def make_metrics(k, rng):
    return {name: rng.uniform(0.1, 2, k) for name in ("loss", "train_loss", "steps", "lr", "reach")}


def drop_fields(updates, *names):
    """Return the same cohort without these fields."""
    fields = ("clients", "deltas", "num_examples", "buffers", "counters", "metrics", "domains")
    return Updates(**{name: getattr(updates, name) for name in fields if name not in names})


def apply_rounds(aggregator, cohorts, model=None, state=None, **apply):
    model, state = model or make_model(), state or aggregator.init(LAYOUT)
    for updates in cohorts:
        out = aggregator.apply(model, updates, state, **apply)
        model, state = out.model, out.state
    return out


ROUNDS = [
    make_cohort("abcd", 0),
    make_cohort("bd", 1),
    make_cohort("ace", 2),
    make_cohort("abcde", 3),
    make_cohort("f", 4),
    make_cohort("fab", 5),
]


@every
def test_partial_participation_late_joiners_and_lone_clients(name):
    out = apply_rounds(AGGREGATORS[name](), ROUNDS)
    assert torch.isfinite(out.model.params).all()
    assert out.weights.shape == (3,)
    assert out.weights.sum().item() == pytest.approx(1, abs=1e-12)
    assert not torch.equal(out.model.params, make_model().params)


@every
def test_order_of_clients_is_irrelevant(name):
    turned = [
        Updates(
            u.clients[::-1],
            *(matrix.flip(0) for matrix in (u.deltas, u.num_examples, u.buffers, u.counters)),
            {name: column.flip(0) for name, column in u.metrics.items()},
            domains=u.domains[::-1],
        )
        for u in ROUNDS
    ]
    ours, theirs = apply_rounds(AGGREGATORS[name](), ROUNDS), apply_rounds(AGGREGATORS[name](), turned)
    assert is_same(ours.model, theirs.model)
    assert torch.equal(ours.weights, theirs.weights.flip(0))


@every
def test_state_survives_safetensors_and_json(name):
    aggregator = AGGREGATORS[name]()
    halfway = apply_rounds(aggregator, ROUNDS[:3])
    arrays, described = halfway.state.to_arrays()
    stored = save({key: value.contiguous() for key, value in arrays.items()}), json.dumps(described)
    state = State.from_arrays(load(stored[0]), json.loads(stored[1]))
    assert type(state) is type(halfway.state)
    resumed = apply_rounds(aggregator, ROUNDS[3:], halfway.model, state)
    whole = apply_rounds(aggregator, ROUNDS)
    assert is_same(resumed.model, whole.model)
    assert torch.equal(resumed.weights, whole.weights)


@every
def test_nothing_that_was_given_is_changed(name):
    aggregator = AGGREGATORS[name]()
    state = apply_rounds(aggregator, ROUNDS[:2]).state
    model, updates = make_model(), make_cohort("abz", 9)
    copies = [
        t.clone()
        for t in (model.params, model.buffers, model.counters, updates.deltas, updates.buffers, updates.counters)
    ]
    arrays = {key: value.clone() for key, value in state.to_arrays()[0].items()}
    aggregator.apply(model, updates, state)
    now = [model.params, model.buffers, model.counters, updates.deltas, updates.buffers, updates.counters]
    assert all(torch.equal(a, b) for a, b in zip(copies, now, strict=True))
    assert all(torch.equal(value, arrays[key]) for key, value in state.to_arrays()[0].items())


@every
def test_the_result_shares_no_memory_with_the_input(name):
    model = make_model()
    out = AGGREGATORS[name]().apply(
        model, Updates([], torch.zeros(0, SIZES.params), []), AGGREGATORS[name]().init(LAYOUT)
    )
    assert is_same(out.model, model)
    out.model.params.add_(1)
    assert is_same(model, make_model())


@every
def test_donated_rounds_give_the_same_bits(name):
    aggregator = AGGREGATORS[name]()
    assert is_same(apply_rounds(aggregator, ROUNDS).model, apply_rounds(aggregator, ROUNDS, donate=True).model)


@every
def test_kernels_give_the_same_model(name):
    ours, theirs = (apply_rounds(AGGREGATORS[name](kernel=kernel), ROUNDS) for kernel in ("reference", "cpu"))
    torch.testing.assert_close(ours.model.params, theirs.model.params, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-9, atol=1e-9)


@every
def test_dtype_and_type_of_the_model_are_kept(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check_dtype_and_type(AGGREGATORS[name](), dtype)


def check_dtype_and_type(aggregator, dtype):
    updates = make_cohort("ab", 0, dtype)
    out = aggregator.apply(make_model(dtype), updates, aggregator.init(LAYOUT))
    assert (out.model.params.dtype, out.model.buffers.dtype, out.model.counters.dtype) == (dtype, dtype, torch.int64)
    bare = drop_fields(updates, "buffers", "counters")
    with pytest.warns(UserWarning, match="buffer values"):
        flat = aggregator.apply(make_model(dtype).params, bare, aggregator.init(LAYOUT))
    assert isinstance(flat.model, torch.Tensor)
    assert torch.equal(flat.model, out.model.params)
    if dtype != torch.bfloat16:
        array = aggregator.apply(make_model(dtype).params.numpy(), bare, aggregator.init(LAYOUT))
        assert isinstance(array.model, np.ndarray)
        assert np.array_equal(array.model, out.model.params.numpy())


@every
def test_the_report_is_json(name):
    out = apply_rounds(AGGREGATORS[name](), ROUNDS)
    assert json.loads(json.dumps(out.report)) == out.report
    assert out.report["skipped"] == {}


@pytest.mark.parametrize("name", sorted(AGGREGATORS.keys() - NO_MEAN))
def test_equal_updates_move_the_model_by_that_update(name):
    """A mean of equal updates is that update, whatever the weights; signs never change, so masks keep everything."""
    aggregator = AGGREGATORS[name]()
    step = torch.linspace(-1, 1, SIZES.params, dtype=torch.float64)
    model, state = make_model(torch.float64), aggregator.init(LAYOUT)
    rng = np.random.default_rng(7)
    for _ in range(5):
        columns = step.expand(3, -1), [1, 5, 50], model.buffers.expand(3, -1)
        updates = Updates("abc", *columns, metrics=make_metrics(3, rng), domains=assign_domains("abc"))
        out = aggregator.apply(model, updates, state)
        torch.testing.assert_close(out.model.params, model.params + step, rtol=0, atol=1e-12)
        model, state = out.model, out.state


@pytest.mark.parametrize("name", STAGES)
def test_every_named_stage_composes_with_a_mask(name):
    stage = STAGES[name]()
    aggregator = Aggregator(chain(stage) if "mask" in stage.gives else chain(stage, STAGES["fphl"]()))
    out = apply_rounds(aggregator, ROUNDS)
    assert set(out.report) >= {"skipped", "kept", "unkept"}


def test_masks_come_before_weights_whatever_the_order():
    fael, fphl = STAGES["fael"](), STAGES["fphl"]()
    ours, theirs = (apply_rounds(Aggregator(chain(*order)), ROUNDS) for order in ((fael, fphl), (fphl, fael)))
    assert is_same(ours.model, theirs.model)
    assert is_same(ours.model, apply_rounds(fedheal(), ROUNDS).model)


def test_two_stages_that_give_weights_are_refused():
    with pytest.raises(ValueError, match="two of these stages give weights"):
        chain(STAGES["uniform"](), STAGES["fael"]())
    with pytest.raises(ValueError, match="two of these stages give mask"):
        chain(STAGES["fphl"](), chain(STAGES["fphl"]()))


def test_a_chain_is_a_stage_and_chains_of_chains_are_flat():
    mask, weights = STAGES["fphl"](), STAGES["fael"]()
    nested = chain(chain(chain(), weights), chain(chain(mask)))
    assert isinstance(nested, Stage)
    assert nested.parts == (mask, weights)
    out = apply_rounds(Aggregator(nested), ROUNDS)
    assert [state.kind for state in out.state.stage.states] == ["consistency", "momentum"]
    assert is_same(out.model, apply_rounds(fedheal(), ROUNDS).model)
