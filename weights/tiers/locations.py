"""Where settings keep objects: in a directory on a mount, or in a bucket; opens either."""

from __future__ import annotations

from pathlib import Path

from weights.format.config import Location
from weights.tiers.objects import DirectoryObjects, Objects
from weights.tiers.objects_s3 import S3Objects


def objects_at(location: Location) -> Objects:
    """The store at a location whose `url` is set. Raises TierUnavailable if its settings make no client."""
    assert location.url is not None
    if not location.url.startswith("s3://"):
        return DirectoryObjects(Path(location.url))
    bucket, _, prefix = location.url.removeprefix("s3://").partition("/")
    file = location.credentials_file
    return S3Objects(
        bucket,
        prefix,
        endpoint=location.endpoint,
        region=location.region,
        credentials_file=None if file is None else str(Path(file).expanduser()),
        credentials_profile=location.credentials_profile,
    )
