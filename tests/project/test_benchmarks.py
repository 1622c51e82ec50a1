"""Benchmarks that need a GPU or Flower: what they say without, and to words that mean nothing."""

from __future__ import annotations

import importlib
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedheal
from fedheal import methods
from fedheal.data import load_dataset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--data", "tiny_data:load", "--device", "cpu", "model=tiny_data:linear"]


@pytest.fixture
def benchmark(monkeypatch):
    """A function that runs a benchmark's `main` with these arguments."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def call(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        importlib.import_module(name).main()

    return call


def assert_refused(benchmark, capsys, message, name, *words):
    with pytest.raises(SystemExit) as end:
        benchmark(name, *words)
    seen = capsys.readouterr()
    assert end.value.code == 2
    assert message in seen.err
    assert len(seen.err.splitlines()) == 1
    assert seen.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda:99"], "device = 'cuda:99' cannot be used here"),
        (["--data", "nope", "--device", "cpu"], "there is no data set 'nope'"),
        ([*TINY, "foo=1"], "unknown field 'foo'"),
        ([*TINY, "rounds=0"], "rounds = 0"),
        ([*TINY, "engine=lanes"], "engine cannot be given as engine=lanes"),
        ([*TINY, "samples_per_client=1000"], "2 clients with 1000 samples each need 2000"),
        ([*TINY, "--repeats", "0"], "repeats = 0: a spread needs at least 2"),
        ([*TINY, "--repeats", "1"], "repeats = 1: a spread needs at least 2"),
        ([*TINY, "--at-a-time", "0"], "at-a-time = 0: use 1 or more"),
        ([*TINY, "--vary", "seed", "init_seed=3"], "init_seed cannot be given as init_seed=3"),
    ],
)
def test_agreement_of_nothing_is_a_sentence(benchmark, capsys, words, message):
    assert_refused(benchmark, capsys, message, "agreement", *words)


@pytest.mark.slow
@pytest.mark.parametrize(("varied", "what"), [("lr", "2 repeats of one seed"), ("seed", "2 seeds")])
def test_agreement_says_that_a_cpu_has_nothing_to_compare(benchmark, capsys, varied, what):
    benchmark("agreement", *TINY, "--repeats", "2", "--at-a-time", "1", "--vary", varied, "rounds=1")
    out = capsys.readouterr().out
    assert what in out.splitlines()[0]
    assert "| serial | " in out
    assert "lanes |" not in out
    assert out.splitlines()[-1] == "Nothing is compared: a CPU has one engine, and lanes need a GPU."


@pytest.mark.parametrize(("varied", "fields"), [("lr", {"lr"}), ("seed", {"init_seed", "batch_seed"})])
def test_the_repeats_of_an_agreement_differ_in_what_is_varied_alone(monkeypatch, varied, fields):
    monkeypatch.syspath_prepend(BENCHMARKS)
    options = SimpleNamespace(vary=varied, repeats=3)
    changes = importlib.import_module("agreement").list_changes(options, lr=0.1)
    assert [set(change) for change in changes] == [fields] * 3
    assert len({tuple(change.values()) for change in changes}) == 3


def test_an_agreement_over_seeds_compares_pairs(monkeypatch):
    """Seeds that differ by 10 points hide a difference of 1 between two engines, unless each pair is subtracted."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    compare = importlib.import_module("agreement").compare
    first = np.array([[50.0], [60.0], [70.0], [80.0]])
    second = first - np.array([[1.1], [0.9], [1.0], [1.0]])
    for paired, is_shown in ((True, True), (False, False)):
        difference, p_values = compare(first, second, paired)
        assert difference == pytest.approx([1.0])
        assert (p_values < 0.05).tolist() == [is_shown]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "lanes"], "engines = lanes: cohort and lanes need a GPU; serial and plain run on a CPU"),
        (["--engines", "serial,threads"], "engines = serial,threads: there is no 'threads'"),
        (["--rounds", "0"], "rounds = 0: use 1 or more"),
        (["--methods", "fedhael"], "there is no method part 'fedhael' (did you mean 'fedheal'?)"),
        (["--methods", "scaffold", "--engines", "plain"], "the plain loop knows fedavg alone"),
    ],
)
def test_a_simulation_of_nothing_is_a_sentence(benchmark, capsys, words, message):
    assert_refused(benchmark, capsys, message, "simulate", "--device", "cpu", *words)


