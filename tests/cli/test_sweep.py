"""`fedheal sweep`: what it prints."""

from __future__ import annotations

from tiny_data import WORDS


def test_a_sweep_says_where_equals_were_chosen_from_and_where_its_runs_are(call) -> None:
    done = call("sweep", *WORDS, "method=fedheal", "rounds=1", "tau=0,0.1", "lr=1e-9", "--jobs", "1", "--out", "found")
    assert done.code == 0, done
    assert "2 points are equally good: this is the first of them, and no better than the others." in done.out
    assert done.out.splitlines()[-1] == "The runs are in found."
