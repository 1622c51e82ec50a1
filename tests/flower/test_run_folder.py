"""A federation's run folder is shown like a simulation's."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedheal
from fedheal.cli import app
from fedheal.flower import FedHEAL
from fedheal.runs import folder as records
from flower.sites import Sites


@pytest.mark.slow
def test_a_report_shows_a_federation_beside_a_simulation(tmp_path):
    sites = Sites(method="fedheal", rounds=3)
    strategy = sites.run(folder=tmp_path / "federation", data="tiny_data:load")
    result = fedheal.run(sites.experiment, tmp_path / "simulation")
    ours, theirs = (records.read_json(tmp_path / where / "result.json") for where in ("federation", "simulation"))
    for key in ("method", "data", "seed", "rounds", "trained", "test_sizes", "only", "without", "pool"):
        assert ours[key] == theirs[key]
    assert ours["domains"] == pytest.approx(result.domains)
    assert ours["clients"] == pytest.approx(theirs["clients"])
    for key in ("avg", "std", "worst", "jain"):
        assert ours[key] == pytest.approx(theirs[key])
    assert theirs.keys() - ours.keys() == {"by_class", "calibration", "engine", "evaluate"}  # clients send accuracies
    assert ours["dropouts"] == ours["skipped"] == 0
    final = load_file(tmp_path / "federation" / "model.safetensors")
    assert all(torch.equal(final[k], v) for k, v in result.model.state_dict().items())
    # The table in text needs nothing but the folder.
    for where in ("federation", "simulation"):
        report = CliRunner().invoke(app, ["report", str(tmp_path / where)])
        assert report.exit_code == 0, report.output
        assert f"{result.worst:.2f}" in report.output
    assert tomllib.loads((tmp_path / "federation" / "federation.toml").read_text())["method"] == strategy.name


def test_rounds_have_the_simulators_fields_and_the_missing_clients(tmp_path, caplog):
    sites = Sites(method="fedheal", rounds=2)
    strategy = sites.strategy(folder=tmp_path / "run")
    grid = sites.grid(lambda node, reply: [] if node == 101 and strategy.rounds.current.number == 2 else [reply])
    with caplog.at_level(logging.INFO, "flwr.fedheal"):
        strategy.start(grid, sites.initial, num_rounds=2)
    first, second = records.read_rounds(tmp_path / "run")
    simulated = fedheal.run(sites.experiment, tmp_path / "simulation")
    ours, theirs = (
        json.loads((tmp_path / where / "rounds.jsonl").read_text().splitlines()[0]) for where in ("run", "simulation")
    )
    assert [*theirs, "client_domains"] == [*ours]
    assert set(first.report) == set(simulated.history[0].report) | {"missing"}
    assert (second.cohort, second.replied, second.report["missing"]) == (5, 4, [sites.names[1]])
    summary = records.read_json(tmp_path / "run" / "result.json")
    assert summary["dropouts"] == 1
    worst = min(first.clients, key=first.clients.get)
    assert f"worst served: '{worst}'" in caplog.text
    assert summary["bytes_sent"] == 2 * 5 * sum(len(a.data) for a in sites.initial.values())


@pytest.mark.slow
def test_a_federation_under_way_is_diagnosed_by_domain(tmp_path):
    sites = Sites(method="fedheal", rounds=3)
    strategy = sites.strategy(folder=tmp_path / "run")

    def spoil(node, reply):
        if strategy.rounds.current.number == 3:
            raise KeyboardInterrupt
        failed = node == 101 and reply.metadata.message_type == "train"  # judged, though it never counts
        return [] if failed else [reply]

    with pytest.raises(KeyboardInterrupt):
        strategy.start(sites.grid(spoil), sites.initial, num_rounds=3)
    client_domains = {name: sites.federation.client_domains[name] for name in sites.names}
    assert [record.client_domains for record in records.read_rounds(tmp_path / "run")] == [
        client_domains,
        client_domains,
    ]
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--diagnose", "--by", "domain"])
    assert result.exit_code == 0, result.output
    assert all(domain in result.output for domain in set(client_domains.values()))
    again = sites.strategy(folder=tmp_path / "run", resume=True)
    again.start(sites.grid(), sites.initial, num_rounds=3)
    assert [record.client_domains for record in again.history] == [client_domains] * 3


def test_without_accuracies_there_is_a_model_but_no_result(tmp_path, caplog):
    Sites(rounds=1).run(folder=tmp_path / "run", fraction_evaluate=0.0)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "result.json").exists()
    assert "no client sent an 'accuracy'" in caplog.text


def test_rejected_evaluations_are_counted_where_the_result_would_be(tmp_path, caplog):
    def spoil(node, reply):
        metrics = reply.content["metrics"]
        if "accuracy" in metrics:
            metrics["accuracy"] = 7.0
        return [] if node == 101 and "accuracy" in metrics else [reply]

    Sites(rounds=1).run(spoil, folder=tmp_path / "run")
    assert "no usable 'accuracy' came (4 replies were rejected, 1 did not come; see not_evaluated in" in caplog.text
    report = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert "since no client sent a usable 'accuracy'" in str(report.exception)


def test_a_report_says_how_to_resume_a_federation_that_is_not_finished(tmp_path):
    sites = Sites(rounds=2)
    strategy = sites.strategy(folder=tmp_path / "run")

    def spoil(node, reply):
        if strategy.rounds.current.number == 2:
            raise KeyboardInterrupt
        return [reply]

    with pytest.raises(KeyboardInterrupt):
        strategy.start(sites.grid(spoil), sites.initial, num_rounds=2)
    for folder in (tmp_path / "run", tmp_path):
        with pytest.raises(
            ValueError, match="holds a federation that is not finished: resume it with resume=true"
        ) as error:
            fedheal.make_report(folder)
        assert f"fedheal report {tmp_path / 'run'} --diagnose shows its rounds now" in str(error.value)
        assert "fedheal run" not in str(error.value)
    assert "resume=true" in str(CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exception)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--diagnose"]).exit_code == 0


def test_an_unusable_folder_is_rejected_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    sites = Sites(rounds=1)
    grid = sites.grid()
    for folder, words in (
        ("file", "file is a file: name another folder"),
        ("file/run", "run cannot be made, since .*file is a file"),
    ):
        with pytest.raises(ValueError, match=words):
            sites.strategy(folder=tmp_path / folder).start(grid, sites.initial, num_rounds=1)
    assert grid.asked == []


def test_a_tilde_in_a_folder_is_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sites = Sites(rounds=1, folder="~/clients")
    strategy = FedHEAL(folder="~/run", fraction_evaluate=0.0, placement="client")
    strategy.start(sites.grid(), sites.initial, num_rounds=1)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert any((tmp_path / "clients").iterdir())
    assert not (tmp_path / "~").exists()


def test_an_existing_folder_on_a_read_only_disk_is_rejected_by_name(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    sites = Sites(rounds=1)
    grid = sites.grid()
    words = f"{tmp_path} cannot be written (Read-only file system): restore access, or name another folder"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        sites.strategy(folder=tmp_path).start(grid, sites.initial, num_rounds=1)
    assert grid.asked == []


def test_federation_toml_has_what_the_strategy_was_given(tmp_path):
    sites = Sites(rounds=1)
    keys = {"roll_call": True, "clients": 7, "budget": 10**9, "tau": 0.6, "placement": "client", "min_replies": 2}
    FedHEAL(folder=tmp_path / "run", **keys).start(sites.grid(), sites.initial, num_rounds=1)
    settings = tomllib.loads((tmp_path / "run" / "federation.toml").read_text())
    assert {key: settings[key] for key in keys if key != "placement"} | {"masked": settings["masked"]} == {
        **{key: value for key, value in keys.items() if key != "placement"},
        "masked": True,
    }


def test_a_rounds_line_is_synced_before_its_checkpoint(tmp_path, monkeypatch):
    synced: list[str] = []

    def fsync(opened: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{opened}"))
        name = path.name.partition(".")[0]
        synced.append(f"{name} {len(path.read_bytes().splitlines())}" if path.suffix == ".jsonl" else name)

    monkeypatch.setattr(os, "fsync", fsync)
    Sites(rounds=2).run(folder=tmp_path / "run", fraction_evaluate=0.0)
    order = [name for name in synced if name.startswith(("rounds", "0"))]
    assert order == ["rounds 1", "00000001", "rounds 2", "00000002"]
