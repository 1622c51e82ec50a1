"""A network namespace with nothing but loopback, for tests that start servers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def loopback() -> Iterator[list[str]]:
    """Make a namespace and yield the command prefix that runs a process in it; stop what still runs there, each by its id."""
    name = f"fedheal-{uuid.uuid4().hex[:8]}"
    inside = ["ip", "netns", "exec", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        yield inside
    finally:
        _stop(name)
        subprocess.run(["ip", "netns", "delete", name], check=True)


def list_pids(inside: list[str]) -> list[int]:
    """Return the processes in the namespace."""
    listed = subprocess.run(["ip", "netns", "pids", inside[-1]], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def _stop(name: str) -> None:
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience
        for pid in list_pids([name]):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while list_pids([name]) and time.monotonic() < deadline:
            time.sleep(0.2)
