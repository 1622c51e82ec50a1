"""The controller, with sites in this process: same model as the simulator, bad sites left out, state and resume."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedheal.core.layout import Packed
from fedheal.federation.node_sampling import TooManyEmptyRounds
from fedheal.nvflare.exchange import DOMAIN, EXAMPLES
from fedheal.report.rows import find_rows
from fedheal.runs import folder as files
from fedheal.simulate.round import sample_cohort
from nvflare_sites import fail, get_federation, run_controller, simulate

BAD = "noisy-1"
GOOD = ("dark-0", "noisy-0", "plain-0", "plain-1")


def assert_same(ours: Packed, theirs: Packed, tolerance: float = 1e-6) -> None:
    for name in ("params", "buffers", "counters"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", ["fedheal", "fedheal:variant=released", "afl+fedyogi"])
def test_the_model_matches_the_simulator(method):
    state, records = simulate(method)
    rounds = run_controller(method=method)._rounds
    assert_same(rounds.state.model, state.model)
    for ours, theirs in zip(rounds.history, records, strict=True):
        assert ours.weights == pytest.approx(theirs.weights, abs=1e-6)
        assert ours.domains == pytest.approx(theirs.domains)
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=1e-6)


def test_differences_give_the_model_of_whole_parameters():
    """A site's difference has buffers and counters, too."""
    whole, differences = run_controller()._rounds, run_controller(as_difference=True)._rounds
    assert int(whole.state.model.counters.max()) > 0
    assert_same(differences.state.model, whole.state.model)


def spoil_array(reply):
    reply.params["2.weight"] = reply.params["2.weight"] * math.nan


def spoil_shape(reply):
    reply.params["2.weight"] = reply.params["2.weight"][:1]


def spoil_names(reply):
    reply.params["other"] = reply.params.pop("2.bias")


def spoil_keys(reply):
    reply.params[3] = np.zeros(2)


def spoil_kind(reply):
    reply.params["2.bias"] = ["a", "b", "c"]


def spoil_dtype(reply):
    reply.params["2.bias"] = torch.ones(3).to(torch.float8_e4m3fn)


def spoil_text(reply):
    reply.params["2.bias"] = np.array(["a", "b", "c"])


def spoil_counter(reply):
    reply.params["1.num_batches_tracked"] = np.asarray(2**60)


def spoil_counter_slowly(reply):
    reply.params["1.num_batches_tracked"] = np.asarray(2**53)


def spoil_variance(reply):
    reply.params["1.running_var"] = -reply.params["1.running_var"]


def set_meta(key, value):
    return lambda reply: reply.meta.update({key: value})


CASES = {
    "NaN": (spoil_array, "NaN"),
    "shape": (spoil_shape, "of shape (1, 192); it must be torch.float32 of shape (3, 192)"),
    "names": (spoil_names, "lacks ['2.bias'] and has unknown ['other']"),
    "keys": (spoil_keys, "no parameters by name"),
    "list": (spoil_kind, "'2.bias' cannot be read: it is a list, not an array"),
    "text": (spoil_text, "not numbers"),
    "float8": (spoil_dtype, "'2.bias' cannot be read: it is a tensor of torch.float8_e4m3fn, which numpy cannot hold"),
    "counter": (spoil_counter, "counts beyond"),
    "counter that jumps": (spoil_counter_slowly, "more than the server sent"),
    "variance": (spoil_variance, "holds a negative variance"),
    "no examples": (lambda reply: reply.meta.pop(EXAMPLES), f"no metric '{EXAMPLES}' that is a number"),
    "zero examples": (set_meta(EXAMPLES, 0), "must be positive"),
    "NaN examples": (set_meta(EXAMPLES, math.nan), "must be positive"),
    "many examples": (set_meta(EXAMPLES, 1e12), "at most max_examples"),
    "true examples": (set_meta(EXAMPLES, True), "that is a number"),
    "domain": (set_meta(DOMAIN, "a\nb"), "cannot be printed"),
    "domain number": (set_meta(DOMAIN, 3), "its domain is an int"),
}


class SpoilSecondRound:
    """Spoils the bad site's answer in round 2."""

    def __init__(self, change):
        self.change, self.trained = change, 0

    def __call__(self, task, site, reply):
        if task == "train" and site == BAD:
            self.trained += 1
            if self.trained == 2:
                return self.change(reply)
        return reply


@pytest.fixture(scope="module")
def model_without_bad_site():
    controller = run_controller(SpoilSecondRound(lambda reply: None))
    assert controller._rounds.history[1].report["missing"] == [BAD]
    return controller._rounds.state.model


@pytest.mark.parametrize("case", CASES)
def test_a_bad_reply_is_left_out_by_name(case, model_without_bad_site, caplog):
    change, reason = CASES[case]

    def spoil(reply):
        change(reply)
        return reply

    with caplog.at_level(logging.WARNING, "fedheal.nvflare"):
        rounds = run_controller(SpoilSecondRound(spoil))._rounds
    skipped = [record.report["skipped"] for record in rounds.history]
    assert [list(names) for names in skipped] == [[], [BAD], []]
    assert reason in skipped[1][BAD]
    assert BAD not in rounds.history[1].weights
    assert f"round 2: '{BAD}' is skipped" in caplog.text
    assert_same(rounds.state.model, model_without_bad_site, tolerance=0)


