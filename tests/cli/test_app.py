"""What all commands have in common."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedheal
from command_line import assert_sentence, read_files
from fedheal.campaign.checks import check_campaign_folder
from fedheal.campaign.sweep import METRICS, SEARCHES
from fedheal.cli import campaigns, paper_results, reports
from fedheal.cli.words import EXAMPLES
from fedheal.report import tables
from fedheal.reproduce import RECIPES
from fedheal.simulate.experiment import Experiment
from tiny_data import WORDS

INTO = {
    "run": ["run", *WORDS],
    "compare": ["compare", "fedavg", "--data", "tiny_data:load"],
    "sweep": ["sweep", *WORDS, "lr=0.1,0.2"],
    "reproduce": ["reproduce", "table1", "--smoke"],
    "demo": ["demo"],
    "data show": ["data", "show", "tiny_data:load"],
}


# Prints which slow libraries are loaded when `fedheal` ends, after whatever it prints itself.
LOADED = """
import sys
import fedheal.cli
try:
    fedheal.cli.main()
except SystemExit as end:
    slow = {"numba", "numpy", "pydantic", "scipy", "sklearn", "torch"}
    print(end.code, *sorted(slow & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0), (["--help"], 0), (["-h"], 0), (["compare", "-h"], 0), ([], 2),
        (["rnu"], 2), (["run", "--rounds"], 2), (["run", "fedheal"], 2), (["compare", "fedavg", "--jobs", "-1"], 2),
        (["sweep", "tau=0,1", "--search", "al"], 2), (["reproduce", "table9"], 2),
    ],
)  # fmt: skip
def test_help_the_version_and_mistakes_import_nothing_slow(tmp_path: Path, words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(code), done.stdout


def test_public_names_can_be_listed_and_imported() -> None:
    names: dict[str, object] = {}
    exec("from fedheal import *", names)
    assert names.keys() >= set(fedheal.__all__)
    assert set(dir(fedheal)) >= set(fedheal.__all__)
    with pytest.raises(AttributeError, match="module 'fedheal' has no attribute 'bogus'"):
        fedheal.bogus  # noqa: B018


def test_every_public_name_is_known_to_type_checkers_and_found_at_run_time() -> None:
    (block,) = (
        node
        for node in ast.parse(Path(fedheal.__file__).read_text()).body
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.test, ast.Name)
    )
    typed = {
        alias.name: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    packages = {name for name, module in typed.items() if module == "fedheal"}
    assert typed.keys() | {"__version__"} == set(fedheal.__all__)
    assert {name: f"fedheal.{module}" for name, module in fedheal._MODULES.items()} == {
        name: module for name, module in typed.items() if name not in packages
    }
    assert packages <= fedheal._PACKAGES


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_commands(shell: str) -> None:
    words = {"bash": {"COMP_WORDS": "fedheal re", "COMP_CWORD": "1"}}.get(shell, {"_TYPER_COMPLETE_ARGS": "fedheal re"})
    environment = {"_FEDHEAL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **words}
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'fedheal'; from fedheal.cli import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "report" in done.stdout
    assert "reproduce" in done.stdout
    assert "compare" not in done.stdout


def test_completion_can_be_installed(call) -> None:
    assert "--install-completion" in call("--help").out


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["rnu"], ["fedheal: No such command 'rnu'. Did you mean 'run'? (see fedheal --help)"]),
        (["compare", "fedavg", "--sedes", "3"], ["'--sedes'. Did you mean '--seeds'? (see fedheal compare --help)"]),
        (
            ["run", "--seed", "3"],
            ["No such option '--seed' (a field is written seed=VALUE; see fedheal run --help)"],
        ),
        (
            ["compare", "fedavg", "--resume"],
            ["No such option '--resume' (run the same command again to resume it; see fedheal compare --help)"],
        ),
        (
            ["reproduce", "table1", "--resume"],
            ["No such option '--resume' (run the same command again to resume it; see fedheal reproduce --help)"],
        ),
        (["run", "--lr", "3"], ["No such option '--lr' (a field is written lr=VALUE; see fedheal run --help)"]),
        (["demo", "--lr", "3"], ["No such option '--lr' (see fedheal demo --help)"]),
        (["report", "runs", "--seed", "3"], ["No such option '--seed' (see fedheal report --help)"]),
        (["demo", "--seed", "x"], ["'x' is not a valid integer (see fedheal demo --help)"]),
        (["demo", "rounds=3"], ["fedheal demo cannot take 'rounds=3': use --rounds 3 (see fedheal demo --help)"]),
        (
            ["methods", "fedavg", "afl"],
            ["fedheal methods cannot take 'afl': leave it out (see fedheal methods --help)"],
        ),
        (
            ["compare"],
            ["Missing argument 'METHOD... [key=value ...]': methods or bounds", "(see fedheal compare --help)"],
        ),
        (["reproduce"], ["Missing argument 'RESULT': one of headline, table1"]),
        (["data", "lst"], ["fedheal: No such command 'lst'"]),
        (
            ["sweep", "tau=0,1", "--trials", "3"],
            ["trials = 3 has no effect: --search grid tries every point; leave it out, or use --search random"],
        ),
    ],
)
def test_words_that_are_no_command_are_a_sentence(call, words: list[str], messages: list[str]) -> None:
    assert_sentence(call(*words), *messages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", ""], "one of the words is empty: leave it out"),
        (["run", "--quiet", ""], "one of the words is empty"),
        (["report", ""], "one of the words is empty"),
        (["run", "--out", "", "rounds=1"], "--out is empty: give it a value, or leave it out"),
        (["demo", "--out="], "--out is empty"),
        (["compare", "fedavg", "--seeds", ""], "--seeds is empty"),
        (["report", "runs", "-f", ""], "--format is empty"),
        (["data", "show", "embedded", "--out", ""], "--out is empty"),
        (["reproduce", "table1", "--rows", "", "--rounds", "0"], "rounds = 0"),  # empty by default: all rows
    ],
)
def test_empty_words_are_refused_before_they_become_the_current_folder(
    call, tmp_path: Path, words: list[str], message: str
) -> None:
    assert_sentence(call(*words), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "out=x"], "'out' is an option, not a field: use --out VALUE"),
        (["run", "json=true"], "'json' is an option, not a field: use --json\n"),
        (["compare", "fedavg", "track=wandb"], "'track' is an option, not a field: use --track VALUE"),
        (["sweep", "seeds=3", "tau=0,1"], "'seeds' is an option, not a field: use --seeds VALUE"),
        (["reproduce", "table1", "--smoke", "jobs=3"], "'jobs' is an option, not a field: use --jobs VALUE"),
        (["data", "show", "embedded", "out=x"], "'out' is an option, not a field: use --out VALUE"),
        (["run", "bogus=x"], "unknown field 'bogus'"),
    ],
)
def test_an_option_that_is_written_as_a_field_is_named(call, words: list[str], message: str) -> None:
    assert_sentence(call(*words), message)


