"""Downloads from a server on this machine: checked, resumed, never half there."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import layouts
from fedheal import data
from fedheal.data import download
from fedheal.data.download import DownloadedFile, download_from_hub, download_from_web
from fedheal.data.specs import HubDataset, WebFile

BODY = bytes(range(256)) * 5000  # 1.28 MB


def ignore_progress(*_: object) -> None:
    pass


def compute_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Site:
    """A server's files, its behaviour, and the requests that it got."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks_after: list[int] = field(default_factory=list)  # bytes of each reply, one after the other
    ranges: bool = True
    tag: str = '"one"'
    asked: list[dict[str, str]] = field(default_factory=list)
    api: dict[str, Any] = field(default_factory=dict)  # JSON by address
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        site.asked.append({"path": self.path} | {k.lower(): v for k, v in self.headers.items()})
        path = self.path.split("?")[0]
        if path in site.api:
            self._send(200, json.dumps(site.api[path]).encode(), {"Content-Type": "application/json"})
        elif path in site.files:
            self._file(site.files[path])
        else:
            self._send(404, b"no such thing")

    do_HEAD = do_GET

    def _file(self, body: bytes) -> None:
        start, requested_range = 0, self.headers.get("Range", "")
        if (
            self.site.ranges
            and requested_range.startswith("bytes=")
            and self.headers.get("If-Range", self.site.tag) == self.site.tag
        ):
            start = int(requested_range.removeprefix("bytes=").split("-")[0])
        if start >= len(body):
            self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            return
        headers = {"ETag": self.site.tag, "X-Repo-Commit": "c" * 40, "X-Linked-Size": str(len(body))}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._send(206 if start else 200, body[start:], headers)

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.site.breaks_after.pop(0) if self.site.breaks_after else len(body)
        self.wfile.write(body[:cut])
        if cut < len(body):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"site": site}))
    site.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# A plain site


def test_a_file_with_a_known_checksum(site: Site, tmp_path: Path) -> None:
    site.files["/set/usps.bz2"] = BODY
    download = download_from_web(
        WebFile(f"{site.address}/set/usps.bz2", compute_sha256(BODY)), tmp_path / "usps", ignore_progress
    )
    assert download == DownloadedFile(tmp_path / "usps" / "usps.bz2", compute_sha256(BODY), True)
    assert download.path.read_bytes() == BODY
    assert list_names(tmp_path / "usps") == ["usps.bz2"]


def test_other_bytes_than_expected_are_not_kept(site: Site, tmp_path: Path) -> None:
    site.files["/usps.bz2"] = BODY
    with pytest.raises(ValueError, match=r"instead of 0000.*: the download was discarded"):
        download_from_web(WebFile(f"{site.address}/usps.bz2", "0" * 64), tmp_path, ignore_progress)
    assert list_names(tmp_path) == []


def test_where_no_checksum_is_known_the_first_download_records_it(site: Site, tmp_path: Path) -> None:
    site.files["/usps.bz2"] = BODY
    web = WebFile(f"{site.address}/usps.bz2")
    assert not download_from_web(web, tmp_path, ignore_progress).is_verified
    assert (tmp_path / "usps.bz2.sha256").read_text() == f"{compute_sha256(BODY)}  usps.bz2\n"
    (tmp_path / "usps.bz2").unlink()
    site.files["/usps.bz2"] = b"other bytes"
    with pytest.raises(ValueError, match="the download was discarded"):
        download_from_web(web, tmp_path, ignore_progress)
    assert list_names(tmp_path) == ["usps.bz2.sha256"]


def test_what_is_there_is_not_asked_for_again(site: Site, tmp_path: Path) -> None:
    site.files["/usps.bz2"] = BODY
    web = WebFile(f"{site.address}/usps.bz2", compute_sha256(BODY))
    download_from_web(web, tmp_path, ignore_progress)
    download_from_web(web, tmp_path, ignore_progress)
    assert len(site.asked) == 1
    (tmp_path / "usps.bz2").write_bytes(b"changed")
    with pytest.raises(ValueError, match="remove it and fetch again"):
        download_from_web(web, tmp_path, ignore_progress)


def test_connections_that_break_are_gone_on_with(site: Site, tmp_path: Path) -> None:
    site.files["/f.mat"] = BODY
    site.breaks_after = [500_000, 300_000]
    download = download_from_web(WebFile(f"{site.address}/f.mat", compute_sha256(BODY)), tmp_path, ignore_progress)
    assert download.path.read_bytes() == BODY
    assert [request.get("range") for request in site.asked] == [None, "bytes=500000-", "bytes=800000-"]


