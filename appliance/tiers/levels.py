"""The tiers that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from appliance.paths import BoxPaths
from appliance.tiers.tiers import Level
from weights.format.config import Packing, RemoteTier, WeightsConfig
from weights.format.header import TensorSpec
from weights.tiers.codec import Codec
from weights.tiers.directory import DirectoryTier
from weights.tiers.objects import DirectoryObjects, Objects
from weights.tiers.objects_s3 import S3Objects
from weights.tiers.packed import PackedTier, moment_codecs


def make_levels(config: WeightsConfig, paths: BoxPaths) -> list[Level]:
    """Nearest first. Raises TierUnavailable where the settings of an S3 store make no client."""
    disk = config.disk
    packed = _packed("disk", DirectoryObjects(paths.packed, free_bytes=disk.free_bytes, create=True), disk)
    levels = [
        Level(
            "disk",
            str(paths.data_dir),
            DirectoryTier("disk", paths.models, free_bytes=disk.free_bytes),
            packed,
            disk.versions,
            disk.snapshots,
            disk.rate_bytes_s,
        )
    ]
    if config.remote.url is not None:
        far = config.remote
        remote = _packed("remote", _objects(far), far)
        levels.append(Level("remote", remote.where, remote, remote, far.versions, far.snapshots, far.rate_bytes_s))
    return levels


def _objects(config: RemoteTier) -> Objects:
    assert config.url is not None
    if not config.url.startswith("s3://"):
        return DirectoryObjects(Path(config.url))
    bucket, _, prefix = config.url.removeprefix("s3://").partition("/")
    return S3Objects(
        bucket,
        prefix,
        endpoint=config.endpoint,
        region=config.region,
        credentials_file=None if config.credentials_file is None else str(Path(config.credentials_file).expanduser()),
        credentials_profile=config.credentials_profile,
    )


def _packed(name: str, objects: Objects, packing: Packing) -> PackedTier:
    def codec_of(kind: str, spec: TensorSpec) -> Codec:
        chosen = moment_codecs(kind, spec) if packing.moments == "int8" else "zstd"
        return "raw" if chosen == "zstd" and packing.compression == "none" else chosen

    return PackedTier(name, objects, level=packing.level, codec_of=codec_of)
