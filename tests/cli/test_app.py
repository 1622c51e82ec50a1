"""What the commands print, leave behind and refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedheal
from fedheal import methods
from fedheal.runs.schema import RoundRecord
from made_up import run_folder
from tiny_data import WORDS, quick, words

with warnings.catch_warnings():  # typer still imports names that click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedheal import cli

TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """`fedheal` with these words, in a folder of its own, as a process would end."""

    def called(*given: str) -> Done:
        monkeypatch.chdir(tmp_path)
        # What a test says otherwise than WORDS takes its place: on a command line each key may stand once.
        keys = [word.partition("=")[0] for word in given]
        kept = [word for i, word in enumerate(given) if not (word in WORDS and keys[i] in keys[i + 1 :])]
        monkeypatch.setattr(sys, "argv", ["fedheal", *kept])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        return Done(code, *capfd.readouterr())

    return called


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_sentence(done: Done, *words: str) -> None:
    """One sentence on stderr, exit code 2, nothing else."""
    assert "Traceback" not in done.err
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("fedheal: ")
    assert done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err, done.err


# It runs


def test_a_run_leaves_a_folder_and_says_where(call, tmp_path: Path) -> None:
    done = call("run", *WORDS, "name=first")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "runs/first"
    folder = tmp_path / "runs" / "first"
    assert {p.name for p in folder.iterdir()} >= {"experiment.toml", "rounds.jsonl", "result.json", "model.safetensors"}
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3


def test_the_output_of_a_run_shows_method_domains_and_summary(call) -> None:
    out = call("run", *WORDS, "method=fedavg+uniform").out
    for word in ("fedavg+uniform", "plain", "noisy", "dark", "AVG", "STD", "worst", "round 1/3", "round 3/3"):
        assert word in out


def test_without_a_name_the_folder_says_method_data_and_seed(call, tmp_path: Path) -> None:
    call("run", *WORDS, "method=fedheal", "tau=0.4", "seed=5", "--quiet")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["fedavg+fedheal_tau=0.4-tiny_data_load-seed5"]


def test_output_that_is_no_terminal_is_plain_lines(call) -> None:
    done = call("run", *WORDS)
    assert CONTROL.search(done.out) is None
    assert done.out.endswith("\n")


def test_json_is_alone_on_stdout_and_the_same_as_the_file(call, tmp_path: Path) -> None:
    done = call("run", *WORDS, "--json", "--out", "here")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == json.loads((tmp_path / "here" / "result.json").read_text())


def test_quiet_prints_nothing(call, tmp_path: Path) -> None:
    assert call("run", *WORDS, "--quiet", "--out", "here") == Done(0, "", "")
    assert (tmp_path / "here" / "result.json").exists()


def test_a_file_and_words_which_win(call, tmp_path: Path) -> None:
    lines = [f'{key} = "{value}"' if not value[0].isdigit() else f"{key} = {value}" for key, value in
             (word.split("=") for word in WORDS)]  # fmt: skip
    (tmp_path / "one.toml").write_text("\n".join([*lines, "tau = 0.4", "seed = 3"]))
    done = call("run", "one.toml", "rounds=2", "--json", "--out", "here")
    result = json.loads(done.out)
    assert (result["rounds"], result["seed"], result["method"]) == (2, 3, "fedavg+fedheal:tau=0.4")


def test_the_experiment_file_of_a_run_runs_again_to_the_same_bits(call, tmp_path: Path) -> None:
    call("run", *WORDS, "tau=0.4", "--quiet", "--out", "one")
    call("run", "one/experiment.toml", "--quiet", "--out", "two")
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one["model.safetensors"] == two["model.safetensors"]
    assert one["experiment.toml"] == two["experiment.toml"]


@pytest.mark.parametrize("extreme", ["tau=1", "tau=0", "beta=1", "beta=0", "lr=1", "server_lr=2"])
def test_a_whole_number_for_a_fraction_can_be_resumed(call, extreme: str) -> None:
    assert call("run", *WORDS, "rounds=1", extreme, "--quiet", "--out", "here").code == 0
    done = call("run", *WORDS, "rounds=1", extreme, "--quiet", "--out", "here", "--resume")
    assert (done.code, done.err) == (0, "")


def test_resuming_a_finished_run_returns_at_once_with_the_same_result(call, tmp_path: Path) -> None:
    first = call("run", *WORDS, "--json", "--out", "here")
    before = files(tmp_path / "here")
    started = time.monotonic()
    again = call("run", *WORDS, "--json", "--out", "here", "--resume")
    assert time.monotonic() - started < 5
    assert again.out == first.out
    assert files(tmp_path / "here") == before


def test_resume_of_a_run_that_never_began_starts_it(call) -> None:
    assert call("run", *WORDS, "--resume", "--quiet", "--out", "here") == Done(0, "", "")


def test_a_folder_is_enough_to_go_on(call, tmp_path: Path) -> None:
    """A run stopped after round 2 of 5; what decides nothing may be said anew."""
    whole = fedheal.run(quick(rounds=5, tau=0.4), tmp_path / "whole", progress=False)

    class Stop(fedheal.Callback):
        def round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedheal.run(quick(rounds=5, tau=0.4), tmp_path / "here", callbacks=[Stop()], progress=False)
    assert [p.name for p in (tmp_path / "here" / "state").iterdir()] == ["00000002.safetensors"]
    done = call("run", "--resume", "--out", "here", "save_seconds=5", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["domains"] == dict(whole.domains)
    assert (tmp_path / "here/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert call("run", "--resume", "--out", "here", "--json").out == done.out  # it is finished


def test_a_folder_without_a_run_is_not_enough(call, tmp_path: Path) -> None:
    assert_sentence(call("run", "--resume", "--out", "nowhere"), "nowhere holds no run to go on with")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_does_not_stand_for_what_the_words_leave_out(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    assert_sentence(call("run", "rounds=3", "--out", "here", "--resume"), "here", "another experiment")


def test_a_parameter_that_only_some_methods_have_is_refused_with_what_to_write(call, tmp_path: Path) -> None:
    done = call("compare", "fedavg", "fedheal", "fedprox:mu=1+fphl", "centralised", "tau=0.3", "--seeds", "1")
    assert_sentence(
        done, "'fedavg', 'centralised' have no parameter 'tau'", "fedheal:tau=0.3 fedprox:mu=1+fphl:tau=0.3"
    )
    assert_sentence(call("compare", "fedavg", "fedprox", "tau=0.4", "--seeds", "1"), "unknown field 'tau'")
    assert_sentence(call("compare", "fedavg", "rounds=1", "rounds=2"), "'rounds' is given twice: rounds=1 and rounds=2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["run", "--help"], ["demo", "--help"]])
def test_version_and_help(call, words: list[str]) -> None:
    done = call(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out.strip() == f"fedheal {fedheal.__version__}" if words == ["--version"] else "Usage" in done.out


def test_a_name_may_end_as_files_do_and_a_files_folder_may_have_an_equals_sign(call, tmp_path: Path) -> None:
    assert call("run", *WORDS, "name=x.toml", "--quiet").code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x.toml"]
    (tmp_path / "lr=0.05").mkdir()
    (tmp_path / "runs" / "x.toml" / "experiment.toml").rename(tmp_path / "lr=0.05" / "e.toml")
    assert call("run", "./lr=0.05/e.toml", "--quiet", "--out", "again").code == 0


def test_words_win_over_what_a_run_wrote_of_its_method(call, tmp_path: Path) -> None:
    call("run", *WORDS, "tau=0.2", "--quiet", "--out", "one")
    assert call("run", "one/experiment.toml", "tau=0.5", "--quiet", "--out", "two").code == 0
    assert "tau=0.5" in json.loads((tmp_path / "two" / "result.json").read_text())["method"]


def test_a_comparison_that_cannot_be_finished_is_not_begun(call, tmp_path: Path) -> None:
    given = [word for word in WORDS if not word.startswith("data=")]
    command = ["compare", "fedavg", "fedce", "--data", "tiny_data:load", "--seeds", "1", *given]
    assert_sentence(call(*command), "method 'fedce' needs examples held out", "validation=0.2")
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


# It refuses

INTO = {
    "run": ["run", *WORDS],
    "compare": ["compare", "fedavg", "--data", "tiny_data:load"],
    "sweep": ["sweep", *WORDS, "lr=0.1,0.2"],
    "reproduce": ["reproduce", "table1", "--smoke"],
    "demo": ["demo"],
    "data show": ["data", "show", "tiny_data:load"],
}


@pytest.mark.parametrize("command", INTO.values(), ids=INTO)
@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("taken", "fedheal: taken is a file: name another folder"),
        ("taken/deep/here", "fedheal: taken/deep/here cannot be made, since taken is a file: name another folder"),
    ],
)
def test_a_file_where_a_folder_should_go_is_a_sentence(
    call, tmp_path: Path, command: list[str], out: str, said: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    assert_sentence(call(*command, "--out", out), said)
    assert files(tmp_path) == {"taken": b"mine"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--html", "--out", "taken/report.html"], "taken is a file: name another folder"),
        (["--html", "--out", "there"], "there is a folder: name a file"),
        (["--html", "--figures", "taken"], "taken is a file: name another folder"),
        (["-f", "csv", "--out", "taken/rows.csv"], "taken is a file: name another folder"),
        (["-f", "latex", "--out", "there"], "there is a folder: name a file"),
        (["-f", "parquet", "--out", "taken/rows.parquet"], "taken is a file: name another folder"),
        (["--diagnose", "--figures", "taken"], "taken is a file: name another folder"),
    ],
)
def test_a_report_that_cannot_be_written_there_is_a_sentence(
    call, tmp_path: Path, options: list[str], said: str
) -> None:
    run_folder(tmp_path / "one")
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "there").mkdir()
    before = files(tmp_path)
    assert_sentence(call("report", "one", *options), said)
    assert files(tmp_path) == before


WRONG = [
    (["rounds=-1"], ["rounds", "-1"]),
    (["rounds=1.5"], ["rounds", "1.5"]),
    (["rounds=many"], ["rounds", "many"]),
    (["rounds=true"], ["rounds"]),
    (["lr=inf"], ["lr", "inf"]),
    (["lr=nan"], ["lr", "nan"]),
    (["server_lr=inf"], ["server_lr", "inf"]),
    (["participation=0"], ["participation"]),
    (["bogus=3"], ["bogus"]),
    (["taw=.3"], ["taw", "tau"]),
    (["taw=0.3"], ["taw", "tau"]),
    (["tau=2"], ["tau", "2"]),
    (["tau=x"], ["tau", "x"]),
    (["sed=1"], ["sed", "seed"]),
    (["=3"], ["=3", "key=value"]),
    (["a-b=3"], ["a-b=3", "key=value"]),
    (["method=fedhael"], ["fedhael", "fedheal"]),
    (["method=fedavg+fedavg"], ["fedavg+fedavg"]),
    (["method=fedheal+uniform"], ["fedheal+uniform", "weights"]),
    (["method="], ["method"]),
    (["method=3"], ["method", "3"]),
    (["method=fedavg", "tau=0.3"], ["tau", "fedavg"]),
    (["method=fedheal:tau=0.2", "tau=0.3"], ["tau", "0.2", "0.3"]),
    (["data=nowhere"], ["nowhere", "embedded"]),
    (["data=no_such_module:load"], ["no_such_module"]),
    (["data=tiny_data:nothing"], ["tiny_data:nothing"]),
    (["data=tiny_data:QUICK"], ["tiny_data:QUICK"]),
    (["data=tiny_data:linear"], ["tiny_data:linear"]),
    (["data=tiny_data:failing"], ["the data set's function 'tiny_data:failing' ended with KeyError: 'nothing'"]),
    (["data=tiny_data:uneven"], ["tiny_data:linear", "does not fit images of shape (3, 16, 16)"]),
    (["data=tiny_data:uneven", "pool=true"], ["several sizes (plain 8 x 8, noisy 8 x 8, dark 16 x 16)", "one size"]),
    (["data=os:getcwd"], ["os:getcwd", "Domains"]),
    (["data=.x:load"], [".x:load"]),
    (["model=resnet11"], ["resnet11", "resnet10"]),
    (["model=no_such_module:net"], ["no_such_module"]),
    (["model=.x:net"], [".x:net"]),
    (["model=os:getcwd"], ["os:getcwd"]),
    (["width=3"], ["width", "tiny_data:linear"]),
    (["model=tiny_data:unable"], ["the model's factory 'tiny_data:unable' ended with RuntimeError: no weights here"]),
    (["model=tiny_data:Unpooled", "method=fedproto"], ["tiny_data:Unpooled", "in training"]),
    (["samples_per_client=1000"], ["1000"]),
    (["device=tpu"], ["fedheal: device = 'tpu' cannot be used here: use auto"]),
    (["device=meta"], ["fedheal: device = 'meta' cannot be used here: use auto"]),
    (["device=cuda:x"], ["device = 'cuda:x' cannot be used here (Invalid device string: 'cuda:x'): use auto"]),
    (["tau=0.3", "tau=0.4"], ["'tau' is given twice", "tau=0.3", "tau=0.4"]),
    (["missing.toml"], ["missing.toml", "No such file"]),
    (["one.toml", "two.toml"], ["one.toml", "two.toml"]),
    (["."], [".", "directory"]),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_input_is_a_sentence_and_nothing_is_written(
    call, tmp_path: Path, words: list[str], said: list[str]
) -> None:
    assert_sentence(call("run", *WORDS, *words), *said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"rounds = \n", "not TOML"),
        (b"rounds = 3\nrounds = 4\n", "not TOML"),
        (b'name = "\xe9t\xe9"\n', "not TOML"),
        (b"\x00\x01\x02", "not TOML"),
        (b"\xff\xfer\x00o\x00", "not TOML"),
        (b"[rounds]\nx = 1\n", "rounds"),
        (b"rounds = [1, 2]\n", "rounds"),
        (b"rounds = 2024-01-01\n", "rounds"),
        (b'rounds = "x\\ny"\n', "rounds"),
        (b"bogus = 1\n", "bogus"),
    ],
)
def test_an_unreadable_description_is_a_sentence(call, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    assert_sentence(call("run", "bad.toml"), said)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.toml"]


def test_a_folder_of_another_experiment_is_refused_and_left_alone(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    before = files(tmp_path)
    for extra in ([], ["--resume"]):
        assert_sentence(call("run", *WORDS, "seed=1", "--out", "here", *extra), "here", "another experiment")
    assert files(tmp_path) == before


def test_an_existing_run_needs_resume(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    before = files(tmp_path)
    assert_sentence(call("run", *WORDS, "--out", "here"), "here", "--resume")
    assert files(tmp_path) == before


@pytest.mark.parametrize("extra", [[], ["--resume"]])
def test_a_folder_that_is_no_run_is_refused_and_left_alone(call, tmp_path: Path, extra: list[str]) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.tex").write_text("important")
    assert_sentence(call("run", *WORDS, "--out", "here", *extra), "here", "not a run folder")
    assert files(tmp_path) == {"here/thesis.tex": b"important"}


def test_a_file_where_the_folder_should_be_is_refused(call, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("important")
    assert_sentence(call("run", *WORDS, "--out", "here"), "here")
    assert_sentence(call("run", *WORDS, "--out", "here/below"), "here")
    assert files(tmp_path) == {"here": b"important"}


def test_a_run_whose_description_is_damaged_is_refused_with_its_name(call, tmp_path: Path) -> None:
    call("run", *WORDS, "--quiet", "--out", "here")
    (tmp_path / "here" / "experiment.toml").write_text("rounds = ")
    before = files(tmp_path)
    assert_sentence(call("run", *WORDS, "--out", "here", "--resume"), "here/experiment.toml")
    assert files(tmp_path) == before


def test_a_diverging_run_is_a_sentence(call) -> None:
    done = call("run", *WORDS, "lr=1e30", "--quiet")
    assert_sentence(done, "client 'dark-0'", "on_bad_update")


def test_a_name_cannot_lead_out_of_the_runs_folder(call, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for name in ("..", "../../up", "/tmp/elsewhere", ".", "a/b"):
        call("run", *WORDS, "rounds=1", f'name="{name}"', "--quiet")
    assert {p.name for p in tmp_path.iterdir()} == {"inside", "runs"}
    assert all(p.is_dir() for p in (tmp_path / "runs").iterdir())


@pytest.mark.parametrize("words", [["demo", "--rounds", "0"], ["demo", "--seed", "-1"]])
def test_wrong_options_of_the_demo_are_a_sentence(call, tmp_path: Path, words: list[str]) -> None:
    assert_sentence(call(*words), words[1].strip("-"), words[2])
    assert list(tmp_path.iterdir()) == []


# Reports


def test_reports_as_a_page_and_as_figures(call, tmp_path: Path) -> None:
    for method in ("fedavg", "fedheal"):
        run_folder(tmp_path / "runs" / method, methods.get(method).name, rounds=4)
    done = call("report", "runs", "--html", "--reference", "fedheal")
    assert (done.code, done.out, done.err) == (0, "runs/report.html\n", "")
    assert "fedavg against fedavg+fedheal" in (tmp_path / "runs" / "report.html").read_text()
    assert call("report", "runs", "--html", "--out", "new/page.html").out == "new/page.html\n"
    assert call("report", "runs", "--figures", "drawn").out == "24 files in drawn\n"
    assert len(list((tmp_path / "drawn").iterdir())) == 24
    assert_sentence(call("report", "runs", "--html", "--reference", "bogus"), "reference = bogus")
    assert_sentence(call("report", "runs", "--figures", "drawn", "-f", "csv"), "format = csv", "--figures")
    assert_sentence(call("report", "runs", "--figures", "drawn", "--out", "x"), "out = x", "--figures")
    assert_sentence(call("report", "runs", "-f", "csv", "--reference", "bogus"), "reference = bogus", "leave it out")


def test_the_text_report_says_what_its_marks_and_numbers_are(call, tmp_path: Path) -> None:
    for method in ("fedavg", "fedheal"):
        run_folder(tmp_path / "runs" / method, methods.get(method).name, rounds=2)
    done = call("report", "runs", "--reference", "fedheal")
    assert "mean of the last 2 rounds" in done.out
    assert "* best of its column" in done.out
    assert "Observed against fedavg+fedheal" in done.out


def test_a_diagnosis_is_a_table_sentences_and_a_picture(call, tmp_path: Path) -> None:
    run_folder(tmp_path / "run", rounds=6)
    done = call("report", "run", "--diagnose")
    assert (done.code, done.err) == (0, "")
    assert "under-served since" in done.out
    assert "syn is" in done.out
    assert done.out.splitlines()[-1] == "run/diagnosis-domain.png"
    assert call("report", "run", "--diagnose", "--by", "client", "--figures", "drawn").code == 0
    assert (tmp_path / "drawn" / "diagnosis-client.svg").exists()
    assert_sentence(call("report", "run", "run", "--diagnose"), "one run")
    assert_sentence(call("report", "run", "--by", "client"), "by = client", "--diagnose")
    for idle in (["--out", "x"], ["--reference", "fedavg"], ["--html"], ["-f", "csv"]):
        assert_sentence(call("report", "run", "--diagnose", *idle), "a picture of its own: leave out --")
    assert_sentence(call("report", "elsewhere", "--diagnose"), "elsewhere", "holds no rounds")


def test_a_result_of_the_paper_beside_ours(call, tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith("data=")]
    command = ["reproduce", "table2", *words, "--data", "tiny_data:load", "--rows", "fedfv,uniform*", "--jobs", "1"]
    done = call(*command)
    assert (done.code, done.err) == (0, "")
    for said in ("2 runs into runs/reproduce", "FedFV", "uniform weights", "our control"):
        assert said in done.out
    page = tmp_path / done.out.splitlines()[-1]
    assert "beside the paper" in page.read_text()
    models = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert len(models) == 2
    assert json.loads(call(*command, "--json").out)[0]["rows"][0]["label"] == "FedFV"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")} == models


def test_a_comparison_says_how_many_runs_are_under_way(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedheal.campaign.placement.number", lambda: 2)
    given = [word for word in words("device=auto") if not word.startswith("data=")]
    command = ["compare", "fedavg", "fedheal", "--data", "tiny_data:load", "--seeds", "1", "--jobs", "1", *given]
    done = call(*command, "--out", "here")
    assert (done.code, done.err) == (0, "")
    assert "2 runs into here, 1 at a time on one GPU:" in done.out
    assert "2 runs into here, all of them finished:" in call(*command, "--out", "here").out


def test_a_comparison_says_which_finished_run_was_on_other_data(call, tmp_path: Path) -> None:
    given = [word for word in words("rounds=1") if not word.startswith("data=")]
    command = ["compare", "fedavg", "fedheal", "--data", "tiny_data:load", "--seeds", "1", "--jobs", "1", *given]
    before = call(*command, "--out", "here")
    assert "Observed against fedavg" in before.out
    (path,) = (tmp_path / "here").glob("fedavg-*/result.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"used_fingerprint": "other"}))
    after = call(*command, "--out", "here")
    said = "Not on the data of fedavg's run with the same seed, and therefore not compared with it: fedavg+fedheal with seed 0"
    assert said in after.out
    assert "Observed against fedavg" not in after.out
    assert said in json.loads(call(*command, "--out", "here", "--json").out)["conclusions"][0]


def test_folders_of_one_name_are_compared_in_folders_of_their_own(call, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []

    def plan(methods: object, seeds: object, values: object, folder: Path, track: object) -> None:
        wanted.append(folder)
        raise ValueError("this is as far as it goes")

    monkeypatch.setattr(cli, "plan", plan)
    for data in ("folder:a/photos", "folder:b/photos"):
        assert call("compare", "fedavg", "--data", data).code == 2
    assert [str(folder) for folder in wanted] == ["runs/compare-folder.a_photos", "runs/compare-folder.b_photos"]


def test_a_gpu_that_is_too_small_is_a_sentence(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(job: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("fedheal.campaign.pool._do", full)
    done = call("compare", "fedavg", "--seeds", "1", "--quiet")
    assert_sentence(done, "too little memory (CUDA out of memory. Tried to allocate 3.00 GiB)", "--jobs")


@pytest.mark.parametrize("command", [["demo"], ["compare", "fedavg"], ["sweep", "tau=0,0.3"]])
def test_fewer_than_no_runs_at_a_time_are_refused(call, tmp_path: Path, command: list[str]) -> None:
    assert_sentence(call(*command, "--jobs", "-2"), "jobs = -2", "0 for as many as this machine takes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["table9"], "there is no result 'table9'; choose one of headline, table1"),
        (["table1", "--smoke", "--rows", "bogus"], "rows = bogus"),
        (["table1", "--smoke", "--rounds", "0"], "rounds = 0"),
        (["table1", "--smoke", "--seeds", "x"], "seeds = x"),
        (["table1", "--smoke", "method=fedavg"], "method is set by the recipe"),
        (["consistency", "--smoke", "clients_per_domain=2"], "clients_per_domain is set by the recipe"),
        (["table1", "--smoke", "--rounds", "1", "rounds=2"], "'rounds' is given twice: rounds=1 and rounds=2"),
        (
            ["table1", "--smoke", "--device", "cpu", "device=cuda:0"],
            "'device' is given twice: device=cpu and device=cuda:0",
        ),
        (["table1", "--smoke", "nonsense"], "'nonsense' should be key=value"),
        (["table1", "--smoke", "--jobs", "-1"], "jobs = -1"),
    ],
)
def test_what_cannot_be_reproduced_is_a_sentence(call, tmp_path: Path, words: list[str], said: str) -> None:
    assert_sentence(call("reproduce", *words), said)
    assert list(tmp_path.iterdir()) == []


# As a process


@pytest.mark.slow
def test_the_module_is_a_command_and_ascii_terminals_will_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedheal", "run", *WORDS, "name=plain"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert CONTROL.search(done.stdout.decode("ascii")) is None
    assert "runs/plain" in done.stdout.decode("ascii")


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedheal", "run", *words("rounds=300", "save_seconds=0"), "--out", "here"]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (background jobs ignore it)
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "here" / "state").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "the same command with --resume" in said
    stopped = len((tmp_path / "here" / "rounds.jsonl").read_text().splitlines())
    assert 0 < stopped < 300
    done = subprocess.run(
        [*command, "--resume"], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert f"going on after round {stopped}" in done.stdout
    whole = fedheal.run(quick(rounds=300, save_seconds=0), progress=False).model.state_dict()
    resumed = fedheal.load(tmp_path / "here").state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.slow
def test_a_result_killed_half_way_goes_on_where_it_stopped(tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith(("data=", "rounds="))]
    command = [sys.executable, "-m", "fedheal", "reproduce", "ablation", *words, "rounds=150", "save_seconds=0"]
    command += ["--data", "tiny_data:load", "--out", "here", "--jobs", "1"]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.rglob("result.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait(timeout=60)
    done = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert 2 <= len(done) < 6
    again = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (0, "")
    assert len(list(tmp_path.rglob("result.json"))) == 6
    assert all(path.stat().st_mtime_ns == written for path, written in done.items())
    assert len(list((tmp_path / "here").glob("ablation*.html"))) == 1


@pytest.mark.slow
def test_the_demo_gives_the_same_bits_twice_and_a_table(tmp_path: Path) -> None:
    said = []
    for name in ("one", "two"):
        command = [sys.executable, "-m", "fedheal", "demo", "--rounds", "2", "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert CONTROL.search(done.stdout) is None
        said.append(done.stdout)
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert "one/report.html (open it in a browser)" in said[0]
    assert b"Accuracy by domain" in one["report.html"]
    assert "mean of the last 2 rounds" in said[0].replace("Mean", "mean")
    models = [name for name in one if name.endswith("model.safetensors")]
    assert len(models) == 4
    assert all(one[name] == two[name] for name in models)
    assert len({one[name] for name in models}) == 4  # four different methods

    header = next(line for line in said[0].splitlines() if "method" in line and "AVG" in line)
    assert re.findall(r"\w+", header) == ["method", "handwritten", "print", "street", "display", "AVG", "STD", "worst"]
    table = said[0][said[0].index(header) :].splitlines()
    rows = [line for line in table if len(re.findall(r"\d+\.\d", line)) == 7]
    methods = [re.findall(r"fed[\w+:=]*", row)[0] for row in rows]
    assert methods == ["fedavg", "fedavg+uniform", "fedavg+fedheal", "fedavg+fedheal:variant=released"]
    for row, method in zip(rows, methods, strict=True):
        folder = tmp_path / "one" / f"{method.replace(':', '_')}-embedded-seed0"
        result = json.loads((folder / "result.json").read_text())
        shown = [f"{x:.1f}" for x in (*result["domains"].values(), result["avg"], result["std"], result["worst"])]
        assert re.findall(r"\d+\.\d", row) == shown


@pytest.mark.parametrize("word", ["engine=lanes", "precision=bf16", "precision=tf32"])
def test_what_needs_a_gpu_is_said_before_anything_is_written(call, word: str) -> None:
    assert_sentence(call("run", *WORDS, word, "--out", "here"), word.partition("=")[0], "needs a GPU")
    assert not Path("here").exists()


# What a command says beside its numbers


def test_a_sweep_says_where_equals_were_chosen_from_and_where_its_runs_are(call) -> None:
    done = call("sweep", *WORDS, "method=fedheal", "rounds=1", "tau=0,0.1", "lr=1e-9", "--jobs", "1", "--out", "found")
    assert done.code == 0, done
    assert "2 points are equally good on it: this is the first, and no better than the others." in done.out
    assert done.out.splitlines()[-1] == "The runs are in found."


def test_a_report_of_what_is_not_there_says_what_is(call, tmp_path: Path) -> None:
    (tmp_path / "runs" / "compare-embedded-rounds=2").mkdir(parents=True)
    done = call("report", "runs/compare-embedded")
    assert_sentence(done, "runs/compare-embedded does not exist; there is runs/compare-embedded-rounds=2")
    assert_sentence(call("report", "runs/other"), "runs/other does not exist\n")


def test_runs_of_other_settings_that_cannot_stand_in_one_table_say_which_settings(call) -> None:
    for folder, rounds in (("one", 1), ("two", 2)):
        assert call("run", *WORDS, f"rounds={rounds}", "--quiet", "--out", f"both/{folder}").code == 0
    assert_sentence(call("report", "both"), "was run twice, with other settings (rounds)", "both/one and both/two")


def test_an_error_among_many_runs_says_in_which(call, tmp_path: Path) -> None:
    more = [word for word in WORDS if not word.startswith("data=")]
    done = call(
        "compare", "fedavg", "--data", "tiny_data:load", *more, "lr=1e30", "--seeds", "1", "--jobs", "1", "--quiet"
    )
    assert_sentence(done, "(in the run runs/compare-tiny_data.load", "fedavg-tiny_data_load-seed0)")


def test_more_rounds_than_anyone_waits_for_are_refused(call) -> None:
    assert_sentence(call("run", *WORDS, "rounds=99999999999999999999999"), "rounds = 99999999999999999999999")


def test_the_next_command_is_one_that_the_shell_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / ".venv" / "bin" / "fedheal"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert cli._command() == ".venv/bin/fedheal"
    monkeypatch.chdir(program.parent.parent)
    assert cli._command() == "bin/fedheal"
    monkeypatch.setenv("PATH", str(program.parent))
    assert cli._command() == "fedheal"