def test_help_explains_arguments_and_fills_lines(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """With click 8.5, typer 0.20 shows arguments without their help."""
    monkeypatch.setenv("COLUMNS", "100")
    assert "One of headline, table1" in call("reproduce", "--help").out
    assert "FEDHEAL_DATA" in call("data", "show", "--help").out
    assert "digits, office-caltech" in call("data", "show", "--help").out
    lines = [line.strip() for line in call("run", "--help").out.splitlines()]
    paragraph = lines[next(i for i, line in enumerate(lines) if line.startswith("The name is made of")) :]
    whole = paragraph[: paragraph.index("")]
    assert all(len(line) > 70 for line in whole[:-1]), whole


def test_a_current_folder_that_was_removed_is_a_sentence(tmp_path: Path) -> None:
    script = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m fedheal methods"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    message = "fedheal: the current folder was removed: change to one that exists (cd), and try again\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_the_options_name_what_the_library_has(call) -> None:
    """The command line does without the modules that have these names."""
    assert set(reports.REPORT_FORMATS) == {*tables.FORMATS, "csv", "parquet"}
    assert ", ".join(RECIPES) == paper_results.RESULTS
    assert tuple(SEARCHES) == campaigns.SEARCHES
    assert f"{', '.join(list(METRICS)[:-1])} or {list(METRICS)[-1]}" in " ".join(
        call("sweep", "--help").out.replace("│", "").split()
    )


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["run", "--help"], ["demo", "--help"]])
def test_version_and_help(call, words: list[str]) -> None:
    done = call(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out.strip() == f"fedheal {fedheal.__version__}" if words == ["--version"] else "Usage" in done.out


@pytest.mark.parametrize("command", INTO.values(), ids=INTO)
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("taken", "fedheal: taken is a file: name another folder"),
        ("taken/deep/here", "fedheal: taken/deep/here cannot be made, since taken is a file: name another folder"),
    ],
)
def test_a_file_where_a_folder_should_go_is_a_sentence(
    call, tmp_path: Path, command: list[str], out: str, message: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    assert_sentence(call(*command, "--out", out), message)
    assert read_files(tmp_path) == {"taken": b"mine"}


UNSEEN = {"run on unseen domains": ["run", *WORDS, "evaluate=unseen"]}


@pytest.mark.parametrize(
    "command", [c for name, c in (INTO | UNSEEN).items() if name != "data show"], ids=lambda command: command[0]
)
def test_a_folder_of_other_files_is_refused_and_left_alone(call, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "photos" / "day" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "day" / "cat" / "1.jpg").write_text("mine")
    assert_sentence(call(*command, "--out", "photos"), "photos is not empty and ", "another", "folder (--out)")
    assert read_files(tmp_path) == {"photos/day/cat/1.jpg": b"mine"}


@pytest.mark.parametrize(
    "left",
    [
        "comparison.json", "sweep.json", "one/experiment.toml", "digits/one/experiment.toml", "one/lock.tmp",
        "sweep.json.ab.tmp", "one/", "digits/one/", ".DS_Store",
    ],
)  # fmt: skip
def test_a_campaign_goes_on_in_what_a_stopped_one_left(tmp_path: Path, left: str) -> None:
    folder, path = tmp_path / "here", tmp_path / "here" / left
    assert check_campaign_folder(folder) == folder  # there is none yet
    (path if left.endswith("/") else path.parent).mkdir(parents=True)
    if not left.endswith("/"):
        path.touch()
    assert check_campaign_folder(folder) == folder
    for name in ("comparison.json", "sweep.json", "one/experiment.toml", "digits/one/experiment.toml"):
        (folder / name).unlink(missing_ok=True)
    (folder / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not empty and holds no runs"):
        check_campaign_folder(folder)


def test_examples_of_fields_can_be_used() -> None:
    for key, value in EXAMPLES.items():
        assert Experiment.read(None, [f"{key}={value}"])


@pytest.mark.parametrize("command", [["demo"], ["compare", "fedavg"], ["sweep", "tau=0,0.3"]])
def test_fewer_than_no_runs_at_a_time_are_refused(call, tmp_path: Path, command: list[str]) -> None:
    assert_sentence(call(*command, "--jobs", "-2"), "jobs = -2", "0 for as many as this machine takes")
    assert list(tmp_path.iterdir()) == []


def test_the_next_command_is_one_that_the_shell_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / ".venv" / "bin" / "fedheal"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert campaigns._find_command() == ".venv/bin/fedheal"
    monkeypatch.chdir(program.parent.parent)
    assert campaigns._find_command() == "bin/fedheal"
    monkeypatch.setenv("PATH", str(program.parent))
    assert campaigns._find_command() == "fedheal"
