"""`fedheal compare`: what it prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import layouts
from command_line import assert_sentence
from fedheal.campaign.compare import DEFAULT_SEEDS
from fedheal.report import conclusions
from tiny_data import WORDS, words


def test_a_parameter_that_only_some_methods_have_is_refused_with_what_to_write(call, tmp_path: Path) -> None:
    done = call("compare", "fedavg", "fedheal", "fedprox:mu=1+fphl", "centralised", "tau=0.3", "--seeds", "1")
    assert_sentence(
        done, "'fedavg', 'centralised' have no parameter 'tau'", "fedheal:tau=0.3 fedprox:mu=1.0+fphl:tau=0.3"
    )
    assert_sentence(call("compare", "fedavg", "fedprox", "tau=0.4", "--seeds", "1"), "unknown field 'tau'")
    assert_sentence(call("compare", "fedavg", "rounds=1", "rounds=2"), "'rounds' is given twice: rounds=1 and rounds=2")
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_that_cannot_be_finished_is_not_begun(call, tmp_path: Path) -> None:
    given = [word for word in WORDS if not word.startswith("data=")]
    command = ["compare", "fedavg", "fedce", "--data", "tiny_data:load", "--seeds", "1", *given]
    assert_sentence(call(*command), "method 'fedce' needs examples held out", "validation=0.2")
    assert list(tmp_path.iterdir()) == []


def test_what_any_run_needs_is_checked_before_the_first_one_starts(call, tmp_path: Path) -> None:
    """MOON, the last of three methods, needs features that this model does not have."""
    given = [word for word in WORDS if not word.startswith("data=")]
    command = [
        "compare",
        "fedavg",
        "fedheal",
        "moon",
        "--data",
        "tiny_data:load",
        "--seeds",
        "2",
        "--jobs",
        "1",
        *given,
    ]
    assert_sentence(
        call(*command), "method 'moon' needs a model with `features` and `head`; 'tiny_data:linear' has none"
    )
    small = ["compare", "fedavg", "--seeds", "1", "model=tiny_data:linear"]
    assert_sentence(call(*small), "model 'tiny_data:linear' does not fit images of shape (3, 32, 32)")
    assert_sentence(call("sweep", *WORDS, "method=fedavg,moon"), "method 'moon' needs a model with `features`")
    assert_sentence(call("reproduce", "table1", "--smoke", *given), "does not fit images of shape (3, 32, 32)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--data", "folder:/nowhere"], "data = 'folder:/nowhere': there is no folder '/nowhere'"),
        (["--data", "digitz"], "there is no data set 'digitz' (did you mean 'digits'?)"),
        (["--data", "nothing_there:load"], "nothing_there"),
        (["some.toml"], "some.toml: a comparison takes no experiment file; write its fields as key=value"),
        (["--track", "wandbb"], "unknown tracker 'wandbb' (did you mean 'wandb'?)"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_first_run(
    given: list[str], says: str, call, tmp_path: Path
) -> None:
    done = call("compare", "fedavg", "--seeds", "2", *given)
    assert_sentence(done, says)  # and no title
    assert "(in the run" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_without_numbers_is_named_in_a_comparison(call, tmp_path: Path) -> None:
    given = [word for word in WORDS if not word.startswith("data=")]
    command = ["compare", "fedavg", "--data", "tiny_data:load", "--seeds", "1", "--out", "here", "--jobs", "1", *given]
    assert call(*command, "--quiet").code == 0
    (result,) = tmp_path.glob("here/*/result.json")
    result.write_text("{}")
    done = call(*command)
    assert done.code == 2
    assert done.err.startswith("fedheal: here/fedavg-tiny_data_load-seed0/result.json: there is no ")
    assert done.err.count("\n") == 1


def test_a_comparison_says_how_many_runs_are_under_way(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedheal.campaign.placement.count_gpus", lambda: 2)
    given = [word for word in words("device=auto") if not word.startswith("data=")]
    command = ["compare", "fedheal", "fedavg", "--data", "tiny_data:load", "--seeds", "1", "--jobs", "1", *given]
    done = call(*command, "--out", "here")
    assert (done.code, done.err) == (0, "")
    assert "2 runs into here, 1 at a time on one GPU:" in done.out
    again = call(*command, "--out", "here").out
    assert "2 runs into here, all of them finished:" in again
    # A report keeps the order of the comparison.
    report = call("report", "here").out
    assert [line.split()[0] for line in report.splitlines() if line.startswith("fedavg")][:2] == [
        "fedavg+fedheal",
        "fedavg",
    ]
    assert report.strip() in again


def test_a_comparison_of_one_method_says_that_nothing_is_compared(call) -> None:
    given = [word for word in words("rounds=1") if not word.startswith("data=")]
    command = ["--data", "tiny_data:load", "--seeds", "2", "--jobs", "1", "--out", "here", *given]
    note = "Note: fedavg is the only method, so nothing is compared: name another to compare it with."
    alone = call("compare", "fedavg", *command)
    assert (alone.code, alone.err) == (0, "")
    assert alone.out.splitlines()[0] == note
    assert "over seeds" in alone.out
    assert len(json.loads(call("compare", "fedavg", *command, "--json").out)["rows"]) == 2
    assert "Note: fedavg is the only" not in call("compare", "fedavg", "fedheal", *command).out


def test_too_few_seeds_are_said_once_before_the_first_run(call) -> None:
    given = [word for word in words("rounds=1") if not word.startswith("data=")]
    command = ["--data", "tiny_data:load", "--jobs", "1", "--out", "here", *given]
    done = call("compare", "fedavg", "fedheal", "centralised", "--seeds", "2", *command)
    assert (done.code, done.err) == (0, "")
    first, *others = done.out.splitlines()
    sentence = "2 seeds cannot show a difference at 0.05 with a two-sided paired test corrected for 2 comparisons, "
    assert first.startswith(f"Note: {sentence}")
    assert first.endswith("; 7 or more can.")
    assert f"{first.removeprefix('Note: ')}" in others  # the report's own
    assert done.out.count("cannot show a difference") == 2
    # With nothing left to run, the report alone says it; crossed seeds are not tested.
    again = call("compare", "fedavg", "fedheal", "centralised", "--seeds", "2", *command)
    assert again.out.count("cannot show a difference") == 1
    crossed = call("compare", "fedavg", "fedheal", "--vary", "split=2,init=2", *command)
    assert (crossed.code, "cannot show a difference" in crossed.out) == (0, False)


def test_one_domain_on_disk_needs_the_seeds_of_one_metric(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six seeds can show a difference in AVG (p = 2/64); STD, which would make it two comparisons, is always 0."""

    def refuse(*_: object) -> None:
        raise ValueError("no run today")

    monkeypatch.setattr("fedheal.campaign.pool._run_here", refuse)
    layouts.image_folders(tmp_path / "pets" / "photos", {"cat": 10, "dog": 10})
    given = [word for word in words("rounds=1") if not word.startswith("data=")]
    command = ["compare", "fedavg", "fedheal", "--data", "folder:pets", "--jobs", "1", *given, "model=small_cnn"]
    assert "Note: " not in call(*command, "--seeds", "6").out
    assert "corrected for 1 comparison, whatever the data" in call(*command, "--seeds", "5").out
    layouts.image_folders(tmp_path / "pets" / "sketches", {"cat": 10, "dog": 10})
    assert "corrected for 2 comparisons, whatever the data" in call(*command, "--seeds", "6").out


