"""The page of results/ is current, and tools/results.py runs, stops, collects and counts right."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import fedheal
from fedheal import Experiment
from fedheal.reproduce import RECIPES
from fedheal.runs.folder import read_json, read_rounds
from made_up import make_run
from tiny_data import QUICK

ROOT = Path(__file__).parents[2]
DATA = "tiny_data:load"
RECIPE = RECIPES["headline"]
SLOW = {"lr": 0.003}  # or all rows would be perfect


@pytest.fixture
def results(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("results")


@pytest.fixture
def page_tool(results) -> ModuleType:
    return importlib.import_module("results_page")


@pytest.fixture
def tool(results, monkeypatch, tmp_path):
    """The tool with a plan of tiny data, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    settings = {DATA: {key: value for key, value in QUICK.items() if key != "data"} | SLOW}
    headline = replace(results.CAMPAIGNS["headline"], settings=settings)
    monkeypatch.setitem(results.CAMPAIGNS, "headline", headline)

    def call(*words):
        return results.main([*words])

    return call


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """The folder of a finished run of the plan of tiny data."""
    folder = tmp_path_factory.mktemp("finished") / "fedavg-tiny_data_load-seed0"
    fedheal.run(Experiment(**QUICK | SLOW, method="fedavg"), folder, progress=False)
    return folder


@pytest.fixture
def kept_run(tool, finished_run, tmp_path):
    """The tool, and the folder of a run that it has collected."""
    shutil.copytree(finished_run, tmp_path / "runs" / "results" / finished_run.name)
    assert tool("collect") == 0
    return tool, tmp_path / "results" / "tiny_data.load" / finished_run.name


def run(tool, *words):
    return tool("run", "--data", DATA, "--device", "cpu", *words)


def replace_clock(monkeypatch, results):
    """Replace the clock by one that advances a second at each look."""
    ticks = itertools.count()
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


def find_run(method, under):
    (folder,) = (path.parent for path in under.rglob("result.json") if read_json(path)["method"] == method)
    return folder


@pytest.mark.slow
def test_the_page_is_current(results):
    written = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert written == results.make_page(ROOT / "results"), "run: make results"


@pytest.mark.parametrize(("data", "heading"), [("digits", "## Digits\n"), ("office-caltech", "## Office-Caltech\n")])
def test_what_the_findings_say_is_what_was_found(data, heading):
    """A table has every domain, AVG, STD and the number of seeds; a row that was run but is not in it fails too."""
    runs = [read_json(path) for path in sorted((ROOT / "results" / data).rglob("result.json"))]
    expected = {}
    for entry in RECIPE.list_rows(data):
        name = Experiment(method=entry.method, data=data).method_name
        own = [run for run in runs if run["method"] == name]
        columns = np.array([[*run["domains"].values(), run["avg"], run["std"]] for run in own]).T
        cells = [f"{c.mean():.2f} ± {c.std(ddof=1):.2f}" if len(c) > 1 else f"{c[0]:.2f}" for c in columns]
        expected |= {entry.label: [*cells, str(len(own))]} if own else {}
    section = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    assert {label: numbers for label, *numbers in rows if label in expected} == expected


def test_the_rows_of_table_1_in_the_findings_are_those_of_the_results():
    findings, results = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("docs/findings.md", "results/README.md")
    )
    section = findings.partition("## FedProx and SCAFFOLD on Digits\n")[2].partition("\n## ")[0]
    table1 = results.partition("## Table 1 on digits\n")[2].partition("\n## ")[0]
    header, _, *rows = (line for line in section.splitlines() if line.startswith("|"))
    assert header == "| percent, seed 0 | MNIST | USPS | SVHN | stand-in | AVG | STD |"
    assert len(rows) == 7
    for row in rows:
        label, *domains, avg, std = (cell.strip() for cell in row.strip("|").split("|"))
        no_syn = ""
        assert " | ".join(["\n| " + label, "ours", *domains, no_syn, avg, std, ""]) in table1


