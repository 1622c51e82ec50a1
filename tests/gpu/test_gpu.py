"""The same on a GPU: skipped where there is none."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedheal
from fedheal import Layout, Reply, Updates, aggregate, methods
from fedheal.aggregate import kernels
from fedheal.aggregate.draft import CountMask
from fedheal.aggregate.validate import NonFinite
from fedheal.core.layout import allocate_rows
from fedheal.engine import open_engine, serial
from fedheal.engine.lanes import Lanes
from fedheal.engine.precision import use_precision
from fedheal.local.term import Term
from fedheal.models.fused_norm import norm_relu
from fedheal.simulate.build import build_federation
from fedheal.simulate.round import initial_state, run_round
from needs import needs
from tiny_data import load, quick

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu():
    needs("gpu")


SETTINGS = [{}, {"variant": "released"}, {"fael": "exact"}, {"fael": False}]
SETTINGS += [{"soft": True}, {"soft": True, "forget": 0.1, "variant": "released"}, {"forget": 0.1, "per_domain": True}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["reference", "cuda"])
def test_aggregation_gives_the_same_model_and_stays_on_the_device(settings, dtype, kernel):
    finals = []
    for device in ("cpu", "cuda"):
        heal = aggregate.fedheal(kernel="reference" if device == "cpu" else kernel, **settings)
        model, state = torch.zeros(3000, dtype=torch.float64, device=device), heal.init(Layout.flat(3000))
        rng = np.random.default_rng(0)
        for t in range(6):
            here = [str(m) for m in range(5) if (m + t) % 4]
            deltas = torch.from_numpy(rng.normal(size=(len(here), 3000))).to(device, dtype)
            sent = Updates(here, deltas, [10] * len(here), domains=["ab"[int(m) % 2] for m in here])
            out = heal.apply(model, sent, state, donate=bool(t % 2))
            model, state = out.model, out.state
        assert model.device.type == device
        finals.append(model.cpu())
    torch.testing.assert_close(finals[1], finals[0], rtol=0, atol=1e-12)


def test_the_reducer_of_the_page_on_adding_a_method_runs_where_the_updates_are():
    """The page itself runs on the CPU; its code is what people start from."""
    page = (Path(__file__).parents[2] / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    parsed = doctest.DocTestParser().get_examples(page)
    examples = [example.source for example in parsed if example.exc_msg is None]  # others show what is refused
    names = {}
    for source in examples[: 1 + next(i for i, source in enumerate(examples) if "def agreeing" in source)]:
        exec(source, names)
    gma = aggregate.Aggregator(aggregate.chain(), names["agreeing"](0.5))
    deltas = torch.tensor([[1.0, 1, -1], [2, -1, -1], [3, 1, 0]], device="cuda")
    sent = Updates(["a", "b", "c"], deltas, [1, 1, 2])
    out = gma.apply(torch.zeros(3, device="cuda"), sent, gma.init(Layout.flat(3)))
    assert out.model.tolist() == [2.25, 0.0, -0.5]


@pytest.mark.parametrize("name", methods.names())
def test_every_method_runs_and_resumes_on_a_gpu(name, tmp_path):
    keys = {"method": name, "model": "tiny_data:feature_model", "participation": 0.6, "rounds": 3, "device": "cuda"}
    if name in ("fedce", "fedga"):
        keys["validation"] = 0.25
    result = fedheal.run(quick(**keys), tmp_path / "run", progress=False)
    assert result.summary["device"].startswith("cuda")
    assert all(np.isfinite(record.train_loss) for record in result.history)
    (tmp_path / "run" / "result.json").unlink()
    again = fedheal.run(quick(**keys), tmp_path / "run", resume=True, progress=False)
    assert again.domains == result.domains


def test_a_round_in_which_nobody_replies_leaves_the_model_on_the_gpu():
    result = fedheal.run(quick(rounds=12, dropout=0.9, device="cuda"), progress=False)
    assert 0 in [record.replied for record in result.history], "no such round: take another seed"
    assert len(result.history) == 12


def test_two_gpu_runs_start_from_the_model_of_a_cpu_run():
    one, two = (fedheal.run(quick(rounds=1, device=d), progress=False) for d in ("cpu", "cuda"))
    assert one.history[0].train_loss == pytest.approx(two.history[0].train_loss, rel=1e-3)


def test_the_kernel_is_chosen_by_where_the_updates_are():
    assert kernels.choose_kernel("auto", torch.zeros(1, 1, device="cuda")).__name__.endswith(".cuda")
    with pytest.raises(ValueError, match="on 'cuda"):
        kernels.choose_kernel("cpu", torch.zeros(1, 1, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [torch.uint8, torch.uint16, torch.uint32])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_cuda_kernel_has_the_bits_of_the_reference(dtype, width, sign, aligned):
    from fedheal.aggregate.kernels import cuda, reference

    def rows_of(made):
        return allocate_rows(*made.shape, made.dtype, made.device).copy_(made) if aligned else made

    rng = np.random.default_rng(3)
    tensors = [5000, 0, 1, 70000, 4096, 907]
    size = sum(tensors)
    rows, slots = np.array([2, 0, 5, 3]), np.array([4, 1, 0, 6])
    deltas = rows_of(torch.from_numpy(rng.normal(size=(6, size))).to("cuda", dtype))
    deltas[:, ::7] = 0
    counts = rows_of(torch.from_numpy(rng.integers(0, 9, (8, size)).astype(str(width).split(".")[1])).cuda())
    assert counts.is_contiguous() != aligned
    counts[:, 100:200] = 4
    deltas[:, 100:200] = -sign
    low, high = np.array([9, 9, 9, 9]), np.array([3, 4, 4, 2])  # columns that nobody keeps
    weights, params = np.array([0.1, 0.4, 0.2, 0.3]), torch.randn(size, device="cuda")
    found = []
    for kernel in (reference, cuda):
        table = rows_of(counts.contiguous().clone())
        kept = CountMask(counts=table, slots=slots, at_least=low, below=high, sign=sign)
        measured = kernel.observe(deltas, rows, tensors, kept)
        found.append(
            (
                measured,
                table,
                kernel.average(params, deltas, rows, weights, kept),
                kernel.measure(deltas, rows, tensors),
            )
        )
    (one, counted, (mean, unkept), everything), (two, table, (other, number), whole) = found
    assert torch.equal(counted.to(torch.int64), table.to(torch.int64))
    assert torch.equal(mean, other)
    assert unkept == number > 0
    for a, b in ((one, two), (everything, whole)):
        assert np.array_equal(a.kept, b.kept)
        np.testing.assert_allclose(a.squares, b.squares, rtol=1e-12)


def test_the_cuda_kernel_names_bad_rows_and_leaves_the_counts():
    from fedheal.aggregate.kernels import cuda

    deltas = torch.randn(4, 10000, device="cuda")
    deltas[2, 9999], deltas[0, 17] = torch.nan, torch.inf
    counts = torch.randint(0, 9, (4, 10000), dtype=torch.uint8, device="cuda")
    before, three = counts.clone(), np.array([3, 3, 3, 3])
    mask = CountMask(counts=counts, slots=np.arange(4), at_least=three, below=three, sign=1)
    with pytest.raises(NonFinite) as found:
        cuda.observe(deltas, np.arange(4), [4000, 6000], mask)
    assert sorted(found.value.rows) == [0, 2]
    assert torch.equal(counts, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found_wherever_it_is(dtype, bad):
    from fedheal.aggregate.reduce import find_finite

    for size in (1, 5, 70_000, 300_001):
        good = torch.full((size,), -torch.finfo(dtype).max, dtype=dtype, device="cuda")
        assert find_finite(good, good[:0], torch.ones(3, device="cuda")) == [True] * 3
        for place in {0, size // 2, size - 1}:
            spoilt = good.clone()
            spoilt[place] = bad
            assert find_finite(good, spoilt, good) == [True, False, True]


def test_metrics_on_a_gpu_arrive():
    losses = torch.tensor([0.25, 0.5], device="cuda")
    sent = [Reply(f"c{i}", torch.zeros(2), 1, metrics={"loss": loss, "steps": 3}) for i, loss in enumerate(losses)]
    found = Updates.collect(sent)
    assert {name: column.tolist() for name, column in found.metrics.items()} == {"loss": [0.25, 0.5], "steps": [3, 3]}


def test_a_run_and_an_aggregation_work_on_a_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    runs = [fedheal.run(quick(method="fedheal", device=f"cuda:{i}"), progress=False) for i in (0, 1)]
    assert [runs[1].domains[name] for name in runs[0].domains] == pytest.approx(list(runs[0].domains.values()), abs=1.0)
    rng = np.random.default_rng(0)
    deltas, rows, weights = torch.from_numpy(rng.normal(size=(3, 5000))), np.arange(3), np.full(3, 1 / 3)
    from fedheal.aggregate.kernels import cuda

    means = [cuda.average(torch.zeros(5000).to(d), deltas.to(d), rows, weights, None)[0] for d in ("cuda:0", "cuda:1")]
    assert torch.equal(means[0].cpu(), means[1].cpu())


LOCAL = [*methods.LOCAL, "scaffold:option=1", "ditto", "fedbn", "fpl"]


@pytest.mark.parametrize("method", LOCAL)
@pytest.mark.parametrize("model", ["resnet10", "tiny_data:feature_model"])
def test_lanes_equal_the_serial_engine_on_the_same_seeds(method, model):
    """fp32, deterministic, the same memory format: after 12 steps of each client in each of two rounds."""
    keys = {"epochs": 4, "augment": "crop-flip", "rounds": 2, "device": "cuda", "lr": 0.01}
    fed = build_federation(quick(method=method, model=model, **keys), load(), torch.device("cuda"))
    start = initial_state(fed)
    with use_precision("fp32", True, torch.device("cuda")):
        sides = Lanes(fed.local_training, 3)
        finals = []
        for engine in (sides, serial.SerialEngine(fed.local_training)):
            state = start
            for _ in range(2):
                state, _ = run_round(fed, state, engine, evaluate=False)
            finals.append(state)
            fed.local_training.module.load_state_dict(fed.local_training.layout.unpack(start.model))
    assert sides.fallback_reason == ""
    one, two = (state.model.params - start.model.params for state in finals)
    assert float((one - two).norm() / two.norm()) < 1e-5
    assert any(
        isinstance(g, torch.cuda.CUDAGraph)
        for lane in sides.lanes
        for step_set in lane.step_sets.values()
        for g in step_set.graphs.values()
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_deterministic_runs_repeat_bit_for_bit(precision):
    keys = {"model": "resnet10", "width": 16, "rounds": 3, "device": "cuda", "augment": "crop"}
    runs = [
        fedheal.run(quick(method="fedheal", precision=precision, deterministic=True, **keys), progress=False)
        for _ in range(2)
    ]
    states = [run.model.state_dict() for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert runs[0].summary["precision"] == precision
    assert np.isfinite(runs[0].history[-1].train_loss)


def test_dropout_in_lanes_draws_as_the_serial_engine_does():
    fed = build_federation(
        quick(model="tiny_data:dropout", rounds=2, epochs=4, device="cuda"), load(), torch.device("cuda")
    )
    state, finals = initial_state(fed), []
    with use_precision("fp32", True, torch.device("cuda")):
        for name in ("lanes", "serial"):
            with open_engine(fed.local_training, name) as engine:
                after, record = run_round(fed, state, engine, evaluate=False)
            finals.append((after.model.params, record.train_loss))
    torch.testing.assert_close(finals[0][0], finals[1][0], rtol=1e-5, atol=1e-6)
    assert finals[0][1] == pytest.approx(finals[1][1], rel=1e-5)


def test_a_module_that_cannot_be_captured_is_trained_one_client_after_another(caplog):
    fed = build_federation(
        quick(model="tiny_data:data_dependent", rounds=1, epochs=5, device="cuda"), load(), torch.device("cuda")
    )
    sides = Lanes(fed.local_training, 2)
    _, record = run_round(fed, initial_state(fed), sides, evaluate=False)
    assert "captured" in sides.fallback_reason
    assert np.isfinite(record.train_loss)
    assert len([r for r in caplog.records if "one client after another" in r.message]) == 1


class Looking(Term):
    """A term that asks the device for a number at every step."""

    def loss(self, batch, ctx):
        return 0.5 * batch.ce if float(batch.ce.detach()) > 0 else None


def test_so_is_a_term_that_cannot_be_captured(caplog):
    fed = build_federation(quick(epochs=5, device="cuda"), load(), torch.device("cuda"))
    local_training = replace(fed.local_training, terms=(Looking(),))
    tasks = [serial.Task(client, 1, ({},)) for client in fed.clients]
    sides, model = Lanes(local_training, 2), initial_state(fed).model
    with use_precision("fp32", True, torch.device("cuda")):
        found = list(sides.train(model, ({},), tasks))
        expected = [serial.train_client(local_training, model, ({},), task) for task in tasks]
    assert "captured" in sides.fallback_reason
    assert len([r for r in caplog.records if "one client after another" in r.message]) == 1
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one.reply.delta, two.reply.delta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (3, 16, 5, 7), (24, 512, 4, 4), (9, 64, 65, 59)])
@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_fused_normalisation_in_evaluation_equals_the_plain_one(dtype, shape, shortcut, relu):
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(shape[1]).cuda()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        torch.nn.init.normal_(tensor)
    torch.nn.init.uniform_(norm.running_var, 0.5, 2.0)
    norm.eval()
    given = [(2 * torch.randn(shape, device="cuda") + 3).to(dtype) for _ in range(2)]
    with torch.no_grad():
        found = norm_relu(norm, given[0], given[1] if shortcut else None, relu)
        expected = norm(given[0].float()) + (given[1].float() if shortcut else 0)
    expected = expected.relu() if relu else expected
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    torch.testing.assert_close(found.float(), expected, **close)
