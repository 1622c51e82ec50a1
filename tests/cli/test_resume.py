"""`fedheal run --resume`: what it says of a folder that was damaged or edited."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fedheal
from command_line import assert_sentence, read_files
from fedheal.runs.folder import read_rounds
from tiny_data import WORDS, quick, words
from tiny_runs import Stop

START_NOTE = "has no rounds to resume from"


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """A run that was stopped after round 2 of 3, in the folder `here`."""
    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(), tmp_path / "here", callbacks=[Stop()], progress=False)
    return tmp_path / "here"


def test_an_edited_description_of_a_finished_run_is_a_sentence(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    path = tmp_path / "here" / "experiment.toml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join("method = 'fedavg'" if line.startswith("method") else line for line in lines))
    before = read_files(tmp_path)
    said = "fedheal: here/experiment.toml says method = 'fedavg', but result.json is of method = 'fedavg+fedheal"
    for command in (words("method=fedavg"), []):
        assert_sentence(call("run", *command, "--resume", "--out", "here"), said)
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("more", [[], ["--quiet"]])
def test_rounds_without_a_checkpoint_are_said_and_kept(call, caplog, stopped_run: Path, more: list[str]) -> None:
    shutil.rmtree(stopped_run / "state")
    old = (stopped_run / "rounds.jsonl").read_bytes()
    done = call("run", "--resume", "--out", "here", *more)
    assert done.code == 0
    assert START_NOTE not in done.out
    kept = "the run starts again with round 1, and keeps them as rounds.jsonl.before-1"
    assert caplog.messages == [f"here has records up to round 2, but no checkpoint: {kept}"]
    assert (stopped_run / "rounds.jsonl.before-1").read_bytes() == old
    assert len(read_rounds(stopped_run)) == 3


@pytest.mark.parametrize("described", [[], WORDS])
@pytest.mark.parametrize(
    ("content", "said"),
    [("", "here/experiment.toml has no method"), ("method = 'fedavg'\nlr = 'abc'\n", "here/experiment.toml: lr = 'abc': use")],
)  # fmt: skip
def test_a_damaged_description_is_named(call, stopped_run: Path, described: list[str], content: str, said: str) -> None:
    (stopped_run / "experiment.toml").write_text(content)
    assert_sentence(call("run", *described, "--resume", "--out", "here"), said)


@pytest.mark.parametrize(("word", "said"), [("lr=0.5", "lr is 0.05 there and 0.5 here"), ("tau=0.5", "method is")])
def test_a_field_that_was_given_is_named_first(call, stopped_run: Path, word: str, said: str) -> None:
    done = call("run", "--resume", "--out", "here", word)
    assert_sentence(
        done, f"here belongs to another experiment ({said}", " more differ): fields given with --resume describe"
    )
    assert "variant=" not in done.err  # a method's name without its defaults
