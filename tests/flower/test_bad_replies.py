"""Whatever a client sends, the run goes on without it, says so by name, and the model stays sound."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from fedheal.flower import FedHEAL
from flower.sites import Sites

BAD = 102  # the node that misbehaves in round 2
Spoil = Callable[[Message], list[Message]]
ABSENT: Spoil = lambda reply: []  # noqa: E731


def change_arrays(change: Callable[[dict[str, Array]], None]) -> Callable[[Message], list[Message]]:
    def spoil(reply: Message) -> list[Message]:
        change(reply.content["arrays"])
        return [reply]

    return spoil


def set_metrics(metrics: dict[str, float | list[float]]) -> Callable[[Message], list[Message]]:
    def spoil(reply: Message) -> list[Message]:
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **metrics})
        return [reply]

    return spoil


def set_message(name: str, values: np.ndarray) -> Callable[[Message], list[Message]]:
    def spoil(reply: Message) -> list[Message]:
        reply.content["fedheal.messages"][f"0.{name}"] = Array(np.asarray(values))
        return [reply]

    return spoil


def set_metric(name: str, value: float | list[float]) -> Callable[[Message], list[Message]]:
    return set_metrics({name: value})


def set_array(name: str, value: object) -> Callable[[dict[str, Array]], None]:
    return lambda record: record.update({name: value})


def set_client_info(**keys: object) -> Callable[[Message], list[Message]]:
    def spoil(reply: Message) -> list[Message]:
        reply.content["fedheal"] = ConfigRecord({**reply.content["fedheal"], **keys})
        return [reply]

    return spoil


def drop_metrics(reply: Message) -> list[Message]:
    del reply.content["metrics"]
    return [reply]


def reply_with_error(reply: Message) -> list[Message]:
    failed = Message(Error(code=1, reason="Traceback ...\nRuntimeError: out of memory"), reply_to=reply)
    failed.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
    return [failed]


def reply_with_superlink_error(reply: Message) -> list[Message]:
    """Reply as the SuperLink does for a dead node: under its own id, so that only the answered message names the node."""
    failed = Message(Error(code=3, reason="the node is gone"), reply_to=reply)
    failed.metadata.__dict__["_src_node_id"] = 1
    failed.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return [failed]


def replay_old_message(reply: Message) -> list[Message]:
    reply.metadata.__dict__["_reply_to_message_id"] = "a message of an earlier round"
    return [reply]


def send_archive(reply: Message) -> list[Message]:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3, np.float32))
    reply.content["arrays"]["head.bias"] = Array("float32", (3,), "numpy.ndarray", file.getvalue())
    return [reply]


def send_object_array(reply: Message) -> list[Message]:
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"
    reply.content["arrays"]["head.bias"] = Array("object", (3,), "numpy.ndarray", header.ljust(127) + b"\n" + b"x" * 24)
    return [reply]


CASES = {
    "an error": (reply_with_error, "out of memory"),
    "an error of the SuperLink": (reply_with_superlink_error, "the node is gone"),
    "no reply": (ABSENT, None),
    "NaN": (change_arrays(set_array("head.bias", Array(np.full(3, math.nan, np.float32)))), "NaN"),
    "infinity": (change_arrays(set_array("head.bias", Array(np.full(3, math.inf, np.float32)))), "infinity"),
    "NaN in a buffer": (
        change_arrays(set_array("body.1.running_var", Array(np.full(4, math.nan, np.float32)))),
        "buffers",
    ),
    "a wrong shape": (change_arrays(set_array("head.bias", Array(np.zeros(4, np.float32)))), r"shape \(4,\)"),
    "a wrong dtype": (change_arrays(set_array("head.bias", Array(np.zeros(3, np.int32)))), "int32"),
    "complex numbers": (change_arrays(set_array("head.bias", Array(np.zeros(3, np.complex64)))), "complex64"),
    "a complex buffer": (
        change_arrays(set_array("body.1.running_var", Array(np.zeros(4, np.complex128)))),
        "complex128",
    ),
    "text for numbers": (
        change_arrays(set_array("head.bias", Array("float32", (3,), "numpy.ndarray", b"hello"))),
        "not an array",
    ),
    "too few bytes": (
        change_arrays(lambda r: set_array("head.bias", _truncate_array(r["head.bias"]))(r)),
        "not an array",
    ),
    "another serialisation": (change_arrays(set_array("head.bias", Array("float32", (3,), "pickle", b""))), "pickle"),
    "an archive": (send_archive, "not an array"),
    "Python objects": (send_object_array, "objects"),
    "a missing array": (change_arrays(lambda record: record.pop("head.bias")), "lacks"),
    "an unknown array": (change_arrays(set_array("more", Array(np.zeros(1)))), "unknown"),
    "no metrics": (drop_metrics, "num-examples"),
    "no examples": (set_metric("num-examples", 0), "num-examples = 0"),
    "negative examples": (set_metric("num-examples", -5), "num-examples = -5"),
    "NaN examples": (set_metric("num-examples", math.nan), "num-examples = nan"),
    "absurdly many examples": (set_metric("num-examples", 10**12), "max_examples"),
    "a list of examples": (set_metric("num-examples", [1.0, 2.0]), "num-examples"),
    "too many metrics": (set_metrics({f"metric-{i}": 1.0 for i in range(300)}), "metrics, at most 256"),
    "an old round": (set_client_info(round=1), "answers round 1"),
    "an old message": (replay_old_message, "not sent in this round"),
    "twice": (lambda reply: [reply, reply], "replied 2 times"),
}


def _truncate_array(array: Array) -> Array:
    return Array(array.dtype, array.shape, array.stype, array.data[:-2])


def run_with_bad_replies(spoil: Spoil | dict[int, Spoil], method: str = "fedheal", **settings):
    """Run three rounds; one node or several send a bad reply in the second."""
    sites = Sites(method=method)
    strategy = sites.strategy(fraction_evaluate=0.0, **settings)
    spoils = spoil if isinstance(spoil, dict) else {BAD: spoil}

    def spoil_second_round(node: int, reply: Message) -> list[Message]:
        return spoils[node](reply) if node in spoils and strategy.rounds.current.number == 2 else [reply]

    strategy.start(sites.grid(spoil_second_round), sites.initial, num_rounds=3)
    return strategy, sites.names[BAD - 100]


@cache
def run_without_reply(method: str = "fedheal", nodes: tuple[int, ...] = (BAD,)) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parameters and buffers of a run in which these nodes do not reply in the second round."""
    model = run_with_bad_replies(dict.fromkeys(nodes, ABSENT), method)[0].state.model
    return model.params, model.buffers


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(CASES), 3))
def test_a_bad_reply_counts_as_an_absent_client(first, caplog):
    """Each run has three cases, each at another node."""
    cases = dict(zip((101, 102, 103), list(CASES.values())[first : first + 3], strict=False))
    with caplog.at_level(logging.WARNING, "flwr.fedheal"):
        strategy, _ = run_with_bad_replies({node: spoil for node, (spoil, _) in cases.items()})
    params, buffers = run_without_reply(nodes=tuple(cases))
    assert torch.equal(strategy.state.model.params, params)
    assert torch.equal(strategy.state.model.buffers, buffers)
    second, names = strategy.history[1], sorted(strategy.history[0].weights)
    reasons = {names[node - 100]: words for node, (_, words) in cases.items()}
    for name, words in reasons.items():
        assert name not in second.weights
        assert words is None or re.search(words, second.report["skipped"][name])
        assert name in caplog.text
    missing = [name for name, words in reasons.items() if words is None]
    assert (second.report["missing"], second.cohort) == (missing, 5)
    assert set(second.report["skipped"]) == reasons.keys() - set(missing)
    errors = sum(spoil in (reply_with_error, reply_with_superlink_error) for spoil, _ in cases.values())
    assert second.replied == 5 - len(missing) - errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (
            "<class 'torch.OutOfMemoryError'>:<'CUDA out of memory.\nTried 2 GiB.'>",
            "OutOfMemoryError: CUDA out of memory.",
        ),
        ("<class 'KeyError'>:<''x\x1b[2J''>", r"KeyError: 'x\x1b[2J'"),
        ("<class 'AssertionError'>:<''>", "AssertionError"),
        (
            "<class 'ray.exceptions.RayTaskError'>:<'ray::run()\nValueError: no data'>",
            "RayTaskError: ValueError: no data",
        ),
        ("<class 'OSError'>:<'" + "/data/patient" * 99 + "'>", "OSError: /data/patient"),
        ("", "code 2"),
    ],
)
def test_the_class_of_a_clients_exception_is_kept_and_its_text_shortened(reason, expected):
    def fail(reply: Message) -> list[Message]:
        failed = Message(Error(code=2, reason=reason), reply_to=reply)
        failed.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
        return [failed]

    strategy, name = run_with_bad_replies(fail)
    words = strategy.history[1].report["skipped"][name]
    assert words.startswith(f"its node reports an error: {expected}")
    assert len(words) < 250