def test_the_numbers_without_the_stand_in_in_the_findings_are_those_of_the_results():
    findings, results = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("docs/findings.md", "results/README.md")
    )
    section = findings.partition("### Without the stand-in\n")[2].splitlines()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section if line.startswith("|")]
    head, _, avg, std = lines[:4]
    table = results.partition("### Without the stand-in\n")[2].partition("\n\n| less")[0].splitlines()
    rows = {cells[0]: cells[-4:-2] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in table)}
    assert len(head) == 5
    assert {label: [a, s] for label, a, s in zip(head[1:], avg[1:], std[1:], strict=True)} == {
        label: rows[label] for label in head[1:]
    }


def test_the_confirmation_of_scaffold_in_the_findings_is_that_of_the_results():
    """Means, gains (the results subtract SCAFFOLD, the findings its controls) and p on Digits; means on Office-Caltech."""
    findings, results = (
        (ROOT / page).read_text(encoding="utf-8").partition(heading)[2]
        for page, heading in (
            ("docs/findings.md", "## SCAFFOLD: the confirmation\n"),
            ("results/README.md", "### Confirmation of SCAFFOLD on digits\n"),
        )
    )
    written = read_tables(findings.partition("\n## ")[0])
    digits, _, office = results.partition("### Confirmation of SCAFFOLD on office-caltech\n")
    means, _, tests = read_tables(digits.partition("####")[0])
    assert [row[:4] for row in written[0][1:]] == [row[:4] for row in means[1:]]
    gains = {(row[0], row[1]): (f"{-float(row[2]):+.2f}", row[5]) for row in tests[1:]}
    assert {row[0]: tuple(row[4:8]) for row in written[0][1:3]} == {
        label: gains[label, "AVG"] + gains[label, "STD"] for label in ("uniform weights", "FedHEAL (paper)")
    }
    rounded = [[row[0], *(f"{float(cell):.1f}" for cell in row[1:3])] for row in read_tables(office)[0][1:]]
    assert [[row[0], *row[4:6]] for row in written[1][1:]] == rounded


def read_tables(text):
    """Return the tables of a page: their lines' cells, without the rules below their heads."""
    blocks = [block for block in text.split("\n\n") if block.strip().startswith("|")]
    cells = [[[c.strip() for c in line.strip("|").split("|")] for line in b.strip().splitlines()] for b in blocks]
    return [[head, *rows] for head, _, *rows in cells]