def test_a_stopped_download_goes_on_in_the_next_process(site: Site, tmp_path: Path, monkeypatch) -> None:
    site.files["/f.mat"] = BODY
    site.breaks_after = [400_000]
    monkeypatch.setattr(download, "MAX_ATTEMPTS", 1)
    with pytest.raises(ValueError, match=r"ended after 400,000 of 1,280,000 bytes.*rerun the command to resume"):
        download_from_web(WebFile(f"{site.address}/f.mat"), tmp_path, ignore_progress)
    assert list_names(tmp_path) == ["f.mat.part", "f.mat.part.etag"]
    downloaded = download_from_web(WebFile(f"{site.address}/f.mat"), tmp_path, ignore_progress)
    assert downloaded.path.read_bytes() == BODY
    assert site.asked[-1]["range"] == "bytes=400000-"
    assert list_names(tmp_path) == ["f.mat", "f.mat.sha256"]


@pytest.mark.parametrize("partial", [BODY, BODY + b"more"], ids=["all", "more"])
def test_a_part_with_nothing_left_to_ask_for_is_begun_anew(site: Site, tmp_path: Path, partial: bytes) -> None:
    """A process that is killed after the last byte and before the rename leaves such a file."""
    site.files["/f.mat"] = BODY
    (tmp_path / "f.mat.part").write_bytes(partial)
    (tmp_path / "f.mat.part.etag").write_text(site.tag)
    download = download_from_web(WebFile(f"{site.address}/f.mat", compute_sha256(BODY)), tmp_path, ignore_progress)
    assert download.path.read_bytes() == BODY
    assert [request.get("range") for request in site.asked] == [f"bytes={len(partial)}-", None]
    assert list_names(tmp_path) == ["f.mat"]


@pytest.mark.parametrize("change", ["file", "ranges"])
def test_a_file_that_changed_and_a_server_without_ranges_start_anew(site: Site, tmp_path: Path, change: str) -> None:
    site.files["/f.mat"] = BODY
    site.breaks_after = [400_000]
    original = Handler._file

    def send_then_change(handler: Handler, body: bytes) -> None:
        original(handler, body)
        if change == "file":
            site.files["/f.mat"], site.tag = BODY[::-1], '"two"'
        else:
            site.ranges = False

    Handler._file = send_then_change  # type: ignore[method-assign]
    try:
        download = download_from_web(WebFile(f"{site.address}/f.mat"), tmp_path, ignore_progress)
    finally:
        Handler._file = original  # type: ignore[method-assign]
    assert download.path.read_bytes() == (BODY[::-1] if change == "file" else BODY)


def test_what_cannot_be_had(site: Site, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="404"):
        download_from_web(WebFile(f"{site.address}/nothing.gz"), tmp_path, ignore_progress)
    assert len(site.asked) == 1  # a refusal is not asked again
    for address in ("file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1/"):
        with pytest.raises(ValueError, match="not the address of a file"):
            download_from_web(WebFile(address), tmp_path, ignore_progress)
    monkeypatch.setattr(download, "MAX_ATTEMPTS", 2)
    with pytest.raises(ValueError, match="cannot be downloaded"):
        download_from_web(WebFile("http://127.0.0.1:1/f.gz"), tmp_path, ignore_progress)
    assert list_names(tmp_path) == []


# The hub


def publish_on_hub(site: Site, repository: str, files: dict[str, bytes], claims: dict[str, str] | None = None) -> None:
    prefix = f"/datasets/{repository}/resolve/main"
    site.files |= {f"{prefix}/{name}": body for name, body in files.items()}
    site.files |= {f"/datasets/{repository}/resolve/{'c' * 40}/{name}": body for name, body in files.items()}
    checksums = {name: compute_sha256(body) for name, body in files.items()} | (claims or {})
    site.api[f"/api/datasets/{repository}/tree/main"] = [
        {
            "type": "file",
            "path": name,
            "size": len(body),
            "oid": "0" * 40,
            "lfs": {"oid": checksums[name], "size": len(body), "pointerSize": 1},
        }
        for name, body in files.items()
    ] + [{"type": "directory", "path": "data", "oid": "0" * 40}]


