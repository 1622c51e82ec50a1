"""Tests that need more than Python: they skip with the reason, or fail where `FEDHEAL_TEST_ALL` says that all must run."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import torch


def needs(*things: str) -> None:
    """Skip unless this machine has all of: `root`, `netns`, `tmpfs`, `browser`, `gpu`, `data`, or a command by its name.

    A GPU and the real data sets cannot be installed: where they are missing a test skips even if all must run.
    """
    for thing in things:
        why = _MISSING[thing]() if thing in _MISSING else _command(thing)
        if why is None:
            continue
        if thing in ("gpu", "data"):
            pytest.skip(why)
        skip_or_fail(why)


def skip_or_fail(why: str) -> None:
    """Skip for this reason, or fail where all tests must run."""
    if os.environ.get("FEDHEAL_TEST_ALL"):
        pytest.fail(f"FEDHEAL_TEST_ALL is set, but {why}")
    pytest.skip(why)


def _root() -> str | None:
    return None if hasattr(os, "geteuid") and os.geteuid() == 0 else "this test must run as root"


def _tmpfs() -> str | None:
    return _root() or _command("mount")


def _netns() -> str | None:
    if _root() or _command("ip"):
        return _root() or _command("ip")
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "network namespaces cannot be made here"


def _browser() -> str | None:
    return (
        None
        if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
        else "no Chromium is installed"
    )


def _gpu() -> str | None:
    return None if torch.cuda.is_available() else "there is no CUDA device"


def _data() -> str | None:
    return None if os.environ.get("FEDHEAL_DATA") else "FEDHEAL_DATA names no folder with the real data sets"


def _command(name: str) -> str | None:
    return None if shutil.which(name) else f"the command '{name}' is not installed"


_MISSING = {"root": _root, "tmpfs": _tmpfs, "netns": _netns, "browser": _browser, "gpu": _gpu, "data": _data}