def test_the_rows_of_the_readme_are_those_of_the_results():
    readme, results = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "results/README.md"))
    table = readme.partition("<!-- from results/README.md -->\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) > 4
    assert [row for row in table[2:] if row not in results.splitlines()] == []


def test_only_light_files_are_kept():
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    runs = [path for path in files if path.parent.name != "second-version"]
    assert {path.name for path in runs} <= {"README.md", "experiment.toml", "rounds.jsonl", "result.json"}
    assert all(path.suffix == ".json" for path in set(files) - set(runs))
    assert all(path.stat().st_size < 1_500_000 for path in files)


@pytest.mark.slow
def test_running_needs_nothing_that_only_pages_and_commands_need(tmp_path):
    code = (
        "import sys\n"
        "for name in ('jinja2', 'plotly', 'matplotlib', 'typer', 'click', 'playwright'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "import results\n"
        "print(len(results.CAMPAIGNS['headline'].recipe.list_rows('digits')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "13", done.stderr


@pytest.mark.slow
def test_a_run_stops_in_time_and_goes_on_to_the_same_result(tool, results, monkeypatch, capsys, tmp_path):
    with monkeypatch.context() as patch:
        replace_clock(patch, results)
        # The clock reads 0 for the deadline, 1 before the row, 2 at its start, 3 and 4 after rounds; a round takes 1.
        assert run(tool, "--rows", "fedavg,uniform weights", "--seconds", "4.5") == 0
    out = capsys.readouterr().out.splitlines()
    assert out == ["FedAvg: starts", "open: FedAvg (at round 2 of 3), uniform weights"]
    assert run(tool, "--rows", "fedavg,uniform weights") == 0
    out = capsys.readouterr().out
    assert "FedAvg: resumes after round 2" in out
    assert "nothing is open: all 2 runs are finished" in out
    assert run(tool, "--rows", "fedavg", "--runs", "whole") == 0
    stopped, whole = find_run("fedavg", tmp_path / "runs"), find_run("fedavg", tmp_path / "whole")
    assert [r.domains for r in read_rounds(stopped)] == [r.domains for r in read_rounds(whole)]
    assert read_json(stopped / "result.json")["avg"] == read_json(whole / "result.json")["avg"]


def test_what_is_finished_is_not_run_again_and_no_row_starts_without_time(tool, capsys, tmp_path):
    run(tool, "--rows", "fedavg")
    before = (find_run("fedavg", tmp_path) / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run(tool, "--rows", "fedavg,*released*", "--seconds", "1e-9") == 0
    assert capsys.readouterr().out == "open: FedHEAL (released)\n"
    assert (find_run("fedavg", tmp_path) / "result.json").stat().st_mtime_ns == before


def test_a_run_says_how_it_goes(tool, results, monkeypatch, capsys):
    monkeypatch.setattr(results, "REPORT_EVERY", 2)
    run(tool, "rounds=5", "--rows", "fedavg", "--seeds", "1,2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines if "round " in line and "/" in line] == [
        f"FedAvg, seed {seed}: round {number}/5" for seed in (1, 2) for number in (2, 4)
    ]
    (line, _) = (line for line in lines if "finished  " in line)
    for word in ("plain ", "noisy ", "dark ", "AVG ", "STD ", "s a round"):
        assert word in line


def test_an_error_in_the_midst_of_a_row_leaves_the_others_their_turn(tool, results, monkeypatch, capsys):
    real = results.fedheal.run

    def run_with_error(experiment, out, **keys):
        if experiment.method_name == "fedavg":
            out.mkdir(parents=True)
            (out / "rounds.jsonl").write_text('{"round": 1}\n')
            raise ValueError("the update of client 'x' is not finite")
        return real(experiment, out, **keys)

    monkeypatch.setattr(results.fedheal, "run", run_with_error)
    assert run(tool, "--rows", "fedavg,uniform weights") == 1
    out = capsys.readouterr().out
    assert "FedAvg: ended by an error: the update of client 'x' is not finite" in out
    assert "uniform weights: finished" in out
    assert out.splitlines()[-1] == "open: FedAvg (at round 1 of 3)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--data", "digitz"], "data = digitz: there is no plan for it; use one of tiny_data:load"),
        (
            ["run", "--data", DATA, "--device", "cpu", "--rows", "fedavgg"],
            "rows = fedavgg: no row has this label or method; the rows are 'FedAvg' (fedavg), ",
        ),
        (["run", "--data", DATA, "--device", "cpu", "--seconds", "0"], "seconds = 0: use a positive number"),
        (["run", "--data", DATA, "--device", "cpu", "--seconds", "nan"], "seconds = nan: use a positive number"),
        (["run", "--data", DATA, "--device", "cpu", "--seeds", "many"], "seeds = many: use a number of seeds"),
        (["run", "--data", DATA, "--device", "cpu", "--rounds", "0"], "rounds = 0"),
        (["run", "--data", DATA, "--rounds", "0", "rounds=2"], "'rounds' is given twice: rounds=0 and rounds=2"),
        (["run", "--data", DATA, "--device", "cpu", "device=cpu"], "'device' is given twice"),
        (["run", "--data", DATA, "--device", "cpu", "bogus=1"], "bogus"),
        (["run", "--data", DATA, "--device", "cpu", "seed=1"], "seed is set by the recipe"),
        (["run", "--data", DATA, "--device", "nowhere"], "device = 'nowhere' cannot be used here"),
        (["collect", "--runs", "nowhere"], "nowhere does not exist"),
        (["table", "--results", "nowhere"], "results = nowhere: there is no such folder"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tool, capsys, tmp_path, words, message):
    assert tool(*words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["table", "rounds=3"], ["run", "--data", DATA, "--bogus"], []])
def test_words_that_mean_nothing_are_refused(tool, capsys, words):
    with pytest.raises(SystemExit) as end:
        tool(*words)
    assert end.value.code == 2


