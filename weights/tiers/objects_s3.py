"""Stores objects in an S3-compatible store. The only file that uses boto3.

Each object is one PUT (they are small enough), so a key has all of its bytes or none. Keys in the store are `prefix`
plus ours. Credentials come from a file by profile name, or from boto3's defaults; no message shows them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import botocore.config
import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from weights.format.config import Location
from weights.format.errors import ObjectDamaged, TierFull, TierUnavailable

# At debug level they log requests with their signed headers.
for _name in ("boto3", "botocore", "s3transfer", "urllib3"):
    logging.getLogger(_name).setLevel(logging.WARNING)

_MISSING = ("NoSuchKey", "404", "NotFound")
_FULL = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507")


class S3Objects:
    """Of a `location` with an s3:// url; the bucket must exist. Raises TierUnavailable if the settings are invalid for
    a client."""

    def __init__(self, location: Location, timeout_s: float = 30.0) -> None:
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
        """Does nothing: an object written by one PUT is never incomplete."""

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            # Only code and operation: a server's message may repeat the access key.
            code, operation = error.response.get("Error", {}).get("Code", "unknown"), error.operation_name
            if code in _MISSING:
                raise ObjectDamaged("it is missing", path=f"{self.where}/{key}") from error
            kind = TierFull if code in _FULL else TierUnavailable
            raise kind(f"{self.where}: {operation} was refused with {code}") from None
        except (BotoCoreError, OSError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise TierUnavailable(f"{self.where} cannot be used: {type(error).__name__} {reason}") from None
