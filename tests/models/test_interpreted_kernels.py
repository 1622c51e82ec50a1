"""The Triton kernels compute what they should, in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from needs import skip_or_fail


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    """In a process of its own: kernels that were imported to be interpreted cannot run on a GPU any more."""
    if importlib.util.find_spec("triton") is None:
        skip_or_fail("Triton is not installed")
    folder = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder / "interpreted_kernels.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