def test_collecting_takes_what_is_light_and_leaves_what_is_there(tool, capsys, tmp_path):
    run(tool, "--rows", "fedavg")
    run(tool, "epochs=2", "--rows", "uniform weights")
    capsys.readouterr()
    assert tool("collect") == 0
    out = capsys.readouterr().out
    assert "left, since it departs from the plan in epochs" in out
    collected = tmp_path / "results" / "tiny_data.load" / "fedavg-tiny_data_load-seed0"
    assert sorted(path.name for path in collected.iterdir()) == ["experiment.toml", "result.json", "rounds.jsonl"]
    assert list(collected.parent.iterdir()) == [collected]
    first = (collected / "rounds.jsonl").read_text() + "\n"
    (collected / "rounds.jsonl").write_text(first)
    tool("collect")
    assert "exists already\n" in capsys.readouterr().out
    assert (collected / "rounds.jsonl").read_text() == first
    (collected / "result.json").write_text(json.dumps(read_json(collected / "result.json") | {"seconds": {}}))
    tool("collect")
    assert "from another run: remove it to take this one" in capsys.readouterr().out
    assert read_json(collected / "result.json")["seconds"] == {}


def edit_file(name, change):
    """Return a function that changes a file's text in a run folder, or removes the file if `change` returns None."""

    def edit(folder):
        text = change((folder / name).read_text())
        (folder / name).unlink() if text is None else (folder / name).write_text(text)

    return edit


def edit_result(**keys):
    """Return a function that changes values in `result.json`, or removes those that are None."""

    def change(text):
        return json.dumps({key: value for key, value in (json.loads(text) | keys).items() if value is not None})

    return edit_file("result.json", change)


def change_last_score(text):
    *lines, last = text.splitlines()
    record = json.loads(last)
    return "\n".join([*lines, json.dumps(record | {"domains": record["domains"] | {"plain": 1.25}})])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_file("rounds.jsonl", lambda text: None), "rounds.jsonl is missing"),
        (edit_file("rounds.jsonl", lambda text: text + "gar"), "its 4 lines are not the records of the 3 rounds"),
        (edit_file("rounds.jsonl", lambda text: text[:-9]), "its 3 lines are not the records of the 3 rounds"),
        (
            edit_file("rounds.jsonl", lambda text: text.split("\n", 1)[1]),
            "its 2 lines are not the records of the 3 rounds",
        ),
        (edit_file("rounds.jsonl", lambda text: text.replace("plain", "plane")), "rounds.jsonl: round 1 lacks the acc"),
        (edit_file("rounds.jsonl", lambda text: text.replace('"seconds"', '"minutes"')), "round 1 has no seconds"),
        (edit_file("rounds.jsonl", change_last_score), "but the last rounds of rounds.jsonl give"),
        (edit_file("result.json", lambda text: None), "result.json is missing"),
        (edit_result(hardware=None), "result.json: there is no hardware"),
        (edit_result(domains={"plain": "good"}), "result.json: domains.plain must be a number, got 'good'"),
        (
            edit_result(domains={"plain": 1.0, "noisy": 99.999, "dark": 1.0}),
            "result.json: plain = 1.0, but the last",
        ),
        (edit_result(avg=99.999), "result.json: avg = 99.999, but the last rounds of rounds.jsonl give"),
        (edit_result(std=float("nan")), "result.json: std = nan, but the last rounds of rounds.jsonl give"),
        (edit_result(averaged=2), "result.json: averaged = 2, but rounds.jsonl has 3 evaluated rounds"),
        (edit_result(seed=1), "result.json: seed = 1, but experiment.toml has 0"),
        (edit_file("experiment.toml", lambda text: None), "experiment.toml cannot be read"),
        (edit_file("experiment.toml", lambda text: text + "bogus = 1"), "experiment.toml: "),
        (
            lambda folder: shutil.copytree(folder, folder.with_name("copy")),
            "copy: the folder of this run must be called",
        ),
    ],
)
def test_a_damaged_result_is_named_and_the_page_stays_as_it_was(kept_run, capsys, tmp_path, damage, message):
    tool, folder = kept_run
    page = (tmp_path / "results" / "README.md").read_text()
    damage(folder)
    capsys.readouterr()
    assert tool("table") == 2
    err = capsys.readouterr().err
    assert message in err
    assert str(Path("results/tiny_data.load")) in err
    assert err.count("\n") == 1
    assert (tmp_path / "results" / "README.md").read_text() == page


