"""Where objects are kept, as settings say it: a directory on a mount or a bucket, and what opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from weights.tiers.objects import DirectoryObjects, Objects
from weights.tiers.objects_s3 import S3Objects


class Place(Protocol):
    """Where objects are kept; see `weights.format.config.RemoteTier`."""

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


def objects_at(place: Place) -> Objects:
    """The store at a place whose `url` is set. Raises TierUnavailable where its settings make no client."""
    assert place.url is not None
    return s3_at(place) if place.url.startswith("s3://") else DirectoryObjects(Path(place.url))


def s3_at(place: Place) -> S3Objects:
    """The bucket at a place whose `url` begins with s3://. Raises TierUnavailable where its settings make no client."""
    assert place.url is not None
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    return S3Objects(
        bucket,
        prefix,
        endpoint=place.endpoint,
        region=place.region,
        credentials_file=None if place.credentials_file is None else str(Path(place.credentials_file).expanduser()),
        credentials_profile=place.credentials_profile,
    )
