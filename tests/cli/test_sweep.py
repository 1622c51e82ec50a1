"""`fedheal sweep`: what it prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from command_line import assert_sentence
from tiny_data import WORDS


def test_a_sweep_says_where_equals_were_chosen_from_and_where_its_runs_are(call) -> None:
    done = call("sweep", *WORDS, "method=fedheal", "rounds=1", "tau=0,0.1", "lr=1e-9", "--jobs", "1", "--out", "found")
    assert done.code == 0, done
    assert "2 points are equally good: this is the first of them, and no better than the others." in done.out
    assert "One seed shows no spread" in done.out
    assert "The runs are in found." in done.out
    assert "Validation examples per domain: plain 10, noisy 6, dark 3." in done.out
    assert "One example is up to 33 points of accuracy." in done.out
    # Nothing is learnt with such a learning rate.
    chance = "No point is more than two standard errors above chance (always predicting one class: AVG "
    assert chance in done.out


def test_a_sweep_shows_validation_scores_with_their_spread_and_nothing_of_the_test_set(call, tmp_path: Path) -> None:
    command = ["sweep", *WORDS, "method=fedheal", "rounds=1", "lr=0.05,0.001", "--jobs", "1", "--out", "found"]
    done = call(*command, "--seeds", "2")
    assert done.code == 0, done
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "found").glob("*/result.json"))]
    assert len(results) == 4
    shown = set(re.findall(r"\d+\.\d\d", done.out))
    for result in results:  # a line for each run, then a table of means
        line = next(line for line in done.out.splitlines() if f"-seed{result['seed']}: validation AVG" in line)
        assert f"AVG {result['validation']['avg']:.2f}" in done.out, line
        assert f"{result['avg']:.2f}" not in shown
    assert "mean ± standard deviation over 2 seeds" in done.out
    assert "above chance" not in done.out
    assert re.search(r"lr=0.05.* \d+\.\d\d ± \d+\.\d\d", done.out)
    table = json.loads((tmp_path / "found" / "sweep.json").read_text())
    assert all(trial.keys() == {"point", "validation"} for trial in table["trials"])
    *words, last = shlex.split(done.out.splitlines()[-1])
    assert [*words[:4], last] == ["fedheal", "compare", "fedavg", "fedavg+fedheal", "lr=0.05"]
    assert words[words.index("--seeds") + 1] == "2-9"
    assert table["next_command"] == done.out.splitlines()[-1].strip()


def test_a_sweep_names_the_points_that_diverge(call, tmp_path: Path) -> None:
    command = ["sweep", *WORDS, "method=fedavg", "rounds=1", "--jobs", "1"]
    done = call(*command, "lr=1e30,0.05", "--out", "found")
    assert done.code == 0, done
    assert "lr=1e+30-seed0: diverged\n" in done.out
    assert re.search(r"lr=1e\+30 .* diverged ", done.out)
    assert "Chosen by avg on validation data: lr=0.05." in done.out
    again = call(*command, "lr=1e30,0.05", "--out", "found", "--json")
    assert again.code == 0, again
    table = json.loads(again.out)
    assert [trial["validation"] is None for trial in table["trials"]] == [True, False]
    assert table == json.loads((tmp_path / "found" / "sweep.json").read_text())
    none = call(*command, "lr=1e30,1e29", "--quiet")
    assert_sentence(none, "training diverges at every point of the search: choose smaller values")
