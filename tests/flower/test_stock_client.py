"""An app that knows nothing of fedheal but the one line with the strategy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import nn

from fedheal import Layout, Updates, aggregate
from fedheal.flower import AFL, QFFL, FedFV, FedHEAL, Uniform, client
from flower.local_grid import LocalGrid

EXAMPLES = {0: 30, 1: 20, 2: 10}


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def fit_partition(state: dict[str, torch.Tensor], partition: int, number: int) -> tuple[nn.Module, float]:
    """Train some steps on this partition's data; return the module, and the loss of the received model."""
    net = make_module()
    net.load_state_dict(state)
    chance = torch.Generator().manual_seed(1000 * partition + number)
    x, y = torch.randn(16, 4, generator=chance), torch.arange(16) % 3
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    first = None
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(x), y)
        first = first or float(loss.detach())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net, first


def make_stock_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition, number = context.node_config["partition-id"], message.content["config"]["server-round"]
        net, loss = fit_partition(message.content["arrays"].to_torch_state_dict(), partition, number)
        metrics = MetricRecord({"train_loss": loss, "num-examples": EXAMPLES[partition]})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"eval_loss": 1.0, "eval_acc": 0.5, "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def make_helper_app(dtype: torch.dtype = torch.float32) -> ClientApp:
    """Return an app that trains a module of this dtype and replies with the client helper."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition, number = context.node_config["partition-id"], message.content["config"]["server-round"]
        own = make_module().to(dtype)
        own.load_state_dict(client.read_model(message))
        net, loss = fit_partition(own.state_dict(), partition, number)
        metrics = {"loss": loss, "reach": 3 * 0.1}
        return client.reply(message, context, net.to(dtype).state_dict(), EXAMPLES[partition], metrics)

    return app


def make_grid(app: ClientApp) -> LocalGrid:
    return LocalGrid(app, {7 + i: {"partition-id": i} for i in EXAMPLES})


@pytest.mark.parametrize("strategy", [FedHEAL, Uniform], ids=["FedHEAL", "Uniform"])
def test_a_stock_app_gets_the_cores_aggregation_unchanged(strategy):
    net = make_module()
    result = strategy().start(make_grid(make_stock_app()), ArrayRecord(net.state_dict()), num_rounds=3)
    aggregator = {FedHEAL: aggregate.fedheal(), Uniform: aggregate.uniform()}[strategy]
    layout = Layout.of(net)
    model, state = layout.pack(net.state_dict()), aggregator.init(layout)
    for number in (1, 2, 3):
        local = [layout.pack(fit_partition(layout.unpack(model), i, number)[0].state_dict()) for i in EXAMPLES]
        updates = Updates(
            [f"node-{7 + i}" for i in EXAMPLES],
            torch.stack([local_model.params - model.params for local_model in local]),
            list(EXAMPLES.values()),
            torch.stack([local_model.buffers for local_model in local]),
            torch.stack([local_model.counters for local_model in local]),
        )
        out = aggregator.apply(model, updates, state)
        model, state = out.model, out.state
    actual = result.arrays.to_torch_state_dict()
    for name, expected in layout.unpack(model).items():
        assert actual[name].dtype == expected.dtype  # counters stay whole numbers
        assert torch.equal(actual[name], expected)
    assert result.evaluate_metrics_clientapp[3]["eval_acc"] == 0.5
    assert result.train_metrics_clientapp[3]["train_loss"] > 0


def test_a_stock_server_can_use_the_helper_too():
    net = make_module()
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    result = strategy.start(make_grid(make_helper_app()), ArrayRecord(net.state_dict()), num_rounds=2)
    assert all(np.isfinite(a.numpy()).all() for a in result.arrays.values())


@pytest.mark.parametrize("strategy", [AFL, QFFL, FedFV], ids=["AFL", "QFFL", "FedFV"])
def test_losses_come_with_the_helper(strategy):
    server = strategy(fraction_evaluate=0.0)
    server.start(make_grid(make_helper_app()), ArrayRecord(make_module().state_dict()), num_rounds=3)
    assert sorted(server.history[-1].weights) == ["partition-0", "partition-1", "partition-2"]
    assert sum(server.history[-1].weights.values()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="needs the client metric 'loss', which no client sends"):
        strategy().start(make_grid(make_stock_app()), ArrayRecord(make_module().state_dict()), num_rounds=1)


def test_a_client_without_the_effective_step_is_told_what_to_send():
    grid = make_grid(make_helper_app())

    def drop_reach(node: int, reply: Message) -> list[Message]:
        del reply.content["metrics"]["reach"]
        return [reply]

    grid.spoil = drop_reach
    with pytest.raises(
        ValueError, match=r"needs the client metric 'reach'.*learning rate times the number of local steps"
    ):
        QFFL().start(grid, ArrayRecord(make_module().state_dict()), num_rounds=1)


def test_the_helper_masks_a_training_loop_of_ones_own():
    by_server, by_client = (
        FedHEAL(tau=0.6, fraction_evaluate=0.0),
        FedHEAL(tau=0.6, placement="client", fraction_evaluate=0.0),
    )
    for strategy in (by_server, by_client):
        strategy.start(make_grid(make_helper_app()), ArrayRecord(make_module().state_dict()), num_rounds=6)
    assert torch.allclose(by_server.state.model.params, by_client.state.model.params, rtol=0, atol=1e-6)
    assert min(by_client.history[-1].report["kept"].values()) < 1


@pytest.mark.parametrize("placement", ["server", "client"])
def test_bfloat16_models_of_the_clients_need_not_be_the_servers(placement, tmp_path):
    narrow, start = torch.bfloat16, ArrayRecord(make_module().state_dict())
    strategies = {}
    for own in (None, Layout.of(make_module().to(narrow))):
        keys = {"tau": 0.6, "placement": placement, "fraction_evaluate": 0.0, "model": own}
        strategy = strategies[own] = FedHEAL(folder=tmp_path / str(own is None), **keys)
        result = strategy.start(make_grid(make_helper_app(narrow)), start, num_rounds=3)
        assert len(strategy.history[-1].weights) == 3
        make_module().to(narrow).load_state_dict(
            result.arrays.to_torch_state_dict()
        )  # as a make_stock_app client reads it
        resumed = FedHEAL(folder=tmp_path / str(own is None), resume=True, **keys)
        resumed.start(make_grid(make_helper_app(narrow)), start, num_rounds=3)
        assert torch.equal(resumed.state.model.params, strategy.state.model.params)
    wide, narrow_params = (strategy.state.model.params for strategy in strategies.values())
    assert (wide.dtype, narrow_params.dtype) == (torch.float32, narrow)
    assert float((wide - narrow_params).norm()) < 0.1 * float(wide.norm())  # signs of what hardly moves differ


def test_a_stock_client_cannot_mask_its_update_and_is_skipped():
    strategy = FedHEAL(placement="client", fraction_evaluate=0.0)
    strategy.start(make_grid(make_stock_app()), ArrayRecord(make_module().state_dict()), num_rounds=1)
    (reason,) = set(strategy.history[0].report["skipped"].values())
    assert reason == "its mask is missing: answer with fedheal.flower.client.reply or client.train"


def test_the_callers_config_is_not_changed_and_reaches_the_clients():
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(dict(message.content["config"]))
        return make_stock_app()(message, context)

    config = ConfigRecord({"lr": 0.5})
    FedHEAL(fraction_evaluate=0.0).start(
        make_grid(app), ArrayRecord(make_module().state_dict()), 1, train_config=config
    )
    assert dict(config) == {"lr": 0.5}
    stocks = [{key: value for key, value in received.items() if not key.startswith("fedheal.")} for received in seen]
    assert stocks == [{"lr": 0.5, "server-round": 1}] * 3


def test_the_caller_may_aggregate_metrics_and_metrics_may_be_lists():
    grid, seen = make_grid(make_stock_app()), []

    def aggregate_metrics(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.append([content["metrics"][key] for content in contents])
        return MetricRecord({"largest": max(seen[-1])})

    def add_list_metric(node: int, reply: Message) -> list[Message]:
        reply.content["metrics"]["by_class"] = [1.0, float(node)]
        return [reply] if node != 8 else [reply, reply]  # a second answer: does not count

    grid.spoil = add_list_metric
    keys = {"train_metrics_aggr_fn": aggregate_metrics, "evaluate_metrics_aggr_fn": aggregate_metrics}
    result = FedHEAL(**keys).start(grid, ArrayRecord(make_module().state_dict()), num_rounds=1)
    assert seen == [[30, 10], [10, 10]]
    assert result.train_metrics_clientapp[1]["largest"] == 30
    plain = FedHEAL(fraction_evaluate=0.0).start(grid, ArrayRecord(make_module().state_dict()), num_rounds=1)
    assert plain.train_metrics_clientapp[1]["by_class"] == pytest.approx([1.0, (30 * 7 + 10 * 9) / 40])


def return_text(contents: list[RecordDict], key: str) -> str:
    return "0.5"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (aggregate_metricrecords, "aggregate_metricrecords raised "),
        (return_text, "return_text returned a str, not a MetricRecord or None"),
        (int, "int raised TypeError: "),
    ],
)
def test_a_metrics_function_that_fails_on_a_clients_metrics_costs_no_round(function, problem, tmp_path, caplog):
    def add_list(node: int, reply: Message) -> list[Message]:
        reply.content["metrics"]["train_loss"] = [1.0, 2.0] if node == 8 else 1.0
        return [reply]

    grid = make_grid(make_stock_app())
    grid.spoil = add_list
    strategy = FedHEAL(
        train_metrics_aggr_fn=function, evaluate_metrics_aggr_fn=function, folder=tmp_path / "run", max_norm="auto"
    )
    result = strategy.start(grid, ArrayRecord(make_module().state_dict()), num_rounds=2)
    assert [len(record.weights) for record in strategy.history] == [3, 3]
    assert result.train_metrics_clientapp == result.evaluate_metrics_clientapp == {}
    for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
        assert f"round 2 has no aggregated metrics: {name} = {problem}" in caplog.text


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_run_in_which_no_update_counted_says_so(num_rounds, caplog):
    strategy = FedHEAL(weighted_by_key="num_examples", fraction_evaluate=0.0)
    strategy.start(make_grid(make_stock_app()), ArrayRecord(make_module().state_dict()), num_rounds=num_rounds)
    rounds = ("1 round", "2 rounds")[num_rounds - 1]
    remedy = "put it into the reply's MetricRecord, or set weighted_by_key to the name that the clients send"
    reason = f"the most frequent reason: it sends no metric 'num_examples' that is a number: {remedy}"
    assert f"no update counted in {rounds}, so training did not change the model; {reason}" in caplog.text


def test_a_run_in_which_one_update_counted_or_nobody_trains_has_no_such_warning(caplog):
    initial = ArrayRecord(make_module().state_dict())
    FedHEAL(fraction_evaluate=0.0).start(make_grid(make_stock_app()), initial, num_rounds=1)
    FedHEAL(fraction_train=0.0).start(make_grid(make_stock_app()), initial, num_rounds=1)
    assert "no update counted" not in caplog.text


def test_central_evaluation_is_called_as_flower_calls_it():
    seen = []
    result = FedHEAL(fraction_evaluate=0.0).start(
        make_grid(make_stock_app()),
        ArrayRecord(make_module().state_dict()),
        num_rounds=2,
        evaluate_fn=lambda number, arrays: seen.append(number) or MetricRecord({"accuracy": 0.1 * number}),
    )
    assert seen == [0, 1, 2]
    assert result.evaluate_metrics_serverapp[2]["accuracy"] == 0.2


@pytest.mark.slow
def test_fedheal_does_not_import_flower_and_says_how_to_install_it():
    code = "import sys, fedheal, fedheal.cli\nassert 'flwr' not in sys.modules\n"
    code += "sys.modules['flwr'] = None\nimport fedheal.flower"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fedheal.flower needs Flower")
    assert "run pip install '.[flower]' in a checkout of fedheal" in last
