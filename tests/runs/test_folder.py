"""Files of a run folder appear whole or not at all, and a damaged state is told from a whole one."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fedheal
from disk_hooks import Operation, raise_disk_full, watch
from fedheal.core.state import METADATA, RunState
from fedheal.runs import folder as records
from fedheal.runs import lock
from fedheal.runs.schema import RoundRecord, RunResult
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.runner import Result
from tiny_data import quick

ARRAYS = {
    "model.params": torch.tensor([1.0, -2.5, 3.0]),
    "model.counters": torch.tensor([7, 8]),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0),
    "scalar": torch.tensor(2.0, dtype=torch.float64),
    "counts": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
}
DESCRIBED = {"round": 3, "seed": 0, "sent": 12345, "received": 678, "aggregator": {"kind": "nothing", "clients": ["a"]}}


def save_state(folder: Path, number: int = 3) -> Path:
    records.save_checkpoint(folder, number, ARRAYS, DESCRIBED, "me")
    return folder / "state" / f"{number:08d}.safetensors"


def get_model_bytes(result: Result) -> list[bytes]:
    return [value.numpy().tobytes() for value in result.model.state_dict().values()]


def run_four_rounds(folder: Path, resume: bool = True, **keys: Any) -> Result:
    return fedheal.run(quick(save_seconds=0, rounds=4, **keys), folder, resume=resume, progress=False)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the states of rounds 3 and 4."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_four_rounds(folder, resume=False)
    return folder


@pytest.fixture
def stopped_run(finished_run: Path, tmp_path: Path) -> Path:
    """The same run, as if killed right after the state of round 4 was saved."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    for name in ("result.json", "model.safetensors"):
        (folder / name).unlink()
    return folder


def read_model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def find_newest_state(folder: Path) -> Path:
    return records.list_checkpoints(folder)[0]


# Whole or not at all


def test_text_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    records.write_text(path, "old")
    records.write_text(path, "nëw\n")
    assert path.read_bytes() == "nëw\n".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    records.write_text(path, "old")

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        records.write_text(path, "new")
    with pytest.raises(OSError, match="No space left"):
        records.save_tensors(tmp_path / "b.safetensors", {"x": torch.ones(2)})
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda d: (order.append("fsync"), fsync(d))[1])
    monkeypatch.setattr(Path, "replace", lambda p, to: (order.append("replace"), replace(p, to))[1])
    records.write_text(tmp_path / "a.txt", "text")
    save_state(tmp_path)
    assert order[:2] == ["fsync", "replace"]
    assert order.index("fsync", 2) < order.index("replace", 2)


def test_tensors_come_back_and_tied_ones_too(tmp_path: Path) -> None:
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    records.save_tensors(tmp_path / "m", {"a": weight, "b": weight, "c": weight.t()})
    tensors = records.load_tensors(tmp_path / "m")
    assert torch.equal(tensors["a"], weight)
    assert torch.equal(tensors["b"], weight)
    assert torch.equal(tensors["c"], weight.t())


# States


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    arrays, described = records.load_checkpoint(save_state(tmp_path), "me")
    assert described == DESCRIBED
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert torch.equal(arrays[name], array), name


def test_the_newest_two_states_are_kept_and_left_overs_cleared(tmp_path: Path) -> None:
    for number in (1, 2, 9, 10, 100):
        save_state(tmp_path, number)
        (tmp_path / "state" / "00000050.safetensors.tmp").write_bytes(b"half")
    assert [path.stem for path in records.list_checkpoints(tmp_path)] == ["00000100", "00000010"]
    save_state(tmp_path, 101)
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == [
        "00000100.safetensors",
        "00000101.safetensors",
    ]


def test_there_are_no_states_before_the_first(tmp_path: Path) -> None:
    assert records.list_checkpoints(tmp_path) == []


def test_a_state_of_another_experiment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(records.CheckpointError, match=r"00000003\.safetensors belongs to another experiment"):
        records.load_checkpoint(save_state(tmp_path), "you")


@pytest.mark.parametrize(
    "metadata", [None, {"fedheal": "[]"}, {"fedheal": "null"}, {"fedheal": '{"format": "x-9"}'}, {}]
)
def test_a_file_of_another_format_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata)
    with pytest.raises(records.CheckpointError, match="not a checkpoint of this version"):
        records.load_checkpoint(path, "me")


