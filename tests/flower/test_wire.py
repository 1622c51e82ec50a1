"""Models in messages, there and back; and what a client remembers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict
from torch import nn

from fedheal import Layout
from fedheal.flower import wire
from fedheal.flower.client import name_of
from fedheal.flower.memory import InContext, InFolder, memory_of, recalled

DTYPES = ["float32", "float64", "float16", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_arrays_are_flowers_and_read_without_a_copy(dtype, shape):
    values = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    theirs = Array(values)
    ours = wire.record({"x": torch.from_numpy(values.copy())})["x"]
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert np.array_equal(ours.numpy(), values)
    for array in (ours, theirs):
        found = wire.viewed(array)
        assert found.dtype == values.dtype
        assert np.array_equal(found, values)


def test_column_major_arrays_are_read_as_such():
    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(wire.viewed(Array(values)), values)


def test_a_strided_tensor_is_sent_in_order():
    values = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(wire.tensors(wire.record({"x": values}))["x"], values)


def test_a_model_comes_back_bit_for_bit():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout, model = Layout.of(net), Layout.of(net).pack(net.state_dict())
    record = wire.record_of(layout, model)
    back = wire.packed(layout, record)
    assert all(torch.equal(getattr(back, n), getattr(model, n)) for n in ("params", "buffers", "counters"))
    assert wire.layout_of(record) == layout  # torch's names for buffers are enough to tell


def test_without_parameters_there_is_nothing_to_learn():
    with pytest.raises(ValueError, match="hold no float parameters"):
        wire.layout_of(ArrayRecord({"n": Array(np.zeros(2, np.int64))}))
    with pytest.raises(ValueError, match="complex"):
        wire.layout_of(ArrayRecord({"n": Array(np.zeros(2, np.complex64))}))


def test_masks_travel_as_bits():
    mask = torch.rand(37, generator=torch.Generator().manual_seed(0)) > 0.5
    assert torch.equal(torch.from_numpy(wire.unbits(wire.bits(mask), 37)).bool(), mask)
    with pytest.raises(ValueError, match="41 entries need 6 bytes"):
        wire.unbits(wire.bits(mask), 41)


def test_a_nodes_name():
    def context(**config):
        return Context(1, 2, config, RecordDict(), {})

    assert name_of(context(name="clinic")) == "clinic"
    assert name_of(context(**{"partition-id": 4})) == "partition-4"
    with pytest.raises(ValueError, match="neither 'name' nor 'partition-id'"):
        name_of(context())


@pytest.fixture(params=["context", "folder"])
def memory(request, tmp_path):
    return (
        InContext(Context(1, 2, {}, RecordDict(), {}), "a")
        if request.param == "context"
        else InFolder(tmp_path / "a", "a")
    )


def test_what_did_not_count_is_forgotten(memory):
    def remember(number):
        memory.save(number, {"n": torch.tensor([number])}, {"about": number})

    assert recalled(memory, 1, None) == ({}, {})
    remember(1)
    assert recalled(memory, 2, 1) == ({"n": torch.tensor([1])}, {"about": 1})
    remember(2)
    remember(3)
    assert memory.rounds() in ([1, 2, 3], [2, 3])
    arrays, described = recalled(memory, 4, 2)  # round 3 never counted
    assert (arrays["n"].item(), described["about"]) == (2, 2)
    assert memory.rounds() == [2]
    remember(4)
    assert recalled(memory, 4, None)[1] == {"about": 2}  # round 4 is done again
    assert recalled(memory, 3, 0) == ({}, {})  # nothing ever counted


def test_clients_of_one_folder_do_not_meet(tmp_path):
    context = Context(1, 2, {}, RecordDict(), {})
    names = ["a/b", "a_b", "..", "é"]
    for i, name in enumerate(names):
        memory_of(context, name, tmp_path).save(1, {"n": torch.tensor([i])}, {})
    assert [memory_of(context, name, tmp_path).load(1)[0]["n"].item() for name in names] == [0, 1, 2, 3]
    assert {p.parent for p in tmp_path.iterdir()} == {tmp_path}
