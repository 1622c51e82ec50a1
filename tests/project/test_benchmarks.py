"""Benchmarks that need a GPU: what they say without one, and to words that mean nothing."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import fedheal

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--data", "tiny_data:load", "--device", "cpu", "model=tiny_data:linear"]


@pytest.fixture
def benchmark(monkeypatch):
    """Runs a benchmark's `main` with these words."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def call(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        importlib.import_module(name).main()

    return call


def assert_refused(benchmark, capsys, said, name, *words):
    with pytest.raises(SystemExit) as end:
        benchmark(name, *words)
    seen = capsys.readouterr()
    assert end.value.code == 2
    assert said in seen.err
    assert len(seen.err.splitlines()) == 1
    assert seen.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
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
    ],
)
def test_agreement_of_nothing_is_a_sentence(benchmark, capsys, words, said):
    assert_refused(benchmark, capsys, said, "agreement", *words)


@pytest.mark.slow
def test_agreement_says_that_a_cpu_has_nothing_to_compare(benchmark, capsys):
    benchmark("agreement", *TINY, "--repeats", "2", "--at-a-time", "1", "rounds=1")
    out = capsys.readouterr().out
    assert "| serial | " in out
    assert "lanes |" not in out
    assert out.splitlines()[-1] == "Nothing is compared: there is one engine on a CPU, and lanes need a GPU."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engines", "lanes"], "engines = lanes: cohort and lanes need a GPU; serial and plain run on a CPU"),
        (["--engines", "serial,threads"], "engines = serial,threads: there is no 'threads'"),
        (["--rounds", "0"], "rounds = 0: use 1 or more"),
        (["--methods", "fedhael"], "there is no method part 'fedhael' (did you mean 'fedheal'?)"),
        (["--methods", "scaffold", "--engines", "plain"], "the plain loop knows fedavg alone"),
    ],
)
def test_a_simulation_of_nothing_is_a_sentence(benchmark, capsys, words, said):
    assert_refused(benchmark, capsys, said, "simulate", "--device", "cpu", *words)


def test_aggregation_on_a_gpu_without_one_is_a_sentence(benchmark, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(benchmark, capsys, "there is no GPU here", "aggregate_gpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_apply", "normalisation"),
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
    assert importlib.import_module("kernels").kind_of(name).startswith(kind)


def test_every_kernel_of_our_own_has_a_kind(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    models = Path(fedheal.__file__).parent / "models"
    source = "".join((models / f"{name}.py").read_text() for name in ("_fused_norm_cuda", "_stacked_cuda"))
    assert set(re.findall(r"@triton\.jit.*\ndef (\w+)\(", source)) == set(importlib.import_module("kernels").OURS)