@pytest.mark.parametrize("content", [b"", b"\0", b"junk" * 100, b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(records.CheckpointError, match=r"x\.safetensors is damaged"):
        records.load_checkpoint(path, "me")


DEEP = '{"round": 1, "x": ' + "[" * 100_000


def test_files_that_are_nested_too_deeply_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"result\.json is not JSON: it is nested too deeply"):
        records.read_result(tmp_path)
    (tmp_path / "rounds.jsonl").write_text(DEEP + "\n")
    assert records.find_damaged_line(tmp_path) == 1
    assert records.read_rounds(tmp_path) == []
    records.drop_damaged_rounds(tmp_path)
    assert (tmp_path / "rounds.jsonl").read_text() == ""
    save_file(ARRAYS, tmp_path / "x.safetensors", {"fedheal": DEEP, METADATA: DEEP})
    with pytest.raises(records.CheckpointError, match=r"x\.safetensors is damaged \(it is nested too deeply\)"):
        records.load_checkpoint(tmp_path / "x.safetensors", "me")
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged \(it is nested too deeply\)"):
        RunState.load(tmp_path / "x.safetensors")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(records.CheckpointError, match="damaged"):
        records.load_checkpoint(tmp_path / "none.safetensors", "me")


def test_a_state_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(records.CheckpointError):
            records.load_checkpoint(path, "me")
    path.write_bytes(whole)
    records.load_checkpoint(path, "me")


@pytest.mark.slow
def test_a_state_with_any_byte_changed_is_refused(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    whole = path.read_bytes()
    chance = random.Random(0)
    accepted = []
    for at in range(len(whole)):
        for flip in {1, 1 << chance.randrange(1, 8)}:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                arrays, described = records.load_checkpoint(path, "me")
            except records.CheckpointError:
                continue
            same = described == DESCRIBED and all(torch.equal(arrays[k], ARRAYS[k]) for k in ARRAYS)
            if not same or arrays.keys() != ARRAYS.keys():
                accepted.append((at, flip, whole[max(0, at - 12) : at + 12]))
    assert accepted == []


# Rounds


def test_rounds_come_back_line_by_line(tmp_path: Path) -> None:
    history = [RoundRecord(round=i, weights={"ä-0": 0.1 + 0.2}, mood="good") for i in (1, 2, 3)]
    for record in history:
        records.append_round(tmp_path, record)
    assert records.read_rounds(tmp_path) == history


def test_no_rounds_yet(tmp_path: Path) -> None:
    assert records.read_rounds(tmp_path) == []
    records.truncate_rounds(tmp_path, 0)
    assert records.read_rounds(tmp_path) == []


def test_numbers_that_json_has_not_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"round 1 cannot be recorded: train_loss = nan is not JSON-serialisable"):
        records.append_round(tmp_path, RoundRecord(round=1, train_loss=float("nan")))
    with pytest.raises(ValueError, match=r"round 1 cannot be recorded: domains must have accuracies from 0 to 100"):
        records.append_round(tmp_path, RoundRecord(round=1, domains={"a": float("nan")}))
    assert records.read_rounds(tmp_path) == []


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(tmp_path: Path) -> None:
    whole = [{"round": 1, "a": "é"}, {"round": 2, "a": {"b": [1, 2]}}]
    torn = json.dumps({"round": 3, "name": "déjà"}, ensure_ascii=False).encode()
    for length in range(len(torn)):
        text = "".join(json.dumps(record) + "\n" for record in whole).encode() + torn[:length]
        (tmp_path / "rounds.jsonl").write_bytes(text)
        assert len(records.read_rounds(tmp_path)) == 2, length
        records.truncate_rounds(tmp_path, 2)
        assert [record.model_dump(exclude_unset=True) for record in records.read_rounds(tmp_path)] == whole
        records.append_round(tmp_path, RoundRecord(round=3))
        assert [r.round for r in records.read_rounds(tmp_path)] == [1, 2, 3]


def test_a_last_line_without_its_end_of_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}')
    records.truncate_rounds(tmp_path, 2)
    records.append_round(tmp_path, RoundRecord(round=3))
    assert [r.round for r in records.read_rounds(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        ([], "it is missing"),
        ([1], "it ends after round 1"),
        ([2, 3], "line 1 is of round 2, not 1"),
        ([1, 3], "line 2 is of round 3, not 2"),
        ([1, 2, 2, 3], "line 3 is of round 2, not 3"),
        ([1, 2, 3, 3], "line 4 is of round 3, not 4"),
        ([2, 1, 3], "line 1 is of round 2, not 1"),
    ],
)
def test_missing_rounds_are_noticed(tmp_path: Path, there: list[int], problem: str) -> None:
    for number in there:
        records.append_round(tmp_path, RoundRecord(round=number))
    before = (tmp_path / "rounds.jsonl").read_bytes() if there else b""
    said = rf"rounds\.jsonl does not hold the records of rounds 1 to 3 \({problem}\)$"
    with pytest.raises(records.RoundsError, match=said):
        records.truncate_rounds(tmp_path, 3)
    assert ((tmp_path / "rounds.jsonl").read_bytes() if there else b"") == before