def test_an_update_above_max_norm_is_skipped():
    far = change_arrays(set_array("head.bias", Array(np.full(3, 50, np.float32))))
    bounded, name = run_with_bad_replies(far, max_norm=10.0)
    assert "max_norm = 10" in bounded.history[1].report["skipped"][name]
    assert torch.equal(bounded.state.model.params, run_without_reply()[0])
    free, _ = run_with_bad_replies(far)
    assert free.history[1].report["skipped"] == {}


def test_a_node_that_was_not_asked_does_not_count():
    def reply_as_stranger(reply: Message) -> list[Message]:
        reply.metadata.__dict__["_src_node_id"] = 999
        return [reply]

    strategy, name = run_with_bad_replies(reply_as_stranger)
    assert "node 999 was not asked" in strategy.history[1].report["skipped"][name]
    assert (strategy.history[1].cohort, strategy.history[1].replied) == (5, 4)


@pytest.mark.parametrize("number", [1, 2])
def test_a_client_discards_its_state_of_a_round_that_was_not_accepted(number):
    """SCAFFOLD's control variate must not move on the client when it did not on the server, not even in the first round."""

    def train_params(asks_bad_node: bool) -> torch.Tensor:
        sites = Sites(method="scaffold")
        grid, strategy = sites.grid(), sites.strategy(fraction_evaluate=0.0)
        strategy.begin(sites.initial)
        strategy._num_rounds = 3
        for now in (1, 2, 3):
            messages = strategy.configure_train(now, strategy._sent, ConfigRecord(), grid)
            if now == number and not asks_bad_node:
                messages = [m for m in messages if m.metadata.dst_node_id != BAD]
            replies = grid.send_and_receive(messages)
            if now == number:  # trained, but the reply never arrives
                replies = [reply for reply in replies if reply.metadata.src_node_id != BAD]
            strategy.aggregate_train(now, replies)
            strategy.aggregate_evaluate(now, ())
        return strategy.state.model.params

    assert torch.equal(train_params(asks_bad_node=True), train_params(asks_bad_node=False))