def test_what_was_left_of_a_copy_is_no_run(kept_run, tmp_path):
    tool, folder = kept_run
    page = (tmp_path / "results" / "README.md").read_text()
    shutil.copytree(folder, folder.with_name(folder.name + ".tmp"))
    assert tool("table") == 0
    assert (tmp_path / "results" / "README.md").read_text() == page


def test_a_copy_that_fails_leaves_nothing(tool, results, finished_run, monkeypatch, capsys, tmp_path):
    shutil.copytree(finished_run, tmp_path / "runs" / "results" / finished_run.name)

    def raise_disk_full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(results.shutil, "copyfile", raise_disk_full)
    assert tool("collect") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "results").rglob("*")) == [tmp_path / "results" / "tiny_data.load"]


def test_the_full_run_takes_the_place_of_a_shorter_one_and_not_the_other_way_round(
    tool, finished_run, capsys, tmp_path
):
    run(tool, "--rows", "fedavg", "--rounds", "2", "--runs", "short")
    shutil.copytree(finished_run, tmp_path / "full" / finished_run.name)
    target = tmp_path / "results" / "tiny_data.load" / finished_run.name
    for words, message in (
        (["--runs", "short"], f"{finished_run.name}: taken\n"),
        (["--runs", "full"], f"{finished_run.name}: taken, with 3 rounds in place of 2\n"),
        (["--runs", "short"], f"left, since it has 2 rounds, and {target.relative_to(tmp_path)} has 3\n"),
        (["--runs", "full"], f"{finished_run.name}: exists already\n"),
    ):
        capsys.readouterr()
        assert tool("collect", *words) == 0
        assert message in capsys.readouterr().out
    assert list(target.parent.iterdir()) == [target]
    assert (target / "rounds.jsonl").read_bytes() == (finished_run / "rounds.jsonl").read_bytes()


def test_a_replacement_that_fails_leaves_what_was_there(tool, results, finished_run, monkeypatch, tmp_path):
    run(tool, "--rows", "fedavg", "--rounds", "2", "--runs", "short")
    tool("collect", "--runs", "short")
    target = tmp_path / "results" / "tiny_data.load" / finished_run.name
    real = Path.replace

    def replace_with_error(path, goal):
        if path.name == f"{finished_run.name}.tmp":
            raise OSError(5, "Input/output error", str(path))
        return real(path, goal)

    monkeypatch.setattr(Path, "replace", replace_with_error)
    with pytest.raises(OSError, match="Input/output"):
        results.copy_run(finished_run, Experiment.read(finished_run / "experiment.toml"), target)
    assert list(target.parent.iterdir()) == [target]
    assert Experiment.read(target / "experiment.toml").rounds == 2


def test_a_damaged_run_is_not_taken(tool, finished_run, capsys, tmp_path):
    folder = tmp_path / "runs" / "results" / finished_run.name
    shutil.copytree(finished_run, folder)
    (folder / "rounds.jsonl").unlink()
    assert tool("collect") == 0
    assert "left, since" in (out := capsys.readouterr().out)
    assert "rounds.jsonl is missing" in out
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["README.md"]


def test_where_data_lay_is_not_kept(tool, tmp_path):
    run(tool, "--rows", "fedavg", "data_root=somewhere")
    tool("collect")
    assert '/somewhere"' in (find_run("fedavg", tmp_path / "runs") / "experiment.toml").read_text()
    description = find_run("fedavg", tmp_path / "results") / "experiment.toml"
    assert "somewhere" not in description.read_text()
    assert (
        Experiment.read(description).identity
        == Experiment.read(find_run("fedavg", tmp_path / "runs") / "experiment.toml").identity
    )


