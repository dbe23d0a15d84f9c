"""The tiers that a configuration asks for."""

from __future__ import annotations

from appliance.paths import BoxPaths
from appliance.tiers.tiers import Level
from weights.format.config import Packing, WeightsConfig
from weights.format.header import TensorSpec
from weights.tiers.codec import Codec
from weights.tiers.directory import DirectoryTier
from weights.tiers.locations import objects_at
from weights.tiers.objects import DirectoryObjects, Objects
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
        remote = _packed("remote", objects_at(far), far)
        levels.append(Level("remote", remote.where, remote, remote, far.versions, far.snapshots, far.rate_bytes_s))
    return levels


def _packed(name: str, objects: Objects, packing: Packing) -> PackedTier:
    def codec_of(kind: str, spec: TensorSpec) -> Codec:
        chosen = moment_codecs(kind, spec) if packing.moments == "int8" else "zstd"
        return "raw" if chosen == "zstd" and packing.compression == "none" else chosen

    return PackedTier(name, objects, level=packing.level, codec_of=codec_of)