def test_everyone_bad_leaves_the_model_as_it_was():
    sites = Sites(method="fedheal", rounds=2)
    spoil = CASES["NaN"][0]
    strategy = sites.run(lambda node, reply: spoil(reply), fraction_evaluate=0.0)
    untouched = sites.federation.local_training.layout.pack(
        {k: torch.from_numpy(v.numpy()) for k, v in sites.initial.items()}
    )
    assert torch.equal(strategy.state.model.params, untouched.params)
    assert [len(record.report["skipped"]) for record in strategy.history] == [5, 5]


def test_a_server_step_that_overflows_leaves_the_model_and_says_why():
    """FedDyn adds its history to the mean: 3e38 + 1.5e38 is beyond float32, though each client's model is finite."""
    sites = Sites(method="feddyn", rounds=2)
    initial = ArrayRecord({**sites.initial, "head.bias": Array(np.full(3, 1.5e38, np.float32))})
    strategy = sites.strategy(fraction_evaluate=0.0)
    far = change_arrays(set_array("head.bias", Array(np.full(3, 3e38, np.float32))))
    models = []

    def spoil(node: int, reply: Message) -> list[Message]:
        models.append(strategy.state.model.params.clone())
        return far(reply) if strategy.rounds.current.number == 1 else [reply]

    strategy.start(sites.grid(spoil), initial, num_rounds=2)
    first, second = strategy.history
    assert "makes the global model infinite" in first.report["unmoved"]
    assert torch.equal(models[0], models[-1])  # of round 1 and of round 2
    assert "unmoved" not in second.report
    assert not torch.equal(strategy.state.model.params, models[0])


def test_too_few_replies_leave_the_model_as_it_was():
    strategy, _ = run_with_bad_replies(ABSENT, min_replies=5)
    assert [any(record.weights.values()) for record in strategy.history] == [True, False, True]
    assert "min_replies = 5" in next(iter(strategy.history[1].report["skipped"].values()))


def test_a_metric_that_no_client_sends_is_an_error_of_the_app():
    sites = Sites(method="afl")
    drop = lambda node, reply: (reply.content["metrics"].pop("loss"), [reply])[1]  # noqa: E731
    with pytest.raises(ValueError, match=r"'fedavg\+afl' needs the client metric 'loss', which no client sends"):
        sites.run(drop)


