"""Settings that cannot work are rejected when a strategy is made, and not after its last round."""

from __future__ import annotations

import re

import pytest
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn

from fedheal.aggregate.server_optimizer import Server
from fedheal.flower import FairStrategy, FedHEAL, Uniform
from fedheal.flower import Server as ServerOfFlower
from flower.local_grid import LocalGrid

MODULE = nn.Linear(2, 1)
TAU_HINT = "name it with a method that has it, as in FairStrategy('fedheal:tau=0.9'), or leave it out"


@pytest.mark.parametrize(
    "make", [lambda **keys: FairStrategy("fedheal", **keys), lambda **keys: FairStrategy("fedavg", **keys), Uniform]
)
def test_a_tau_that_no_client_would_use_is_rejected(make):
    message = f"tau = 0.9 has no effect, since only placement = 'client' uses it: {TAU_HINT}"
    with pytest.raises(ValueError, match=re.escape(message)):
        make(tau=0.9)
    with pytest.raises(ValueError, match=re.escape("tau = 0.3 has no effect")):  # clients' default
        make(tau=0.3)
    assert make().settings.tau is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LocalGrid(ClientApp(), {}), MODULE.state_dict()), "initial_arrays is an OrderedDict: give ArrayRecord("),
        ((LocalGrid(ClientApp(), {}), None), "initial_arrays is a NoneType: give ArrayRecord(model.state_dict())"),
        ((None, ArrayRecord(MODULE.state_dict())), "grid is a NoneType: give the one that Flower passes to"),
        (
            (LocalGrid, ArrayRecord(MODULE.state_dict())),
            "grid is the class LocalGrid: give the one that Flower passes to",
        ),
    ],
)
def test_a_start_with_another_type_says_what_to_give(arguments, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        FairStrategy("fedavg").start(*arguments)


@pytest.mark.parametrize("name", ["train_config", "evaluate_config"])
@pytest.mark.parametrize(("value", "kind"), [("x", "a str"), (5, "an int"), ([], "a list")])
def test_a_config_of_another_type_is_rejected_before_training(name, value, kind):
    with pytest.raises(TypeError, match=f"^{name} is {kind}: give a ConfigRecord such as "):
        FairStrategy("fedavg", wait_seconds=0).start(
            LocalGrid(ClientApp(), {}), ArrayRecord(MODULE.state_dict()), **{name: value}
        )


@pytest.mark.parametrize("function", [5, 0, "x", lambda: None, lambda number: None, len])
def test_a_central_evaluation_that_cannot_be_called_is_rejected_before_training(function):
    message = f"evaluate_fn = {function!r}: give a function of two arguments, the number of the round and the model's"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        FairStrategy("fedavg", wait_seconds=0).start(
            LocalGrid(ClientApp(), {}), ArrayRecord(MODULE.state_dict()), evaluate_fn=function
        )


def evaluate_wrongly(number, arrays):
    return {"accuracy": 0.5}


def test_a_central_evaluation_that_returns_no_metrics_is_named_before_training():
    grid = LocalGrid(ClientApp(), {})
    message = "what evaluate_fn = evaluate_wrongly returned is a dict: return a MetricRecord or None"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        FairStrategy("fedavg", wait_seconds=0).start(
            grid, ArrayRecord(MODULE.state_dict()), evaluate_fn=evaluate_wrongly
        )
    assert grid.asked == []


def test_a_tau_that_is_used_is_kept():
    assert FedHEAL(tau=0.9).method.parameters["tau"] == 0.9
    assert FairStrategy("fedheal:tau=0.9").method.parameters["tau"] == 0.9
    assert FedHEAL(placement="client", tau=0.9).settings.tau == 0.9
    assert FairStrategy("uniform", placement="client", tau=0.9).settings.tau == 0.9
    assert FairStrategy("uniform", placement="client").settings.tau == 0.3


def add_with_default(replies, key, more=()):
    return None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": None}, "data = None: use a string that is not empty"),
        ({"data": 3}, "data = 3: use a string that is not empty"),
        ({"data": ""}, "data = '': use a string that is not empty"),
        ({"name": 3}, "name = 3: use a string that is not empty"),
        ({"name": ""}, "name = '': use a string that is not empty"),
        ({"server": "adam"}, "server = 'adam': give a Server, such as Server('adam')"),
        ({"server": {"optimizer": "adam"}}, "server = {'optimizer': 'adam'}: give a Server, such as Server('adam')"),
        ({"server": Server}, ": give a Server, such as Server('adam')"),
        ({"weighted_by_key": ""}, "weighted_by_key = '': use a string that is not empty"),
        ({"weighted_by_key": None}, "weighted_by_key = None: use a string that is not empty"),
        ({"arrayrecord_key": 3}, "arrayrecord_key = 3: use a string that is not empty"),
        ({"configrecord_key": ""}, "configrecord_key = '': use a string that is not empty"),
        (
            {"arrayrecord_key": "config"},
            "arrayrecord_key and configrecord_key are both 'config': a message holds both records, so give each a key",
        ),
        ({"train_metrics_aggr_fn": "mean"}, "train_metrics_aggr_fn = 'mean': give a function of two arguments"),
        ({"train_metrics_aggr_fn": 0}, "train_metrics_aggr_fn = 0: give a function of two arguments"),
        ({"evaluate_metrics_aggr_fn": len}, "evaluate_metrics_aggr_fn = <built-in function len>: give a function of two"),
        ({"evaluate_metrics_aggr_fn": lambda replies: None}, ": give a function of two arguments, the list of replies"),
        ({"evaluate_metrics_aggr_fn": lambda a, b, c: None}, ": give a function of two arguments, the list of replies"),
        ({"max_norm": "Auto"}, "max_norm = 'Auto': use a finite number above 0, 'auto' or None"),
        ({"folder": ""}, "folder = '': use a path such as 'runs/hospitals', or leave it out"),
        ({"folder": "a\0b"}, "folder = 'a\\x00b': use a path such as 'runs/hospitals', or leave it out"),
        ({"folder": "x" * 5000}, f"folder = '{'x' * 80}'... cannot be used (File name too long): name another folder"),
        ({"folder": "~nobody-has-this/run"}, "folder = '~nobody-has-this/run' cannot be used ("),
        ({"min_replies": None}, "min_replies = None: use a whole number of at least 1"),
        ({"evaluate_every": None}, "evaluate_every = None: use a whole number of at least 1"),
    ],
)  # fmt: skip
def test_a_setting_that_would_fail_later_is_rejected_by_name(settings, message):
    for make in (FedHEAL, lambda **keys: FairStrategy("fedprox", **keys)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**settings)