def read_table(page, words):
    """Return the first table at or below these words: cells by row."""
    below = page[page.index(words) :].splitlines()
    rest = itertools.dropwhile(lambda line: not line.startswith("|"), below)
    rows = [line.strip("| ").split(" | ") for line in itertools.takewhile(lambda line: line.startswith("|"), rest)]
    return {label: cells for label, *cells in rows[2:]}


def test_the_numbers_of_the_page_are_those_of_the_runs(tool, tmp_path):
    run(tool, "--rows", "fedavg,uniform weights,fedavg+fedheal")
    tool("collect")
    page = (tmp_path / "results" / "README.md").read_text()
    plain = read_json(find_run("fedavg", tmp_path / "results") / "result.json")
    even = read_json(find_run("fedavg+uniform", tmp_path / "results") / "result.json")
    row = next(line for line in page.splitlines() if line.startswith("| [FedAvg](tiny_data.load/"))
    for value in (*plain["domains"].values(), plain["avg"], plain["std"], plain["worst"]):
        assert f" {value:.2f} |" in row
    assert f"| {sum(plain['seconds'].values()) / 3:.2f} |" in row
    assert row.endswith(f"| 3 | fp32 | {plain['hardware']} |")
    differences = [even["domains"][d] - plain["domains"][d] for d in plain["domains"]]
    differences += [even[key] - plain[key] for key in ("avg", "std", "worst")]
    assert read_table(page, "| less FedAvg ")["uniform weights"] == [*(f"{x:+.2f}" for x in differences), "1"]
    assert any(differences)
    assert read_table(page, "| less uniform weights ")["FedAvg"] == [*(f"{0.0 - x:+.2f}" for x in differences), "1"]
    records = read_rounds(find_run("fedavg", tmp_path / "results"))
    moved = np.std([r.fairness["avg"] for r in records], ddof=1)
    noise = read_table(page, "### How much the last rounds move")["FedAvg"]
    assert noise[4] == f"{moved:.2f}"  # after the seed and three domains
    assert noise[-1] == "3"
    open_rows = page.partition("### Open")[2]
    assert f"- AFL: `python tools/results.py run --data {DATA} --rows AFL`" in open_rows
    assert "FedHEAL" not in open_rows


@pytest.mark.slow
def test_runs_with_other_settings_are_not_subtracted(tool, tmp_path):
    run(tool, "--rows", "fedavg")
    run(tool, "--rows", "uniform weights", "--rounds", "4")
    tool("collect")
    page = (tmp_path / "results" / "README.md").read_text()
    assert "less FedAvg" not in page
    run(tool, "--rows", "fedavg+fedheal")
    tool("collect")
    page = (tmp_path / "results" / "README.md").read_text()
    assert set(read_table(page, "| less FedAvg ")) >= {"FedHEAL (paper)"}
    assert "nothing is subtracted: uniform weights, 4 rounds (beside FedAvg), FedAvg (beside uniform weights)," in page


@pytest.mark.slow
def test_more_seeds_are_paired(tool, tmp_path):
    run(tool, "--rows", "fedavg,uniform weights", "--seeds", "2")
    run(tool, "--rows", "fedavg+fedheal")
    tool("collect")
    page = (tmp_path / "results" / "README.md").read_text()
    assert read_table(page, "| less FedAvg ")["uniform weights"][-1] == "2"
    assert read_table(page, "| less FedAvg ")["FedHEAL (paper)"][-1] == "1"
    assert "1 to 2 seeds, ± standard deviation over them" in page


def test_a_stand_in_is_named_and_what_an_independent_version_found_stands_beside(page_tool, tmp_path):
    near = {"mnist": 91.6 - 5.1, "usps": 91.6 + 3.1, "svhn": 81.6 - 2.9, "syn_standin": 50.0}
    make_run(tmp_path, "digits", "fedavg", near, 200)
    page = page_tool.write_page(RECIPE, [("digits", tmp_path, 200)])
    assert page.count("| syn_standin (stand-in for syn) |") == 6  # in all tables but that of differences
    assert "syn_standin is a stand-in for syn: its column is no result on syn" in page
    assert "| difference | **-5.1** | **+3.1** | -2.9 | +27.0 |" in page
    assert "| difference to the nearest, by column | -5.1 | +2.6 | -2.1 | +27.0 |" in page
    assert "further from its first line than 5 on mnist, 3 on usps, 3 on svhn (points)" in page
    assert "[The findings](../docs/findings.md#an-independent-implementation) discuss what is flagged." in page
    assert "Flagged: FedAvg on mnist (-5.1), FedAvg on usps (+3.1)." in page
    assert "| FedAvg | ours | 86.50 | 94.70 | 78.70 | 50.00 |  | " in page
    assert "|  | paper | 89.84 | 93.25 | 79.54 |  | 41.35 | 76.00 | 23.82 |  |" in page


