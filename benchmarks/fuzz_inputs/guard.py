"""Watch one input: its time, its memory, the files it writes, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree"}


# Every so many limits on the clock an input must have used some processor time. With less it waits for something. With more it
# is only slow, because other programs run, too.
WAITING_FACTOR = 6
LEAST_SECONDS = 1.0


class Broken(Exception):
    """An input broke a promise."""


class Hang(BaseException):
    """An input took too long. This is no Exception, which the code under test might catch."""


@dataclass(frozen=True)
class Limits:
    """What an input may take.

    `seconds` are processor time. After six times as many on the clock an input that has used almost none counts as waiting.
    `patience`: seconds of processor time until a command is interrupted as by Ctrl-C.
    """

    seconds: float = 10.0
    megabytes: int = 1024
    patience: float | None = None


class WriteWatch:
    """An audit hook that notes what this process changes outside the allowed folders."""

    def __init__(self, allowed: list[Path]) -> None:
        self.allowed = tuple(f"{path.resolve()}{os.sep}" for path in allowed)
        self.strays: list[str] = []
        self.is_on = False
        sys.addaudithook(self._handle_event)

    def _handle_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open":
            path, mode, flags = arguments
            is_write = any(c in mode for c in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITING)
            if is_write:
                self._note_path(event, path)
        elif event in CHANGES:
            paths = arguments[: 2 if event in ("os.rename", "os.link") else 1]
            # A name relative to an open folder comes with that folder's descriptor. It was checked when it was opened.
            if all(place == -1 for place in arguments[len(paths) :] if isinstance(place, int) and event != "os.mkdir"):
                for path in paths:
                    self._note_path(event, path)

    def _note_path(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):  # a descriptor
            return
        text = os.fsdecode(path)
        place = os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))
        if not f"{place}{os.sep}".startswith((*self.allowed, "/dev/", "/proc/")) and "__pycache__" not in place:
            self.strays.append(f"{event} {place}")


def list_files(folders: list[Path]) -> set[str]:
    return {os.path.join(place, name) for folder in folders for place, _, names in os.walk(folder) for name in names}


def read_status(key: str) -> int:
    """Return a number of /proc/self/status in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) // 1024
    raise LookupError(key)


class Guard:
    """Runs attempts under limits. The files in the folders of `kept_clean` must not change."""

    def __init__(self, limits: Limits, watch: WriteWatch, kept_clean: list[Path]) -> None:
        self.limits, self.watch, self.kept_clean = limits, watch, kept_clean
        self.before = list_files(kept_clean)
        self.most_megabytes, self.most_seconds = 0, 0.0

    def run(self, attempt: Callable[[], str]) -> str:
        """Return the result of an attempt. Raise its error, `Hang`, or `Broken`."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
        start, began = read_status("VmRSS"), time.process_time()
        self.watch.strays.clear()
        with self._limit_time():
            self.watch.is_on = True
            try:
                outcome = attempt()
            finally:
                self.watch.is_on = False
        growth = read_status("VmHWM") - start
        self.most_megabytes = max(self.most_megabytes, growth)
        self.most_seconds = max(self.most_seconds, time.process_time() - began)
        if growth > self.limits.megabytes:
            raise Broken(f"it took {growth} MB of memory")
        if self.watch.strays:
            raise Broken(f"it wrote elsewhere: {', '.join(self.watch.strays[:3])}")
        if (now := list_files(self.kept_clean)) != self.before:
            new, self.before = now ^ self.before, now
            raise Broken(f"it left or took files: {', '.join(sorted(new)[:3])}")
        return outcome

    @contextmanager
    def _limit_time(self) -> Iterator[None]:
        patience, used = self.limits.patience, time.process_time()
        deadline = used + self.limits.seconds

        def on_alarm(number: int, frame: FrameType | None) -> None:
            nonlocal used
            if time.process_time() - used < LEAST_SECONDS:
                raise Hang
            used = time.process_time()

        def on_processor_time(number: int, frame: FrameType | None) -> None:
            if time.process_time() >= deadline or patience is None:
                raise Hang
            if Interruptible.is_entered:  # again and again: an interrupt in a finaliser is lost
                signal.raise_signal(signal.SIGINT)

        before = signal.signal(signal.SIGALRM, on_alarm), signal.signal(signal.SIGPROF, on_processor_time)
        signal.setitimer(signal.ITIMER_REAL, WAITING_FACTOR * self.limits.seconds, WAITING_FACTOR * self.limits.seconds)
        signal.setitimer(signal.ITIMER_PROF, patience or self.limits.seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGALRM, before[0])
            signal.signal(signal.SIGPROF, before[1])


class Interruptible:
    """A `with` block in which a command runs that Ctrl-C may end."""

    is_entered = False

    def __enter__(self) -> None:
        Interruptible.is_entered = True

    def __exit__(self, *error: object) -> None:
        Interruptible.is_entered = False
