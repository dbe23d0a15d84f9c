"""Download a checkpoint or an adapter from a model hub, and check every file against the hub's checksum."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from appliance.models import adapter
from appliance.models.checkpoint import INDEX_SUFFIX, KEPT_TEXT, WEIGHT_SUFFIX, no_weights
from appliance.models.errors import DownloadCorrupt, HubDisallowed, HubNotFound, HubUnreachable, SourceNotFound
from weights.format.manifest import AUX_SUFFIXES

REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}")


@dataclass(frozen=True)
class HubSettings:
    """The box's hub settings. `token` gives access to gated repositories and is sent only to `endpoint`."""

    allowed: bool = False
    endpoint: str = "https://huggingface.co"
    token: str | None = None


class HubFile(NamedTuple):
    """A file of a repository. digest: the hub's checksum in hex, SHA-256 or git's SHA-1 of a blob."""

    name: str
    nbytes: int
    digest: str


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
        """Whether the repository's files are an adapter and no whole model."""
        return any(file.name == adapter.CONFIG_FILE for file in self.files)


def check_reference(repository: str, revision: str | None) -> None:
    """Raise SourceNotFound unless these are valid names of a repository and a revision."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise SourceNotFound(
            f"{repository[:200]!r} is neither a directory on this machine nor a hub repository (ORGANISATION/NAME)"
        ) from error
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise SourceNotFound(f"revision {revision[:200]!r} is not a branch, tag or commit name")


def list_files(repository: str, revision: str | None, settings: HubSettings) -> Listing:
    """List a repository's files that belong to its checkpoint or adapter. Raises HubError, PickleRefused,
    NotACheckpoint."""
    if not settings.allowed:
        raise HubDisallowed(
            f"{repository!r} is not a directory here, and this box does not use model hubs (offline by default). "
            "Give the path of a checkpoint directory, or a package by its name in `appliance model catalog`, or "
            f"allow downloads from {settings.endpoint} with `hub_offline = false` under [box] (`hub_endpoint` sets a "
            "mirror)"
        )
    api = HfApi(endpoint=settings.endpoint, token=settings.token or False)
    info = _ask(settings, repository, lambda: api.model_info(repository, revision=revision, files_metadata=True))
    siblings = info.siblings or []
    names, files = _files_of(repository, {sibling.rfilename for sibling in siblings}), []
    for sibling in siblings:
        if sibling.rfilename in names:
            digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            files.append(HubFile(sibling.rfilename, sibling.size or 0, digest or ""))
    return Listing(repository, str(info.sha), tuple(sorted(files, key=lambda file: file.nbytes)))


def _files_of(repository: str, names: Iterable[str]) -> set[str]:
    top = {name for name in names if "/" not in name and not name.startswith(".")}
    if adapter.names_adapter(top):
        return adapter.files_of(repository, top)
    top -= {adapter.CONFIG_FILE, adapter.WEIGHTS_FILE}
    weights = {name for name in top if name.endswith(WEIGHT_SUFFIX)}
    if not weights:
        raise no_weights(repository, top)
    if "model.safetensors" in weights and f"model{INDEX_SUFFIX}" not in top:
        weights = {"model.safetensors"}
    return weights | {name for name in top if name.endswith(AUX_SUFFIXES) or name in KEPT_TEXT}


def download(listing: Listing, directory: Path, settings: HubSettings, on_file: Callable[[int, str], None]) -> None:
    """Download every file of `listing` into `directory`. Calls `on_file(nbytes, file)` before each file, with the bytes
    so far. Raises HubUnreachable (call again to resume), HubNotFound, DownloadCorrupt (the file is deleted)."""
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
        if (actual := _digest(path, file.digest)) != file.digest:
            path.unlink()
            raise DownloadCorrupt(
                f"{file.name} does not have the checksum of the hub (expected {file.digest}, got {actual}); "
                "it was deleted. Run the import again; if this repeats, a proxy may be changing files"
            )
        done += file.nbytes
    on_file(done, listing.files[-1].name)


def _digest(path: Path, like: str) -> str:
    # A git blob's name is the SHA-1 of "blob <size>\0" and the content (gitformat-loose).
    digest = hashlib.sha256() if len(like) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest()


def _ask(settings: HubSettings, repository: str, question: Callable[[], Any]) -> Any:
    where = f"{repository} at {settings.endpoint}"
    try:
        return question()
    except GatedRepoError as error:
        raise HubNotFound(
            f"{where} is gated and requires an access token; download it elsewhere and import the directory"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubNotFound(f"{where} does not exist, or is private") from error
    except RevisionNotFoundError as error:
        raise HubNotFound(f"{where} has no such revision") from error
    except (httpx2.HTTPError, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise HubUnreachable(f"{where}: {type(error).__name__} {str(error)[:300]}") from error
