"""The box's own Ray: a head node, on loopback unless other nodes may join it, with a token, fencing exact devices by
name."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from appliance.paths import BoxPaths
from runtime.oom import DiesAs
from runtime.process import die_with_parent, tail

NAMESPACE = "appliance"
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; weights never travel through the object store


class RayStartError(RuntimeError):
    """Ray's head did not come up; the message holds the end of its log."""


def temp_dir(paths: BoxPaths) -> Path:
    """Ray's session directory. Short, because Ray keeps Unix sockets (107 bytes at most) below it."""
    return Path(tempfile.gettempdir()) / f"appliance-{paths.box_id}"


def environment(paths: BoxPaths, start_timeout_s: float) -> dict[str, str]:
    """Settings every process that joins this Ray needs.

    Token authentication: Ray's servers bind all interfaces, whatever the node address says. Workers are not
    started ahead, since actors are few and each idle worker costs about 90 MB.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(paths.ray_token),
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Its own logs, of each process: 512 MiB and five of them otherwise.
        "RAY_ROTATION_MAX_BYTES": str(16 * 2**20),
        "RAY_ROTATION_BACKUP_COUNT": "2",
        # A raylet first waits for two agents in Python to import what they need, a new worker does so itself. Ray gives
        # them 30 to 60 s, too little on a machine without a processor to spare; who waits for all of it is `_start`.
        "RAY_raylet_start_wait_time_s": str(round(start_timeout_s)),
        "RAY_agent_register_timeout_ms": str(round(start_timeout_s * 1000)),
        "RAY_worker_register_timeout_seconds": str(round(start_timeout_s)),
        # Ray's workers run at niceness 15 by default, and every engine forked below them would inherit it.
        "RAY_worker_niceness": "0",
        # Memory is the box's own policy. With a foreign program at 95 % of the machine, Ray's monitor ended seven
        # supervisors, and engines and ranks with them.
        "RAY_memory_monitor_refresh_ms": "0",
        # Its workers would be the first that the kernel kills (1000), and everything forked below them.
        "RAY_worker_oom_score_adjustment": str(int(DiesAs.SUPERVISOR)),
        # Freed devices are known after one report; a lease asked for before that waits most of a second (ray_fences).
        "RAY_raylet_report_resources_period_milliseconds": "20",
        # When Ray is told to end, the controller has ended everything on it already: nothing to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # A node that dies is missed within four seconds instead of twenty.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        # A head that is gone does not come back, a new one is another cluster: its other nodes end so long after it.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        # Ray hides GPUs from actors that reserve none; ours fence devices by custom resource instead.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


async def start(
    paths: BoxPaths,
    device_ids: Sequence[str],
    log_path: Path,
    env: Mapping[str, str],
    timeout_s: float,
    node_address: str | None = None,
    node_port: int = 0,
) -> asyncio.subprocess.Process:
    """Start `ray start --head --block`; returns once other processes can join it.

    `node_address`: where other nodes can join, at `node_port`; None: nobody can, Ray stays on loopback.
    Raises RayStartError when it exits or does not answer within `timeout_s` seconds.
    """
    where = ["--head", f"--port={node_port if node_address else 0}", f"--node-ip-address={node_address or '127.0.0.1'}"]
    # No autoscaler either: the monitor is its process.
    process = await _start(paths, [*where, "--include-dashboard=false", "--no-monitor"], device_ids, log_path, env)
    await _wait_until(lambda: address(paths) is not None, process, log_path, timeout_s)
    return process


async def join(
    paths: BoxPaths,
    head: str,
    node_address: str,
    device_ids: Sequence[str],
    log_path: Path,
    env: Mapping[str, str],
    timeout_s: float,
) -> asyncio.subprocess.Process:
    """Start `ray start --address --block` on another machine than the head's (`head`: its host:port).

    Returns once this node is part of the cluster. Raises RayStartError.
    """
    process = await _start(
        paths, [f"--address={head}", f"--node-ip-address={node_address}"], device_ids, log_path, env
    )
    await _wait_until(lambda: address(paths) is not None, process, log_path, timeout_s)
    return process


async def _start(
    paths: BoxPaths, where: Sequence[str], device_ids: Sequence[str], log_path: Path, env: Mapping[str, str]
) -> asyncio.subprocess.Process:
    folder = temp_dir(paths)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    resources = {f"device:{device_id}": 1 for device_id in device_ids}
    with open(log_path, "ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "scheduler.ray_start", "start", *where, "--block", "--disable-usage-stats",
            "--include-log-monitor=false",  # it brings the output of workers to drivers, and ours want none
            "--num-cpus=2", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={folder}", f"--resources={json.dumps(resources)}",
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            env=dict(env), start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip


async def _wait_until(
    ready: Callable[[], bool], process: asyncio.subprocess.Process, log_path: Path, timeout_s: float
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not ready():
                if process.returncode is not None:
                    raise RayStartError(f"ray start exited with {process.returncode}:\n{tail(log_path)}")
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise RayStartError(
            f"ray did not start within {timeout_s:g} s ([box] start_timeout_s; a slow machine needs more); "
            f"{log_path} ends with:\n{tail(log_path)}"
        ) from error


def address(paths: BoxPaths) -> str | None:
    """Host and port of the head that Ray here belongs to, None before it is up."""
    try:
        return (temp_dir(paths) / "ray_current_cluster").read_text().strip() or None
    except FileNotFoundError:
        return None


def remove_files(paths: BoxPaths) -> None:
    """Delete Ray's session directory; call it when Ray has ended."""
    shutil.rmtree(temp_dir(paths), ignore_errors=True)
