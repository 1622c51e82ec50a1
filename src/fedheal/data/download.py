"""Download data sets: atomic, resumable, and checked by SHA-256. Only `fedheal data fetch` does so.

Files of the Hugging Face hub are checked against its checksums, files of other sites against the specification's. Without one,
the first download records the SHA-256 in `<file>.sha256`, and a later download must match it.
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
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from fedheal.core.atomic_files import write_text
from fedheal.core.errors import explain_install
from fedheal.data.specs import DomainSpec, HubDataset, WebFile

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
MAX_ATTEMPTS = 5  # per file; each resumes the previous one

Progress = Callable[[str, int, int], None]  # file, bytes so far, total bytes (0: unknown)


@dataclass(frozen=True)
class DownloadedFile:
    """A file on disk, its checksum, and whether a published checksum confirmed it."""

    path: Path
    sha256: str
    is_verified: bool


def check_origin(origin: str) -> None:
    """Raise ValueError unless this is a kind of site to download from, or "" for any."""
    if origin not in ("", "hub", "web"):
        raise ValueError(f"from = {origin}: use hub or web")


def download_domain(spec: DomainSpec, root: Path, progress: Progress, origin: str = "") -> list[DownloadedFile]:
    """Download one domain to where it is looked for. `origin` is "hub", "web" or "" for either."""
    check_origin(origin)
    if spec.hub and origin != "web":
        return download_from_hub(spec.hub, root, progress)
    if spec.web and origin != "hub":
        return [download_from_web(file, root / spec.folders[0], progress) for file in spec.web]
    where = f" from the {origin}" if origin else ""
    raise ValueError(f"{spec.name} cannot be downloaded{where}: get it from {spec.available_from}")


def download_from_web(file: WebFile, folder: Path, progress: Progress) -> DownloadedFile:
    """Download one file into a folder, resuming a partial download."""
    address = urlsplit(file.url)
    name = Path(address.path).name
    if address.scheme not in ("http", "https") or not name:
        raise ValueError(f"{file.url!r} is not the address of a file")
    path, record = folder / name, folder / f"{name}.sha256"
    expected = file.sha256 or (record.read_text(encoding="utf-8")[:64].strip() if record.is_file() else "")
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        actual = _verify(path, expected, str(path), is_new=False)
    else:
        part = folder / f"{name}.part"
        _download(file.url, part, progress)
        actual = _verify(part, expected, file.url)
        os.replace(part, path)
    if not expected:
        write_text(record, f"{actual}  {name}\n")
    return DownloadedFile(path, actual, bool(file.sha256))


def download_from_hub(hub: HubDataset, root: Path, progress: Progress) -> list[DownloadedFile]:
    """Download the required files of a repository. The hub's library resumes; checksums are compared here."""
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.hf_api import RepoFile
    except ImportError:
        raise ValueError(f"the Hugging Face hub requires its library: {explain_install('hub')}") from None
    endpoint = os.environ.get("HF_ENDPOINT")
    downloads = []
    try:
        tree = HfApi(endpoint=endpoint).list_repo_tree(hub.repository, repo_type="dataset", recursive=True)
        files = [f for f in tree if isinstance(f, RepoFile) and any(fnmatch(f.path, p) for p in hub.files)]
        for number, file in enumerate(files):
            progress(f"{hub.repository} {file.path}", number, len(files))
            path = hf_hub_download(
                hub.repository, file.path, repo_type="dataset", local_dir=hub.folder(root), endpoint=endpoint
            )
            downloads.append((Path(str(path)), file.lfs.sha256 if file.lfs else ""))
    except Exception as error:  # of the library, its HTTP library or the system; the first line gives the reason
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{hub.repository} cannot be downloaded from the hub: {reason}") from error
    if not files:
        raise ValueError(f"{hub.repository} on the hub has no files like {', '.join(hub.files)}")
    return [
        DownloadedFile(path, _verify(path, expected, f"{path.name} of {hub.repository}"), bool(expected))
        for path, expected in downloads
    ]


def _download(url: str, part: Path, progress: Progress) -> None:
    """Complete the partial file `part`, with several attempts."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            _resume(url, part, progress)
            return
        except (urllib.error.HTTPError, FileExistsError) as error:
            raise ValueError(f"{url} cannot be downloaded: {error}") from error
        except (OSError, http.client.HTTPException) as error:  # the connection broke; the partial file stays
            if attempt == MAX_ATTEMPTS:
                raise ValueError(f"{url} cannot be downloaded: {error}; rerun the command to resume") from error


def _resume(url: str, part: Path, progress: Progress) -> None:
    size = part.stat().st_size if part.is_file() else 0
    etag = part.with_name(f"{part.name}.etag")  # the version of the file that the part belongs to
    headers = {"User-Agent": "fedheal", "Accept-Encoding": "identity"}
    if size and etag.is_file():
        headers |= {"Range": f"bytes={size}-", "If-Range": etag.read_text(encoding="utf-8")}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or "Range" not in headers:
            raise
        error.close()  # the part is as long as the file or longer, so it cannot be trusted: start again
        part.unlink()
        etag.unlink()
        return _resume(url, part, progress)
    with response:
        is_partial = response.status == HTTPStatus.PARTIAL_CONTENT
        if is_partial and not response.headers.get("Content-Range", "").startswith(f"bytes {size}-"):
            raise ConnectionError("the server sent another range than requested")
        size = size if is_partial else 0
        total = size + int(response.headers.get("Content-Length") or 0)
        version = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if version:
            etag.write_text(version, encoding="utf-8")
        with part.open("ab" if is_partial else "wb") as file:
            while data := response.read(CHUNK):
                file.write(data)
                size += len(data)
                progress(part.name.removesuffix(".part"), size, total)
    if size < total:
        raise ConnectionError(f"the connection ended after {size:,} of {total:,} bytes")
    etag.unlink(missing_ok=True)


def _verify(path: Path, expected: str, source: str, *, is_new: bool = True) -> str:
    """Return the SHA-256 of a file. If another is expected, raise ValueError, and discard the file if it is new."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and actual != expected:
        if is_new:
            path.unlink()
        remedy = "the download was discarded" if is_new else "remove it and fetch again"
        raise ValueError(f"{source} has the SHA-256 {actual} instead of {expected}: {remedy}")
    return actual
