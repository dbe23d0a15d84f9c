"""Downloads a checkpoint from a model hub by `huggingface_hub`, every file checked against the hub's checksums.

A file that an earlier call has brought whole is not brought again. Only the files of a safetensors checkpoint, or of an
adapter, are fetched.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, hf_hub_download
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


def download(listing: Listing, directory: Path, settings: HubSettings, on_file: Callable[[int, str], None]) -> None:
    """Brings every file of `listing` into `directory`. `on_file(count, file)` is called before each, with the bytes
    that are there. Raises HubUnreachable (call again to go on), HubNotFound, DownloadCorrupt (the file is gone)."""
    done = 0
    for file in listing.files:
        on_file(done, file.name)
        fetch = partial(
            hf_hub_download,
            listing.repository,
            file.name,
            revision=listing.commit,
            local_dir=directory,
            endpoint=settings.endpoint,
            token=settings.token or False,
        )
        path = Path(_ask(settings, listing.repository, fetch))
        if (found := _digest(path, file)) != file.expected:
            path.unlink()
            raise DownloadCorrupt(file.name, file.expected, found)
        done += file.nbytes
    on_file(done, listing.files[-1].name)


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
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise HubUnreachable(f"{where}: {type(error).__name__} {str(error)[:200]}") from error
