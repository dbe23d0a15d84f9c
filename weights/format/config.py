"""Defines the settings of the weight store and its tiers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

URL = r"^https?://[^\s/@]+(/\S*)?$"
"""Pattern of URLs without credentials, because URLs appear in messages and in `ps`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KeepRules(_Strict):
    """Versions of each model that a tier keeps: all if no rule is set, else every version that some rule keeps."""

    keep_last: int | None = Field(default=None, ge=1, description="newest versions to keep")
    keep_best: int | None = Field(default=None, ge=1, description="versions with the lowest validation loss to keep")


class DiskTier(_Strict):
    """The local disk: versions and snapshots as plain directories."""

    free_bytes: int = Field(default=1 << 30, ge=0, description="disk space that tiers must not fill")
    versions: KeepRules = Field(default_factory=KeepRules, description="versions kept")
    snapshots: KeepRules = Field(default=KeepRules(keep_last=1), description="snapshots kept in addition to the newest")


class Location(_Strict):
    """The place of stored objects: a directory on a mount, or an S3-compatible store."""

    url: str | None = Field(default=None, description="path of a mounted directory, or s3://bucket/prefix; one per box")
    endpoint: str | None = Field(
        default=None, pattern=URL, description="https address of the S3-compatible store; unset: Amazon's"
    )
    region: str | None = Field(default=None, description="region of the bucket; unset: us-east-1")
    credentials_file: str | None = Field(default=None, description="AWS credentials file; unset: boto3's default")
    credentials_profile: str | None = Field(default=None, description="section of the credentials file")

    @field_validator("url")
    @classmethod
    def _known_kind(cls, url: str | None) -> str | None:
        if url is not None and not (url.startswith("/") or url.startswith("s3://") and url[5:].strip("/")):
            raise ValueError("expected an absolute path of a directory or s3://bucket/prefix")
        return url


class RemoteTier(Location):
    """A directory on a mount, or an S3-compatible store. Off without `url`."""

    moments: Literal["exact", "int8"] = Field(
        default="exact",
        description="Adam moments of snapshots; 'int8': one byte per element and one scale per 256; a job resumed from "
        "them continues approximately, not exactly",
    )
    versions: KeepRules = Field(default_factory=KeepRules, description="versions kept")
    snapshots: KeepRules = Field(default=KeepRules(keep_last=1), description="snapshots kept in addition to the newest")


class WeightsConfig(_Strict):
    """Memory limits of the weight store, and its tiers. Unknown keys are errors."""

    budget_bytes: int | None = Field(default=None, ge=1, description="largest size of the store in bytes")
    budget_share: float = Field(default=0.5, gt=0, le=1, description="largest share of the tmpfs for the store")
    disk: DiskTier = Field(default_factory=DiskTier, description="settings of the tier on the local disk")
    remote: RemoteTier = Field(default_factory=RemoteTier, description="settings of the optional remote tier")