def test_the_help_says_how_many_seeds_are_enough(call) -> None:
    assert conclusions.foresee_too_few_seeds(DEFAULT_SEEDS, methods=4) == ""
    assert conclusions.foresee_too_few_seeds(DEFAULT_SEEDS, methods=5) != ""
    shown = " ".join(call("compare", "--help").out.replace("│", " ").split())
    assert "Eight can show a difference between up to four methods" in shown
    assert "[default: 8]" in shown
    assert "[default: 20]" in " ".join(call("sweep", "--help").out.replace("│", " ").split())


def test_a_comparison_says_which_finished_run_was_on_other_data(call, tmp_path: Path) -> None:
    given = [word for word in words("rounds=1") if not word.startswith("data=")]
    command = ["compare", "fedavg", "fedheal", "--data", "tiny_data:load", "--seeds", "1", "--jobs", "1", *given]
    before = call(*command, "--out", "here")
    assert "Observed against fedavg" in before.out
    (path,) = (tmp_path / "here").glob("fedavg-*/result.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"used_fingerprint": "other"}))
    after = call(*command, "--out", "here")
    message = "Not on the same data as the run of fedavg with the same seed, and therefore not compared with it: fedavg+fedheal"
    assert message in after.out
    assert "Observed against fedavg" not in after.out
    assert message in json.loads(call(*command, "--out", "here", "--json").out)["conclusions"][0]


def test_a_comparison_with_many_fields_has_a_folder_that_can_be_made(call, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    monkeypatch.setattr("fedheal.campaign.compare.plan", lambda *words: folders.append(words[3]) or [])
    for number in (1, 2):
        names = ",".join(f"a-long-name-of-a-client-{i}" for i in range(20))
        call("compare", "fedavg", f"only={names}", f"without=client-{number}", "--quiet")
    assert len(set(folders)) == 2
    assert all(len(folder.name) <= 250 for folder in folders)


def test_folders_of_one_name_are_compared_in_folders_of_their_own(call, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []

    def plan(methods: object, seeds: object, values: object, folder: Path, track: object) -> None:
        wanted.append(folder)
        raise ValueError("this is as far as it goes")

    monkeypatch.setattr("fedheal.campaign.compare.plan", plan)
    for data in ("folder:a/photos", "folder:b/photos"):
        assert call("compare", "fedavg", "--data", data).code == 2
    assert [str(folder) for folder in wanted] == ["runs/compare-folder.a_photos", "runs/compare-folder.b_photos"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has ..."),
            "a GPU has too little memory (CUDA out of memory. Tried to allocate 3.00 GiB)",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\nmore lines"),
            "this machine has too little memory (DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes)",
        ),
        (MemoryError(), "this machine has too little memory (it cannot hold what this command needs)"),
    ],
)
def test_too_little_memory_is_a_sentence(call, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def full(job: object) -> None:
        raise error

    monkeypatch.setattr("fedheal.campaign.pool.run_job", full)
    assert_sentence(call("compare", "fedavg", "--seeds", "1", "--quiet"), said, "--jobs")


def test_an_error_among_many_runs_says_in_which(call, tmp_path: Path) -> None:
    more = [word for word in WORDS if not word.startswith("data=")]
    done = call(
        "compare", "fedavg", "--data", "tiny_data:load", *more, "lr=1e30", "--seeds", "1", "--jobs", "1", "--quiet"
    )
    assert_sentence(done, "(in the run runs/compare-tiny_data.load", "fedavg-tiny_data_load-seed0)")


def test_a_device_that_cannot_be_used_is_refused_before_anything_is_printed(call, tmp_path: Path) -> None:
    done = call("compare", "fedavg", "--seeds", "1", "device=tpu")
    assert_sentence(done, "device = 'tpu' cannot be used here")
    assert list(tmp_path.iterdir()) == []


def test_crossed_seeds_are_shown_as_components(call, tmp_path: Path) -> None:
    given = [word for word in words("rounds=1") if not word.startswith("data=")]
    command = ["compare", "fedavg", "--data", "tiny_data:load", "--vary", "init=2,batch=2", "--jobs", "1", *given]
    found = json.loads(call(*command, "--json").out)
    assert [record["column"] for record in found["components"]] == ["AVG", "STD", "worst", "plain", "noisy", "dark"]
    assert [c["df"] for c in found["components"][0]["components"]] == [1, 1, 1]
    assert [(row["init_seed"], row["batch_seed"]) for row in found["rows"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("compare-tiny_data.load-vary=init_batch-")
    assert "Variance components (2 init x 2 batch)" in call("report", str(folder)).out
    assert_sentence(call(*command, "--seeds", "3"), "seeds = 3: vary sets the seeds itself")


@pytest.mark.parametrize("word", ["data=embedded", "seeds=3", "vary=split", "jobs=2"])
def test_an_option_that_is_given_as_a_field_is_named(call, word: str) -> None:
    option, _, value = word.partition("=")
    assert_sentence(call("compare", "fedavg", "fedheal", word), f"use --{option} {value}")
