"""What a run evaluates, returns, writes and tells callbacks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedheal
from fedheal.data.augment import normalise_images
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.devices import describe_hardware
from fedheal.simulate.experiment import Experiment
from tiny_data import CLIENTS, TEST, linear, load, quick
from tiny_runs import IDS, Stop, get_model_bytes, run

# What is evaluated


@pytest.mark.parametrize(
    ("rounds", "every", "evaluated"), [(5, 1, [1, 2, 3, 4, 5]), (5, 2, [2, 4, 5]), (6, 3, [3, 6]), (3, 10, [3])]
)
def test_evaluation_every_so_many_rounds_and_in_the_last(rounds: int, every: int, evaluated: list[int]) -> None:
    history = run(rounds=rounds, eval_every=every).history
    assert [record.round for record in history if record.domains is not None] == evaluated
    for record in history:
        assert (record.fairness is None) == (record.clients is None) == (record.domains is None)


def test_evaluating_less_often_does_not_change_the_model() -> None:
    assert get_model_bytes(run(rounds=4).model) == get_model_bytes(run(rounds=4, eval_every=3).model)


def test_accuracy_is_of_the_final_model_on_each_domain_and_on_each_clients_share() -> None:
    result = run(rounds=2, lr=0.01)
    clients = {}
    for domain in load().domains:
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        x = (domain.test.images / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        right = (result.model.eval()(x).argmax(1) == domain.test.labels).tolist()
        assert result.history[-1].domains[domain.name] == pytest.approx(100 * sum(right) / TEST[domain.name])
        for i in range(CLIENTS[domain.name]):
            share = right[i :: CLIENTS[domain.name]]
            clients[f"{domain.name}-{i}"] = 100 * sum(share) / len(share)
    assert dict(result.history[-1].clients) == pytest.approx(clients)


def test_a_client_without_a_test_example_is_not_judged() -> None:
    result = run(clients_per_domain=8, samples_per_client=2, batch_size=2)
    assert len(result.history[-1].weights) == 24
    assert len(result.history[-1].clients) == 8 + 8 + TEST["dark"]
    assert "dark-7" not in result.history[-1].clients


def test_the_result_counts_correct_examples_by_class() -> None:
    result = run(rounds=2)
    counts = result.summary["by_class"]
    for domain, accuracy in result.history[-1].domains.items():
        correct, every = (sum(column) for column in zip(*counts[domain], strict=True))
        assert every == TEST[domain]
        assert 100 * correct / every == pytest.approx(accuracy)
        assert all(0 <= right <= total for right, total in counts[domain])


def test_the_result_has_the_calibration_of_the_final_model() -> None:
    result = run(rounds=2)
    test = load()["dark"].test
    with torch.no_grad():
        p = result.model.eval()(normalise_images(test.images)).double().softmax(dim=1)
    (confidence, predicted), rows = p.max(dim=1), torch.arange(len(test))
    bins = np.digitize(confidence, np.linspace(0, 1, 16), right=True)
    gaps = [abs(float(((predicted == test.labels).double() - confidence)[bins == b].sum())) for b in range(1, 16)]
    calibration = result.summary["calibration"]["dark"]
    assert calibration["ece"] == pytest.approx(100 * sum(gaps) / len(test), abs=1e-4)
    assert calibration["nll"] == pytest.approx(float(-p[rows, test.labels].log().mean()), abs=1e-5)
    target = torch.nn.functional.one_hot(test.labels, p.shape[1])
    assert calibration["brier"] == pytest.approx(float((p - target).square().sum(dim=1).mean()), abs=1e-5)
    assert len(json.dumps(calibration)) < 70  # bytes that a domain adds to result.json; rounds.jsonl does not grow


def test_results_are_means_of_the_last_quarter_of_the_evaluated_rounds() -> None:
    result = run(rounds=23, eval_every=2, lr=0.0006)
    evaluated = [record for record in result.history if record.domains is not None]
    assert [record.round for record in evaluated[-4:]] == [18, 20, 22, 23]
    assert result.summary["averaged"] == 3
    means = {d: sum(record.domains[d] for record in evaluated[-3:]) / 3 for d in TEST}
    assert dict(result.domains) == pytest.approx(means)
    average = sum(means.values()) / 3
    assert result.avg == pytest.approx(average)
    assert result.worst == pytest.approx(min(means.values()))
    # The deviation of the means, over domains, with 3 - 1 below.
    deviation = (sum((m - average) ** 2 for m in means.values()) / 2) ** 0.5
    assert result.std == pytest.approx(deviation)


def test_fewer_than_five_evaluated_rounds_will_do() -> None:
    result = run(rounds=2)
    assert result.domains["dark"] == pytest.approx(sum(record.domains["dark"] for record in result.history) / 2)


def test_a_domain_without_test_examples_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_data

    whole = tiny_data.load()
    last = whole.domains[-1]
    none = type(last.test)(last.test.images[:0], last.test.labels[:0])
    domains = (*whole.domains[:-1], type(last)(last.name, last.train, none))
    monkeypatch.setattr(
        tiny_data, "load", lambda: type(whole)("x", whole.classes, domains, whole.clients_per_domain, (4, 4, 4))
    )
    with pytest.raises(ValueError, match="dark"):
        run()


@pytest.mark.slow
def test_experiments_on_the_embedded_digits_learn() -> None:
    """One short round on the embedded digits is better than chance on the easy domain."""
    experiment = Experiment(rounds=3, epochs=1, clients_per_domain=1, width=4, eval_every=3, device="cpu")
    result = fedheal.run(experiment, progress=False)
    assert list(result.domains) == ["handwritten", "print", "street", "display"]
    assert max(result.domains.values()) > 20


# What comes out


def test_a_result_has_its_fields_and_says_what_its_file_says(tmp_path: Path) -> None:
    result = fedheal.run(quick(tau=0.4, seed=2), tmp_path / "run", progress=False)
    summary = json.loads((tmp_path / "run" / "result.json").read_text())
    assert summary == dict(result.summary)
    expected = {"method", "data", "seed", "rounds", "domains", "avg", "std", "worst", "device", "precision", "threads"}
    assert expected | {"bytes_sent", "bytes_received", "versions", "data_fingerprint"} <= summary.keys()
    assert (summary["method"], summary["data"]) == ("fedavg+fedheal:tau=0.4", "tiny_data:load")
    assert (summary["seed"], summary["rounds"], summary["device"], summary["threads"]) == (2, 3, "cpu", 1)
    assert summary["precision"] == "fp32"
    assert summary["versions"]["torch"] == torch.__version__
    assert (summary["avg"], summary["std"], summary["worst"]) == (result.avg, result.std, result.worst)
    assert list(summary["domains"]) == ["plain", "noisy", "dark"]
    assert [record.round for record in result.history] == [1, 2, 3]
    assert 0 <= result.worst <= result.avg <= 100


def test_a_result_says_what_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(rounds=1).summary["hardware"].endswith(f", {os.cpu_count()} cores")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")
    assert describe_hardware(torch.device("cuda", 1)) == "GPU number 1"


def test_every_round_is_a_line_with_what_happened(tmp_path: Path) -> None:
    result = fedheal.run(quick(), tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    for line, record in zip(lines, result.history, strict=True):
        assert line["domains"] == dict(record.domains)
        assert {"avg", "std", "worst"} <= line["fairness"].keys()
        assert sorted(line["weights"]) == IDS
        assert set(line["report"]["kept"]) == set(IDS)
        assert line["seconds"].keys() == {"train", "aggregate", "evaluate"}
        assert all(seconds >= 0 for seconds in line["seconds"].values())


@pytest.mark.parametrize(
    "model", ["tiny_data:linear", "tiny_data:conv_batchnorm", "tiny_data:dropout", "tiny_data:tied_weights"]
)
def test_load_gives_a_module_with_the_same_outputs(model: str, tmp_path: Path) -> None:
    result = fedheal.run(quick(model=model), tmp_path / "run", progress=False)
    loaded = fedheal.load(tmp_path / "run")
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not loaded.training
    assert torch.equal(loaded(x), result.model.eval()(x))
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == loaded.state_dict().keys()


def test_load_of_an_unfinished_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished run"):
        fedheal.load(tmp_path)
    with pytest.raises(ValueError, match="nothere does not exist: name the folder of a finished run"):
        fedheal.load(tmp_path / "nothere")
    fedheal.run(quick(rounds=1), tmp_path / "run", progress=False)
    (tmp_path / "run" / "result.json").unlink()  # as after a stop between the model and the result
    with pytest.raises(ValueError, match="no finished run"):
        fedheal.load(tmp_path / "run")


def test_load_and_resume_say_what_they_need(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"module is a function: give the module itself, such as make_model\(10\)"):
        fedheal.load(tmp_path, linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resume = True, but out is None: give the run folder as out"):
        fedheal.run(quick(), resume=True)


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run()
    assert list(tmp_path.iterdir()) == []


def test_a_string_is_a_folder_too_and_parents_are_made(tmp_path: Path) -> None:
    fedheal.run(quick(rounds=1), str(tmp_path / "a" / "b" / "c"), progress=False)
    assert (tmp_path / "a" / "b" / "c" / "result.json").exists()


class RecordEvents(fedheal.Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def started(self, experiment: Mapping[str, Any], done: Sequence[RoundRecord]) -> None:
        self.events.append(("started", experiment["method"], len(done)))

    def round(self, record: RoundRecord) -> None:
        self.events.append(record.round)

    def finished(self, result: Mapping[str, Any]) -> None:
        self.events.append(("finished", result["avg"]))


def test_callbacks_are_told_in_order() -> None:
    first, second = RecordEvents(), RecordEvents()
    result = fedheal.run(quick(), callbacks=[first, fedheal.Callback(), second], progress=False)
    assert first.events == second.events == [("started", "fedavg+fedheal", 0), 1, 2, 3, ("finished", result.avg)]


def test_a_callback_hears_of_a_round_once_it_is_on_disk(tmp_path: Path) -> None:
    class Reader(fedheal.Callback):
        seen: list[int] = []  # noqa: RUF012  (a test's own)

        def round(self, record: RoundRecord) -> None:
            self.seen.append(len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()))

        def finished(self, result: Mapping[str, Any]) -> None:
            assert json.loads((tmp_path / "run" / "result.json").read_text()) == dict(result)

    fedheal.run(quick(), tmp_path / "run", callbacks=[Reader()], progress=False)
    assert Reader.seen == [1, 2, 3]


def test_a_resumed_run_tells_how_far_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(save_seconds=0), tmp_path / "run", callbacks=[Stop()], progress=False)
    diary = RecordEvents()
    fedheal.run(quick(), tmp_path / "run", resume=True, callbacks=[diary], progress=False)
    assert diary.events[:2] == [("started", "fedavg+fedheal", 2), 3]