def test_aggregation_on_a_gpu_without_one_is_a_sentence(benchmark, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(benchmark, capsys, "there is no GPU here", "aggregate_gpu")


@pytest.mark.parametrize("name", ["kernels", "convolutions"])
def test_kernels_without_a_gpu_are_a_sentence(benchmark, capsys, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(benchmark, capsys, "no GPU is available", name)


@pytest.mark.parametrize("name", ["chaos", "flower", "soak"])
def test_a_federation_without_flower_is_a_sentence(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.delitem(sys.modules, "fedheal.flower", raising=False)
    for module in ("flwr", "flwr.serverapp"):
        monkeypatch.setitem(sys.modules, module, None)
    assert_refused(
        lambda script: runpy.run_path(str(script)),
        capsys,
        "fedheal.flower needs Flower",
        BENCHMARKS / f"{name}.py",
    )


def test_actors_without_ray_are_a_sentence(benchmark, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert_refused(benchmark, capsys, "Ray is not installed", "over_machines", "--tasks", "thin")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("chaos", ["--rounds", "0"], "argument --rounds: '0' is not a whole number of at least 1"),
        ("chaos", ["--seconds", "nan"], "argument --seconds: 'nan' is not a finite number above 0"),
        ("fuzz", ["--inputs", "-5"], "argument --inputs: '-5' is not a whole number of at least 1"),
        ("fuzz", ["--jobs", "0"], "argument --jobs: '0' is not a whole number of at least 1"),
        ("kills", ["--kills", "-1"], "argument --kills: '-1' is not a whole number of at least 1"),
        ("kills", ["--seconds", "-3"], "argument --seconds: '-3' is not a finite number above 0"),
        ("simulate", ["--lanes", "0"], "argument --lanes: '0' is not a whole number of at least 1"),
        ("soak", ["--rounds", "0"], "argument --rounds: '0' is not a whole number of at least 1"),
        *((name, ["--out", __file__], "is a file: name another folder") for name in ("chaos", "fuzz", "kills", "soak")),
    ],
)
def test_a_trial_of_nothing_or_into_a_file_is_a_sentence(tmp_path, name, words, message):
    out = [] if name == "simulate" or "--out" in words else ["--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, *out]
    end = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert end.returncode == 2
    assert message in end.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("apply_norm", "normalisation"),
        (
            "void at::native::batch_norm_transform_input_channels_last_kernel<c10::BFloat16, float, float, 4>",
            "normalisation",
        ),
        ("sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64", "convolutions"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<3>>",
            "optimiser and other",
        ),
        ("Memset (Device)", "copies and casts"),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align2>",
            "everything else",
        ),
    ],
)
def test_kernels_are_told_apart_by_their_names(monkeypatch, name, kind):
    monkeypatch.syspath_prepend(BENCHMARKS)
    assert importlib.import_module("kernels").find_kind(name).startswith(kind)


def test_every_kernel_of_our_own_has_a_kind(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    source = "".join(path.read_text() for path in Path(fedheal.__file__).parent.glob("*/_*_cuda.py"))
    compiled = set(re.findall(r"@triton\.jit.*\ndef (\w+)\(", source))
    called = {name for name in compiled if re.search(rf"(?<!def )\b{name}\(", source)}  # by kernels, as a part of them
    assert compiled - called == set(importlib.import_module("kernels").OWN_KERNELS)


@pytest.fixture
def search(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("search")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], "jobs = 0: use 1 or more"),
        (["--seeds", "x"], "seeds = x"),
        (["--device", "cuda:99"], "device = 'cuda:99' cannot be used here"),
        (["--candidates", "fedhael"], "there is no method part 'fedhael' (did you mean 'fedheal'?)"),
        (["foo=1"], "unknown field 'foo'"),
    ],
)
def test_a_search_of_nothing_is_a_sentence(benchmark, capsys, tmp_path, words, message):
    assert_refused(benchmark, capsys, message, "search", *words, "--out", str(tmp_path))