def test_cutting_keeps_the_first_rounds(tmp_path: Path) -> None:
    for number in range(1, 6):
        records.append_round(tmp_path, RoundRecord(round=number, train_loss=number / 3))
    records.truncate_rounds(tmp_path, 2)
    assert [record.train_loss for record in records.read_rounds(tmp_path)] == [1 / 3, 2 / 3]


def test_a_json_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"r\.json does not hold a JSON object"):
        records.read_json(tmp_path / "r.json")


# A run that meets damaged files


def empty_file(path: Path) -> None:
    path.write_bytes(b"")


def truncate_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bit(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 4
    path.write_bytes(bytes(whole))


def change_round(path: Path) -> None:
    """Flip one bit of the round's number."""
    whole = path.read_bytes()
    at = re.search(rb'\\"round\\": ', whole)
    assert at is not None
    path.write_bytes(whole[: at.end()] + bytes([whole[at.end()] ^ 1]) + whole[at.end() + 1 :])


def change_kind(path: Path) -> None:
    """Damage the description, and leave the tensors whole."""
    whole = path.read_bytes()
    kind = rb"\"kind\": \"server\""
    assert kind in whole
    path.write_bytes(whole.replace(kind, kind.replace(b"server", b"cerver")))


def replace_by_foreign_state(path: Path) -> None:
    arrays, described = records.load_checkpoint(path, quick(rounds=4).identity)
    folder = path.parents[2] / "foreign"
    folder.mkdir(exist_ok=True)
    records.save_checkpoint(folder, int(path.stem), arrays, described, "another experiment's")
    shutil.copy(find_newest_state(folder), path)


def drop_round(path: Path) -> None:
    """Write a checkpoint with a right checksum that lacks its round and data."""
    arrays, described = records.load_checkpoint(path, None)
    lacking = {key: value for key, value in described.items() if key not in ("round", "used")}
    records.save_checkpoint(path.parents[1], int(path.stem), arrays, lacking, quick(rounds=4).identity)


DAMAGES = [empty_file, truncate_file, flip_bit, change_round, change_kind, replace_by_foreign_state, drop_round]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_state_gives_way_to_the_one_before(
    finished_run: Path, stopped_run: Path, damage: Callable[[Path], None]
) -> None:
    damage(find_newest_state(stopped_run))
    result = run_four_rounds(stopped_run)
    assert [record.round for record in result.history] == [1, 2, 3, 4]
    assert read_model(stopped_run) == read_model(finished_run)
    assert [r.round for r in records.read_rounds(stopped_run)] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage is not replace_by_foreign_state])
def test_two_damaged_states_are_a_sentence_and_nothing_is_lost(
    stopped_run: Path, damage: Callable[[Path], None]
) -> None:
    for path in records.list_checkpoints(stopped_run):
        damage(path)
    before = {p.name: p.read_bytes() for p in stopped_run.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=f"no checkpoint in {re.escape(str(stopped_run))} can be used") as error:
        run_four_rounds(stopped_run)
    assert "00000004.safetensors" in str(error.value)
    assert "00000003.safetensors" in str(error.value)
    assert "restore state/ from a backup" in str(error.value)
    assert str(error.value).endswith("; rounds.jsonl is still whole")
    assert "\n" not in str(error.value)
    assert {p.name: p.read_bytes() for p in stopped_run.rglob("*") if p.is_file()} == before


