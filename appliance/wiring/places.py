"""Where this node of the box keeps what, as the scheduler has to know it."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.config import BoxConfig
from appliance.paths import BoxPaths
from runtime.node import WarmSpec
from scheduler.discovery import HEAD_NODE
from scheduler.inventory import Device
from scheduler.ray_node import Place

LOOPBACK = "127.0.0.1"


def place_of(config: BoxConfig, paths: BoxPaths, devices: tuple[Device, ...]) -> Place:
    at_home = devices[0].node == HEAD_NODE

    def warm(name: str, socket_path: Path) -> WarmSpec:
        return WarmSpec(name, f"{name}.preload", str(socket_path), str(paths.logs / f"warm-{name}.log"))

    return Place(
        name=devices[0].node,
        address=config.box.node_address or LOOPBACK,
        devices=devices,
        run_dir=paths.run,
        log_dir=paths.logs,
        shm_root=paths.shm_root,
        warm=(warm("serve", paths.warm_serve_socket), warm("train", paths.warm_train_socket)),
        token_path=paths.ray_token,
        jobs_dir=paths.jobs if at_home else paths.away_jobs,
        lends=(paths.models,) if at_home else (),
        budget_bytes=weight_budget_bytes(config, paths),
    )


def weight_budget_bytes(config: BoxConfig, paths: BoxPaths) -> int | None:
    """What the weight store may take of this node's shared memory."""
    space = os.statvfs(paths.shm_root)
    return config.weights.budget_for(space.f_blocks * space.f_frsize)
