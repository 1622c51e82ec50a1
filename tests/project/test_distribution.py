"""The wheel and the source distribution: the same bytes from the same source, complete, and at work without a network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

import fedheal

ROOT = Path(__file__).parents[2]

# Imports every module, runs and reports, and prints what reached for the network.
PROGRAM = """
import importlib, pkgutil, socket, sys

reached = []

def watch(event, arguments):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and arguments[0].family != socket.AF_UNIX):
        reached.append(arguments[-1])

sys.addaudithook(watch)
if sys.argv[1:] == ["reach"]:
    try:
        socket.create_connection(("192.0.2.1", 9), timeout=1)
    except OSError:
        pass
else:
    sys.path.insert(0, "wheel")
    import fedheal
    for module in pkgutil.walk_packages(fedheal.__path__, "fedheal."):
        if not module.name.endswith(("cuda", "stacked_kernels", "__main__")):
            importlib.import_module(module.name)
    fedheal.run(fedheal.Experiment(method="fedavg", data="embedded", rounds=1, steps=1), "run")
    fedheal.make_report("run").write_html("page.html")
    print(fedheal.__file__)
print(reached)
"""


def build_distributions(source: Path, out: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git tracks, with other times."""
    copy = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def run_without_network(folder: Path, *words: str) -> list[str]:
    """Run the program in a network namespace without interfaces; return the lines it prints."""
    command = ["unshare", "--net", sys.executable, "-W", "ignore", "-c", PROGRAM, *words]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_builds_are_the_same_bytes_complete_and_run_without_a_network(sources, tmp_path):
    first = build_distributions(sources, tmp_path / "first")
    for path in sources.rglob("*.py"):
        os.utime(path, (time.time() + 1e6,) * 2)
    assert build_distributions(sources, tmp_path / "second") == first
    assert len(first) == 2
    wheel, source = (next((tmp_path / "first").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(p.relative_to(sources / "src")) for p in (sources / "src").rglob("*") if p.is_file()}
    extra = packed - expected
    assert not expected - packed
    assert {name.partition("/")[0] for name in extra} == {f"fedheal-{fedheal.__version__}.dist-info"}
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "constraints.txt", "src/fedheal/__init__.py", "Makefile"} <= names
    # The wheel alone, in another folder: no import, run or report reaches for the network.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        "wheel",
        str(wheel),
    ]
    subprocess.run(pip, cwd=tmp_path, check=True, capture_output=True)
    printed = run_without_network(tmp_path)
    assert printed[-2:] == [str(tmp_path / "wheel" / "fedheal" / "__init__.py"), "[]"]
    assert (tmp_path / "page.html").exists()
    assert "192.0.2.1" in run_without_network(tmp_path, "reach")[-1]  # which the watch would have seen
