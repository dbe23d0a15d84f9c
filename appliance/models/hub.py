"""Downloads a checkpoint from a model hub, with resume and with every byte checked.

`huggingface_hub` speaks the protocol (listing, redirects, ranges, resume of `.incomplete` files). What it leaves out is
done here: it compares sizes only, so each file's SHA-256 (large files) or git blob hash (small ones) is compared with
the one in the listing; and only the files that make a safetensors checkpoint are asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from appliance.models.checkpoint import INDEX_SUFFIX, KEPT_TEXT, PICKLES, WEIGHT_SUFFIX
from appliance.models.errors import (
    DownloadCorrupt,
    HubDisallowed,
    HubNotFound,
    HubUnreachable,
    NotACheckpoint,
    PickleRefused,
    SourceNotFound,
)
from weights.source import AUX_SUFFIXES

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}")
READ_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class HubSettings:
    """`[hub]` of the box's configuration. `token` is for gated repositories and is sent to `endpoint` only."""

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


@dataclass(frozen=True)
class Listing:
    repository: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def check_reference(repository: str, revision: str | None) -> None:
    """Raises SourceNotFound unless these have the form of a repository and a revision."""
    if not REPOSITORY.fullmatch(repository) or ".." in repository:
        raise SourceNotFound(
            f"{repository[:200]!r} is neither a directory on this machine nor a hub repository (ORGANISATION/NAME)"
        )
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise SourceNotFound(f"revision {revision[:200]!r} is no branch, tag or commit name")


def list_files(repository: str, revision: str | None, settings: HubSettings) -> Listing:
    """The files of a repository that make a checkpoint. Raises HubError, PickleRefused, NotACheckpoint."""
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

    `on_bytes(count, file)` hears of every piece, in bytes since the last call, from the downloading thread.
    Raises HubUnreachable (call again to go on), HubNotFound, DownloadCorrupt (the file is gone).
    """
    for file in listing.files:
        path = directory / file.name
        if path.is_file() and _digest(path, file) == (file.sha256 or file.git_sha1):
            on_bytes(file.nbytes, file.name)
            continue
        path.unlink(missing_ok=True)
        _ask(settings, listing.repository, lambda file=file: hf_hub_download(
            listing.repository, file.name, revision=listing.commit, local_dir=directory, endpoint=settings.endpoint,
            token=settings.token or False, tqdm_class=_progress_class(file.name, on_bytes),
        ))  # fmt: skip
        found, expected = _digest(path, file), file.sha256 or file.git_sha1
        if found != expected:
            path.unlink()
            raise DownloadCorrupt(file.name, str(expected), found)


def _digest(path: Path, file: HubFile) -> str:
    # A git blob's name is the SHA-1 of "blob <size>\0" and the content (gitformat-loose).
    running = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as content:
        while chunk := content.read(READ_CHUNK_BYTES):
            running.update(chunk)
    return running.hexdigest()


def _progress_class(name: str, on_bytes: Callable[[int, str], None]) -> type[tqdm]:
    class Progress(tqdm):
        """Draws nothing; forwards the counts. Bytes kept from an interrupted download come as `initial`."""

        def __init__(self, *args: Any, **kwargs: Any):
            kept = int(kwargs.get("initial") or 0)
            super().__init__(*args, **(kwargs | {"disable": True}))
            if kept:
                on_bytes(kept, name)

        def update(self, n: float | None = 1) -> None:
            if n:
                on_bytes(int(n), name)

    return Progress


def _ask(settings: HubSettings, repository: str, question: Callable[[], Any]) -> Any:
    where = f"{repository} at {settings.endpoint}"
    try:
        return question()
    except GatedRepoError as error:
        raise HubNotFound(f"{where} is gated: accept its terms there and set `token` under [hub]") from error
    except RepositoryNotFoundError as error:
        raise HubNotFound(f"{where} does not exist, or is private and needs `token` under [hub]") from error
    except RevisionNotFoundError as error:
        raise HubNotFound(f"{where} has no such revision") from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachable(f"{where}: HF_HUB_OFFLINE is set in the environment of the box; unset it") from error
    except LocalEntryNotFoundError as error:
        raise HubUnreachable(f"{where} could not be reached: {error.__cause__ or error}") from error
    except EntryNotFoundError as error:
        raise HubNotFound(f"{where}: {error}") from error
    except HFValidationError as error:
        raise SourceNotFound(str(error)) from error
    except HfHubHTTPError as error:
        raise HubUnreachable(f"{where} answered with an error: {str(error)[:300]}") from error
    except (httpx2.HTTPError, OSError) as error:
        raise HubUnreachable(
            f"{where}: {type(error).__name__} {str(error)[:200]}; what was downloaded is kept, run the import again"
        ) from error
