"""A run that dies goes on in a new one, with the results of a run that never stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from typer.testing import CliRunner

from fedheal import methods
from fedheal.aggregate.server_optimizer import Server
from fedheal.cli import app
from fedheal.federation.run_folder import RunFolder
from fedheal.flower import FairStrategy, FedHEAL, Uniform
from fedheal.flower.client_state import SavedState, describe_missing_state, load_before_round, open_store
from fedheal.runs import folder as records
from flower.sites import Sites

pytestmark = pytest.mark.slow


class Killed(Exception):
    pass


def run_until_killed(sites, number: int, kind: str, **settings):
    """Run until the replies of this round come in, then raise `Killed`."""
    strategy = sites.strategy(**settings)

    def spoil(node, reply):
        if strategy.rounds.current.number == number and reply.metadata.message_type == kind:
            raise Killed
        return [reply]

    with pytest.raises(Killed):
        strategy.start(sites.grid(spoil), sites.initial, num_rounds=sites.experiment.rounds)


@pytest.mark.parametrize(
    ("method", "kind"),
    [("scaffold+fedheal", "train"), ("fedavg+afl", "evaluate"), ("feddyn", "train"), ("moon", "evaluate")],
)
def test_a_killed_run_resumes_to_the_same_model(method, kind, tmp_path):
    sites = Sites(tmp_path / "sites", method=method, rounds=4)
    whole = Sites(method=method, rounds=4).run(folder=tmp_path / "whole")
    run_until_killed(sites, 3, kind, folder=tmp_path / "run")
    strategy = sites.strategy(folder=tmp_path / "run", resume=True)
    strategy.start(
        sites.grid(first=500), sites.initial, num_rounds=4
    )  # a new run has other node ids, and no context.state
    assert torch.equal(strategy.state.model.params, whole.state.model.params)
    assert torch.equal(strategy.state.model.buffers, whole.state.model.buffers)
    ours, theirs = (records.read_rounds(tmp_path / where) for where in ("run", "whole"))
    # Evaluation ends a round, and so its record: a kill before costs the whole round.
    assert [record.round for record in ours if record.report.pop("resumed", False)] == [3]
    for first, other in zip(ours, theirs, strict=True):
        assert first.model_copy(update={"seconds": {}}) == other.model_copy(update={"seconds": {}})
    first, other = (json.loads((tmp_path / where / "result.json").read_text()) for where in ("run", "whole"))
    assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


def test_the_record_says_that_a_run_died_before_it_finished_a_round(tmp_path):
    sites = Sites(rounds=2)
    run_until_killed(sites, 1, "train", folder=tmp_path)
    history = sites.run(folder=tmp_path, resume=True).history
    assert [record.report.get("resumed", False) for record in history] == [True, False]


def test_masks_on_clients_survive_a_new_run(tmp_path):
    sites = Sites(tmp_path / "sites", method="fedheal:tau=0.6", rounds=4)
    keys = {"tau": 0.6, "placement": "client", "model": sites.federation.local_training.layout}
    whole = FedHEAL(**keys)
    whole.start(Sites(method="fedheal:tau=0.6").grid(), sites.initial, num_rounds=4)
    for resume, rounds in ((False, 2), (True, 4)):
        part = FedHEAL(**keys, folder=tmp_path / "run", resume=resume)
        part.start(sites.grid(), sites.initial, num_rounds=rounds)
    assert torch.equal(part.state.model.params, whole.state.model.params)


@pytest.mark.parametrize("where", ["folder", "context"])
def test_clients_do_not_reuse_the_state_of_an_earlier_federation(where, tmp_path):
    sites = Sites(tmp_path / "sites" if where == "folder" else None, method="scaffold", rounds=4)

    def train_params(sites, grid, seed):
        strategy = sites.strategy(fraction_train=0.4, fraction_evaluate=0.0, min_train_nodes=1, seed=seed)
        strategy.start(grid, sites.initial, num_rounds=4)
        return strategy.state.model.params

    grid = sites.grid()
    train_params(sites, grid, 0)
    fresh = Sites(method="scaffold", rounds=4)
    for seed in (1, 2):  # other cohorts: a client may first be asked in a late round
        assert torch.equal(train_params(sites, grid, seed), train_params(fresh, fresh.grid(), seed))


def test_a_client_ignores_the_saved_state_of_another_federation(tmp_path, caplog):
    for federation, number in (("first", 3), ("second", 3)):
        memory = open_store(Context(1, 2, {}, RecordDict(), {}), "clinic", tmp_path, federation)
        assert load_before_round(memory, number + 1, number) == SavedState({}, {})
        memory.save(number, {"n": torch.tensor([number])}, {})
    assert "belongs to another experiment: this client continues without" in caplog.text
    assert load_before_round(memory, 4, 3)[0]["n"].item() == 3


def test_a_client_continues_without_a_damaged_state(tmp_path, caplog):
    sites = Sites(tmp_path / "sites", method="scaffold", rounds=4)
    strategy = sites.strategy(fraction_evaluate=0.0)

    def spoil(node, reply):
        if strategy.rounds.current.number == 2 and node == 100:
            for path in (tmp_path / "sites" / f"client-{sites.names[0]}").rglob("*.safetensors"):
                data = bytearray(path.read_bytes())
                data[-3] ^= 1
                path.write_bytes(data)
            (tmp_path / "sites" / f"client-{sites.names[0]}" / "state" / "copy of 1.safetensors").write_text("")
        return [reply]

    strategy.start(sites.grid(spoil), sites.initial, num_rounds=4)
    assert [record.report["skipped"] for record in strategy.history] == [{}] * 4
    assert caplog.text.count("continues without its saved state") == 1


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    sites = Sites(rounds=2)
    sites.run(folder=tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    grid = sites.grid()
    again = sites.strategy(folder=tmp_path / "run", resume=True)
    again.start(grid, sites.initial, num_rounds=2)
    assert grid.asked == []
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()} == before


def test_more_rounds_continue_from_the_last(tmp_path):
    sites = Sites(rounds=2)
    sites.run(folder=tmp_path / "run")
    longer = sites.strategy(folder=tmp_path / "run", resume=True)
    longer.start(sites.grid(), sites.initial, num_rounds=4)
    assert torch.equal(longer.state.model.params, Sites(rounds=4).run().state.model.params)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 4


def test_a_resumed_federation_drops_the_result_of_fewer_rounds(tmp_path):
    sites = Sites(rounds=4)
    sites.strategy(folder=tmp_path / "run").start(sites.grid(), sites.initial, num_rounds=2)
    run_command = (tmp_path / "run" / "result.json").read_bytes()
    run_until_killed(sites, 3, "train", folder=tmp_path / "run", resume=True)
    assert (
        tmp_path / "run" / "result.json"
    ).read_bytes() == run_command  # no further round is over: it is still of them all
    run_until_killed(sites, 4, "train", folder=tmp_path / "run", resume=True)
    assert len(records.read_rounds(tmp_path / "run")) == 3
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    diagnosed = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--diagnose"])
    assert diagnosed.exit_code == 0, diagnosed.output
    sites.run(folder=tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 4


def test_a_damaged_checkpoint_drops_the_result_of_its_round(tmp_path):
    sites = Sites(rounds=3)
    sites.run(folder=tmp_path / "run")
    records.list_checkpoints(tmp_path / "run")[0].write_bytes(b"")
    run_until_killed(sites, 3, "train", folder=tmp_path / "run", resume=True)
    assert len(records.read_rounds(tmp_path / "run")) == 2
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_flowers_own_loop_drops_the_result_of_fewer_rounds_when_killed(tmp_path, monkeypatch):
    sites = Sites(rounds=3)
    strategy, grid = sites.strategy(folder=tmp_path / "run"), sites.grid()

    def run_round(number, arrays):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        judges = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        strategy.aggregate_evaluate(number, grid.send_and_receive(judges))
        return arrays

    def raise_killed(*args):
        raise Killed

    arrays = run_round(1, sites.initial)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 1
    monkeypatch.setattr(RunFolder, "write_result", raise_killed)
    with pytest.raises(Killed):
        run_round(2, arrays)
    assert len(records.read_rounds(tmp_path / "run")) == 2
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_damaged_newest_checkpoint_costs_one_round(tmp_path, caplog):
    sites = Sites(rounds=4)
    run_until_killed(sites, 4, "train", folder=tmp_path / "run")
    newest = records.list_checkpoints(tmp_path / "run")[0]
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)
    strategy = sites.run(folder=tmp_path / "run", resume=True)
    assert "damaged" in caplog.text
    assert torch.equal(strategy.state.model.params, Sites(rounds=4).run().state.model.params)


@pytest.mark.parametrize("before", [0, 2])
def test_half_a_line_left_by_a_kill_is_cut_on_resume(before, tmp_path):
    """The server died while it wrote the line of the next round, the first one or a later one."""
    sites, folder = Sites(rounds=4), tmp_path / "run"
    whole = sites.run(folder=tmp_path / "whole")
    run_until_killed(sites, before + 1, "train", folder=folder)
    lines = (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(lines[before][: len(lines[before]) // 2])
    assert len(records.read_rounds(folder)) == before
    strategy = sites.run(folder=folder, resume=True)
    assert [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert torch.equal(strategy.state.model.params, whole.state.model.params)


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_clients_go_back_with_a_server_that_lost_a_checkpoint(method, tmp_path, caplog):
    sites = Sites(tmp_path / "sites", method=method, rounds=5)
    run_until_killed(sites, 4, "train", folder=tmp_path / "run")
    records.list_checkpoints(tmp_path / "run")[0].write_bytes(b"")
    strategy = sites.strategy(folder=tmp_path / "run", resume=True)
    strategy.start(sites.grid(first=500), sites.initial, num_rounds=5)
    assert "resuming from 00000002.safetensors" in caplog.text
    assert "has no saved state of round" not in caplog.text
    assert torch.equal(strategy.state.model.params, Sites(method=method, rounds=5).run().state.model.params)


@pytest.mark.parametrize("method", ["scaffold", "fedprox", "fedheal"])
def test_a_client_that_lost_its_state_warns_if_its_method_needs_one(method, tmp_path, caplog):
    sites = Sites(tmp_path / "sites", method=method, rounds=3)
    run_until_killed(sites, 3, "train", folder=tmp_path / "run")
    shutil.rmtree(tmp_path / "sites", ignore_errors=True)
    sites.run(folder=tmp_path / "run", resume=True)
    warnings = caplog.text.count("has no saved state of round 2, its last accepted one: it continues without")
    assert warnings == (5 if method == "scaffold" else 0)


def test_a_client_with_an_older_state_names_its_round(tmp_path):
    memory = open_store(Context(1, 2, {}, RecordDict(), {}), "clinic", tmp_path)
    memory.save(2, {"n": torch.tensor([2])}, {})
    assert describe_missing_state(memory, "clinic", 2) is None
    assert "continues with that of round 2" in describe_missing_state(memory, "clinic", 4)


def test_a_folder_in_use_by_a_living_process_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("fedheal.runs.lock.WAIT_SECONDS", 0)
    sites = Sites(rounds=2)
    sites.run(folder=tmp_path / "run")
    code = "import fcntl, sys\nf = open(sys.argv[1], 'a')\nfcntl.flock(f, fcntl.LOCK_EX)\nprint('held', flush=True)\ninput()"
    words = [sys.executable, "-c", code, str(tmp_path / "run" / "lock.tmp")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="in use by another run"):
            sites.strategy(folder=tmp_path / "run", resume=True).start(sites.grid(), sites.initial, num_rounds=3)
        other.communicate("\n")
    again = sites.strategy(folder=tmp_path / "run", resume=True)
    again.start(sites.grid(), sites.initial, num_rounds=3)
    assert len(again.history) == 3


def test_a_folder_belongs_to_one_method_seed_and_server_whatever_the_name(tmp_path):
    sites = Sites(rounds=1)

    def assert_refused(words, method, **settings):
        with pytest.raises(ValueError, match=words):
            FairStrategy(method, name="ours", folder=tmp_path / "run", resume=True, **settings).start(
                sites.grid(), sites.initial, num_rounds=2
            )

    FairStrategy("fedheal", name="ours", folder=tmp_path / "run").start(sites.grid(), sites.initial, num_rounds=1)
    described = (tmp_path / "run" / "federation.toml").read_bytes()
    description = tomllib.loads(described.decode())
    assert (description["method"], description["algorithm"]) == ("ours", methods.get("fedheal").full_name)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["algorithm"] == description["algorithm"]
    assert_refused(r"algorithm = '.*tau=0.3.*', not '.*tau=0.9", "fedheal:tau=0.9")
    assert_refused("algorithm = ", "fedprox")
    assert_refused(r"server = \{'optimizer': 'sgd'.*, not \{'optimizer': 'adam'", "fedheal", server=Server("adam"))
    assert_refused("seed = 0, not 1", "fedheal", seed=1)
    assert (tmp_path / "run" / "federation.toml").read_bytes() == described
    (tmp_path / "run" / "federation.toml").write_text("method =")
    assert_refused("federation.toml is not TOML", "fedheal")
    (tmp_path / "run" / "federation.toml").write_bytes(described.replace(b"tau=0.3", b"tau=0.9"))
    assert_refused(
        "belongs to another experiment", "fedheal:tau=0.9"
    )  # the states know better than a file that was changed


def test_placement_and_name_cannot_change_on_resume(tmp_path):
    sites = Sites(rounds=1)
    Uniform(folder=tmp_path / "run").start(sites.grid(), sites.initial, num_rounds=1)
    for keys, words in (
        ({"placement": "client"}, "masked = False, not True"),
        ({"name": "u"}, "uniform', not 'u'"),
    ):
        with pytest.raises(ValueError, match=words):
            Uniform(folder=tmp_path / "run", resume=True, **keys).start(sites.grid(), sites.initial, num_rounds=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: {**model, "w": torch.zeros(4)}, r"'w' of float32 \[3\], and this one has 'w' of float32 \[4\]"),
        (
            lambda model: {**model, "w": model["w"].half()},
            r"'w' of float32 \[3\], and this one has 'w' of float16 \[3\]",
        ),
        (lambda model: {"v": model["w"], "b": model["b"]}, r"no 'v', and this one has 'v' of float32 \[3\]"),
        (lambda model: {**model, "v": torch.zeros(1)}, r"no 'v', and this one has 'v' of float32 \[1\]"),
        (lambda model: {"w": model["w"]}, r"'b' of float32 \[1\], and this one has no 'b'"),
    ],
)
def test_another_model_is_rejected_by_its_tensors(tmp_path, change, words):
    model = {"w": torch.zeros(3), "b": torch.zeros(1)}
    FedHEAL(folder=tmp_path / "run").begin(ArrayRecord(model))
    again = FedHEAL(folder=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=rf"holds a federation whose model has {words}: start from that model"):
        again.begin(ArrayRecord(change(model)))
    assert FedHEAL(folder=tmp_path / "run", resume=True).begin(ArrayRecord(model))


def test_a_folder_that_cannot_be_resumed_is_rejected(tmp_path):
    sites = Sites(rounds=1)
    sites.run(folder=tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a federation: set resume=True to continue it"):
        sites.run(folder=tmp_path / "run")
    described = (tmp_path / "run" / "federation.toml").read_text()
    with pytest.raises(ValueError, match=r"with method = 'fedavg\+fedheal', not 'fedavg': restore that setting"):
        Sites(method="fedavg").run(folder=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "federation.toml").read_text() == described
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="not empty and not a federation's run folder"):
        sites.run(folder=tmp_path / "mine", resume=True)


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [None, "{half a li"], ids=["whole records", "a damaged record"])
def test_a_finished_federation_whose_state_is_gone_is_rejected_and_loses_nothing(damage, tmp_path):
    sites, folder = Sites(rounds=2), tmp_path / "run"
    sites.run(folder=folder)
    shutil.rmtree(folder / "state")
    if damage is not None:
        (folder / "rounds.jsonl").write_text(damage + "\n" + (folder / "rounds.jsonl").read_text())
    before = read_files(folder)
    with pytest.raises(
        ValueError, match=r"run has records up to round 2 and result\.json and model\.safe.*, but no"
    ) as error:
        sites.run(folder=folder, resume=True)
    assert "restore state/ from a backup, or move the folder away to start again" in str(error.value)
    assert read_files(folder) == before


def test_an_unfinished_federation_whose_state_is_gone_is_rejected(tmp_path):
    sites, folder = Sites(rounds=4), tmp_path / "run"
    run_until_killed(sites, 3, "train", folder=folder)
    shutil.rmtree(folder / "state")
    before = read_files(folder)
    with pytest.raises(ValueError, match="run has records up to round 2, but no checkpoint in state/: restore state/"):
        sites.run(folder=folder, resume=True)
    assert read_files(folder) == before


def test_a_federation_killed_before_its_first_checkpoint_starts_again(tmp_path, caplog):
    sites, folder = Sites(rounds=2), tmp_path / "run"
    run_until_killed(sites, 2, "train", folder=folder)
    shutil.rmtree(folder / "state")  # as if it was killed between the record and the checkpoint of round 1
    strategy = sites.run(folder=folder, resume=True)
    assert torch.equal(strategy.state.model.params, Sites(rounds=2).run().state.model.params)
    assert f"{folder} holds a federation that saved no round: it starts at round 1" in caplog.text


def test_damaged_checkpoints_advise_a_backup_and_name_what_is_whole(tmp_path):
    sites, folder = Sites(rounds=2), tmp_path / "run"
    sites.run(folder=folder)
    for path in records.list_checkpoints(folder):
        path.write_bytes(b"x")
    before = read_files(folder)
    words = r"start again; rounds\.jsonl and model\.safetensors are still whole$"
    with pytest.raises(
        ValueError, match=rf"no checkpoint in .* can be used .*: restore state/ from a backup, .* {words}"
    ):
        sites.run(folder=folder, resume=True)
    assert read_files(folder) == before
    (folder / "model.safetensors").write_bytes(b"x")
    (folder / "rounds.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"move the folder away to start again$"):
        sites.run(folder=folder, resume=True)


def test_a_resume_in_a_mistyped_folder_says_that_it_starts_at_round_1(tmp_path, caplog):
    Sites(rounds=1).run(folder=tmp_path / "hopsitals", resume=True)
    assert f"{tmp_path / 'hopsitals'} holds no federation to resume: this one starts at round 1" in caplog.text


def test_a_resume_says_that_no_round_is_left(tmp_path, caplog):
    sites = Sites(rounds=2)
    sites.run(folder=tmp_path / "run")
    assert "starts at round 1" not in caplog.text
    sites.strategy(folder=tmp_path / "run", resume=True).start(sites.grid(), sites.initial, num_rounds=1)
    assert "run has 2 rounds already, and 1 are asked for: no round is left to run" in caplog.text


@pytest.mark.parametrize(
    ("line", "damage"),
    [(1, "\x00" * 40), (2, '{"round": "two"}'), (3, '{"round": 3, "weights": 7}'), (1, None)],
    ids=["bytes of a disk", "no number", "wrong fields", "no file"],
)
def test_damaged_records_beside_sound_states_are_cut_by_name_and_the_run_continues(line, damage, tmp_path, caplog):
    sites, folder = Sites(rounds=5), tmp_path / "run"
    whole = sites.run(fraction_evaluate=0.0)
    sites.strategy(folder=folder, fraction_evaluate=0.0).start(sites.grid(), sites.initial, num_rounds=3)
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    lost = [line] if damage else [1, 2, 3]
    if damage:
        lines[line - 1] = damage
        (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    else:
        (folder / "rounds.jsonl").unlink()
    strategy = sites.strategy(folder=folder, fraction_evaluate=0.0, resume=True)
    strategy.start(sites.grid(), sites.initial, num_rounds=5)
    assert torch.equal(strategy.state.model.params, whole.state.model.params)
    assert [record.round for record in records.read_rounds(folder)] == sorted({1, 2, 3, 4, 5} - set(lost))
    assert f"rounds.jsonl: damaged or missing records were cut, of rounds {', '.join(map(str, lost))}:" in caplog.text
