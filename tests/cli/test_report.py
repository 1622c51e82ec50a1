"""`fedheal report`: what it prints, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import assert_sentence, read_files
from fedheal import methods
from made_up import run_folder
from tiny_data import WORDS, words


@pytest.mark.parametrize(
    ("options", "message"),
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
    call, tmp_path: Path, options: list[str], message: str
) -> None:
    run_folder(tmp_path / "one")
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "there").mkdir()
    before = read_files(tmp_path)
    assert_sentence(call("report", "one", *options), message)
    assert read_files(tmp_path) == before


@pytest.mark.slow
def test_reports_as_a_page_and_as_figures(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedheal.report.figures.FORMATS", {"svg": {"Date": None}})
    for method in ("fedavg", "fedheal"):
        run_folder(tmp_path / "runs" / method, methods.get(method).name, rounds=4)
    done = call("report", "runs", "--html", "--reference", "fedheal")
    assert (done.code, done.out, done.err) == (0, "runs/report.html\n", "")
    assert "fedavg against fedavg+fedheal" in (tmp_path / "runs" / "report.html").read_text()
    assert call("report", "runs", "--html", "--out", "new/page.html").out == "new/page.html\n"
    assert call("report", "runs", "--out", "new/other.html").out == "new/other.html\n"
    assert "<html" in Path("new/other.html").read_text()
    assert call("report", "runs", "--figures", "drawn").out == "9 files in drawn\n"
    assert len(list((tmp_path / "drawn").glob("*.svg"))) == 9


def test_a_run_that_has_diverged_says_so_and_so_does_its_report(call) -> None:
    note = (
        "Note: the model's outputs are not finite on plain, noisy, dark, so training has diverged and the accuracy means "
        "nothing: use a smaller lr."
    )
    given = words("lr=1e15", "rounds=1", "model=tiny_data:feature_model", "method=fedavg", "on_bad_update=skip")
    done = call("run", *given, "--out", "run")
    assert (done.code, done.err) == (0, "")
    assert note in done.out.splitlines()
    assert note in call("report", "run").out.splitlines()


def test_options_without_effect_are_refused(call, tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "fedavg", rounds=2)
    assert_sentence(call("report", "runs", "--html", "--reference", "bogus"), "reference = bogus")
    assert_sentence(call("report", "runs", "--figures", "drawn", "-f", "csv"), "format = csv", "--figures")
    assert_sentence(call("report", "runs", "--figures", "drawn", "--out", "x"), "out = x", "--figures")
    assert_sentence(
        call("report", "runs", "-f", "csv", "--reference", "bogus"), "reference = bogus", "leave out --reference"
    )


def test_the_text_report_says_what_its_marks_and_numbers_are(call, tmp_path: Path) -> None:
    for method in ("fedavg", "fedheal"):
        run_folder(tmp_path / "runs" / method, methods.get(method).name, rounds=8)
    done = call("report", "runs", "--reference", "fedheal")
    assert "mean of the last 2 rounds" in done.out
    assert "* best of its column" in done.out
    assert "Observed against fedavg+fedheal" in done.out
    meant = "reference = fedhael (did you mean 'fedavg+fedheal'?): use one of fedavg, fedavg+fedheal"
    assert_sentence(call("report", "runs", "--reference", "fedhael"), meant)


@pytest.mark.slow
def test_a_diagnosis_is_a_table_sentences_and_a_picture(call, tmp_path: Path) -> None:
    run_folder(tmp_path / "run", rounds=6)
    done = call("report", "run", "--diagnose")
    assert (done.code, done.err) == (0, "")
    assert "under-served since" in done.out
    assert "syn is" in done.out
    assert done.out.splitlines()[-1] == "run/diagnosis-domain.png"
    assert call("report", "run", "--diagnose", "--by", "client", "--figures", "drawn").code == 0
    assert (tmp_path / "drawn" / "diagnosis-client.svg").exists()


def test_a_diagnosis_that_cannot_be_made_is_refused(call, tmp_path: Path) -> None:
    run_folder(tmp_path / "run", rounds=2)
    assert_sentence(call("report", "run", "run", "--diagnose"), "one run")
    assert_sentence(call("report", "run", "--by", "client"), "by = client", "--diagnose")
    for idle in (["--out", "x"], ["--reference", "fedavg"], ["--html"], ["-f", "csv"]):
        assert_sentence(call("report", "run", "--diagnose", *idle), "its own table and figure: leave out --")
    (tmp_path / "empty").mkdir()
    assert_sentence(call("report", "empty", "--diagnose"), "empty holds no rounds")
    assert_sentence(call("report", "elsewhere", "--diagnose"), "elsewhere does not exist: ")
    said = "run/result.json is a file, not a folder: name a folder of runs, such as run\n"
    assert_sentence(call("report", "run/result.json", "--diagnose"), said)


def test_a_report_of_what_is_not_there_says_what_is(call, tmp_path: Path) -> None:
    (tmp_path / "runs" / "compare-embedded-rounds=2").mkdir(parents=True)
    done = call("report", "runs/compare-embedded")
    assert_sentence(done, "runs/compare-embedded does not exist: did you mean runs/compare-embedded-rounds=2?")
    assert_sentence(
        call("report", "runs/other"), "runs/other does not exist: name a folder that fedheal run, compare, "
    )
    (tmp_path / "runs" / "afile").touch()
    assert_sentence(call("report", "runs/afile"), "runs/afile is a file, not a folder: name a folder of runs")
    for name in "abcdef":
        run_folder(tmp_path / "runs" / name / "one")
    said = "runs/other does not exist: finished runs are in runs/a, runs/b, runs/c, runs/d, runs/e and 1 more"
    assert_sentence(call("report", "runs/other"), said)


def test_a_folder_without_runs_is_called_that(call, tmp_path: Path) -> None:
    for name in ("empty", "photos"):
        (tmp_path / name).mkdir()
    assert_sentence(call("report", "empty"), "there is no finished run in empty: it holds no runs\n")
    assert_sentence(call("report", "empty", "photos"), "there is no finished run in empty, photos: they hold no runs\n")


def test_how_to_resume_is_said_of_a_comparison_and_of_a_run(call, tmp_path: Path) -> None:
    for seed in (0, 1):
        run_folder(tmp_path / "here" / f"fedavg-{seed}", "fedavg", seed=seed, finished=False)
    again = "run the same fedheal compare (or demo, sweep or reproduce) again to resume its runs"
    assert_sentence(call("report", "here"), "there is no finished run in here: a run is finished when", again)
    alone = call("report", "here/fedavg-1")
    assert_sentence(alone, "; resume it with fedheal run --resume --out here/fedavg-1\n")


def test_a_damaged_line_of_the_rounds_is_named_and_the_report_goes_on(call, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "fedavg", rounds=4)
    whole = call("report", "runs").out
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    (folder / "rounds.jsonl").write_text("\n".join([*lines[:2], lines[2][:40], lines[3]]) + "\n")
    done = call("report", "runs")
    caution = "runs/fedavg/rounds.jsonl is damaged in line 3. Tables do not need that file, but figures do.\n"
    assert (done.code, done.err, done.out.replace(caution, "")) == (0, "", whole)
    assert_sentence(call("report", "runs", "--html"), "runs/fedavg/rounds.jsonl has 2 rounds and is damaged in line 3")


def test_runs_of_other_settings_that_cannot_stand_in_one_table_say_which_settings(call) -> None:
    for folder, rounds in (("one", 1), ("two", 2)):
        assert call("run", *WORDS, f"rounds={rounds}", "--quiet", "--out", f"both/{folder}").code == 0
    assert_sentence(call("report", "both"), "was run twice, with other settings (rounds)", "both/one and both/two")


@pytest.mark.parametrize(
    ("name", "start"),
    [("table.csv", "data,method,seed"), ("table.tex", "% "), ("table.md", ""), ("table.txt", ""), ("table", "")],
)
def test_the_ending_of_a_reports_name_gives_its_format(call, tmp_path: Path, name: str, start: str) -> None:
    run_folder(tmp_path / "one")
    done = call("report", "one", "--out", name)
    assert (done.code, done.out.strip()) == (0, name)
    text = (tmp_path / name).read_text()
    assert text.startswith(start)
    assert ("|---" in text.replace(" ", "")) == (name == "table.md")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "table.xyz"], "no format has the ending .xyz"),
        (["--html", "--out", "page.pdf"], "the name of a page ends in .html"),
        (["--out", "x.csv", "-f", "latex"], "format = latex: the ending of x.csv stands for csv; leave out --format"),
    ],
)
def test_the_ending_of_a_reports_name_must_be_known(call, tmp_path: Path, options: list[str], message: str) -> None:
    run_folder(tmp_path / "one")
    assert_sentence(call("report", "one", *options), message)
