"""Downloads a checkpoint from a model hub: resumed where it stopped, every byte checked.

`huggingface_hub` gets the listing. The files are fetched here, because version 2 of that library throws a partial file
away when a download is interrupted, and compares sizes only; a 140 GB model over a shaky line needs more. A partial
file is kept as `<file>.part` and becomes `<file>` once its SHA-256 (large files) or git blob hash (small ones) is the
one in the listing. Only the files of a safetensors checkpoint are fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from appliance.models import adapter
from appliance.models.checkpoint import INDEX_SUFFIX, KEPT_TEXT, WEIGHT_SUFFIX
from appliance.models.errors import DownloadCorrupt, HubDisallowed, HubNotFound, HubUnreachable, SourceNotFound
from weights.checkpoint.errors import NotACheckpoint, PickleRefused
from weights.checkpoint.folder import PICKLES
from weights.format.source import AUX_SUFFIXES

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}")
READ_CHUNK_BYTES = 4 << 20
RETRIES, RETRY_S, RETRY_MAX_S = 5, 0.25, 10.0
TIMEOUT = httpx2.Timeout(30.0)


@dataclass(frozen=True)
class HubSettings:
    """What the box's configuration says of hubs. `token` opens gated repositories and is sent to `endpoint` only."""

    allowed: bool = False
    endpoint: str = "https://huggingface.co"
    token: str | None = None


@dataclass(frozen=True)
class HubFile:
    """One file of the listing: size in bytes, and the hash of its content as the hub states it."""

    name: str
    nbytes: int
    sha256: str | None
    git_sha1: str | None

    @property
    def expected(self) -> str:
        """The hash its bytes must have."""
        return str(self.sha256 or self.git_sha1)


@dataclass(frozen=True)
class Listing:
    repository: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def is_adapter(self) -> bool:
        """Whether these are the files of an adapter and of no whole model."""
        return any(file.name == adapter.CONFIG_FILE for file in self.files)


def check_reference(repository: str, revision: str | None) -> None:
    """Raises SourceNotFound unless these have the form of a repository and a revision."""
    if not REPOSITORY.fullmatch(repository) or ".." in repository:
        raise SourceNotFound(
            f"{repository[:200]!r} is neither a directory on this machine nor a hub repository (ORGANISATION/NAME)"
        )
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise SourceNotFound(f"revision {revision[:200]!r} is not a branch, tag or commit name")


def list_files(repository: str, revision: str | None, settings: HubSettings) -> Listing:
    """The files of a repository that make a checkpoint, or an adapter.

    Raises HubError, PickleRefused, NotACheckpoint."""
    check_reference(repository, revision)
    if not settings.allowed:
        raise HubDisallowed(repository, settings.endpoint)
    api = HfApi(endpoint=settings.endpoint, token=settings.token or False)
    info = _ask(settings, repository, lambda: api.model_info(repository, revision=revision, files_metadata=True))
    siblings = info.siblings or []
    names = {sibling.rfilename for sibling in siblings}
    wanted = _wanted(repository, names)
    files = []
    for sibling in siblings:
        if sibling.rfilename not in wanted:
            continue
        sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
        if sha256 is None and sibling.blob_id is None:
            raise HubNotFound(
                f"{settings.endpoint} states no checksum for {sibling.rfilename} of {repository}; refused"
            )
        files.append(HubFile(sibling.rfilename, sibling.size or 0, sha256, None if sha256 else sibling.blob_id))
    return Listing(repository, str(info.sha), tuple(sorted(files, key=lambda file: file.nbytes)))


def _wanted(repository: str, names: Iterable[str]) -> set[str]:
    top = {name for name in names if "/" not in name and not name.startswith(".")}
    if adapter.names_adapter(top):
        return adapter.wanted(repository, top)
    top -= {adapter.CONFIG_FILE, adapter.WEIGHTS_FILE}
    weights = {name for name in top if name.endswith(WEIGHT_SUFFIX)}
    if not weights:
        pickles = sorted(name for name in top if name.endswith(PICKLES))
        if pickles:
            raise PickleRefused(pickles[0], f"{repository} offers its weights as pickles only, which can run any code")
        raise NotACheckpoint("", f"{repository} has no *{WEIGHT_SUFFIX} file")
    if "model.safetensors" in weights and f"model{INDEX_SUFFIX}" not in top:
        weights = {"model.safetensors"}
    described = {name for name in top if name.endswith(AUX_SUFFIXES) or name in KEPT_TEXT}
    return weights | described


