"""A model as modules: updates made from them, and running statistics that move."""

from __future__ import annotations

import copy
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fedheal import Layout, Packed, Updates, aggregate


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def train_copies(module: nn.Module) -> dict[str | int, tuple[nn.Module, float]]:
    """Return two clients' modules after a step on different data."""
    clients: dict[str | int, tuple[nn.Module, float]] = {}
    for i, client in enumerate(("b", "a")):
        own = copy.deepcopy(module)
        own(torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) + i).square().mean().backward()
        torch.optim.SGD(own.parameters(), 0.1).step()
        clients[client] = own, 8.0 * (i + 1)
    return clients


def unpack_values(model: Packed) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in Layout.of(make_module()).unpack(model).items()}


def test_updates_from_modules_are_those_of_the_manual_path_bit_for_bit() -> None:
    module = make_module()
    clients, layout, aggregator = train_copies(module), Layout.of(module), aggregate.fedheal()
    before = layout.pack(module.state_dict())
    packed = [layout.pack(own.state_dict()) for own, _ in clients.values()]
    manual = Updates(
        clients,
        [own.params - before.params for own in packed],
        [8, 16],
        buffers=[own.buffers for own in packed],
        counters=[own.counters for own in packed],
    )
    from_modules = Updates.from_modules(module, clients)
    first, second = (aggregator.apply(before, updates, aggregator.init(layout)) for updates in (manual, from_modules))
    assert unpack_values(first.model) == unpack_values(second.model)
    assert first.state == second.state


def test_running_statistics_move_with_updates_from_modules() -> None:
    """FedAvg: (8 b + 16 a) / 24 of what each client has seen; the counter takes the largest."""
    module = make_module()
    clients, layout, aggregator = train_copies(module), Layout.of(module), aggregate.fedavg()
    start = layout.pack(module.state_dict())
    out = aggregator.apply(start, Updates.from_modules(module, clients), aggregator.init(layout))
    after, (b, a) = layout.unpack(out.model), [own.state_dict() for own, _ in clients.values()]
    for name in ("1.running_mean", "1.running_var"):
        assert not torch.equal(after[name], module.state_dict()[name])
        torch.testing.assert_close(after[name], (8 * b[name] + 16 * a[name]) / 24)
    assert int(after["1.num_batches_tracked"]) == 1


def test_a_model_without_buffers_metrics_and_domains() -> None:
    module, own = nn.Linear(2, 1), nn.Linear(2, 1)
    updates = Updates.from_modules(module, {7: (own, 3)}, metrics={"loss": [0.5]}, domains=["x"])
    assert (updates.clients, updates.buffers, updates.counters, updates.domains) == (("7",), None, None, ("x",))
    assert updates.metrics["loss"].tolist() == [0.5]
    assert torch.equal(updates.deltas[0, :2], own.weight.detach()[0] - module.weight.detach()[0])
    assert Updates.from_modules(make_module(), {}).clients == ()


def test_a_module_that_does_not_fit_is_refused_by_client() -> None:
    with pytest.raises(ValueError, match=r"client 'a': the state_dict does not belong to this layout"):
        Updates.from_modules(make_module(), {"a": (nn.Linear(3, 2), 1)})
    with pytest.raises(TypeError, match=r"client 'a' comes with a Linear: give \(module, num_examples\)"):
        Updates.from_modules(nn.Linear(3, 2), {"a": nn.Linear(3, 2)})  # type: ignore[dict-item]


def test_updates_without_the_models_buffers_warn_once_with_the_remedy() -> None:
    """Without buffers in the updates the running statistics would never change."""
    module = make_module()
    layout, aggregator = Layout.of(module), aggregate.fedavg()
    model = layout.pack(module.state_dict())
    bare = Updates(["a"], torch.ones(1, len(model.params)), [1])
    with pytest.warns(UserWarning, match=r"32 buffer values.*Updates\.from_modules") as caught:
        out = aggregator.apply(model, bare, aggregator.init(layout))
    assert caught[0].filename == __file__
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        aggregator.apply(out.model, bare, out.state)
        flat = aggregate.fedavg()
        flat.apply(torch.zeros(3), Updates(["a"], torch.ones(1, 3), [1]), flat.init(Layout.flat(3)))
    assert again == []
    other = aggregate.uniform()
    with pytest.warns(UserWarning, match="buffer values"):
        other.apply(model, bare, other.init(layout))


def test_the_example_moves_running_statistics() -> None:
    path = Path(__file__).parents[2] / "examples" / "aggregate.py"
    module = runpy.run_path(str(path))["train_network"](aggregate.fedavg(), rounds=1)
    assert bool((module[1].running_mean != 0).all())
    assert int(module[1].num_batches_tracked) == 5


@pytest.mark.slow
def test_a_new_process_restores_a_state(tmp_path: Path) -> None:
    """The new process knows only the kinds of states that `fedheal.aggregate` imports."""
    layout, aggregator = Layout.of(make_module()), aggregate.fedheal()
    updates = Updates.from_modules(make_module(), train_copies(make_module()))
    state = aggregator.apply(layout.pack(make_module().state_dict()), updates, aggregator.init(layout)).state
    state.save(tmp_path / "one")
    code = (
        "import sys; from fedheal.aggregate import AggregatorState;AggregatorState.load(sys.argv[1]).save(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "one"), str(tmp_path / "two")], check=True)
    assert aggregate.AggregatorState.load(tmp_path / "two") == state


def test_each_client_trains_a_module_of_its_own() -> None:
    module = nn.Linear(2, 1)
    trained = copy.deepcopy(module)
    for clients in ({"a": (module, 1)}, {"a": (trained, 1), "b": (trained, 1)}):
        with pytest.raises(ValueError, match="train a copy for each client"):
            Updates.from_modules(module, clients)
