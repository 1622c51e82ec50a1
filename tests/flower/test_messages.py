"""Models, masks and term messages as Flower records, and back."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from fedheal import Layout
from fedheal.core.layout import Entry
from fedheal.flower import FairStrategy, messages

DTYPES = ["float32", "float64", "float16", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_arrays_are_flowers_and_read_without_a_copy(dtype, shape):
    values = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    theirs = Array(values)
    ours = messages.tensors_to_record({"x": torch.from_numpy(values.copy())})["x"]
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert np.array_equal(ours.numpy(), values)
    for array in (ours, theirs):
        array_view = messages.view_array(array)
        assert array_view.dtype == values.dtype
        assert np.array_equal(array_view, values)


def test_bfloat16_travels_as_float32_and_comes_back_as_it_was():
    values = torch.arange(-400, 400, dtype=torch.int16).view(torch.bfloat16).nan_to_num().reshape(2, 400)
    record = messages.tensors_to_record({"x": values})
    assert np.array_equal(record["x"].numpy(), values.to(torch.float32).numpy())  # what a stock client finds
    assert torch.equal(messages.record_to_tensors(record)["x"].view(torch.int16), values.view(torch.int16))
    layout = messages.infer_layout(record)
    plain = ArrayRecord({"x": Array(record["x"].numpy())})  # as a stock client or a wrapper sends it on
    assert torch.equal(messages.record_to_model(layout, plain).params, values.reshape(-1))
    assert torch.equal(
        layout.pack(messages.match_bfloat16(layout, {"x": values.to(torch.float32)})).params, values.reshape(-1)
    )
    wide = messages.infer_layout(plain)
    assert wide.pack(messages.match_bfloat16(wide, {"x": values})).params.dtype == torch.float32


def test_a_label_alone_makes_no_bfloat16():
    lied = Array("bfloat16", (3,), "numpy.ndarray", Array(np.arange(3)).data)
    assert messages.record_to_tensors(ArrayRecord({"x": lied}))["x"].dtype == torch.int64


def test_a_dtype_that_no_array_can_hold_is_refused_by_name():
    odd = Layout((Entry("head.weight", "param", (2,), torch.float8_e4m3fn, 0, 2),))
    with pytest.raises(
        ValueError, match=r"'head.weight' of the model is torch.float8_e4m3fn, .*: use bfloat16, float16"
    ):
        FairStrategy("fedavg", model=odd)


def test_column_major_arrays_are_read_as_such():
    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(messages.view_array(Array(values)), values)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_numpys_format_is_read(version):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(6.0).reshape(2, 3), version)
    array_view = messages.view_array(Array("float64", (2, 3), "numpy.ndarray", file.getvalue()))
    assert np.array_equal(array_view, np.arange(6.0).reshape(2, 3))


def make_archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3, np.float32))
    return file.getvalue()


def make_npy_bytes(text: str, version: int = 1) -> bytes:
    """Return bytes of numpy's file format with this header."""
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode("latin1") + bytes(12)


NO_ARRAYS = {
    "nothing": b"",
    "an archive": make_archive(),
    "a broken archive": b"PK\x03\x04" + b"x" * 200,
    "a version to come": b"\x93NUMPY\x09\x00aa",
    "a header cut short": b"\x93NUMPY\x01\x00",
    "a header that is too deep to parse": make_npy_bytes("-" * 9000 + "1"),
    "one of version 2 too": make_npy_bytes("-" * 9000 + "1", 2),
    "a truth value as size": make_npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 3), }"),
    "more numbers than bytes": make_npy_bytes(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }"
    ),
    "memory that nobody has": make_npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,), }", 2),
    "a dtype of nothing": make_npy_bytes("{'descr': {'names': 1}, 'fortran_order': False, 'shape': (3,), }"),
    "a list as key": make_npy_bytes("{[]: 1}"),
}


@pytest.mark.parametrize("case", NO_ARRAYS)
def test_bytes_that_are_not_an_array_are_rejected(case):
    array = Array("float32", (3,), "numpy.ndarray", NO_ARRAYS[case])
    with pytest.raises(ValueError, match=r"its bytes are not an array \(.+\)"):
        messages.view_array(array)
    with pytest.raises(ValueError, match="its bytes are not an array"):
        messages.record_to_mask(ArrayRecord({"bits": array}), 24)
    with pytest.raises(ValueError, match="its bytes are not an array"):
        messages.record_to_terms(ArrayRecord({"0.change": array}), 1)


def test_a_strided_tensor_is_sent_in_order():
    values = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(messages.record_to_tensors(messages.tensors_to_record({"x": values}))["x"], values)


def test_a_model_comes_back_bit_for_bit():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout, model = Layout.of(net), Layout.of(net).pack(net.state_dict())
    record = messages.model_to_record(layout, model)
    back = messages.record_to_model(layout, record)
    assert all(torch.equal(getattr(back, n), getattr(model, n)) for n in ("params", "buffers", "counters"))
    assert messages.infer_layout(record) == layout  # torch's names for buffers are enough to tell


@pytest.mark.parametrize("dtypes", [["complex64"], ["complex128"], ["complex64", "float32"], ["float16", "float64"]])
def test_models_of_any_dtypes_come_back_bit_for_bit(dtypes):
    net = nn.ParameterDict({d: nn.Parameter(torch.randn(3, dtype=getattr(torch, d))) for d in dtypes})
    layout = Layout.of(net)
    back = messages.record_to_tensors(messages.model_to_record(layout, layout.pack(net.state_dict())))
    assert {name: str(tensor.dtype) for name, tensor in back.items()} == {d: f"torch.{d}" for d in dtypes}
    assert all(torch.equal(back[name], tensor) for name, tensor in net.state_dict().items())


def test_a_model_without_float_parameters_is_rejected():
    with pytest.raises(ValueError, match="hold no float parameters"):
        messages.infer_layout(ArrayRecord({"n": Array(np.zeros(2, np.int64))}))
    with pytest.raises(ValueError, match="complex"):
        messages.infer_layout(ArrayRecord({"n": Array(np.zeros(2, np.complex64))}))


def test_a_message_of_no_term_is_left_out():
    """'²' is a digit to Python, and no number."""
    tensors = {"0.change": torch.ones(1), "1.change": torch.ones(1), "².change": torch.ones(1), "x": torch.ones(1)}
    assert [list(group) for group in messages.split_by_term(tensors, 1)] == [["change"]]


def test_masks_travel_as_bits():
    mask = torch.rand(37, generator=torch.Generator().manual_seed(0)) > 0.5
    assert torch.equal(torch.from_numpy(messages.record_to_mask(messages.mask_to_record(mask), 37)).bool(), mask)
    with pytest.raises(ValueError, match="41 entries need 6 bytes"):
        messages.record_to_mask(messages.mask_to_record(mask), 41)
    floats = ArrayRecord({"bits": Array(np.zeros(9, np.float32))})
    with pytest.raises(ValueError, match=r"^its mask is float32 of shape \(9,\); 65 entries need 9 bytes, as uint8$"):
        messages.record_to_mask(floats, 65)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (Array(np.array(["a"])), "'0.change' holds <U1, which torch does not have"),
        (
            Array("float32", (1,), "pickle", b"x"),
            "'0.change' cannot be read: it is serialised as 'pickle', not as a numpy array",
        ),
    ],
)
def test_an_array_that_no_tensor_can_hold_is_named(array, problem):
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        messages.record_to_tensors(ArrayRecord({"0.change": array}))