def test_a_missing_metric_does_not_end_the_run_while_others_are_silent_or_fail():
    sites = Sites(method="afl", rounds=2)
    strategy = sites.strategy(fraction_evaluate=0.0)

    def spoil(node: int, reply: Message) -> list[Message]:
        if strategy.rounds.current.number == 2:
            return [reply]
        if node == BAD:
            del reply.content["metrics"]["loss"]
            return [reply]
        return reply_with_error(reply) if node == 100 else []

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=2)
    assert "no metric 'loss'" in strategy.history[0].report["skipped"][sites.names[BAD - 100]]
    assert len(strategy.history[1].weights) == 5


def test_a_client_without_a_needed_metric_is_skipped():
    def drop_loss(reply: Message) -> list[Message]:
        del reply.content["metrics"]["loss"]
        return [reply]

    strategy, name = run_with_bad_replies(drop_loss, "afl")
    assert "no metric 'loss'" in strategy.history[1].report["skipped"][name]
    assert torch.equal(strategy.state.model.params, run_without_reply("afl")[0])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (set_metric("accuracy", 7.0), r"^accuracy = 7\.0: use a number from 0 to 1$"),
        (set_metric("num-examples", 0), "^num-examples = 0 must be positive"),
        (set_metric("num-examples", [3.0]), "^it sends no metric 'num-examples' that is a number: put it into"),
        (drop_metrics, "^it sends no metric 'num-examples' that is a number: put it into"),
        (reply_with_error, "^its node reports an error: RuntimeError: out of memory$"),
    ],
)
def test_a_bad_evaluation_reply_is_skipped(damage, words):
    sites = Sites(method="fedheal", rounds=1)

    def spoil(node: int, reply: Message) -> list[Message]:
        return damage(reply) if node == BAD and "accuracy" in reply.content["metrics"] else [reply]

    strategy = sites.run(spoil)
    name = sites.names[BAD - 100]
    assert re.search(words, strategy.history[0].report["not_evaluated"][name])
    assert set(strategy.history[0].clients) == set(sites.names) - {name}


def test_a_metric_that_is_not_a_number_does_not_cost_a_site_its_accuracy():
    sites = Sites(method="fedheal", rounds=1)

    def spoil(node: int, reply: Message) -> list[Message]:
        if "accuracy" in reply.content["metrics"]:
            set_metric("auc", math.nan if node == BAD else 0.5)(reply)
            set_metric("odds", 1e308)(reply)
            set_metric("recall", [0.0, math.nan] if node == BAD else [0.25, 0.75])(reply)
        return [reply]

    strategy = sites.strategy()
    result = strategy.start(sites.grid(spoil), sites.initial, num_rounds=1)
    assert set(strategy.history[0].clients) == set(sites.names)
    assert "not_evaluated" not in strategy.history[0].report
    assert result.evaluate_metrics_clientapp[1]["auc"] == pytest.approx(0.5)  # of those who have one
    assert result.evaluate_metrics_clientapp[1]["odds"] == pytest.approx(1e308)
    assert result.evaluate_metrics_clientapp[1]["recall"] == pytest.approx([0.25, 0.75])


def test_a_non_finite_initial_model_is_rejected_before_training():
    sites = Sites(rounds=1)
    grid = sites.grid()
    bad = ArrayRecord({**sites.initial, "head.bias": Array(np.full(3, math.nan, np.float32))})
    message = "the initial model holds NaN or infinity in 'head.bias': start from a finite one"
    with pytest.raises(ValueError, match=f"^{message}$"):
        sites.strategy().start(grid, bad, num_rounds=1)
    assert grid.asked == []


@pytest.mark.parametrize("gives_module", [True, False])
def test_a_constant_with_infinity_can_stay_out_of_the_model(gives_module):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    strategy = FedHEAL(model=module if gives_module else None)
    advice = (
        "start from a finite one, and keep a constant such as an attention mask out of it: register_buffer(..., pers"
    )
    message = f"the initial model holds NaN or infinity in 'mask': {advice}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        strategy.begin(ArrayRecord(module.state_dict()))
    module.register_buffer("mask", module.mask, persistent=False)
    FedHEAL(model=module if gives_module else None).begin(ArrayRecord(module.state_dict()))


def test_a_model_that_became_non_finite_between_rounds_is_rejected_by_name():
    """A wrapper may change the model that the last round gave."""
    module = torch.nn.Linear(2, 2)
    strategy = FedHEAL()
    strategy.begin(ArrayRecord(module.state_dict()))
    module.weight.data[0, 1] = math.nan
    with pytest.raises(
        ValueError, match=r"^the model to continue from holds NaN or infinity in 'weight': start from a fi"
    ):
        strategy._set_model(ArrayRecord(module.state_dict()))