def test_a_script_that_raises_does_not_end_the_job(model_without_bad_site):
    controller = run_controller(SpoilSecondRound(lambda reply: fail("train", BAD, reply)))
    assert controller._rounds.history[1].report["skipped"] == {BAD: "its reply is an error: EXECUTION_EXCEPTION"}
    assert [record.replied for record in controller._rounds.history] == [5, 4, 5]
    assert_same(controller._rounds.state.model, model_without_bad_site, tolerance=0)


def test_a_site_that_does_not_evaluate_is_recorded():
    rounds = run_controller(lambda task, site, reply: None if (task, site) == ("validate", BAD) else reply)._rounds
    assert [record.report["not_evaluated"] for record in rounds.history] == [{BAD: "it did not reply"}] * 3
    assert [record.report["missing"] for record in rounds.history] == [[]] * 3


def test_a_site_that_replies_twice_is_left_out(model_without_bad_site):
    rounds = run_controller(SpoilSecondRound(lambda reply: [reply, reply]))._rounds
    assert rounds.history[1].report["skipped"] == {BAD: "it replied 2 times in this round"}
    assert_same(rounds.state.model, model_without_bad_site, tolerance=0)


def test_too_few_replies_leave_the_model_as_it_was_and_end_the_job_in_the_end(tmp_path):
    folder = tmp_path / "run"
    settings = {"folder": str(folder), "min_replies": 2, "max_empty_rounds": 2, "num_rounds": 9, "evaluate_every": 0}
    with pytest.raises(TooManyEmptyRounds, match="max_empty_rounds = 2: the last 2 rounds left the model as it was"):
        run_controller(lambda task, site, reply: reply if site == GOOD[0] else fail(task, site, reply), **settings)
    records = files.read_rounds(folder)
    assert [sorted(record.report["skipped"]) for record in records] == [sorted(get_federation().clients)] * 2
    assert "fewer than min_replies = 2" in records[0].report["skipped"][GOOD[0]]
    assert "max_empty_rounds" in records[-1].report["ended"]
    assert not (folder / "model.safetensors").exists()


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    whole = run_controller(folder=str(tmp_path / "whole"), num_rounds=4)._rounds

    class Killed(RuntimeError): ...

    def die(task, site, reply):
        if task == "train" and reply.params["1.num_batches_tracked"] > 8 and site == "plain-0":
            raise Killed
        return reply

    folder = str(tmp_path / "run")
    with pytest.raises(Killed):
        run_controller(die, folder=folder, num_rounds=4)
    done = len(files.read_rounds(tmp_path / "run"))
    assert 0 < done < 4
    with pytest.raises(ValueError, match="set resume=True"):
        run_controller(folder=folder, num_rounds=4)
    resumed = run_controller(folder=folder, num_rounds=4, resume=True)._rounds
    assert_same(resumed.state.model, whole.state.model, tolerance=0)
    assert [record.round for record in files.read_rounds(tmp_path / "run")] == [1, 2, 3, 4]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    expected = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert {k: result[k] for k in ("domains", "avg", "worst", "clients")} == {
        k: expected[k] for k in ("domains", "avg", "worst", "clients")
    }
    assert result["versions"]["nvflare"]
    model = files.load_tensors(tmp_path / "run" / "model.safetensors")
    assert torch.equal(model["2.weight"].reshape(-1), whole.layout.unpack(whole.state.model)["2.weight"].reshape(-1))


def test_the_folder_is_reported_like_any_run(tmp_path):
    run_controller(folder=str(tmp_path / "run"), num_rounds=2, data="hospitals")
    (row,) = find_rows([tmp_path / "run"])
    assert (row.data, sorted(row.domains)) == ("hospitals", ["dark", "noisy", "plain"])


def test_another_method_or_framework_is_not_resumed(tmp_path):
    folder = str(tmp_path / "run")
    run_controller(folder=folder, num_rounds=1)
    with pytest.raises(ValueError, match="holds a federation with method = 'fedavg\\+fedheal'"):
        run_controller(folder=folder, num_rounds=2, resume=True, method="fedheal:tau=0.5")
    toml = tmp_path / "run" / "federation.toml"
    toml.write_text(toml.read_text().replace('framework = "nvflare"\n', ""))
    with pytest.raises(ValueError, match="framework = None, not 'nvflare'"):
        run_controller(folder=folder, num_rounds=2, resume=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"method": "scaffold+fedheal"},
            "method = 'scaffold\\+fedheal' has local terms.*use its server part, such as 'fedheal'",
        ),
        ({"method": 3}, "method = 3: use a name"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"timeout": 0}, "timeout"),
        ({"min_replies": 0}, "min_replies"),
        ({"fraction": 1.5}, "fraction"),
        ({"max_norm": -1.0}, "max_norm"),
        ({"folder": 3}, "folder = 3: use a path"),
        ({"resume": True}, "resume = True needs folder"),
        ({"server": {"optimizer": "lion"}}, "optimizer"),
        ({"model": "nvflare_sites"}, "use 'module:function'"),
        ({"model": "math:pi"}, "cannot be imported"),
        ({"model": "builtins:dict"}, "it must make a torch module"),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        run_controller(**settings)


def test_a_share_of_the_sites_trains_as_in_a_simulation():
    rounds = run_controller(fraction=0.4, seed=3, evaluate_every=0)._rounds
    federation = replace(get_federation(), participation=0.4)
    for record in rounds.history:
        assert sorted(record.weights) == sample_cohort(federation, 3, record.round)
