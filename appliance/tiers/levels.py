"""The tiers that a configuration asks for."""

from __future__ import annotations

from appliance.paths import BoxPaths
from appliance.tiers.tiers import Level
from weights.format.config import Packing, WeightsConfig
from weights.tiers.directory import DirectoryTier
from weights.tiers.locations import objects_at
from weights.tiers.objects import DirectoryObjects, Objects
from weights.tiers.packed import PackedTier


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
    return PackedTier(name, objects, int8_moments=packing.moments == "int8")