@pytest.mark.parametrize("function", [add_with_default, lambda *replies: None, dict.get, max, None])
def test_functions_that_take_two_arguments_are_accepted(function):
    FedHEAL(train_metrics_aggr_fn=function, evaluate_metrics_aggr_fn=function)


def test_the_server_optimiser_can_be_imported_beside_the_strategies():
    assert ServerOfFlower is Server
    assert FedHEAL(server=ServerOfFlower("adam")).server == Server("adam")


@pytest.mark.parametrize(("method", "stage"), [("scaffold+fedheal", "fedheal"), ("feddyn+qffl", "qffl")])
def test_weights_that_the_controls_do_not_have_are_warned_of(caplog, method, stage):
    with caplog.at_level("WARNING", "flwr.fedheal"):
        FairStrategy(method)
    local = method.partition("+")[0]
    problem = f"the weights of '{stage}' do not apply to the controls of '{local}', so training can fail"
    assert [record.getMessage() for record in caplog.records] == [
        f"{method}: {problem}; leave that stage out, since clients keep their controls"
    ]


@pytest.mark.parametrize("method", ["scaffold", "scaffold+fphl", "fedprox+fedheal", "scaffold+uniform"])
def test_methods_whose_controls_agree_with_their_weights_start_without_a_warning(caplog, method):
    with caplog.at_level("WARNING", "flwr.fedheal"):
        FairStrategy(method)
    assert caplog.records == []
