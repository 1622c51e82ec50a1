"""A model becomes three vectors and comes back bit for bit, whatever its state_dict holds."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fedheal import Layout, Packed
from fedheal.core.layout import Sizes
from tiny_data import conv_batchnorm


class Bag(nn.Module):
    """A module that holds just these parameters and buffers."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def make_parameter(values, dtype=torch.float32):
    return nn.Parameter(values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype), False)


def make_tensor_from_bits(values, width, dtype):
    """Return a tensor with these bit patterns."""
    return torch.from_numpy(np.array(values, f"uint{width}").view(f"int{width}")).view(dtype)


def to_bytes(tensor):
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert to_bytes(actual[name]) == to_bytes(tensor), name


def assert_round_trip(module):
    layout, state_dict = Layout.of(module), module.state_dict()
    packed = layout.pack(state_dict)
    assert packed.params.ndim == packed.buffers.ndim == packed.counters.ndim == 1
    unpacked = layout.unpack(packed)
    assert_same(unpacked, state_dict)
    target = copy.deepcopy(module)
    for tensor in target.state_dict().values():
        tensor.zero_()
    target.load_state_dict(unpacked, strict=True)
    assert_same(target.state_dict(), state_dict)


def make_tied_module():
    shared = make_parameter([[1.0, 2.0], [3.0, 4.0]])
    return Bag(first=shared, between=make_parameter([5.0]), second=shared)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), "b": nn.LSTM(2, 3)})
        self.head = nn.Linear(3, 2, bias=False)
        self.register_buffer("not_saved", torch.ones(2), persistent=False)


