"""A client's name, and the state it saves between rounds."""

from __future__ import annotations

import logging

import pytest
import torch
from flwr.app import Context, RecordDict

from fedheal.federation.run_folder import RunFolder
from fedheal.flower.client import get_client_name
from fedheal.flower.client_state import ContextStore, FolderStore, SavedState, load_before_round, open_store
from fedheal.flower.strategy import FLOWER
from fedheal.runs.resume import load_newest_checkpoint


def test_a_nodes_name():
    def make_context(**config):
        return Context(1, 2, config, RecordDict(), {})

    assert get_client_name(make_context(name="clinic")) == "clinic"
    assert get_client_name(make_context(**{"partition-id": 4})) == "partition-4"
    with pytest.raises(ValueError, match="neither 'name' nor 'partition-id'"):
        get_client_name(make_context())


def test_a_file_that_is_named_with_no_number_is_no_round(tmp_path):
    """'²' is a digit to Python, and no number."""
    (tmp_path / "state").mkdir()
    for name in ("00000002", "²"):
        (tmp_path / "state" / f"{name}.safetensors").touch()
    assert FolderStore(tmp_path, "a").rounds() == [2]
    assert RunFolder(tmp_path, True, FLOWER).count_rounds() == 2
    with pytest.raises(ValueError, match="restore state/ from a backup"):
        load_newest_checkpoint(tmp_path, "a", logging.getLogger("test"))


@pytest.fixture(params=["context", "folder"])
def store(request, tmp_path):
    return (
        ContextStore(Context(1, 2, {}, RecordDict(), {}), "a")
        if request.param == "context"
        else FolderStore(tmp_path / "a", "a")
    )


def test_state_of_rounds_that_were_not_accepted_is_dropped(store):
    def save_round(number):
        store.save(number, {"n": torch.tensor([number])}, {"about": number})

    assert load_before_round(store, 1, None) == SavedState({}, {})
    save_round(1)
    assert load_before_round(store, 2, 1) == ({"n": torch.tensor([1])}, {"about": 1}, 1)
    save_round(2)
    save_round(3)
    assert store.rounds() == [1, 2, 3]
    arrays, described, _ = load_before_round(store, 4, 2)  # round 3 never counted
    assert (arrays["n"].item(), described["about"]) == (2, 2)
    assert store.rounds() == [1, 2][-store.accepted_rounds_kept :]
    save_round(4)
    assert load_before_round(store, 4, None)[1] == {"about": 2}  # round 4 is done again
    assert load_before_round(store, 3, 0) == SavedState({}, {})  # nothing ever counted


def test_clients_with_one_folder_keep_separate_states(tmp_path):
    context = Context(1, 2, {}, RecordDict(), {})
    names = ["a/b", "a_b", "..", "é"]
    for i, name in enumerate(names):
        open_store(context, name, tmp_path).save(1, {"n": torch.tensor([i])}, {})
    assert [open_store(context, name, tmp_path).load(1)[0]["n"].item() for name in names] == [0, 1, 2, 3]
    assert {p.parent for p in tmp_path.iterdir()} == {tmp_path}
