"""Presents a remote location, a directory or an S3-compatible store, as a flat map from keys to bytes."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weights.format.config import Location
from weights.format.errors import ObjectDamaged, TierFull, TierUnavailable
from weights.format.names import replace_file, sync

_MISSING = ("NoSuchKey", "404", "NotFound")
_FULL = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507")
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}")  # names of the temporary files of `replace_file`


@contextmanager
def tier_errors(where: Path) -> Iterator[None]:
    """Convert an OSError in the block to TierFull or TierUnavailable."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"{where}: {error.strerror}; free space, or keep fewer versions and snapshots"
            raise TierFull(reason) from error
        raise TierUnavailable(f"{where}: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Create the folder and its parents durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)


class DirectoryObjects:
    """Objects as files below `root`, which must exist, so that no file is written below a lost mount.

    Keys are relative paths without parts that begin with a dot. Every call may raise TierUnavailable. `where`: a path
    or URL for messages, without credentials.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.where = str(root)

    def put(self, key: str, data: bytes) -> None:
        """Store `data` durably and atomically: readers see all of `data` or the previous content. Raises TierFull."""
        target = self.root / key
        with self._rooted():
            make_folder(target.parent)
            replace_file(target, data, durable=True)

    def get(self, key: str) -> bytes:
        """Return the key's bytes. Raises ObjectDamaged if the key does not exist."""
        with self._rooted():
            try:
                return (self.root / key).read_bytes()
            except FileNotFoundError:
                raise ObjectDamaged("it is missing", path=self.root / key) from None

    def list(self, prefix: str) -> Iterator[str]:
        """Return the keys below the folder `prefix`, which ends in "/"."""
        with self._rooted():
            for folder, _, names in os.walk(self.root / prefix):
                for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
                    yield path.relative_to(self.root).as_posix()

    def delete(self, key: str) -> None:
        """Delete a key; idempotent."""
        with self._rooted():
            (self.root / key).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove incomplete objects of a dead writer. Call it only while no writer is active."""
        with self._rooted():
            for folder, _, names in os.walk(self.root):
                for name in names:
                    if _PARTIAL.fullmatch(name):
                        Path(folder, name).unlink(missing_ok=True)

    @contextmanager
    def _rooted(self) -> Iterator[None]:
        if not self.root.is_dir():
            raise TierUnavailable(f"there is no directory {self.root}; is it mounted?")
        with tier_errors(self.root):
            yield


class S3Objects:
    """An S3-compatible store at a `location` with an s3:// url; the bucket must exist. Raises TierUnavailable if the
    settings are invalid.

    Each object is written by a single PUT, so it is complete or absent. Keys in the bucket are `prefix` plus our key.
    Credentials come from a profile in a file, or from boto3's defaults; messages never contain them.
    """

    def __init__(self, location: Location, timeout_s: float = 30.0) -> None:
        import boto3  # imported only here, because the import takes half a second
        import botocore.config
        import botocore.session

        for name in ("boto3", "botocore", "s3transfer", "urllib3"):  # their debug logs contain signed headers
            logging.getLogger(name).setLevel(logging.WARNING)
        assert location.url is not None
        self._bucket, _, prefix = location.url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.where = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        with self._translated(""):
            session = botocore.session.Session(profile=location.credentials_profile)
            if location.credentials_file is not None:
                session.set_config_variable("credentials_file", str(Path(location.credentials_file).expanduser()))
            config = botocore.config.Config(
                connect_timeout=timeout_s,
                read_timeout=timeout_s,
                retries={"mode": "standard", "max_attempts": 2},
                # Stores other than Amazon's often do not support trailing checksums; every read checks ours.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if location.endpoint else "auto"},
            )
            self._client = boto3.session.Session(botocore_session=session).client(
                "s3", endpoint_url=location.endpoint, region_name=location.region or "us-east-1", config=config
            )

    def put(self, key: str, data: bytes) -> None:
        with self._translated(key):
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)

    def get(self, key: str) -> bytes:
        with self._translated(key):
            return self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)["Body"].read()

    def list(self, prefix: str) -> Iterator[str]:
        with self._translated(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield entry["Key"][len(self._prefix) :]

    def delete(self, key: str) -> None:
        with self._translated(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def sweep(self) -> None:
        """Do nothing, because an object written by one PUT is never incomplete."""

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            # Report only code and operation, because a server's message may contain the access key.
            code, operation = error.response.get("Error", {}).get("Code", "unknown"), error.operation_name
            if code in _MISSING:
                raise ObjectDamaged("it is missing", path=f"{self.where}/{key}") from error
            kind = TierFull if code in _FULL else TierUnavailable
            raise kind(f"{self.where}: {operation} was refused with {code}") from None
        except (BotoCoreError, OSError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise TierUnavailable(f"{self.where} cannot be used: {type(error).__name__} {reason}") from None


Objects = DirectoryObjects | S3Objects


def objects_at(location: Location) -> Objects:
    """Return the store at a location whose `url` is set. Raises TierUnavailable if the settings are invalid."""
    assert location.url is not None
    return S3Objects(location) if location.url.startswith("s3://") else DirectoryObjects(location.url)
