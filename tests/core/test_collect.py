"""Collecting replies one at a time: the same bits in memory and in a mapped file, and bad replies named and left out."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import tempfile
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedheal import Layout, Reply, Updates
from fedheal.aggregate import fedavg, fedheal, uniform
from fedheal.core.updates import Collector, gather_metrics
from needs import needs, skip_or_fail

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
AGGREGATORS = {
    "fedavg": fedavg,
    "uniform": uniform,
    "fedheal": fedheal,
    "released": lambda **k: fedheal(variant="released", **k),
    "fphl alone": lambda **k: fedheal(fael=False, **k),
    "fael alone": lambda **k: fedheal(fphl=False, **k),
    "exact": lambda **k: fedheal(fael="exact", **k),
    "exact-reg": lambda **k: fedheal(fael="exact-reg", **k),
    "exact, released": lambda **k: fedheal(fael="exact", variant="released", **k),
}


def make_replies(k=5, width=33, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(k, width, generator=generator, dtype=torch.float64).to(dtype)
    return [(f"c{i}", deltas[i], 10 + i) for i in range(k)]


def to_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def temporary_files(monkeypatch):
    """The folders of all temporary files that were created."""
    folders, original = [], tempfile.TemporaryFile

    def record_file(*args, **kwargs):
        folders.append(kwargs.get("dir"))
        return original(*args, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", record_file)
    return folders


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mapped_matrix_has_the_same_bits(dtype, temporary_files):
    replies = make_replies(dtype=dtype)
    inside = Updates.collect(replies)
    assert temporary_files == []
    outside = Updates.collect(replies, budget=0)
    assert len(temporary_files) == 1
    assert outside.deltas.dtype == inside.deltas.dtype == dtype
    assert to_bytes(outside.deltas) == to_bytes(inside.deltas) == b"".join(to_bytes(delta) for _, delta, _ in replies)
    assert outside.clients == inside.clients == ("c0", "c1", "c2", "c3", "c4")
    assert outside.num_examples.tolist() == [10, 11, 12, 13, 14]


def test_odd_bits_survive_the_file():
    patterns = torch.from_numpy(np.array([0x7FC00001, 0x7F800001, 0x80000000, 1, 0xFF800000], np.uint32).view(np.int32))
    replies = [("a", patterns.view(torch.float32), 1)]
    assert (
        to_bytes(Updates.collect(replies, budget=0).deltas)
        == to_bytes(Updates.collect(replies).deltas)
        == to_bytes(patterns)
    )


@pytest.mark.parametrize("budget", [None, 0])
def test_rows_of_any_memory_layout(budget):
    backwards, strided = np.arange(3.0)[::-1], np.arange(6.0)[::2]
    frozen = np.frombuffer(np.arange(3.0).tobytes())
    transposed = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).T[1]
    updates = Updates.collect(
        [(i, d, 1) for i, d in enumerate((backwards, strided, frozen, transposed, [7, 8.0, 9]))], budget
    )
    assert updates.deltas.tolist() == [[2, 1, 0], [0, 2, 4], [0, 1, 2], [1, 3, 5], [7, 8, 9]]


# A row is 3 float32, so 12 bytes.
@pytest.mark.parametrize(
    ("budget", "rows", "spilled"),
    [(None, 4, 0), (0, 1, 1), (11, 1, 1), (12, 1, 0), (12, 2, 1), (35, 3, 1), (36, 3, 0), (36, 4, 1), (0, 0, 0)],
)
def test_the_budget_counts_bytes_of_rows(temporary_files, budget, rows, spilled):
    replies = [(i, torch.full((3,), float(i)), 1) for i in range(rows)]
    updates = Updates.collect(iter(replies), budget)
    assert len(temporary_files) == spilled
    assert updates.deltas.tolist() == [[i] * 3 for i in range(rows)]


@pytest.mark.parametrize("budget", [-1, -(10**9)])
def test_a_negative_budget_is_refused(budget):
    with pytest.raises(ValueError, match=f"budget = {budget}: .*bytes"):
        Updates.collect([], budget)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="on_bad_update = 'ignore': use 'raise' or 'skip'"):
        Updates.collect([], on_bad_update="ignore")


def test_nobody_replied():
    for budget in (None, 0):
        updates = Updates.collect([], budget)
        assert (updates.clients, updates.deltas.shape[0]) == ((), 0)


@pytest.mark.parametrize("budget", [0, 800, None])
def test_a_reply_is_let_go_before_the_next_is_asked_for(budget):
    """Otherwise the replies would hold all updates in memory in spite of the budget."""
    references, most = [], 0

    def stream():
        nonlocal most
        for i in range(10):
            delta = np.full(100, float(i))
            references.append(weakref.ref(delta))
            yield (i, delta, 1)
            del delta
            most = max(most, sum(ref() is not None for ref in references))

    updates = Updates.collect(stream(), budget)
    assert updates.deltas[:, 0].tolist() == list(range(10))
    assert most <= 1


def test_what_was_collected_does_not_change_with_what_was_sent():
    delta, buffers, counters = np.ones(2), np.ones(1), np.ones(1, np.int64)
    updates = Updates.collect([("a", delta, 1, buffers, counters)])
    for array in (delta, buffers, counters):
        array[:] = 9
    assert (updates.deltas.tolist(), updates.buffers.tolist(), updates.counters.tolist()) == ([[1, 1]], [[1]], [[1]])


@pytest.mark.slow
def test_the_file_has_no_name_and_goes_with_the_matrix(tmp_path, temporary_files):
    if not Path("/proc/self/fd").exists():
        skip_or_fail("open files are counted in /proc, which is not here")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        updates = Updates.collect(make_replies(), budget=0, folder=str(tmp_path))
        assert temporary_files == [str(tmp_path)]
        assert list(tmp_path.iterdir()) == []
        assert updates.deltas.sum() != 0
        del updates
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []
    assert [str(w.message) for w in warned if w.category is ResourceWarning] == []


def test_the_file_goes_when_a_later_reply_is_refused(tmp_path):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="client 'b'"):
            Updates.collect([("a", np.ones(3), 1), ("b", np.ones(4), 1)], budget=0, folder=str(tmp_path))
        gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert [str(w.message) for w in warned if w.category is ResourceWarning] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_aggregator_gives_the_same_bits_on_a_mapped_matrix(name, dtype):
    aggregator, finals = AGGREGATORS[name](), []
    for budget in (None, 0):
        model, state = torch.zeros(33, dtype=torch.float64 if dtype == torch.float64 else torch.float32), None
        state = aggregator.init(Layout.flat(33))
        for seed in range(3):
            out = aggregator.apply(model, Updates.collect(make_replies(dtype=dtype, seed=seed), budget), state)
            model, state = out.model, out.state
        arrays, json = state.to_arrays()
        finals.append(
            (to_bytes(model), to_bytes(out.weights), {k: to_bytes(v) for k, v in arrays.items()}, json, out.report)
        )
    assert finals[0] == finals[1]
    assert bool(model.abs().max() > 0)


def test_the_first_reply_sets_the_dtype():
    replies = [
        ("a", np.ones(2, np.float32), 1),
        ("b", np.full(2, 1 / 3), 1),
        ("c", torch.ones(2, dtype=torch.bfloat16), 1),
    ]
    for budget in (None, 0):
        deltas = Updates.collect(replies, budget).deltas
        assert deltas.dtype == torch.float32
        assert deltas[1, 0].item() == np.float32(1 / 3)


BAD = {
    "another length": ("bad", np.ones(4), 1),
    "no vector": ("bad", np.ones((1, 3)), 1),
    "integers": ("bad", np.ones(3, np.int64), 1),
    "complex": ("bad", np.ones(3, np.complex64), 1),
    "words": ("bad", np.array(["a", "b", "c"]), 1),
    "nothing": ("bad", None, 1),
    "ragged": ("bad", [1.0, [2.0], 3.0], 1),
    "examples in words": ("bad", np.ones(3), "many"),
    "no examples": ("bad", np.ones(3), None),
    "two numbers of examples": ("bad", np.ones(3), torch.ones(2)),
    "buffers of a model that has none": ("bad", np.ones(3), 1, np.ones(2)),
    "buffers in two dimensions": ("bad", np.ones(3), 1, np.ones((2, 2))),
    "a metric in words": ("bad", np.ones(3), 1, None, None, {"loss": "low"}),
    "metrics that are a list": ("bad", np.ones(3), 1, None, None, [1.0]),
    "metrics that are nothing": ("bad", np.ones(3), 1, None, None, None),
}


@pytest.mark.parametrize("flaw", BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_reply_is_named_and_left_out(flaw, place):
    replies = [("good", np.array([1.0, 2.0, 3.0]), 10), ("fine", np.array([4.0, 5.0, 6.0]), 30)]
    replies.insert(place, BAD[flaw])
    with pytest.raises(ValueError, match="client 'bad'") as refused:
        Updates.collect(replies, layout=Layout.flat(3))
    assert "\n" not in str(refused.value)
    for budget in (None, 0):
        updates = Updates.collect(replies, budget, on_bad_update="skip", layout=Layout.flat(3))
        assert updates.clients == ("good", "fine")
        assert updates.deltas.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert list(updates.refused) == ["bad"]
        aggregator = fedavg(on_bad_update="skip")
        out = aggregator.apply(np.zeros(3), updates, aggregator.init(Layout.flat(3)))
        # 10 and 30 examples: (1 + 3*4)/4, (2 + 3*5)/4, (3 + 3*6)/4.
        assert out.model.tolist() == [3.25, 4.25, 5.25]
        assert out.report["skipped"] == updates.refused
        assert len(out.weights) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (("bad", np.ones(4), 1), r"update has length 4 where length 3 is expected"),
        (("bad", np.ones(3, np.int32), 1), "int32; use float32, float64, bfloat16 or float16"),
        (("bad", np.ones(3), "many"), r"num_examples.*many"),
        (("bad", np.ones(3), 1, None, None, {"loss": "low"}), r"loss.*low"),
        (("bad", None, 1), "update"),
        (("bad",), r"client 'bad': its reply has 1 parts: give a Reply, or 3 to 7 of \('client', 'delta'"),
        (("bad", np.ones(3), 1, None, None, {}, "home", 8), "its reply has 8 parts"),
    ],
)
def test_the_reason_names_the_field_and_the_value(reply, message):
    with pytest.raises(ValueError, match=message):
        Updates.collect([("good", np.ones(3), 1), reply])


@pytest.mark.parametrize(
    "bad_reply",
    [5, None, {"client": "bad"}, "bad", np.ones(3), iter(("bad", np.ones(3), 1))],
    ids=["number", "nothing", "mapping", "text", "array", "iterator"],
)
def test_what_is_no_reply_at_all_is_refused_like_one_that_does_not_fit(bad_reply):
    replies = [("good", np.ones(3), 1), bad_reply]
    with pytest.raises(
        ValueError, match=r"^client '.*': its reply is an? .*: give a Reply, or \(client, delta, num_examples\)"
    ):
        Updates.collect(replies)
    updates = Updates.collect([("good", np.ones(3), 1), bad_reply], on_bad_update="skip")
    assert updates.clients == ("good",)
    assert len(updates.refused) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=str)
def test_a_client_of_which_one_reply_is_refused_is_left_out_altogether(order):
    """As with two valid replies of one client, nobody can say which is right."""
    replies = [("a", np.ones(3), 1), ("a", np.ones(2), 1), ("b", np.full(3, 5.0), 1)]
    updates = Updates.collect([replies[i] for i in order], on_bad_update="skip", layout=Layout.flat(3))
    for make in AGGREGATORS.values():
        aggregator = make(on_bad_update="skip")
        out = aggregator.apply(np.zeros(3), updates, aggregator.init(Layout.flat(3)))
        assert list(out.report["skipped"]) == ["a"]
        assert "update has length 2" in out.report["skipped"]["a"]
        assert dict(zip(updates.clients, out.weights.tolist(), strict=True)) == {"a": 0.0, "b": 1.0}
        assert out.model.tolist() == [5, 5, 5]
    strict = fedavg()
    with pytest.raises(ValueError, match="client 'a': its id occurs again in this cohort"):
        strict.apply(np.zeros(3), updates, strict.init(Layout.flat(3)))


def test_refused_and_bad_clients_are_both_reported():
    replies = [
        ("short", np.ones(2), 1),
        ("nan", np.array([1.0, np.nan, 1.0]), 1),
        ("good", np.ones(3), 1),
        ("none", np.ones(3), 0),
    ]
    updates = Updates.collect(replies, on_bad_update="skip", layout=Layout.flat(3))
    assert list(updates.refused) == ["short"]
    for make in AGGREGATORS.values():
        aggregator = make(on_bad_update="skip")
        out = aggregator.apply(np.zeros(3), updates, aggregator.init(Layout.flat(3)))
        assert set(out.report["skipped"]) == {"short", "nan", "none"}
        assert out.weights.tolist() == [0, 1, 0]
        assert out.model.tolist() == [1, 1, 1]


def test_everyone_refused_leaves_the_model():
    updates = Updates.collect([("a", np.ones(2), 1)], on_bad_update="skip", layout=Layout.flat(3))
    aggregator = fedheal(on_bad_update="skip")
    state = aggregator.init(Layout.flat(3))
    out = aggregator.apply(np.arange(3.0), updates, state)
    assert out.model.tolist() == [0, 1, 2]
    assert out.state is state
    assert list(out.report["skipped"]) == ["a"]


@pytest.mark.parametrize("who", ["first", "second"])
def test_counters_that_are_no_integers_spoil_only_their_own_client(who):
    layout = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))  # 4 parameters, 2 buffers, 1 counter
    whole, broken = np.array([3]), np.array([3.5])
    replies = [
        Reply("first", np.ones(4), 1, np.ones(2), broken if who == "first" else whole),
        Reply("second", np.ones(4), 1, np.ones(2), broken if who == "second" else whole),
    ]
    updates = Updates.collect(replies, on_bad_update="skip", layout=layout)
    assert list(updates.refused) == [who]
    assert updates.counters.tolist() == [[3]]


def test_metrics_that_are_tensors_are_joined_unless_a_client_sent_none():
    losses = torch.tensor([0.25, 0.5, torch.nan], dtype=torch.float32)
    replies_of = [
        Reply(f"c{i}", torch.zeros(2), 1, metrics={"loss": loss, "steps": i}) for i, loss in enumerate(losses)
    ]
    columns = gather_metrics(replies_of)
    torch.testing.assert_close(columns["loss"], losses.double(), rtol=0, atol=0, equal_nan=True)
    assert columns["steps"] == [0, 1, 2]
    columns = gather_metrics([*replies_of, Reply("c3", torch.zeros(2), 1, metrics={"lr": torch.tensor(0.5)})])
    assert columns["loss"][:2] == [0.25, 0.5]
    assert np.isnan(columns["loss"][2:]).all()
    assert columns["steps"][:3] == [0, 1, 2]
    assert columns["lr"][3] == 0.5


def test_a_metric_keeps_its_value_when_the_senders_tensor_changes():
    loss = torch.tensor(0.25)
    collector = Collector()
    collector.add(Reply("a", torch.zeros(2), 1, metrics={"loss": loss}))
    loss.fill_(7.0)
    assert collector.finish().metrics["loss"].tolist() == [0.25]


def test_buffers_counters_and_metrics_arrive():
    layout = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    replies = [Reply(i, np.ones(4), 1, np.full(2, float(i)), np.array([i]), {"loss": i / 2}) for i in range(3)]
    updates = Updates.collect(replies, budget=0, layout=layout)
    assert updates.buffers.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert updates.counters.tolist() == [[0], [1], [2]]
    assert updates.metrics["loss"].tolist() == [0, 0.5, 1]


@pytest.mark.parametrize(
    "odd",
    [
        Reply("b", np.ones(4), 1),
        Reply("b", np.ones(4), 1, np.ones(3), np.array([1]), {"loss": 1}),
        Reply("b", np.ones(4), 1, np.ones(2), np.array([1, 2]), {"loss": 1}),
    ],
)
def test_a_reply_with_other_parts_than_the_rest_is_refused(odd):
    layout = Layout.of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    good = Reply("a", np.ones(4), 1, np.ones(2), np.array([1]), {"loss": 1})
    with pytest.raises(ValueError, match="client 'b'"):
        Updates.collect([good, odd], layout=layout)
    assert Updates.collect([good, odd], on_bad_update="skip", layout=layout).clients == ("a",)


SMALL_AND_LARGE = [100, 3000]  # float64 a row: below and above what a buffered file holds back


@pytest.mark.parametrize("width", SMALL_AND_LARGE)
def test_a_file_that_may_not_grow_is_told_in_a_sentence(tmp_path, width):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"memory budget.*folder with room") as refused:
            Updates.collect(((i, np.ones(width), 1) for i in range(200)), budget=0, folder=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "width"), [(82, 100), (200, 100), (200, 3000)]
)  # 82 * 800 bytes: only the last overflow
def test_a_full_disk_is_told_in_a_sentence(tmp_path, rows, width):
    needs("root", "tmpfs")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        skip_or_fail("mounting a file system is not permitted here")
    try:
        with pytest.raises(OSError, match=r"memory budget.*folder with room") as refused:
            Updates.collect(((i, np.ones(width), 1) for i in range(rows)), budget=0, folder=str(tmp_path))
        assert str(tmp_path) in str(refused.value)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.collect()
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # the traceback may still hold the file


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match="missing"):
        Updates.collect([("a", np.ones(3), 1)], budget=0, folder=str(tmp_path / "missing"))


def test_a_metric_that_a_client_did_not_send_is_nan():
    updates = Updates.collect(
        [("a", np.ones(2), 1, None, None, {"loss": 1}), ("b", np.ones(2), 1, None, None, {"steps": 2})]
    )
    assert updates.metrics["loss"][0] == 1
    assert updates.metrics["loss"].isnan().tolist() == [False, True]
    assert updates.metrics["steps"].isnan().tolist() == [True, False]


def test_updates_are_kept_in_the_dtype_of_the_first():
    for budget in (None, 0):
        updates = Updates.collect([("a", np.ones(2, np.float32), 1), ("b", np.full(2, 1 / 3), 1)], budget)
        assert updates.deltas.dtype == torch.float32
        assert updates.deltas[1].tolist() == [float(np.float32(1 / 3))] * 2


def test_rows_of_one_matrix_are_kept_where_they_are() -> None:
    matrix = torch.randn(4, 7)
    deltas = Updates.collect([(str(i), matrix[i], 1) for i in range(4)], keep=True).deltas
    assert deltas.data_ptr() == matrix.data_ptr()
    assert torch.equal(deltas, matrix)
    part = Updates.collect([(str(i), matrix[i], 1) for i in (1, 2)], keep=True).deltas
    assert part.data_ptr() == matrix[1].data_ptr()
    assert torch.equal(part, matrix[1:3])
    copied = Updates.collect([(str(i), matrix[i], 1) for i in range(4)]).deltas
    assert copied.data_ptr() != matrix.data_ptr()
    padded = torch.randn(4, 16)[:, :7]
    deltas = Updates.collect([(str(i), padded[i], 1) for i in range(4)], keep=True).deltas
    assert deltas.data_ptr() == padded.data_ptr()
    assert torch.equal(deltas, padded)


def test_buffers_and_counters_that_are_rows_of_a_matrix_are_kept_where_they_are() -> None:
    buffers, counters = torch.randn(3, 4), torch.arange(6).view(3, 2)
    replies = [Reply(str(i), torch.ones(2), 1, buffers[i], counters[i]) for i in range(3)]
    kept, copied = Updates.collect(replies, keep=True), Updates.collect(replies)
    for updates in (kept, copied):
        assert updates.buffers is not None
        assert updates.counters is not None
        assert torch.equal(updates.buffers, buffers)
        assert torch.equal(updates.counters, counters)
        assert (updates.buffers.data_ptr() == buffers.data_ptr()) == (updates is kept)
        assert (updates.counters.data_ptr() == counters.data_ptr()) == (updates is kept)
    turned = Updates.collect([replies[2], replies[0]], keep=True)
    assert turned.buffers is not None
    assert torch.equal(turned.buffers, buffers[[2, 0]])


@pytest.mark.parametrize("rows", [(1, 0), (0, 2), (0, 0)], ids=str)
def test_rows_that_are_not_consecutive_are_put_together(rows: tuple[int, int]) -> None:
    matrix = torch.randn(3, 5)
    replies = [(f"c{i}", matrix[row], 1) for i, row in enumerate(rows)]
    assert torch.equal(Updates.collect(replies, keep=True).deltas, matrix[list(rows)])
    columns = [(f"c{i}", matrix.T[row], 1) for i, row in enumerate(rows)]
    assert torch.equal(Updates.collect(columns, keep=True).deltas, matrix.T[list(rows)])
