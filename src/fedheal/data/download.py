"""Downloads, only ever when asked for: whole files or none, resumed where they stopped, checked by SHA-256.

Where a data set is on the Hugging Face hub it comes from there, and the hub says what the checksums are. Files of other sites
are checked against the description's checksum. Where that has none, the first download records what came in
`<file>.sha256`: a later one that brings other bytes is refused.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from fedheal.data.specs import Hub, Source, Web

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
NOTHING_MORE = 416  # what a server answers that is asked for bytes beyond the end of a file
TRIES = 5  # connections for one file, each going on where the last one broke

Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all (0: not known)


@dataclass(frozen=True)
class Fetched:
    """A file that is there now: its checksum, and whether somebody else vouches for it."""

    path: Path
    sha256: str
    vouched: bool


def fetch(source: Source, root: Path, progress: Progress, origin: str = "") -> list[Fetched]:
    """Download one domain to where it will be found. `origin`: `hub`, `web`, or whichever there is."""
    if origin not in ("", "hub", "web"):
        raise ValueError(f"from = {origin}: use hub or web")
    if source.hub and origin != "web":
        return from_hub(source.hub, root, progress)
    if source.web and origin != "hub":
        return [from_web(web, root / source.folders[0], progress) for web in source.web]
    where = f" from the {origin}" if origin else ""
    raise ValueError(f"{source.name} cannot be downloaded{where}: get it from {source.available}")


def from_web(web: Web, folder: Path, progress: Progress) -> Fetched:
    """One file into a folder; a part of it that is already there is gone on with."""
    address = urlsplit(web.url)
    name = Path(address.path).name
    if address.scheme not in ("http", "https") or not name:
        raise ValueError(f"{web.url!r} is not the address of a file")
    path, recorded = folder / name, folder / f"{name}.sha256"
    known = web.sha256 or (recorded.read_text(encoding="utf-8")[:64].strip() if recorded.is_file() else "")
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        part = folder / f"{name}.part"
        _download(web.url, part, progress)
        found = _sha256(part)
        if known and found != known:
            part.unlink()
            raise ValueError(f"{web.url} brought bytes with the SHA-256 {found} instead of {known}: nothing was kept")
        os.replace(part, path)
    found = _sha256(path)
    if known and found != known:
        raise ValueError(f"{path} has the SHA-256 {found} instead of {known}: remove it and fetch again")
    if not known:
        recorded.write_text(f"{found}  {name}\n", encoding="utf-8")
    return Fetched(path, found, bool(web.sha256))


def from_hub(hub: Hub, root: Path, progress: Progress) -> list[Fetched]:
    """The files of a repository that are needed; the hub's library resumes, its checksums are compared here."""
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.hf_api import RepoFile
    except ImportError:
        raise ValueError("the Hugging Face hub needs its library: pip install 'fedheal[hub]'") from None
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        tree = HfApi(endpoint=endpoint).list_repo_tree(hub.repository, repo_type="dataset", recursive=True)
        listed = [item for item in tree if isinstance(item, RepoFile)]
        wanted = [f for f in listed if any(fnmatch(f.path, pattern) for pattern in hub.files)]
        found = []
        for number, file in enumerate(wanted):
            progress(f"{hub.repository} {file.path}", number, len(wanted))
            local = hf_hub_download(
                hub.repository, file.path, repo_type="dataset", local_dir=hub.folder(root), endpoint=endpoint
            )
            found.append((Path(str(local)), file.lfs.sha256 if file.lfs else ""))
    except (
        Exception
    ) as error:  # the library's own, its HTTP library's and the system's: all say why in their first line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the hub's {hub.repository} cannot be downloaded now: {reason}") from error
    if not wanted:
        raise ValueError(f"the hub's {hub.repository} has no files like {', '.join(hub.files)}")
    return [_checked(path, known, hub.repository) for path, known in found]


def _checked(path: Path, known: str, repository: str) -> Fetched:
    found = _sha256(path)
    if known and found != known:
        path.unlink()
        raise ValueError(
            f"{path.name} of {repository} came with the SHA-256 {found} instead of {known}: it was removed"
        )
    return Fetched(path, found, bool(known))


def _download(url: str, part: Path, progress: Progress) -> None:
    """Fill `part`; what is there already is asked for no more."""
    for tried in range(1, TRIES + 1):
        try:
            _go_on(url, part, progress)
            return
        except (urllib.error.HTTPError, FileExistsError) as error:
            raise ValueError(f"{url} cannot be downloaded: {error}") from error
        except (OSError, http.client.HTTPException) as error:  # a connection that broke; what came so far stays
            if tried == TRIES:
                raise ValueError(
                    f"{url} cannot be downloaded: {error}. The same command goes on where it stopped"
                ) from error


def _go_on(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.is_file() else 0
    mark = part.with_name(f"{part.name}.etag")  # which version of the file the part is of
    headers = {"User-Agent": "fedheal", "Accept-Encoding": "identity"}
    if have and mark.is_file():
        headers |= {"Range": f"bytes={have}-", "If-Range": mark.read_text(encoding="utf-8")}
    try:
        opened = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != NOTHING_MORE or "Range" not in headers:
            raise
        error.close()  # the part is as long as the file, or longer: who knows what it is
        part.unlink()
        mark.unlink()
        return _go_on(url, part, progress)
    with opened as reply:
        goes_on = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if reply.status == 206 and not goes_on:
            raise ConnectionError("another part came than the one that was asked for")
        have = have if goes_on else 0
        total = have + int(reply.headers.get("Content-Length") or 0)
        version = reply.headers.get("ETag") or reply.headers.get("Last-Modified")
        if version:
            mark.write_text(version, encoding="utf-8")
        with part.open("ab" if goes_on else "wb") as file:
            while data := reply.read(CHUNK):
                file.write(data)
                have += len(data)
                progress(part.name.removesuffix(".part"), have, total)
    if have < total:
        raise ConnectionError(f"it ended after {have:,} of {total:,} bytes")
    mark.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
