"""Kernels that are compiled before they are used: with a stand-in, since no kernel runs on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fedheal.models.kernel_launches import allocate_output, compile_in_parallel, launch


class Kernel:
    def __init__(self, name):
        self.fn, self.launched, self.compiled, self.loaded = SimpleNamespace(__name__=name), [], [], 0

    def __getitem__(self, grid):
        return lambda *args, **settings: self.launched.append((grid, args, settings))

    def warmup(self, *args, grid, **settings):
        self.compiled.append((grid, args, settings))
        return self

    @property
    def run(self):
        self.loaded += 1


def test_kernels_are_compiled_once_each_and_not_launched():
    kernel, other = Kernel("one"), Kernel("other")

    def run():
        labels = allocate_output((4,), torch.int64, torch.device("cpu"))
        assert torch.equal(labels, torch.zeros(4, dtype=torch.int64))
        for number in (3, 5, 16):
            launch(kernel, (number,), labels, number, block=8)
        launch(other, (1,), labels, 2.5)

    called = []
    compile_in_parallel(run, torch.device("cpu"), meanwhile=lambda: called.append(1))
    assert called == [1]
    assert kernel.launched == other.launched == []
    assert [args[1] for _, args, _ in kernel.compiled] == [3, 16]  # a multiple of 16 has a kernel of its own
    assert len(other.compiled) == 1
    assert (kernel.loaded, other.loaded) == (2, 1)  # with what launches them
    launch(other, (2, 3), 1.0, block=4)
    assert other.launched == [((2, 3), (1.0,), {"block": 4})]


def test_kernels_are_compiled_for_each_shape_of_a_descriptor():
    kernel = Kernel("boxes")

    def run():
        for size in (16, 32, 16):
            launch(kernel, (1,), SimpleNamespace(base=torch.empty(4), block_shape=[size, 8]))

    compile_in_parallel(run, torch.device("cpu"))
    assert [args[0].block_shape for _, args, _ in kernel.compiled] == [[16, 8], [32, 8]]