def test_means_and_tests_are_repeated_without_the_stand_in(page_tool, tmp_path):
    """A method that gains on the stand-in alone has no gain without it."""
    for seed in range(3):
        domains = {"mnist": 90.0, "usps": 90.0, "svhn": 81.0 + seed, "syn_standin": 30.0}
        make_run(tmp_path, "digits", "fedavg+uniform", domains, 200, seed=seed)
        make_run(tmp_path, "digits", "fedavg", domains | {"syn_standin": 20.0}, 200, seed=seed)
    page = page_tool.write_page(RECIPE, [("digits", tmp_path, 200)])
    with_it, without = (
        page.partition(f"### {title}\n")[2].partition("\n### ")[0]
        for title in ("What may be concluded", "Without the stand-in")
    )
    assert "| FedAvg | AVG | -2.50 | " in with_it
    assert "| FedAvg | AVG | +0.00 | " in without
    assert "| row | method | mnist | usps | svhn | AVG | STD | worst | seeds |" in without
    assert "| FedAvg | `fedavg` | 90.00 ± 0.00 | 90.00 ± 0.00 | 82.00 ± 1.00 | 87.33 ± 0.33 | " in without


def test_fewer_rounds_leave_a_row_open_and_nothing_is_subtracted_from_the_paper(page_tool, tmp_path):
    accuracy = {"mnist": 50.0, "usps": 50.0, "svhn": 50.0, "syn_standin": 50.0}
    make_run(tmp_path, "digits", "fedavg", accuracy, 20)
    make_run(tmp_path, "digits", "fedavg+fedheal:variant=released", accuracy, 200)
    page = page_tool.write_page(RECIPE, [("digits", tmp_path, 200)])
    assert "Not the protocol's 200 rounds: FedAvg (20)." in page
    assert "| ours |" not in page.partition("### Beside an independent")[2].partition("| FedHEAL")[0]
    beside = page.partition("### Beside the paper")[2].partition("###")[0]
    assert "| FedAvg, 20 rounds | ours | 50.00 |" in beside
    assert [line.split(" | ")[1] for line in beside.splitlines() if line.startswith("|  | ")][1:] == [
        "paper",
        "difference",
    ]
    assert (
        "Not the protocol's 200 rounds, so that the paper's numbers do not stand beside: FedAvg, 20 rounds." in beside
    )
    assert "against FedAvg" not in beside  # what is claimed of rows is not held against a part of one
    open_rows = page.partition("### Open")[2]
    assert "- FedAvg (so far with 20 rounds): `python tools/results.py run --data digits --rows FedAvg`" in open_rows
    assert (
        "- FedHEAL (released), seeds 1, 2, 8, 9, 10, 11, 12: `python tools/results.py run --data digits --rows "
        in open_rows
    )
    assert "'FedHEAL (released)' --seeds 1,2,8,9,10,11,12`" in open_rows


