"""Where settings keep objects: in a directory on a mount, or in a bucket; opens either."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from weights.tiers.objects import DirectoryObjects, Objects
from weights.tiers.objects_s3 import S3Objects


class Location(Protocol):
    """Where settings keep objects; see `weights.format.config.RemoteTier`."""

    @property
    def url(self) -> str | None: ...

    @property
    def endpoint(self) -> str | None: ...

    @property
    def region(self) -> str | None: ...

    @property
    def credentials_file(self) -> str | None: ...

    @property
    def credentials_profile(self) -> str | None: ...


def objects_at(location: Location) -> Objects:
    """The store at a location whose `url` is set. Raises TierUnavailable if its settings make no client."""
    assert location.url is not None
    return s3_at(location) if location.url.startswith("s3://") else DirectoryObjects(Path(location.url))


def s3_at(location: Location) -> S3Objects:
    """The bucket at a location whose `url` begins with s3://. Raises TierUnavailable if its settings make no client."""
    assert location.url is not None
    bucket, _, prefix = location.url.removeprefix("s3://").partition("/")
    return S3Objects(
        bucket,
        prefix,
        endpoint=location.endpoint,
        region=location.region,
        credentials_file=None
        if location.credentials_file is None
        else str(Path(location.credentials_file).expanduser()),
        credentials_profile=location.credentials_profile,
    )
