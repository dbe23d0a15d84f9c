"""Paths and settings of this node, in the form that the scheduler needs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from appliance.config import BoxConfig
from appliance.paths import BoxPaths
from runtime.devices.kinds import FORK_ENVIRONMENT, kind_of
from runtime.processes.warm_parent import WARM_ENV, WarmSpec
from scheduler.core.workload import Device
from scheduler.devices.discovery import HOME_NODE
from scheduler.ray.node import NodeConfig


def node_config_of(config: BoxConfig, paths: BoxPaths, devices: tuple[Device, ...]) -> NodeConfig:
    at_home = devices[0].node == HOME_NODE
    rank_env = kind_of(devices[0].kind).rank_environment()
    env = (*WARM_ENV, *device_environment(devices[0].kind, paths.caches).items())

    def warm(name: str, preload: str, socket_path: Path, more: Mapping[str, str]) -> WarmSpec:
        return WarmSpec(name, preload, str(socket_path), str(paths.logs / f"warm-{name}.log"), (*env, *more.items()))

    return NodeConfig(
        name=devices[0].node,
        address=config.box.node_address or "127.0.0.1",
        devices=devices,
        run_dir=paths.run,
        log_dir=paths.logs,
        shm_root=paths.shm_root,
        warm=(
            warm("serve", "serve.engine.preload", paths.warm_serve_socket, {}),
            warm("train", "train.trainer.preload", paths.warm_train_socket, rank_env),
        ),
        jobs_dir=paths.jobs if at_home else paths.away_jobs,
        budget_bytes=weight_budget_bytes(config, paths),
        numa_bind=config.box.numa_bind,
    )


def device_environment(kind: str, caches: Path) -> dict[str, str]:
    """Return environment variables that libraries in the warm parent processes need at import.

    On GPUs the variables put caches of compiled kernels into the box's folder. The defaults are the home directory,
    which a service may be unable to write (then engines do not start), and TMPDIR, which is deleted with its engine.
    """
    env = {
        # Otherwise DeepSpeed initializes CUDA, and forked ranks cannot use it. Also, a box that is configured for
        # logical CPU devices must train on them even if the machine has GPUs.
        "DS_ACCELERATOR": kind,
        **FORK_ENVIRONMENT,
    }
    if kind_of(kind).on_host:
        return env
    return env | {
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        **kind_of(kind).library_environment(caches),
    }


def weight_budget_bytes(config: BoxConfig, paths: BoxPaths) -> int:
    """Return the bytes of this node's shared memory that the weight store may use."""
    if config.weights.budget_bytes is not None:
        return config.weights.budget_bytes
    return int(shutil.disk_usage(paths.shm_root).total * config.weights.budget_share)