class Extra(nn.Module):
    """Keeps a tensor as extra state."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = make_parameter([1.0]), torch.tensor([0.5, -0.0])

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, float("inf"), -float("inf"), 3.4e38]
MODULES = {
    "batch norm": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
    "batch norm without parameters": lambda: nn.BatchNorm1d(3, affine=False),
    "nothing at all": nn.Module,
    "nested": Nested,
    "tied": make_tied_module,
    "tied buffers": lambda: (lambda shared: Bag(a=shared, b=torch.ones(1), c=shared))(torch.tensor([1.0, 2.0])),
    "two views of one storage": lambda: (lambda base: Bag(a=make_parameter(base[:2]), b=make_parameter(base[1:])))(
        torch.arange(3.0)
    ),
    "special numbers": lambda: Bag(w=make_parameter(SPECIAL), b=torch.tensor(SPECIAL)),
    "bf16 beside fp32": lambda: Bag(w=make_parameter([0.1, -0.0, 1e-40], BF16), v=make_parameter(SPECIAL)),
    "bf16 beside fp16": lambda: Bag(
        w=make_parameter([0.1, 3e38, 1e-40], BF16), v=make_parameter([6e-8, -0.0, 65504.0], F16)
    ),
    "fp16 alone": lambda: Bag(w=make_parameter([6e-8, -0.0, 65504.0, float("inf")], F16)),
    "float8 beside fp32": lambda: Bag(
        w=make_parameter(torch.tensor([0.5, -0.0, 448]).to(torch.float8_e4m3fn)), v=make_parameter([0.1])
    ),
    "float64 buffer": lambda: Bag(w=make_parameter([1.0]), b=torch.tensor([1 / 3, 1e-320], dtype=F64)),
    "float64 beside fp32": lambda: Bag(
        w=make_parameter([1 / 3], F64), v=make_parameter(SPECIAL), b=torch.tensor(SPECIAL, dtype=BF16)
    ),
    "complex parameter": lambda: Bag(
        w=make_parameter([[1 + 2j, -0.0j], [complex(0, float("inf")), 3]], torch.complex64)
    ),
    "complex behind an odd number of floats": lambda: Bag(
        w=make_parameter([1.0, 2, 3]), v=make_parameter([1 + 2j], torch.complex64)
    ),
    "complex buffers": lambda: Bag(
        a=torch.tensor(1j), b=torch.ones(1), c=torch.tensor([1 / 3 + 1j], dtype=torch.complex128)
    ),
    "complex, transposed": lambda: Bag(w=make_parameter(torch.tensor([[1 + 2j, 3j], [4, 5 - 1j]]).T)),
    "bool and integers": lambda: Bag(
        a=torch.tensor([True, False]),
        b=torch.tensor([-128, 127], dtype=torch.int8),
        c=torch.tensor([[2**63 - 1], [-(2**63)]]),
        d=torch.tensor(65535, dtype=torch.uint16),
        e=torch.tensor([2**63 + 5], dtype=torch.uint64),
        w=make_parameter([1, 2], torch.int32),
    ),
    "an empty parameter": lambda: Bag(a=make_parameter(torch.zeros(0, 3)), b=make_parameter([1.0])),
    "two empty ones of different shapes": lambda: Bag(
        a=make_parameter(torch.zeros(0, 3)), b=make_parameter(torch.zeros(2, 0)), c=make_parameter([1.0])
    ),
    "two empty ones of different dtypes": lambda: Bag(a=torch.zeros(0), b=torch.zeros(0, dtype=F64), c=torch.ones(1)),
    "only empty ones": lambda: Bag(
        a=make_parameter(torch.zeros(0)), b=torch.zeros(0, 2), c=torch.zeros(0, dtype=torch.int64)
    ),
    "0-dim": lambda: Bag(a=make_parameter(1.5), b=torch.tensor(2.5), c=torch.tensor(3), d=torch.tensor(True)),
    "not contiguous": lambda: Bag(
        a=make_parameter(torch.arange(6.0).reshape(2, 3).T),
        b=make_parameter(torch.arange(8.0)[::2]),
        c=make_parameter(torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)),
    ),
    "extra state that is a tensor": Extra,
}


@pytest.mark.parametrize("name", MODULES)
def test_round_trip(name):
    assert_round_trip(MODULES[name]())


PAYLOADS = {  # quiet, signalling and negative NaNs with payloads
    F32: [0x7FC00001, 0x7F800001, 0xFFC12345, 0x7FFFFFFF],
    F16: [0x7E01, 0x7C01, 0xFE55, 0x7FFF],
    BF16: [0x7FC1, 0x7F81, 0xFFD5, 0x7FFF],
    F64: [0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8DEADBEEF0000, 0x7FFFFFFFFFFFFFFF],
}


@pytest.mark.parametrize("dtype", PAYLOADS)
def test_the_bits_of_nan_come_back(dtype):
    values = make_tensor_from_bits(PAYLOADS[dtype], dtype.itemsize * 8, dtype)
    assert_round_trip(Bag(w=make_parameter(values), b=values.clone()))


def test_nan_stays_nan_in_a_mix_of_dtypes():
    module = Bag(
        w=make_parameter([float("nan"), 1.0], BF16),
        v=make_parameter([2.0, float("nan")]),
        b=torch.tensor(1 / 3, dtype=F64),
    )
    layout = Layout.of(module)
    unpacked = layout.unpack(layout.pack(module.state_dict()))
    assert unpacked["w"].isnan().tolist() == [True, False]
    assert unpacked["v"].isnan().tolist() == [False, True]


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
pieces = st.tuples(
    st.booleans(),  # a parameter?
    st.sampled_from(FLOATS + INTEGERS),
    st.lists(st.integers(0, 3), max_size=3),
    st.booleans(),  # transposed?
    st.booleans(),  # tied to the piece before?
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=6), st.integers(0, 2**32 - 1))
@example([(True, torch.float32, [3], False, False), (True, torch.complex64, [2], False, False)], 0)
@example([(True, torch.float32, [0, 3], False, False), (True, torch.float32, [2, 0], False, False)], 0)
def test_round_trip_of_random_modules(drawn, seed):
    rng, tensors = np.random.default_rng(seed), {}
    for i, (is_param, dtype, shape, transposed, tie) in enumerate(drawn):
        if tie and i:
            tensors[f"t{i}"] = tensors[f"t{i - 1}"]
            continue
        if dtype in INTEGERS:
            tensor = torch.from_numpy(rng.integers(-(2**62), 2**62, shape)).to(dtype)
        else:
            special = rng.choice([0.0, -0.0, 1e-45, np.inf, -np.inf, 0.1], shape)
            values = np.where(rng.random(shape) < 0.3, special, rng.normal(size=shape))
            tensor = torch.from_numpy(np.asarray(values)).to(dtype)
            tensor = torch.complex(tensor.real, -tensor.real) if dtype.is_complex else tensor
        tensor = tensor.movedim(0, -1) if transposed and tensor.ndim > 1 else tensor
        tensors[f"t{i}"] = nn.Parameter(tensor, requires_grad=False) if is_param else tensor
    assert_round_trip(Bag(**tensors))


def test_sizes_by_hand():
    # Linear(2, 3): 6 + 3.  BatchNorm1d(3): weight 3, bias 3; running mean and variance 3 + 3; one counter.
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    assert layout.sizes() == Sizes((("0.weight", 6), ("0.bias", 3), ("1.weight", 3), ("1.bias", 3)), 6, 1)
    assert layout.sizes().params == 15


def test_a_complex_number_counts_twice_and_a_tied_tensor_once():
    shared = make_parameter([1 + 1j, 2, 3], torch.complex64)
    layout = Layout.of(Bag(a=shared, b=make_parameter([1.0]), c=shared, d=torch.tensor(True)))
    assert layout.sizes() == Sizes((("a", 6), ("b", 1)), 0, 1)


def test_vectors_are_in_the_order_of_the_state_dict_whatever_the_order_given():
    module = Bag(
        w=make_parameter([1.0, 2.0]), mean=torch.tensor([3.0]), v=make_parameter([[4.0], [5.0]]), seen=torch.tensor(6)
    )
    layout, state = Layout.of(module), module.state_dict()
    for state_dict in (state, dict(reversed(state.items()))):
        packed = layout.pack(state_dict)
        assert packed.params.tolist() == [1, 2, 4, 5]
        assert (packed.buffers.tolist(), packed.counters.tolist()) == ([3], [6])
        assert (packed.params.dtype, packed.counters.dtype) == (torch.float32, torch.int64)


def test_tied_names_share_memory_and_stay_tied_after_loading():
    module = make_tied_module()
    layout = Layout.of(module)
    assert layout.sizes().params == 5
    unpacked = layout.unpack(layout.pack(module.state_dict()))
    unpacked["first"][0, 0] = 9.0
    assert unpacked["second"][0, 0] == 9.0
    module.load_state_dict(unpacked)
    assert module.first is module.second
    assert module.second.tolist() == [[9, 2], [3, 4]]


def test_equal_modules_have_equal_layouts():
    assert Layout.of(Nested()) == Layout.of(Nested())
    assert Layout.of(nn.Linear(2, 3)) != Layout.of(nn.Linear(3, 2))


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), make_tied_module()]
)
def test_unpacked_and_packed_are_fresh_memory(module):
    layout = Layout.of(module)
    state_dict = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    packed = layout.pack(module.state_dict())
    assert not packed.params.requires_grad
    unpacked = layout.unpack(packed)
    before = [t.clone() for t in (packed.params, packed.buffers, packed.counters)]
    for tensor in unpacked.values():
        tensor.fill_(7)
    assert all(torch.equal(a, b) for a, b in zip((packed.params, packed.buffers, packed.counters), before, strict=True))
    packed.params.fill_(8)
    assert all(bool((tensor == 7).all()) for tensor in unpacked.values())
    assert_same(module.state_dict(), state_dict)


TWO = Bag(w=make_parameter([[1.0, 2.0], [3.0, 4.0]]), seen=torch.tensor(3))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("w"), "'w'"),
        (lambda d: d.update(strange=torch.ones(1)), "'strange'"),
        (lambda d: d.update(w=torch.ones(4)), r"'w'.*\(4,\).*\(2, 2\)"),
        (lambda d: d.update(w=torch.ones(2, 2, dtype=F64)), "'w'.*float64.*float32"),
        (lambda d: d.update(seen=torch.tensor(3.0)), "'seen'.*float32.*int64"),
        (lambda d: d.update(w=np.ones((2, 2), np.float32)), "'w'"),
        (lambda d: d.update(seen=3), "'seen'"),
        (lambda d: d.update(w=None), "'w'"),
    ],
)
def test_a_state_dict_of_another_model_is_refused_by_name(change, named):
    state_dict = dict(TWO.state_dict())
    change(state_dict)
    with pytest.raises(ValueError, match=named):
        Layout.of(TWO).pack(state_dict)


@pytest.mark.parametrize("other", ["another value", "the same memory transposed", "minus zero"])
def test_tied_tensors_that_differ_are_refused(other):
    layout, w = Layout.of(make_tied_module()), torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    second = {
        "another value": w + 1,
        "the same memory transposed": w.T,
        "minus zero": w * torch.tensor([[1, 1], [-1.0, 1]]),
    }
    with pytest.raises(ValueError, match=r"'second'.*'first'|'first'.*'second'"):
        layout.pack({"first": w, "between": torch.ones(1), "second": second[other]})
    layout.pack({"first": w, "between": torch.ones(1), "second": w.clone()})


def test_vectors_of_another_length_are_refused():
    layout = Layout.of(TWO)
    packed = layout.pack(TWO.state_dict())
    for name, wrong in (
        ("param", packed.params[:3]),
        ("buffer", torch.ones(1)),
        ("counter", packed.counters.reshape(1, 1)),
    ):
        changed = {"params": packed.params, "buffers": packed.buffers, "counters": packed.counters, f"{name}s": wrong}
        with pytest.raises(ValueError, match=name):
            layout.unpack(Packed(**changed))


def test_extra_state_that_is_no_tensor_is_refused_by_name():
    class DictExtra(Extra):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(TypeError, match=r"_extra_state.*dict"):
        Layout.of(nn.Sequential(DictExtra()))


def test_a_flat_layout_is_one_parameter_tensor():
    layout = Layout.flat(3)
    assert layout.sizes() == Sizes((("params", 3),), 0, 0)
    packed = layout.pack({"params": torch.tensor([1.0, 2.0, 3.0])})
    assert (len(packed.buffers), len(packed.counters)) == (0, 0)
    assert layout.unpack(packed)["params"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_flat_layout_needs_a_positive_whole_size(size):
    with pytest.raises((TypeError, ValueError), match=f"size.*{size}"):
        Layout.flat(size)


class Doubling(nn.Linear):
    """Loads twice the values that it is given."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        super()._load_from_state_dict({k: 2 * v for k, v in state_dict.items()}, prefix, *rest)


