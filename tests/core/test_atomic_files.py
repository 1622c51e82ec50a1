"""Files that are whole whoever writes them at once, and on the disk when a function returns."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from disk_hooks import Operation, raise_disk_full, watch
from fedheal.core import atomic_files
from fedheal.core.atomic_files import sync_path, write_bytes, write_if_changed, write_text


def test_two_processes_that_write_a_file_at_once_both_leave_it_whole(tmp_path: Path) -> None:
    path, other = tmp_path / "table.json", [b"theirs, and longer"]

    def write_meanwhile(operation: Operation) -> None:
        if operation.kind == "fsync" and other:
            write_bytes(path, other.pop())

    with watch(tmp_path, write_meanwhile):
        write_bytes(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_folder_is_synced_after_a_file_appears_in_it(tmp_path: Path) -> None:
    seen: list[Operation] = []
    with watch(tmp_path, seen.append):
        write_text(tmp_path / "a.txt", "text")
    assert [operation.kind for operation in seen] == ["create", "write", "fsync", "rename", "fsync"]
    assert seen[-1].path == str(tmp_path)


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    with watch(tmp_path, raise_disk_full), pytest.raises(OSError, match="No space left on device") as error:
        write_text(tmp_path / "a.txt", "text")
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / "a.txt"))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_sync_folders_is_used_but_a_broken_one_is_an_error(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", raise_error)
    if number == errno.EINVAL:
        return sync_path(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        sync_path(tmp_path)
    return None


def test_only_old_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    old, new, others = (tmp_path / name for name in ("a.txt.1.tmp", "a.txt.2.tmp", "b.txt.1.tmp"))
    for path in (old, new, others):
        path.touch()
    for path in (old, others):
        os.utime(path, (0, 0))
    write_text(tmp_path / "a.txt", "text")
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", new.name, others.name}


def test_a_text_that_is_there_already_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_if_changed(tmp_path / "a.txt", "text")
    monkeypatch.setattr(atomic_files, "write_text", lambda *_: pytest.fail("it was written"))
    write_if_changed(tmp_path / "a.txt", "text")