def test_held_out_images_are_training_images_that_no_client_holds(search):
    embedded = load_dataset("embedded")
    held_out = search.hold_out(embedded, 100)
    for before, now, needed in zip(embedded.domains, held_out.domains, (1200, 1200, 900, 240), strict=True):
        assert len(now.train) == needed
        rows = [{image.numpy().tobytes() for image in s.images} for s in (before.train, now.train, now.test)]
        assert rows[1] | rows[2] == rows[0]
        assert len(now.train) + len(now.test) == len(before.train)
    other = search.hold_out(embedded, 101)
    assert not torch.equal(other["display"].test.images, held_out["display"].test.images)
    assert torch.equal(search.hold_out(embedded, 100)["display"].test.images, held_out["display"].test.images)


def test_more_than_enough_images_are_not_all_held_out(search, monkeypatch):
    monkeypatch.setattr(search, "HELD_OUT", 50)
    held_out = search.hold_out(load_dataset("embedded"), 0)
    assert [len(domain.test) for domain in held_out.domains] == [50] * 4


def test_the_margin_is_the_smallest_gain_over_all_controls(search):
    """AVG, STD less uniform: +2, -3; less FedHEAL: +1, -4; less uniform with FedAdam: +5, -0.5; seed 2 is unpaired."""
    runs = {
        "fedavg+uniform": {1: {"avg": 70.0, "std": 9.0}},
        "fedavg+fedheal": {1: {"avg": 71.0, "std": 10.0}},
        "fedavg+uniform+fedadam": {1: {"avg": 67.0, "std": 6.5}},
        "fedavg+afl": {1: {"avg": 72.0, "std": 6.0}, 2: {"avg": 0.0, "std": 99.0}},
        "fedavg+afl+fedadam": {1: {"avg": 72.0, "std": 6.0}},
    }
    assert search.compute_margin(runs, "fedavg+afl") == 1
    assert search.compute_margin(runs, "fedavg+afl+fedadam") == 0.5
    assert math.isnan(search.compute_margin(runs, "fedavg+uniform"))
    assert math.isnan(search.compute_margin({"fedavg+afl": runs["fedavg+afl"]}, "fedavg+afl"))


def test_every_candidate_of_the_search_is_in_its_plan(search):
    plan = (BENCHMARKS.parent / "docs" / "search-plan.md").read_text()
    stages = {part for name in search.CANDIDATES for part in name.split("+")}
    names = [methods.get(name).name for name in [*search.CONTROLS, *search.CANDIDATES]]
    assert len(set(names)) == len(names)
    assert [part for part in stages if part not in plan and part != "fedavg"] == []


@pytest.mark.slow
def test_a_search_runs_once_and_prints_the_best_first(benchmark, capsys, tmp_path):
    tiny = ["samples_per_client=8", "epochs=1", "--seeds", "100", "--rounds", "1", "--out", str(tmp_path)]
    benchmark("search", *tiny, "--candidates", "afl+mix")
    first = capsys.readouterr()
    assert "3 runs, 3 to do" in first.err
    listed = [line.split("`")[1] for line in first.out.splitlines() if line.startswith("| `")]
    assert listed == ["fedavg+afl+mix", "fedavg+fedheal", "fedavg+uniform"]
    benchmark("search", *tiny, "--candidates", "afl+mix")
    again = capsys.readouterr()
    assert "3 runs, 0 to do" in again.err
    assert again.out == first.out