def test_a_state_with_too_few_rounds_gives_way_to_the_one_before(finished_run: Path, stopped_run: Path) -> None:
    lines = (stopped_run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (stopped_run / "rounds.jsonl").write_text("".join(lines[:3]) + lines[3][:30])
    run_four_rounds(stopped_run)
    assert read_model(stopped_run) == read_model(finished_run)
    assert [r.round for r in records.read_rounds(stopped_run)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda lines: None, "it is missing"),
        (lambda lines: [], "it is empty"),
        (lambda lines: [lines[0], *lines], "line 2 is of round 1, not 2"),
        (lambda lines: ["garbage", *lines[1:]], "line 1 is not the record of a round"),
    ],
    ids=["missing", "empty", "twice", "garbage"],
)
def test_damaged_rounds_are_named_and_the_checkpoints_are_not_blamed(
    stopped_run: Path, damage: Callable[[list[str]], list[str] | None], problem: str
) -> None:
    path = stopped_run / "rounds.jsonl"
    lines = damage(path.read_text().splitlines())
    if lines is None:
        path.unlink()
    else:
        path.write_text("".join(line + "\n" for line in lines))
    before = {p: p.read_bytes() for p in stopped_run.rglob("*") if p.is_file()}
    held = f"{path} does not hold the records of rounds 1 to 4 ({problem})"
    remedy = "repair it or restore it from a backup, or move the folder away to start again"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{held}: {remedy}; state/ has a whole checkpoint')}$"):
        run_four_rounds(stopped_run)
    assert {p: p.read_bytes() for p in stopped_run.rglob("*") if p.is_file()} == before


def test_a_run_without_any_state_starts_again_and_keeps_the_old_records(
    finished_run: Path, stopped_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        shutil.rmtree(stopped_run / "state")
        for name in ("result.json", "model.safetensors"):
            (stopped_run / name).unlink(missing_ok=True)
        old = (stopped_run / "rounds.jsonl").read_bytes()
        run_four_rounds(stopped_run)
        assert read_model(stopped_run) == read_model(finished_run)
        assert [r.round for r in records.read_rounds(stopped_run)] == [1, 2, 3, 4]
        assert (stopped_run / f"rounds.jsonl.before-{number}").read_bytes() == old
        kept = f"the run starts again with round 1, and keeps them as rounds.jsonl.before-{number}"
        assert f"{stopped_run} has records up to round 4, but no checkpoint: {kept}" in caplog.messages


def test_records_behind_a_damaged_line_are_kept_too(stopped_run: Path) -> None:
    shutil.rmtree(stopped_run / "state")
    lines = (stopped_run / "rounds.jsonl").read_text().splitlines()
    damaged = "\n".join(["garbage", *lines[1:]])
    (stopped_run / "rounds.jsonl").write_text(damaged)
    run_four_rounds(stopped_run)
    assert (stopped_run / "rounds.jsonl.before-1").read_text() == damaged


# A description that was edited


RESULT, STATES = "result.json is", "the checkpoints in state/ are"


@pytest.mark.parametrize(
    ("old", "new", "there", "before", "of_result"),
    [
        ('method = ".*"', 'method = "fedavg"', "method = 'fedavg'", "method = 'fedavg+fedheal", True),
        ("seed = 0", "seed = 1", "seed = 1", "seed = 0", True),
        ("seed = 0", "seed = 0\nsplit_seed = 2", "split_seed = 2", "no split_seed", True),
        ("rounds = 4", "rounds = 5", "rounds = 5", "rounds = 4", True),
        ("lr = 0.05", "lr = 0.07", "lr = 0.07", "lr = 0.05", False),
        ('model = ".*"', 'model = "tiny_data:conv_batchnorm"', "model = 'tiny_data:conv_batchnorm'", "model = ", False),
    ],
    ids=["method", "seed", "split_seed", "rounds", "lr", "model"],
)
def test_an_edited_description_is_refused_with_the_setting(
    finished_run: Path, stopped_run: Path, tmp_path: Path, old: str, new: str, there: str, before: str, of_result: bool
) -> None:
    finished = tmp_path / "finished"
    shutil.copytree(finished_run, finished)
    for folder, others in ((finished, RESULT if of_result else STATES), (stopped_run, STATES)):
        path = folder / "experiment.toml"
        path.write_text(re.sub(f"^{old}$", new, path.read_text(), count=1, flags=re.MULTILINE))
        files = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        with pytest.raises(ValueError, match=re.escape(f"{path} says {there}")) as error:
            fedheal.run(Experiment.read(path), folder, resume=True, progress=False)
        assert f", but {others} of {before}" in str(error.value)
        assert str(error.value).endswith(": restore what was changed, or name another folder")
        assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files
    if of_result:
        shutil.rmtree(finished / "state")
        with pytest.raises(ValueError, match=f"but result.json is of {re.escape(before)}"):
            fedheal.run(Experiment.read(finished / "experiment.toml"), finished, resume=True, progress=False)


def test_checkpoints_that_are_all_of_another_experiment_are_a_sentence(stopped_run: Path) -> None:
    for path in records.list_checkpoints(stopped_run):
        replace_by_foreign_state(path)
    differs = "experiment.toml differs from the experiment that the checkpoints in state/ are of"
    with pytest.raises(ValueError, match=f"{differs}: restore what was changed, or name another folder$"):
        run_four_rounds(stopped_run)


def test_settings_that_an_earlier_version_lacks_are_not_called_changed(stopped_run: Path) -> None:
    identity = quick(rounds=4).identity
    for path in records.list_checkpoints(stopped_run):
        arrays, described = records.load_checkpoint(path, identity)
        del described["settings"]["lr_schedule"], described["settings"]["lr"]
        records.save_checkpoint(stopped_run, int(path.stem), arrays, described, "an earlier version's")
    with pytest.raises(
        ValueError, match=r"experiment\.toml says lr = 0\.05, but the checkpoints in state/ are of no lr:"
    ):
        run_four_rounds(stopped_run)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", " has no method, so it is not as a run wrote it: restore it, or name another folder"),
        ("method = 'fedavg'\nlr = 'abc'\n", ": lr = 'abc': use a number"),
    ],
)
def test_a_damaged_description_is_named(stopped_run: Path, content: str, message: str) -> None:
    path = stopped_run / "experiment.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}{message}')}$"):
        run_four_rounds(stopped_run)


