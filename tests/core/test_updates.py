"""One cohort's updates: what is taken as it is, what is converted, what is refused and in which words."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedheal import Updates

ROWS = [[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]


def test_ids_become_strings():
    updates = Updates(["a", 7, np.int32(-3), np.uint8(0)], np.zeros((4, 1)), [1] * 4)
    assert updates.clients == ("a", "7", "-3", "0")
    assert Updates((str(i) for i in range(2)), np.zeros((2, 1)), [1, 1]).clients == ("0", "1")


@pytest.mark.parametrize("client", [True, np.True_, 1.0, np.float64(2), None, b"a", ("a",), torch.tensor(1)])
def test_an_id_that_is_neither_string_nor_integer_is_refused(client):
    with pytest.raises(TypeError, match=r"client id .* use a string or an integer"):
        Updates([client], np.zeros((1, 1)), [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_keep_dtype_and_memory(dtype):
    deltas = torch.tensor(ROWS, dtype=dtype, requires_grad=True)
    updates = Updates("ab", deltas, torch.tensor([1, 2]))
    assert updates.deltas.dtype == dtype
    assert updates.deltas.data_ptr() == deltas.data_ptr()
    assert not updates.deltas.requires_grad
    assert updates.deltas.tolist() == ROWS
    assert (updates.num_examples.dtype, updates.num_examples.tolist()) == (torch.float64, [1, 2])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_arrays_keep_dtype_and_memory(dtype):
    deltas = np.array(ROWS, dtype)
    updates = Updates("ab", deltas, [1, 2])
    assert updates.deltas.numpy().dtype == dtype
    assert updates.deltas.data_ptr() == deltas.ctypes.data


def make_packed_records():
    records = np.zeros((2, 3), dtype=[("tag", "u1"), ("x", "f4")])
    records["x"] = ROWS
    return records["x"]


def make_read_only():
    deltas = np.array(ROWS)
    deltas.flags.writeable = False
    return deltas


@pytest.mark.parametrize(
    "make",
    [
        make_read_only,
        lambda: np.frombuffer(np.array(ROWS, np.float32).tobytes(), np.float32).reshape(2, 3),
        lambda: np.array(ROWS)[:, ::-1][:, ::-1],
        lambda: np.array([row[::-1] for row in ROWS])[:, ::-1],
        lambda: np.array(ROWS[::-1])[::-1],
        lambda: np.asfortranarray(ROWS),
        lambda: np.repeat(ROWS, 2, axis=1)[:, ::2],
        lambda: np.array(ROWS, ">f4"),
        make_packed_records,
        lambda: torch.tensor(ROWS).T.contiguous().T,
        lambda: [np.array(row, np.float32) for row in ROWS],
        lambda: [torch.tensor(row, dtype=torch.bfloat16) for row in ROWS],
        lambda: tuple(np.array(row)[::-1][::-1] for row in ROWS),
        lambda: ROWS,
        lambda: [ROWS[0], torch.tensor(ROWS[1])],
    ],
)
def test_every_layout_of_memory_is_read_right(make):
    assert Updates("ab", make(), [1, 2]).deltas.tolist() == ROWS


def test_a_read_only_array_stays_read_only_and_as_it_was():
    deltas = make_read_only()
    Updates("ab", deltas, [1, 2])
    assert not deltas.flags.writeable
    assert deltas.tolist() == ROWS


def test_a_row_repeated_by_broadcasting_is_read_right():
    assert Updates("ab", np.broadcast_to(np.array([1.0, 2.0]), (2, 2)), [1, 2]).deltas.tolist() == [[1, 2], [1, 2]]


def test_rows_of_different_float_types_are_not_narrowed():
    rows = [np.array([0.5], np.float32), np.array([1 / 3])]
    assert Updates("ab", rows, [1, 2]).deltas.tolist() == [[0.5], [1 / 3]]


def test_buffers_counters_metrics_and_refused():
    updates = Updates(
        "ab",
        ROWS,
        [1, 2],
        buffers=np.ones((2, 1)),
        counters=[[1], [2]],
        metrics={"loss": [0.5, np.nan]},
        refused={"c": "no"},
    )
    assert updates.buffers.shape == (2, 1)
    assert (updates.counters.dtype, updates.counters.tolist()) == (torch.int64, [[1], [2]])
    assert updates.metrics["loss"][0] == 0.5
    assert updates.refused == {"c": "no"}
    nothing = Updates("ab", ROWS, [1, 2])
    assert nothing.buffers is None
    assert nothing.counters is None
    assert (nothing.metrics, nothing.refused) == ({}, {})


def test_nobody_is_a_cohort_too():
    assert Updates([], [], []).deltas.shape[0] == 0
    assert Updates([], np.zeros((0, 3)), []).deltas.shape == (0, 3)


def test_updates_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Updates("ab", ROWS, [1, 2]).deltas = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deltas": np.zeros(3)}, r"deltas has shape \(3,\); 2 clients need \(2, length\)"),
        ({"deltas": np.zeros((3, 3))}, r"deltas has shape \(3, 3\); 2 clients need"),
        ({"deltas": np.zeros((2, 1, 3))}, r"deltas has shape \(2, 1, 3\); 2 clients need"),
        (
            {"deltas": [[1.0, 2.0], [1.0]]},
            r"deltas: the row of client 'b' has shape \(1,\), the first has \(2,\).*skip",
        ),
        ({"deltas": [np.zeros((1, 2)), np.zeros((1, 2))]}, r"deltas: the row of client 'a' has shape \(1, 2\)"),
        ({"deltas": [np.zeros(2)] * 3}, r"deltas has shape \(3, 2\); 2 clients need"),
        ({"num_examples": [1]}, r"num_examples has shape \(1,\); 2 clients need \(2,\)"),
        ({"num_examples": 3}, r"num_examples has shape \(\); 2 clients need \(2,\)"),
        ({"num_examples": [[1, 2]]}, r"num_examples has shape \(1, 2\)"),
        ({"buffers": np.zeros((1, 3))}, r"buffers has shape \(1, 3\); 2 clients need"),
        ({"counters": [[1], [1, 2]]}, "counters: the row of client 'b'"),
        ({"metrics": {"loss": [1.0]}}, r"metrics\['loss'\] has shape \(1,\); 2 clients need"),
    ],
)
def test_a_wrong_shape_is_refused_by_field(change, message):
    fields = {"clients": "ab", "deltas": ROWS, "num_examples": [1, 2]} | change
    with pytest.raises(ValueError, match=message) as refused:
        Updates(**fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"deltas": np.array([[None], [1]], object)}, "deltas"),
        ({"deltas": ["x", "y"]}, "deltas"),
        ({"deltas": None}, "deltas"),
        ({"deltas": np.zeros((2, 1), "M8[s]")}, "deltas"),
        ({"deltas": np.zeros((2, 1), np.longdouble)}, "deltas"),
        ({"num_examples": ["x", "y"]}, "num_examples"),
        ({"num_examples": None}, "num_examples"),
        ({"num_examples": [1j, 2]}, "num_examples"),
        ({"buffers": np.array([["x"], ["y"]])}, "buffers"),
        ({"metrics": {"loss": [None, 1.0]}}, "loss"),
    ],
)
def test_what_holds_no_numbers_is_refused_by_field(change, field):
    fields = {"clients": "ab", "deltas": ROWS, "num_examples": [1, 2]} | change
    with pytest.raises((TypeError, ValueError), match=field):
        Updates(**fields)
