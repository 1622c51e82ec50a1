"""What others on the machine, and newcomers to the federation, cannot find out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from flwr.app import ConfigRecord

from fedheal.flower.client_state import open_store
from fedheal.flower.messages import RoundInstructions
from flower.sites import Sites


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_newcomer_cannot_confirm_guessed_names(method, tmp_path):
    sites = Sites(method=method, rounds=2, folder=tmp_path)
    strategy, grid = sites.strategy(fraction_evaluate=0.0), sites.grid()
    strategy.start(grid, sites.initial, num_rounds=2)
    for_newcomer, for_member = strategy._make_messages([999, 100], {}, ConfigRecord(), 3, "train")
    instructions = RoundInstructions.from_message(for_newcomer)
    assert [instructions.get_accepted_round(name) for name in sites.names] == [0] * 5
    assert RoundInstructions.from_message(for_member).get_accepted_round(sites.names[0]) == 2
    if method == "scaffold":  # a member on a new node finds its own round
        tokens = {name: open_store(grid.contexts[100], name, tmp_path).read_token() for name in sites.names}
        assert len(set(tokens.values())) == 5
        assert [instructions.get_accepted_round(name, tokens[name]) for name in sites.names] == [2] * 5


def read_modes(folder: Path) -> set[int]:
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 3
    return {stat.S_IMODE(path.stat().st_mode) - (0o700 if path.is_dir() else 0o600) for path in paths}


def test_only_the_owner_may_read_run_folders_and_states(tmp_path):
    before = os.umask(0o022)
    try:
        sites = Sites(method="scaffold", rounds=2, folder=tmp_path / "clients")
        sites.run(folder=tmp_path / "runs" / "run")
        (tmp_path / "shared").mkdir()
        sites.run(folder=tmp_path / "shared")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert (tmp_path / "runs" / "run" / "model.safetensors").exists()
    assert read_modes(tmp_path / "runs" / "run") == {0}
    assert all(read_modes(folder) == {0} for folder in (tmp_path / "clients").iterdir())
    # Folders of the operator's own keep their modes.
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "runs")} == {0o755}
    assert stat.S_IMODE((tmp_path / "shared" / "rounds.jsonl").stat().st_mode) == 0o600
