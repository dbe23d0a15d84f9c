"""The box's own Ray: a head node with a token, on loopback unless other nodes may join it. Each device is a resource by
name."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from appliance.boot.supervised_process import BOX_VARIABLE
from appliance.paths import BoxPaths
from runtime.logs import tail
from runtime.processes.kernel import DiesAs, die_with_parent

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; only copies between nodes are in it, in chunks


class RayStartError(RuntimeError):
    """Ray's head did not come up; the message holds the end of its log."""


def box_environment(paths: BoxPaths, start_timeout_s: float, *, joinable: bool = False) -> dict[str, str]:
    """The environment of the processes of a box or node: ours, Ray's settings, and what tells whose they are. joinable:
    other nodes may join. Then Ray's processes speak TLS alone, and both sides show a certificate
    (appliance/invitation.py). Otherwise Ray listens on 127.0.0.1 alone.

    A token authenticates: whoever reaches one of Ray's servers has to show it, because loopback is open to every user
    of this machine. Workers are not started ahead: actors are few, and each idle worker costs about 90 MB.
    """
    if not joinable:
        # Ray replaces 127.0.0.1 by the machine's own address if it has one, and then listens on all of them. With its
        # switch for systems without clusters it stays on loopback.
        secure = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    else:
        secure = {
            "RAY_USE_TLS": "1",
            "RAY_TLS_CA_CERT": str(paths.certificates / "ca.pem"),
            "RAY_TLS_SERVER_CERT": str(paths.certificates / "node.pem"),
            "RAY_TLS_SERVER_KEY": str(paths.certificates / "node.key"),
        }
    return {
        **os.environ,
        **secure,
        BOX_VARIABLE: paths.box_id,
        "OMP_NUM_THREADS": "1",
        # Numba keeps what it compiled beside the source, or in the home directory, and its import of a module that asks
        # for that fails where it can write to neither, as in a container on a root that is read-only.
        "NUMBA_CACHE_DIR": str(paths.caches / "numba"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(paths.ray_token),
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # The logs of each of its processes; by default five of 512 MiB.
        "RAY_ROTATION_MAX_BYTES": str(16 * 2**20),
        "RAY_ROTATION_BACKUP_COUNT": "2",
        # A raylet first waits until two agents in Python have imported what they need; a new worker imports too. Ray
        # allows 30 to 60 s, which is too little on a machine without a free processor. `start` waits for all of it.
        "RAY_raylet_start_wait_time_s": str(round(start_timeout_s)),
        "RAY_agent_register_timeout_ms": str(round(start_timeout_s * 1000)),
        "RAY_worker_register_timeout_seconds": str(round(start_timeout_s)),
        # Ray's workers run at niceness 15 by default, and every engine forked below them would inherit it.
        "RAY_worker_niceness": "0",
        # The box has its own policy for memory. When a foreign program took the machine to 95 %, Ray's monitor ended
        # seven supervisors, and engines and ranks with them.
        "RAY_memory_monitor_refresh_ms": "0",
        # By default (1000) the kernel kills its workers first, and everything forked below them.
        "RAY_worker_oom_score_adjustment": str(int(DiesAs.SUPERVISOR)),
        # When Ray is told to end, the controller has ended everything on it: there is nothing to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # A node that dies is missed within four seconds instead of twenty.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        # A head that is gone does not come back, and a new one is another cluster: its nodes end so long after it.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        # Ray hides GPUs from actors that reserve none; ours reserve devices as custom resources instead.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def head(node_address: str | None, node_port: int) -> list[str]:
    """Options of the head, which other nodes can join at this address and port; None: Ray stays on loopback."""
    address, port = (node_address, node_port) if node_address else ("127.0.0.1", 0)
    # The monitor is the process of the autoscaler, which is not needed either.
    return ["--head", f"--port={port}", f"--node-ip-address={address}", "--include-dashboard=false", "--no-monitor"]


def member(head: str, node_address: str) -> list[str]:
    """Options of another machine that joins the head at `head` (host:port)."""
    return [f"--address={head}", f"--node-ip-address={node_address}"]


async def start(
    paths: BoxPaths, where: Sequence[str], device_ids: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> tuple[asyncio.subprocess.Process, str]:
    """Start `ray start --block` with the options of `head` or `member`; return it and the head's address once other
    processes can use it. Raises RayStartError when it exits or does not answer in time."""
    remove_files(paths)
    for folder in (paths.ray_session, paths.ray_logs):
        folder.mkdir(mode=0o700)
    resources = {f"device:{device_id}": 1 for device_id in device_ids}
    options = [
        "--disable-usage-stats",
        "--include-log-monitor=false",  # it brings the output of workers to drivers, and ours want none
        "--num-cpus=2",
        "--num-gpus=0",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={paths.ray_session}",
        f"--resources={json.dumps(resources)}",
    ]
    command = ["-P", "-m", "scheduler.ray.start", str(paths.ray_logs), "start", *where, "--block", *options]
    log_path = paths.logs / "ray.log"
    with open(log_path, "ab") as log:
        process = await start_process(command, log, env)
    file = paths.ray_session / "ray_current_cluster"  # Ray writes host and port of its head
    try:
        async with asyncio.timeout(timeout_s):
            while not (file.exists() and (address := file.read_text().strip())):
                if process.returncode is not None:
                    raise RayStartError(f"ray start exited with {process.returncode}:\n{tail(log_path)}")
                await asyncio.sleep(0.05)
        return process, address
    except TimeoutError as error:
        raise RayStartError(
            f"ray did not start within {timeout_s:g} s ([box] start_timeout_s; a slow machine needs more); "
            f"{log_path} ends with:\n{tail(log_path)}"
        ) from error


async def start_process(
    arguments: Sequence[str], output: BinaryIO, env: Mapping[str, str], python: str = sys.executable
) -> asyncio.subprocess.Process:
    """Start Python with these arguments, in a session of its own that dies with this process."""
    return await asyncio.create_subprocess_exec(
        python,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(env),
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def remove_files(paths: BoxPaths) -> None:
    """Delete Ray's session and its logs. Call it when Ray has ended."""
    for folder in (paths.ray_session, paths.ray_logs):
        shutil.rmtree(folder, ignore_errors=True)