def download(listing: Listing, directory: Path, settings: HubSettings, on_bytes: Callable[[int, str], None]) -> None:
    """Brings every file of `listing` into `directory`, continuing what an earlier call left there.

    `on_bytes(count, file)` is called for every piece with the bytes since the last call, negative if the hub could not
    resume and a file begins again. Raises HubUnreachable (call again to go on), HubNotFound, DownloadCorrupt (the file
    is gone).
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": "appliance"}
    if settings.token:
        # The client takes this header away when a redirect leads to another host.
        headers["Authorization"] = f"Bearer {settings.token}"
    with httpx2.Client(headers=headers, follow_redirects=True, timeout=TIMEOUT) as client:
        for file in listing.files:
            part, path = directory / f"{file.name}.part", directory / file.name
            if path.is_file():
                if _digest(path, file) == file.expected:
                    on_bytes(file.nbytes, file.name)
                    continue
                path.unlink()
            url = f"{settings.endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(file.name)}"
            _fetch(client, url, file, part, on_bytes)
            found = _digest(part, file)
            if found != file.expected:
                part.unlink()
                raise DownloadCorrupt(file.name, file.expected, found)
            os.rename(part, path)


def _fetch(client: httpx2.Client, url: str, file: HubFile, part: Path, on_bytes: Callable[[int, str], None]) -> None:
    """Appends to `part` until it has all of `file`, over as many connections as it takes.

    Gives up after RETRIES connections in a row that brought nothing.
    """
    with part.open("ab") as out:
        have = out.tell()
        if have > file.nbytes:
            out.truncate(0)
            have = 0
        on_bytes(have, file.name)
        fruitless = 0
        while have < file.nbytes:
            before = have
            try:
                with client.stream("GET", url, headers={"Range": f"bytes={have}-"} if have else {}) as answer:
                    _refuse_status(answer, url)
                    if have and answer.status_code != httpx2.codes.PARTIAL_CONTENT:
                        on_bytes(-have, file.name)
                        out.truncate(0)
                        have = before = 0
                    for piece in answer.iter_raw():
                        if have + len(piece) > file.nbytes:
                            raise DownloadCorrupt(file.name, f"{file.nbytes} bytes", "more")
                        out.write(piece)
                        have += len(piece)
                        on_bytes(len(piece), file.name)
                problem = "the connection ended early"
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__} {str(error)[:200]}"
            fruitless = 0 if have > before else fruitless + 1
            if fruitless > RETRIES:
                raise HubUnreachable(
                    f"{url}: {problem}, {fruitless} times in a row; {have} of {file.nbytes} bytes are kept, run the "
                    "import again to go on"
                )
            if have < file.nbytes:
                time.sleep(min(RETRY_S * 2**fruitless, RETRY_MAX_S))
        out.flush()
        os.fsync(out.fileno())


def _refuse_status(answer: httpx2.Response, url: str) -> None:
    """Raises HubNotFound for answers that another try will not change, a TransportError for those that it may."""
    status = answer.status_code
    if status in (httpx2.codes.TOO_MANY_REQUESTS, httpx2.codes.REQUEST_TIMEOUT) or status >= 500:
        raise httpx2.RemoteProtocolError(f"status {status}")
    if status not in (httpx2.codes.OK, httpx2.codes.PARTIAL_CONTENT):
        raise HubNotFound(f"{url} answered with status {status}")


def _digest(path: Path, file: HubFile) -> str:
    # A git blob's name is the SHA-1 of "blob <size>\0" and the content (gitformat-loose).
    running = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as content:
        while chunk := content.read(READ_CHUNK_BYTES):
            running.update(chunk)
    return running.hexdigest()


def _ask(settings: HubSettings, repository: str, question: Callable[[], Any]) -> Any:
    where = f"{repository} at {settings.endpoint}"
    try:
        return question()
    except GatedRepoError as error:
        raise HubNotFound(
            f"{where} is gated and wants an access token; download it elsewhere, then import the directory"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubNotFound(f"{where} does not exist, or is private") from error
    except RevisionNotFoundError as error:
        raise HubNotFound(f"{where} has no such revision") from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachable(f"{where}: HF_HUB_OFFLINE is set in the environment of the box; unset it") from error
    except HFValidationError as error:
        raise SourceNotFound(str(error)) from error
    except HfHubHTTPError as error:
        raise HubUnreachable(f"{where} answered with an error: {str(error)[:300]}") from error
    except (httpx2.HTTPError, OSError) as error:
        raise HubUnreachable(f"{where}: {type(error).__name__} {str(error)[:200]}") from error