@pytest.fixture
def hub(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    monkeypatch.setenv("HF_ENDPOINT", site.address)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return site


@pytest.mark.slow  # imports the hub's library
def test_the_files_that_are_needed_come_from_the_hub(hub: Site, tmp_path: Path) -> None:
    publish_on_hub(hub, "owner/set", {"data/train.parquet": BODY, "data/test.parquet": b"test", "README.md": b"no"})
    downloads = download_from_hub(HubDataset("owner/set"), tmp_path / "root", ignore_progress)
    assert sorted(download.path.name for download in downloads) == ["test.parquet", "train.parquet"]
    assert all(file.is_verified for file in downloads)
    folder = tmp_path / "root" / "hub" / "owner--set" / "data"
    assert (folder / "train.parquet").read_bytes() == BODY
    assert not any("README" in request["path"] for request in hub.asked)


@pytest.mark.slow  # imports the hub's library
def test_the_hubs_checksums_are_compared(hub: Site, tmp_path: Path) -> None:
    publish_on_hub(hub, "owner/set", {"data/train.parquet": BODY}, {"data/train.parquet": "1" * 64})
    with pytest.raises(ValueError, match=r"instead of 1111.*the download was discarded"):
        download_from_hub(HubDataset("owner/set"), tmp_path / "root", ignore_progress)
    assert not list((tmp_path / "root").rglob("train.parquet"))


@pytest.mark.slow  # imports the hub's library
def test_a_repository_that_is_gone_or_empty(hub: Site, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="owner/gone cannot be downloaded from the hub"):
        download_from_hub(HubDataset("owner/gone"), tmp_path, ignore_progress)
    publish_on_hub(hub, "owner/set", {"README.md": b"only this"})
    with pytest.raises(ValueError, match=r"has no files like data/\*\.parquet"):
        download_from_hub(HubDataset("owner/set"), tmp_path, ignore_progress)


# The command


@pytest.fixture
def data_root(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty data root, for a data set whose USPS is on the server and whose SYN cannot be downloaded."""
    from fedheal.data.catalogue import digits

    layouts.usps(tmp_path / "origin")
    for path in (tmp_path / "origin").iterdir():
        site.files[f"/{path.name}"] = path.read_bytes()
    web = tuple(WebFile(f"{site.address}/{name}") for name in ("usps.bz2", "usps.t.bz2"))
    usps = replace(digits.USPS, folders=("digits/usps",), home="home", hub=None, web=web)
    monkeypatch.setitem(data.SPECS, "digits", replace(digits.DIGITS, domains=(usps, digits.SYN)))
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_the_command_fetches_what_is_missing_and_says_its_checksum(data_root: Path, site: Site, call) -> None:
    done = call("data", "fetch", "digits", "--domain", "usps", "--data-root", data_root)
    assert done.code == 0, done.err
    assert done.out.count("recorded: no published checksum") == 2
    assert compute_sha256(site.files["/usps.bz2"]) in done.out
    actual = call("data", "check", "digits", "--data-root", data_root)
    assert "usps: incomplete" in actual.out
    requests_before = len(site.asked)
    assert (
        "usps is already on disk" in call("data", "fetch", "digits", "--domain", "usps", "--data-root", data_root).out
    )
    assert len(site.asked) == requests_before


def test_the_command_says_what_it_cannot_fetch_but_fetches_the_rest(data_root: Path, call) -> None:
    done = call("data", "fetch", "digits", "--data-root", data_root)
    assert done.code == 2
    assert "syn cannot be downloaded: get it from http://yaroslav.ganin.net/" in done.err
    assert (data_root / "digits" / "usps" / "usps.bz2").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--domain", "mnist"], "domain = mnist: use one of usps, syn, the domains of 'digits'"),
        (["--from", "elsewhere"], "use hub or web"),
        (["--from", "hub", "--domain", "usps"], "cannot be downloaded from the hub"),
    ],
)
def test_the_command_refuses(data_root: Path, call, words: list[str], message: str) -> None:
    done = call("data", "fetch", "digits", "--data-root", data_root, *words)
    assert done.code == 2
    assert message in done.err


def test_no_other_command_uses_the_network(tmp_path: Path, call, monkeypatch) -> None:
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    root = layouts.digits(tmp_path / "data")
    words = ["--data-root", root]
    assert call("data", "check", "digits", *words).code == 0
    assert call("data", "prepare", "digits", *words).code == 0
    assert call("data", "show", "digits", *words).code == 0
    assert call("data", "check", "pacs", *words).code == 1