def test_a_model_that_does_not_fit_is_a_short_sentence(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    shutil.rmtree(folder / "state")  # which would tell that the description was edited
    path = folder / "experiment.toml"
    path.write_text(path.read_text().replace("tiny_data:linear", "resnet10"))
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit model 'resnet10'") as error:
        fedheal.load(folder)
    assert len(str(error.value)) < 220 + len(str(folder))
    assert str(error.value).endswith(" ...)")


def test_a_model_without_result_and_states_is_not_removed(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    shutil.rmtree(folder / "state")
    (folder / "result.json").unlink()
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ValueError, match=r"and model\.safetensors, but no checkpoint in state/: restore state/"):
        run_four_rounds(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_leftover_temporary_files_change_nothing(finished_run: Path, stopped_run: Path) -> None:
    for name in ("rounds.jsonl", "model.safetensors", "result.json", "experiment.toml", "state/00000004.safetensors"):
        (stopped_run / f"{name}.tmp").write_bytes(b"half of somethi")
    (stopped_run / "state" / "00000009.safetensors.tmp").write_bytes(b"")
    run_four_rounds(stopped_run)
    assert read_model(stopped_run) == read_model(finished_run)


def test_resuming_a_finished_run_changes_no_file(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    result = run_four_rounds(folder)
    assert [record.round for record in result.history] == [1, 2, 3, 4]
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_finished_run_keeps_its_rounds_when_its_states_are_gone(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    shutil.rmtree(folder / "state")
    result = run_four_rounds(folder)
    assert [record.round for record in result.history] == [1, 2, 3, 4]
    assert (folder / "rounds.jsonl").read_bytes() == (finished_run / "rounds.jsonl").read_bytes()


def test_a_finished_run_with_damaged_states_is_still_finished(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    for path in records.list_checkpoints(folder):
        empty_file(path)
    assert get_model_bytes(run_four_rounds(folder)) == get_model_bytes(run_four_rounds(finished_run))


def test_a_run_killed_before_its_description_was_written_can_be_resumed(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "experiment.toml.tmp").write_text('name = ""\nmeth')
    run_four_rounds(folder)
    assert read_model(folder) == read_model(finished_run)


class Intruder(fedheal.Callback):
    """Starts the same run in the same folder while it goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.messages: list[str] = []

    def round(self, record: Any) -> None:
        with pytest.raises(ValueError, match="is in use by another run") as refused:
            fedheal.run(quick(rounds=2), self.folder, resume=True)
        self.messages.append(str(refused.value))


def test_two_runs_cannot_be_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0)
    alone = fedheal.run(quick(rounds=2), tmp_path / "alone")
    intruder = Intruder(tmp_path / "run")
    disturbed = fedheal.run(quick(rounds=2), tmp_path / "run", callbacks=[intruder])
    assert len(intruder.messages) == 2
    assert str(tmp_path / "run") in intruder.messages[0]
    assert get_model_bytes(disturbed) == get_model_bytes(alone)
    assert [record.round for record in records.read_rounds(tmp_path / "run")] == [1, 2]
    fedheal.run(quick(rounds=2), tmp_path / "run", resume=True)  # the lock went with the run


def test_a_run_waits_for_a_killed_one_that_is_still_ending(tmp_path):
    ending = lock.acquire_lock(tmp_path)
    timer = threading.Timer(0.2, ending.release)
    timer.start()
    with lock.hold_lock(tmp_path):
        assert not ending.is_locked
    timer.join()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def raise_no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", raise_no_locks)
    assert fedheal.run(quick(rounds=1), tmp_path / "run").summary["rounds"] == 1


# A result


def test_every_field_of_a_result_has_its_kind(finished_run: Path) -> None:
    """Otherwise a new field of results would not be checked."""
    always = [name for name, field in RunResult.model_fields.items() if field.is_required()]
    later = {"by_class", "calibration", "engine", "evaluate", "schema_version"}  # which runs of 0.1 do not have
    assert set(records.read_json(finished_run / "result.json")) == {*always, *later}
    assert records.read_result(finished_run, always)["rounds"] == 4


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"avg": "x"}, "avg must be a number, got 'x'"),
        ({"std": True}, "std must be a number, got True"),
        ({"seed": False}, "seed must be a whole number, got False"),
        ({"pool": 0}, "pool must be true or false, got 0"),
        ({"seconds": []}, "seconds must be a dictionary, got []"),
        ({"schema_version": 3}, "schema_version = 3 belongs to a newer version of fedheal than this one: upgrade"),
        ({"versions": list(range(10**6))}, "versions must be a dictionary, got [0, 1, 2, 3, 4, 5, ...]"),
    ],
)
def test_a_result_of_the_wrong_kind_is_named_even_if_nobody_needs_it(
    finished_run: Path, tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    whole = records.read_json(finished_run / "result.json")
    (tmp_path / "result.json").write_text(json.dumps(whole | values))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'result.json'}: {sentence}") + "$"):
        records.read_result(tmp_path)


def test_a_result_of_another_version_may_have_more_and_less(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"rounds": 3, "avg": 80, "validation": null, "mood": "good"}')
    assert records.read_result(tmp_path, ["rounds"])["avg"] == 80
    with pytest.raises(ValueError, match=r"result\.json: there is no seed$"):
        records.read_result(tmp_path, ["rounds", "seed"])
    with pytest.raises(ValueError, match=r"nowhere/result\.json is missing: name the folder of a finished run"):
        records.read_result(tmp_path / "nowhere")


def test_a_crash_while_the_last_line_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    for number in (1, 2):
        records.append_round(tmp_path, RoundRecord(round=number))

    def check_rounds(operation: Operation) -> None:
        assert [record.round for record in records.read_rounds(tmp_path)] == [1, 2], operation

    with watch(tmp_path, check_rounds):
        records.replace_last_round(tmp_path, RoundRecord(round=2, train_loss=0.5))
    assert [record.train_loss for record in records.read_rounds(tmp_path)] == [None, 0.5]


def test_whoever_gets_the_lock_removes_temporary_files_of_killed_processes(tmp_path: Path) -> None:
    """This includes a checkpoint's file, if a process was killed right after the last save of a run."""
    (tmp_path / "state").mkdir()
    for name in ("model.safetensors.1a2b.tmp", "report.html", "state/3.safetensors", "state/3.safetensors.3c4d.tmp"):
        (tmp_path / name).touch()
    with lock.hold_lock(tmp_path):
        remaining = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert remaining == {lock.LOCK, "report.html", "state/3.safetensors"}
