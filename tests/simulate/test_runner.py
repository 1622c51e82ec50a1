"""A run in its folder: what it goes on from, what it refuses, and what an error leaves."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import fedheal
from fedheal import Method
from fedheal.core.metrics import fairness
from fedheal.local.fedprox import FedProx
from fedheal.local.term import Term
from fedheal.methods import get
from fedheal.runs import folder as records
from fedheal.runs.lock import LOCK
from fedheal.runs.schema import RoundRecord
from fedheal.simulate import runner
from fedheal.simulate.devices import resolve_device
from fedheal.simulate.experiment import Experiment
from tiny_data import load, quick, shaped
from tiny_runs import drop_seconds, get_model_bytes, run


def test_a_method_of_ones_own_can_be_resumed_and_loaded(tmp_path):
    own = Method((FedProx(0.5),), get("fedavg").aggregator, "mine")
    whole = fedheal.run(quick(method=own, rounds=3))
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(method=own, rounds=3), tmp_path / "run", callbacks=[StopAt(2)])
    resumed = fedheal.run(quick(method=own, rounds=3), tmp_path / "run", resume=True)
    assert [record.round for record in resumed.history] == [1, 2, 3]
    loaded = fedheal.load(tmp_path / "run").state_dict()
    assert all(value.equal(loaded[name]) for name, value in whole.model.state_dict().items())
    with pytest.raises(ValueError, match="belongs to another experiment"):
        fedheal.run(quick(method=own, rounds=4), tmp_path / "run", resume=True)


def test_a_changed_method_needs_a_name_of_its_own():
    changed = replace(get("fedprox"), local=(FedProx(5.0),))
    with pytest.raises(ValueError, match="method 'fedprox' exists already: give yours another name"):
        quick(method=changed)
    assert quick(method=replace(changed, name="strong")).method_name == "strong"
    assert quick(method=get("fedprox", mu=0.5)).identity == quick(method="fedprox", mu=0.5).identity


class StopAt(fedheal.Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    def round(self, record: RoundRecord) -> None:
        if record.round == self.number:
            raise KeyboardInterrupt


def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(), tmp_path / "run", callbacks=[StopAt(2)])
    dataset = load()
    first = dataset.domains[0]
    images = first.test.images.clone()
    images[0, 0, 0, 0] ^= 1
    other = replace(first, test=replace(first.test, images=images))
    monkeypatch.setattr("tiny_data.load", lambda: replace(dataset, domains=(other, *dataset.domains[1:])))
    with pytest.raises(ValueError, match=r"the data of .*run have changed since it was begun"):
        fedheal.run(quick(), tmp_path / "run", resume=True)
    monkeypatch.undo()
    assert len(fedheal.run(quick(), tmp_path / "run", resume=True).history) == 3


class FailAtStart(fedheal.Callback):
    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        raise ValueError("the tracker does not answer")


def test_what_stopped_before_its_first_round_is_not_in_the_way(tmp_path):
    with pytest.raises(ValueError, match="does not answer"):
        fedheal.run(quick(), tmp_path / "run", callbacks=[FailAtStart()])
    fedheal.run(quick(), tmp_path / "run")
    with pytest.raises(ValueError, match=r"is finished: `fedheal report .*run` shows it"):
        fedheal.run(quick(), tmp_path / "run")


def test_however_often_it_stopped_there(tmp_path):
    for _ in range(3):
        with pytest.raises(ValueError, match="does not answer"):
            fedheal.run(quick(), tmp_path / "run", callbacks=[FailAtStart()])
    assert get_model_bytes(fedheal.run(quick(), tmp_path / "run").model) == get_model_bytes(run().model)


def test_other_classes_are_other_data(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(), tmp_path / "run", callbacks=[StopAt(2)])
    dataset = load()
    monkeypatch.setattr("tiny_data.load", lambda: replace(dataset, classes=(*dataset.classes, "another")))
    with pytest.raises(ValueError, match=r"the data of .*run have changed since it was begun"):
        fedheal.run(quick(), tmp_path / "run", resume=True)


class FailInSecondRound(fedheal.Callback):
    def round(self, record: RoundRecord) -> None:
        if record.round == 2:
            raise RuntimeError("something else")


def test_an_error_between_rounds_loses_none(tmp_path):
    with pytest.raises(RuntimeError, match="something else"):
        fedheal.run(quick(), tmp_path / "run", callbacks=[FailInSecondRound()])
    assert [path.name for path in records.list_checkpoints(tmp_path / "run")] == ["00000002.safetensors"]
    assert get_model_bytes(fedheal.run(quick(), tmp_path / "run", resume=True).model) == get_model_bytes(run().model)


class KillWorkers(fedheal.Callback):
    """Kills the workers after round 2, as a system without memory does."""

    def round(self, record: RoundRecord) -> None:
        if record.round == 2:
            for process in multiprocessing.active_children():
                process.kill()
                process.join()


@pytest.mark.slow
def test_a_killed_worker_is_a_sentence_and_loses_no_round(tmp_path):
    with pytest.raises(ChildProcessError, match="was killed"):
        fedheal.run(quick(workers=2), tmp_path / "run", callbacks=[KillWorkers()])
    assert [path.name for path in records.list_checkpoints(tmp_path / "run")] == ["00000002.safetensors"]
    assert get_model_bytes(fedheal.run(quick(workers=1), tmp_path / "run", resume=True).model) == get_model_bytes(
        run().model
    )


def test_fairness_over_clients_is_that_of_their_mean_accuracies():
    summary = run(rounds=4).summary
    assert summary["client_fairness"] == fairness(summary["clients"])


def test_a_model_that_stays_with_clients_cannot_be_pooled():
    with pytest.raises(
        ValueError, match="method 'fedbn' keeps a part of the model with each client: pool=true leaves none"
    ):
        run(method="fedbn", pool=True, model="tiny_data:conv_batchnorm")


@pytest.mark.parametrize("name", ["2024-01-01", "5", "true-ish"])
def test_a_name_may_look_like_something_else(name):
    assert Experiment.read(None, [f"name={name}"]).folder_name == name


def test_a_finished_run_is_read_where_nothing_may_be_written(tmp_path, monkeypatch):
    done = fedheal.run(quick(), tmp_path / "run")
    (tmp_path / "run" / LOCK).unlink()
    monkeypatch.setattr(runner, "hold_lock", None)
    assert get_model_bytes(fedheal.run(quick(), tmp_path / "run", resume=True).model) == get_model_bytes(done.model)
    assert not (tmp_path / "run" / LOCK).exists()
    with pytest.raises(ValueError, match="belongs to another experiment"):
        fedheal.run(quick(lr=0.5), tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


def test_damaged_files_of_a_finished_run_are_named(tmp_path):
    fedheal.run(quick(), tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"too short")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        fedheal.load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        fedheal.run(quick(), tmp_path / "run", resume=True)
    (tmp_path / "run" / "result.json").write_text("garbage")
    with pytest.raises(ValueError, match=r"result\.json is not JSON"):
        fedheal.run(quick(), tmp_path / "run", resume=True)
    (tmp_path / "run" / "result.json").write_text("[]")
    with pytest.raises(ValueError, match=r"result\.json does not hold a JSON object"):
        fedheal.load(tmp_path / "run")


def test_a_model_that_needs_the_shape_of_an_image_is_loaded_into_a_module(tmp_path):
    result = fedheal.run(quick(model="tiny_data:shaped"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"'input_shape'; or give the module itself, load\(folder, module\)$"):
        fedheal.load(tmp_path / "run")
    loaded = fedheal.load(tmp_path / "run", shaped(3, (3, 8, 8)))
    assert get_model_bytes(loaded) == get_model_bytes(result.model)


def test_a_model_that_is_missing_is_written_from_the_last_checkpoint(tmp_path):
    done = fedheal.run(quick(), tmp_path / "run")
    model, result = (tmp_path / "run" / name for name in ("model.safetensors", "result.json"))
    written = model.read_bytes(), result.read_bytes()
    model.unlink()
    again = fedheal.run(quick(), tmp_path / "run", resume=True)
    assert (model.read_bytes(), result.read_bytes()) == written
    assert drop_seconds(again.history) == drop_seconds(done.history)
    model.unlink()
    (tmp_path / "run" / "state" / "00000003.safetensors").unlink()
    rounds = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    missing = (
        r"model\.safetensors is missing in .*run, and state/ holds no checkpoint of round 3.*remove .*result\.json"
    )
    with pytest.raises(ValueError, match=missing):
        fedheal.run(quick(), tmp_path / "run", resume=True)
    assert (result.read_bytes(), (tmp_path / "run" / "rounds.jsonl").read_bytes()) == (written[1], rounds)


def test_a_damaged_result_is_written_again_once_it_is_removed(tmp_path):
    fedheal.run(quick(), tmp_path / "run")
    result = tmp_path / "run" / "result.json"
    written = result.read_bytes()
    for damaged in (b"garbage", b"{}"):
        result.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"result\.json.*; remove it and resume \(--resume, or resume=True\)"):
            fedheal.run(quick(), tmp_path / "run", resume=True)
        result.unlink()
        fedheal.run(quick(), tmp_path / "run", resume=True)
        assert result.read_bytes() == written


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"round": 3, "cohort": true}', "cohort must be a whole number, got True"),
        ('{"round": 3, "domains": {"a": "good"}}', "domains.a must be a number, got 'good'"),
    ],
)
def test_rounds_that_no_run_writes_are_named(tmp_path, line, sentence):
    fedheal.run(quick(), tmp_path / "run")
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"rounds\.jsonl: line 4: {sentence}"):
        fedheal.run(quick(), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("key", "value"), [("classes", None), ("avg", "high"), ("domains", [])])
def test_a_result_that_lacks_something_is_named(tmp_path, key, value):
    fedheal.run(quick(), tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    summary = json.loads(path.read_text())
    path.write_text(
        json.dumps({k: v for k, v in summary.items() if k != key} | ({} if value is None else {key: value}))
    )
    message = f"there is no {key}" if value is None else f"{key} must be .*, got "
    with pytest.raises(ValueError, match=rf"result\.json: {message}"):
        fedheal.run(quick(), tmp_path / "run", resume=True)
    if key == "classes":
        with pytest.raises(ValueError, match=rf"result\.json: {message}"):
            fedheal.load(tmp_path / "run")


def test_a_model_that_has_changed_since_is_a_sentence(tmp_path):
    fedheal.run(quick(model="tiny_data:conv_batchnorm", width=4), tmp_path / "run")
    path = tmp_path / "run" / "experiment.toml"
    path.write_text(path.read_text().replace("width = 4", "width = 5"))
    with pytest.raises(
        ValueError, match=r"model\.safetensors does not fit model 'tiny_data:conv_batchnorm', which .* \(size mismatch"
    ):
        fedheal.load(tmp_path / "run")


def test_a_folder_that_another_run_took_meanwhile_is_refused(tmp_path, monkeypatch):
    """The other run had the lock when this one read the folder, and had ended when this one got the lock."""
    alone = runner.hold_lock

    def lock_late(folder):
        monkeypatch.undo()
        fedheal.run(quick(lr=0.001), folder, progress=False)
        return alone(folder)

    monkeypatch.setattr(runner, "hold_lock", lock_late)
    with pytest.raises(
        ValueError, match=r"another experiment \(seed is 0 there and 7 here; lr is 0.001 there and .* here\)"
    ):
        fedheal.run(quick(seed=7), tmp_path / "run", resume=True)


def test_the_folder_of_a_method_that_only_another_program_knows_is_refused(tmp_path):
    own = Method((FedProx(0.5),), get("fedavg").aggregator, "mine")
    fedheal.run(quick(method=own), tmp_path / "run")
    with pytest.raises(ValueError, match=r"run belongs to another experiment, of method .mine.*: give another name"):
        fedheal.run(quick(), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("data", "remedy"), [("embedded", ""), ("tiny_data:load", ", or resize them in your function")]
)
def test_images_that_come_as_they_are_have_no_other_size(data, remedy):
    with pytest.raises(ValueError, match=f"image_size = 16: the images of '.*' are not resized; leave it out{remedy}$"):
        run(data=data, image_size=16)


@pytest.mark.parametrize(
    ("gpus", "usable"),
    [
        (0, "auto or cpu (cuda and cuda:N need a GPU that torch can use, and here is none)"),
        (1, "auto, cpu, cuda or cuda:0"),
        (4, "auto, cpu, cuda or cuda:0 to cuda:3"),
    ],
)
def test_a_device_that_cannot_be_used_is_answered_with_those_that_can(monkeypatch, gpus, usable):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(ValueError, match=re.escape(f"device = 'tpu' cannot be used here: use {usable}") + "$"):
        resolve_device("tpu")
    with pytest.raises(ValueError, match=r"device = 'cuda:99' cannot be used here \(.+\): use auto"):  # and why
        resolve_device("cuda:99")


class Misspelt(Term):
    def los(self, batch, ctx):
        return batch.ce


class Loss:
    def loss(self, batch, ctx):
        return None


class Mixed(Loss, Term):
    pass


class HoldsOut(Term):
    """It changes what clients train with."""

    validates = True


def test_a_term_that_overrides_no_hook_is_warned_of():
    message = r"your term `.*:Misspelt` overrides no hook of Term, so it changes nothing \(did you mean 'loss'\?\)$"
    with pytest.warns(UserWarning, match=message) as warned:
        fedheal.run(quick(method=Method((Misspelt(), FedProx(0.1)), name="misspelt"), rounds=1), progress=False)
    assert [warning.filename for warning in warned] == [__file__]  # which calls fedheal.run
    clipped = Term()
    clipped.clip = 1.0
    method = Method((Mixed(), clipped, HoldsOut()), name="mixed")
    fedheal.run(quick(method=method, rounds=1, validation=0.2), progress=False)


def test_a_wrong_folder_or_callback_is_a_sentence():
    with pytest.raises(TypeError, match="out is an int: give the path of the run folder"):
        fedheal.run(quick(), out=3)
    used_up = (callback for callback in [fedheal.Callback()])  # by the check, so that the run would call none
    wrong = {"builtin_function_or_method": len, "Callback": fedheal.Callback(), "generator": used_up}
    for name, callbacks in wrong.items():  # Ray replaces `print`
        with pytest.raises(TypeError, match=rf"callbacks is a {name}: give a list of fedheal\.Callback"):
            fedheal.run(quick(), callbacks=callbacks)
    with pytest.raises(TypeError, match=r"callbacks\[1\] is an int: give an instance of a fedheal\.Callback"):
        fedheal.run(quick(), callbacks=[fedheal.Callback(), 3])