@pytest.mark.parametrize(("rounds", "suffix"), [(200, ""), (100, ", 100 rounds")])
def test_differences_to_uniform_weights_are_tested_as_one_family(page_tool, tmp_path, rounds, suffix):
    gains = {"fedavg": [-2.0] * 8, "fedavg+fedheal": [1.0] * 7 + [-3.0]}
    for seed in range(8):
        even = {"mnist": 90.0 + seed, "usps": 90.0, "svhn": 80.0, "syn_standin": 30.0}
        make_run(tmp_path, "digits", "fedavg+uniform", even, rounds, seed=seed)
        for method, points in gains.items():
            moved = {domain: value + points[seed] for domain, value in even.items()}
            make_run(tmp_path, "digits", method, moved, rounds, seed=seed)
    make_run(tmp_path, "digits", "fedavg+afl", even, rounds)  # not one of the rows with several seeds
    page = page_tool.write_page(RECIPE, [("digits", tmp_path, 200)])
    section = page.partition("### What may be concluded")[2].partition("###")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    cells = {(row.removesuffix(suffix), column): rest for row, column, *rest in table}
    assert all(row.endswith(suffix) for row, *_ in table)
    assert set(cells) == {(row, column) for row in ("FedAvg", "FedHEAL (paper)") for column in ("AVG", "STD")}
    # All 8 differences have one sign: p = 2 / 2^8, times 4 comparisons.
    assert cells["FedAvg", "AVG"] == ["-2.00", "-2.00 to -2.00", "0 of 8", "0.031", "0.031"]
    assert cells["FedHEAL (paper)", "AVG"][0] == "+0.50"
    assert cells["FedHEAL (paper)", "AVG"][2] == "7 of 8"
    assert float(cells["FedHEAL (paper)", "AVG"][3]) > 0.05
    assert "- fedavg is worse than fedavg+uniform in AVG by 2.00 points (95 % CI 2.00 to 2.00, p = 0.0312 " in section


def test_what_is_quoted_is_said_at_the_head(page_tool, tmp_path):
    make_run(
        tmp_path, "digits", "fedavg+uniform", {"mnist": 90.0, "usps": 90.0, "svhn": 80.0, "syn_standin": 30.0}, 200
    )
    page = page_tool.write_page(RECIPE, [("digits", tmp_path, 200)])
    head, _, below = page.partition("## digits")
    assert "numbers and those of an independent implementation are quoted" in head
    assert "Everything else is computed from what is in the folders." in head
    assert "its own split and first model, so that some of a difference comes from that alone" in below
    assert "Flagged: nothing." in below
    assert "difference to the nearest" not in below  # it has one seed of this row


def test_seconds_are_of_all_phases_as_mean_and_median_over_rounds(page_tool, tmp_path):
    make_run(tmp_path, "digits", "fedavg", {"mnist": 50.0, "usps": 60.0}, 3, seconds=(5.0, 1.0, 1.5))
    page = page_tool.write_page(RECIPE, [("digits", tmp_path, 200)])
    assert "| 2.50 | 1.50 | 3 | bf16 | a GPU |" in page
    assert "the first round of a process compiles what the others use" in page


def test_a_run_that_is_no_row_is_refused_by_name(page_tool, tmp_path):
    make_run(tmp_path, "digits", "fedprox", {"mnist": 50.0}, 20)
    with pytest.raises(ValueError, match="fedprox is not in the plan; the rows are fedavg, fedavg"):
        page_tool.write_page(RECIPE, [("digits", tmp_path, 200)])


def test_where_a_result_might_have_ended_is_said(page_tool):
    accuracies = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 0.0]
    run = SimpleNamespace(
        label="FedAvg",
        experiment=SimpleNamespace(seed=0),
        accuracies=[{"a": value, "b": 90.0} for value in accuracies],
        summary={"domains": {"a": 36.0, "b": 90.0}},
    )
    text = "\n\n".join(page_tool._measure_noise([run], "digits"))
    reach = read_table(text, "in it.")["FedAvg"]  # means of five in a row: 30, 40, 36
    assert reach == ["0", "30.0 to 40.0", "90.0 to 90.0", "60.0 to 65.0", "35.4 to 42.4", "30.0 to 40.0", "7"]
    assert "Lowest and highest mean of 5 rounds in a row" in text
    longer = read_table(text, "might have ended.")["FedAvg"]  # the mean of all seven is 30
    assert longer == ["0", "30.00", "90.00", "60.00", "42.43", "30.00", "7"]
    few = SimpleNamespace(**vars(run) | {"accuracies": run.accuracies[:5]})
    assert "Lowest" not in "\n\n".join(page_tool._measure_noise([few], "digits"))
