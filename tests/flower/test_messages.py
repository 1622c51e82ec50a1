"""Models in messages, there and back; and what a client remembers."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict
from torch import nn

from fedheal import Layout
from fedheal.core.layout import Entry
from fedheal.flower import FairStrategy
from fedheal.flower import messages as wire
from fedheal.flower.client import name_of
from fedheal.flower.client_state import InContext, InFolder, memory_of, recalled

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


def test_bfloat16_travels_as_float32_and_comes_back_as_it_was():
    values = torch.arange(-400, 400, dtype=torch.int16).view(torch.bfloat16).nan_to_num().reshape(2, 400)
    sent = wire.record({"x": values})
    assert np.array_equal(sent["x"].numpy(), values.to(torch.float32).numpy())  # what a stock client finds
    assert torch.equal(wire.tensors(sent)["x"].view(torch.int16), values.view(torch.int16))
    layout = wire.layout_of(sent)
    plain = ArrayRecord({"x": Array(sent["x"].numpy())})  # as a stock client or a wrapper sends it on
    assert torch.equal(wire.packed(layout, plain).params, values.reshape(-1))
    assert torch.equal(layout.pack(wire.fitted(layout, {"x": values.to(torch.float32)})).params, values.reshape(-1))
    wide = wire.layout_of(plain)
    assert wide.pack(wire.fitted(wide, {"x": values})).params.dtype == torch.float32


def test_a_label_alone_makes_no_bfloat16():
    lied = Array("bfloat16", (3,), "numpy.ndarray", Array(np.arange(3)).data)
    assert wire.tensors(ArrayRecord({"x": lied}))["x"].dtype == torch.int64


def test_a_dtype_that_no_array_can_hold_is_refused_by_name():
    odd = Layout((Entry("head.weight", "param", (2,), torch.float8_e4m3fn, 0, 2),))
    with pytest.raises(
        ValueError, match=r"'head.weight' of the model is torch.float8_e4m3fn, .*: use bfloat16, float16"
    ):
        FairStrategy("fedavg", model=odd)


def test_column_major_arrays_are_read_as_such():
    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(wire.viewed(Array(values)), values)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_numpys_format_is_read(version):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(6.0).reshape(2, 3), version)
    found = wire.viewed(Array("float64", (2, 3), "numpy.ndarray", file.getvalue()))
    assert np.array_equal(found, np.arange(6.0).reshape(2, 3))


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3, np.float32))
    return file.getvalue()


def headed(text: str, version: int = 1) -> bytes:
    """An array of numpy's format with this for a header."""
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode("latin1") + bytes(12)


NO_ARRAYS = {
    "nothing": b"",
    "an archive": archive(),
    "a broken archive": b"PK\x03\x04" + b"x" * 200,
    "a version to come": b"\x93NUMPY\x09\x00aa",
    "a header cut short": b"\x93NUMPY\x01\x00",
    "a header that is too deep to parse": headed("-" * 9000 + "1"),
    "one of version 2 too": headed("-" * 9000 + "1", 2),
    "a truth value as size": headed("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 3), }"),
    "more numbers than bytes": headed("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }"),
    "memory that nobody has": headed("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,), }", 2),
    "a dtype of nothing": headed("{'descr': {'names': 1}, 'fortran_order': False, 'shape': (3,), }"),
    "a list as key": headed("{[]: 1}"),
}


@pytest.mark.parametrize("case", NO_ARRAYS)
def test_bytes_that_are_no_array_are_said_to_be_none(case):
    array = Array("float32", (3,), "numpy.ndarray", NO_ARRAYS[case])
    with pytest.raises(ValueError, match=r"its bytes are no array \(.+\)"):
        wire.viewed(array)
    with pytest.raises(ValueError, match="its bytes are no array"):
        wire.unbits(ArrayRecord({"bits": array}), 24)
    with pytest.raises(ValueError, match="its bytes are no array"):
        wire.grouped(ArrayRecord({"0.change": array}), 1)


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


@pytest.mark.parametrize("dtypes", [["complex64"], ["complex128"], ["complex64", "float32"], ["float16", "float64"]])
def test_models_of_any_dtypes_come_back_bit_for_bit(dtypes):
    net = nn.ParameterDict({d: nn.Parameter(torch.randn(3, dtype=getattr(torch, d))) for d in dtypes})
    layout = Layout.of(net)
    back = wire.tensors(wire.record_of(layout, layout.pack(net.state_dict())))
    assert {name: str(tensor.dtype) for name, tensor in back.items()} == {d: f"torch.{d}" for d in dtypes}
    assert all(torch.equal(back[name], tensor) for name, tensor in net.state_dict().items())


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
    assert memory.rounds() == [1, 2, 3]
    arrays, described = recalled(memory, 4, 2)  # round 3 never counted
    assert (arrays["n"].item(), described["about"]) == (2, 2)
    assert memory.rounds() == [1, 2][-memory.counted :]
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
