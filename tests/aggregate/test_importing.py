"""The kernels may be called while a module is being imported, when other threads cannot import anything."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_aggregating_inside_an_import_does_not_hang(tmp_path):
    (tmp_path / "aggregates.py").write_text(
        "import torch\n"
        "from fedheal import Layout, Updates, aggregate\n"
        "torch.set_num_threads(2)\n"
        "mean = aggregate.fedavg(kernel='cpu')\n"  # both passes start their threads in the same place; this compiles one
        "state = mean.init(Layout.flat(300_000))\n"
        "out = mean.apply(torch.zeros(300_000), Updates(range(9), torch.ones(9, 300_000), [1] * 9), state)\n"
    )
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}  # empty: everything is compiled anew
    code = "import os; os.environ.update(%r); import aggregates; print(float(aggregates.out.model[0]))" % environment  # noqa: UP031
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "1.0", done.stderr