def make_module_with_load_hook() -> nn.Module:
    module = nn.Linear(3, 2)

    def clear_bias(module, keys):
        nn.init.zeros_(module.bias)

    module.register_load_state_dict_post_hook(clear_bias)
    return module


def make_mixed_dtype_module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3, dtype=torch.float64))


class Negated(nn.Linear):
    """Saves its bias with the opposite sign."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "bias"] = -destination[prefix + "bias"]


def make_partly_saved_module() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False), nn.ReLU())
    module.register_buffer("left_out", torch.randn(3), persistent=False)
    return module


def make_module_with_save_hook() -> nn.Module:
    module = nn.Linear(3, 2)

    def negate_bias(module, state, prefix, metadata):
        if not state[f"{prefix}bias"].requires_grad:
            state[f"{prefix}bias"] = -state[f"{prefix}bias"]

    module.register_state_dict_post_hook(negate_bias)
    return module


SAVED_MODULES = MODULES | {
    "tied": make_tied_module,
    "normed": lambda: conv_batchnorm(3, 16),
    "own loading": lambda: Doubling(3, 2),
    "hook": make_module_with_load_hook,
    "dtypes": make_mixed_dtype_module,
    "own saving": lambda: Negated(3, 2),
    "saving hook": make_module_with_save_hook,
    "partly saved": make_partly_saved_module,
    "complex": lambda: nn.Linear(3, 2, dtype=torch.complex64),
}


@pytest.mark.parametrize("make", SAVED_MODULES.values(), ids=SAVED_MODULES)
def test_a_bound_module_packs_the_bits_of_its_state_dict(make):
    torch.manual_seed(0)
    module = make()
    packed = Layout.of(module).bind(module).pack()
    expected = Layout.of(module).pack(copy.deepcopy(module).state_dict())
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.zero_()  # the vectors are new memory
    assert_same(vars(packed), vars(expected))
    assert not any(value.requires_grad for value in vars(packed).values())


def test_a_module_that_has_changed_is_refused_by_name():
    module = nn.Sequential(nn.Linear(3, 2))
    layout = Layout.of(module)
    module.append(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has unknown"):
        layout.bind(module).pack()
    with pytest.raises(ValueError, match=r"'0\.weight' is"):
        layout.bind(nn.Sequential(nn.Linear(2, 3))).pack()


@pytest.mark.parametrize("make", SAVED_MODULES.values(), ids=SAVED_MODULES)
def test_load_into_gives_the_bits_of_load_state_dict(make):
    torch.manual_seed(0)
    source, fast, slow = make(), make(), make()
    layout = Layout.of(source)
    layout.load_into(fast, layout.pack(source.state_dict()))
    slow.load_state_dict(layout.unpack(layout.pack(source.state_dict())))
    assert_same(fast.state_dict(), slow.state_dict())
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in slow.named_parameters()]
