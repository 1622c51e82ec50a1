"""States as arrays and JSON: every type of field, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from fedheal.core.arrays import Floats
from fedheal.core.layout import Packed, Sizes
from fedheal.core.state import Nothing, RunState, State, TermState


@dataclass(frozen=True)
class Inner(State, kind="test-inner"):
    clients: tuple[str, ...]
    column: Floats
    table: Tensor


@dataclass(frozen=True)
class Outer(State, kind="test-outer"):
    number: int
    share: float
    word: str
    switch: bool
    sizes: Sizes
    inner: Inner
    parts: tuple[State, ...]
    by_name: Mapping[str, Tensor]
    by_client: Mapping[str, Mapping[str, Tensor]]
    missing: Tensor | None = None
    present: Tensor | None = None


ODD = "a.b"  # a client id may hold any character


def make_inner(clients: int = 2) -> Inner:
    return Inner(tuple("ab"[:clients]), np.arange(clients, dtype=np.float64), torch.arange(6.0).reshape(3, 2))


def make_outer() -> Outer:
    by_client = {ODD: {"c": torch.ones(1)}, "a": {"b.c": torch.zeros(1)}, "idle": {}}
    sizes = Sizes((("w", 3), ("b", 0)), 2, 1)
    parts = (make_inner(), Nothing())
    return Outer(3, 1, "x", True, sizes, make_inner(), parts, {"x.y": torch.ones(2)}, by_client, present=torch.ones(2))


def save_and_load(state: State) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the state's arrays and JSON after a round trip through safetensors and JSON text."""
    arrays, described = state.to_arrays()
    return load(save({name: array.contiguous() for name, array in arrays.items()})), json.loads(json.dumps(described))


def test_every_type_of_field_comes_back() -> None:
    before = make_outer()
    after = State.from_arrays(*save_and_load(before))
    assert isinstance(after, Outer)
    for name in ("number", "share", "word", "switch", "sizes", "missing"):
        assert getattr(after, name) == getattr(before, name)
    assert after.inner.clients == before.inner.clients
    assert after.inner.column.tolist() == [0, 1]
    assert [type(part) for part in after.parts] == [Inner, Nothing]
    assert after.by_name["x.y"].tolist() == [1, 1]
    assert {c: {k: v.tolist() for k, v in slot.items()} for c, slot in after.by_client.items()} == {
        ODD: {"c": [1.0]},
        "a": {"b.c": [0.0]},
        "idle": {},
    }
    assert after.present is not None


def test_spare_rows_are_not_saved() -> None:
    assert make_inner(1).to_arrays()[0]["table"].tolist() == [[0, 1]]


def test_a_field_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(TypeError, match="holds a set in 'word'"):
        Outer(3, 1, {1}, True, None, None, (), {}, {}).to_arrays()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("number", "three", "damaged.*'number' must be int, got 'three'"),
        ("number", True, "damaged.*'number' must be int, got True"),
        ("sizes", None, "damaged"),
        ("parts", [{"kind": "new"}], "state of kind 'new' is unknown; this version knows"),
        ("parts", [3], "state of kind None is unknown"),
        ("inner", {"kind": "nothing"}, "kind 'nothing' .*'test-inner' is expected"),
        ("by_client", {"new": {"x": "array"}}, "damaged.*by_client"),
    ],
)
def test_damaged_json_is_refused(field: str, value: object, why: str) -> None:
    arrays, described = save_and_load(make_outer())
    with pytest.raises(ValueError, match=why):
        State.from_arrays(arrays, described | {field: value})
    with pytest.raises(ValueError, match=f"damaged.*{field}"):
        State.from_arrays(arrays, {name: value for name, value in described.items() if name != field})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("column", torch.zeros(3, dtype=torch.float64), r"'column' has shape \(3,\) for 2 clients"),
        ("column", torch.zeros(2, 1, dtype=torch.float64), r"'column' has shape \(2, 1\) for 2 clients"),
        ("table", torch.zeros(1, 2), "'table' has 1 entries and does not belong to 2 clients"),
        ("table", torch.zeros(()), "damaged"),
    ],
)
def test_arrays_need_an_entry_per_client(field: str, value: Tensor, why: str) -> None:
    arrays, described = save_and_load(make_inner())
    with pytest.raises(ValueError, match=why):
        State.from_arrays(arrays | {field: value}, described)


def test_a_run_comes_back() -> None:
    model = Packed(torch.ones(3), torch.zeros(1), torch.tensor([7]))
    terms = (TermState({"c": torch.ones(3)}, {ODD: {"c": torch.zeros(3)}}), TermState({}, {}))
    before = RunState(
        round=4, seed=1, model=model, aggregator=make_inner(), server=Nothing(), terms=terms, sent=5, received=6
    )
    after = RunState.from_arrays(*save_and_load(before), torch.device("cpu"))
    assert (after.round, after.seed, after.sent, after.received) == (4, 1, 5, 6)
    assert after.model.counters.tolist() == [7]
    assert isinstance(after.aggregator, Inner)
    assert after.terms[0].slots[ODD]["c"].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="'run' is expected"):
        RunState.from_arrays(*save_and_load(make_inner()))


def test_states_compare_by_value() -> None:
    first, second = make_outer(), make_outer()
    assert (first == second) is True
    assert (first != second) is False
    assert replace(second, by_name={"x.y": torch.zeros(2)}) != first
    assert replace(second, by_name={"x.y": torch.ones(2, dtype=torch.float64)}) != first
    assert replace(second, by_name={}) != first
    assert replace(second, number=4) != first
    assert replace(second, inner=make_inner(1)) != first
    assert first != make_inner()
    assert first != "another thing"
    with pytest.raises(TypeError, match="unhashable type: 'Outer'"):
        hash(first)


def test_a_state_goes_to_a_file_and_back(tmp_path: Path) -> None:
    shared = torch.ones(2)
    state = replace(make_outer(), by_name={"a": shared, "b": shared})  # safetensors refuses shared memory
    state.save(tmp_path / "state.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]
    assert State.load(tmp_path / "state.safetensors") == state
    assert Outer.load(str(tmp_path / "state.safetensors")) == state


def test_a_file_that_holds_no_such_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    make_outer().save(path)
    with pytest.raises(ValueError, match=r"state\.safetensors: .*'test-inner' is expected"):
        Inner.load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged"):
        State.load(path)
    path.write_bytes(save({"x": torch.ones(1)}))
    with pytest.raises(
        ValueError, match=r"state\.safetensors holds no state of fedheal: give a file that .*`save` wrote"
    ):
        State.load(path)
    with pytest.raises(FileNotFoundError):
        State.load(tmp_path / "absent")


def test_one_flipped_bit_in_a_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    make_outer().save(path)
    whole = path.read_bytes()
    numbers = 8 + int.from_bytes(whole[:8], "little")  # after the header and its length
    for place in (whole.index(b"test-outer"), *range(numbers, len(whole))):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(
            ValueError, match=r"state\.safetensors is damaged \(its checksum does not fit its contents\)"
        ):
            State.load(path)


def test_a_file_of_an_earlier_version_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    arrays, described = make_outer().to_arrays()
    path.write_bytes(save({k: v.clone() for k, v in arrays.items()}, {"fedheal-state": json.dumps(described)}))
    assert State.load(path) == make_outer()


def test_a_state_that_cannot_be_written_names_its_path_and_leaves_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "s.safetensors", tmp_path):  # no such folder; a folder
        with pytest.raises(OSError, match=r".") as error:
            Inner.save(make_outer(), path)
        assert error.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"{tmp_path}.tmp").exists()
