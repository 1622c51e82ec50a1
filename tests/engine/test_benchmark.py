"""The benchmark of training on a CPU: it runs, and the ways it compares are ways of training the same network."""

from __future__ import annotations

import multiprocessing.dummy
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedheal.models import build

FOLDER = Path(__file__).parents[2] / "benchmarks"
PLAIN, SERIAL = "| plain loop, 1 thread |", "| 1 thread |"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import simulate_cpu

    return simulate_cpu


@pytest.mark.slow
def test_it_runs(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Threads replace the processes, which take seconds to start; that their arguments can be pickled is checked."""
    assert pickle.loads(pickle.dumps((benchmark.CPU_PROTOCOLS, benchmark.WAYS)))  # noqa: S301  (its own)
    threads, options = torch.get_num_threads(), ["--ways", "plain,serial", "--repeats", "1", "--examples", "4"]
    monkeypatch.setattr(benchmark, "get_context", lambda kind: multiprocessing.dummy)
    monkeypatch.setattr(sys, "argv", ["simulate_cpu.py", *options])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    try:
        benchmark.main()
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert "small: 20 clients, 80 training images, 16 test images" in text
    rows = [line for line in text.splitlines() if PLAIN in line or SERIAL in line]
    assert len(rows) == 2
    for row in rows:
        train, _, evaluate, total = (float(cell) for cell in row.split("|")[2:6])
        assert total > max(train, evaluate) > 0
    assert "1.00 x" in rows[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--ways", "serial,threds"], "there is no 'threds'; use some of plain,plain-threads,serial,"),
        (["--protocols", "digits"], "there is no 'digits'; use some of small,resnet10"),
        (["--repeats", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_what_it_cannot_do_is_said(
    options: list[str], sentence: str, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_cpu.py", *options])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", ["small_cnn", "resnet10"])
def test_channels_first_computes_the_same(name: str, benchmark: ModuleType) -> None:
    module = build(name, classes=10, width=4).eval()
    x = torch.randn(3, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(benchmark.Contiguous(module)(x), module(x))


def test_what_is_compiled_does_not_travel(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda step, dynamic: compiled.append(step) or step)
    module, x = benchmark.Compiled(build("small_cnn", classes=10)), torch.randn(3, 3, 32, 32)
    module.eval()(x)
    assert not compiled  # only what trains is
    for each in (module.train(), module, pickle.loads(pickle.dumps(module))):  # noqa: S301  (its own)
        each(x)
    assert len(compiled) == 2
