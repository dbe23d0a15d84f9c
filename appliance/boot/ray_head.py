"""The box's own Ray: a head node with a token, on loopback unless other nodes may join. Each device is a named
resource."""

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

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; only chunks of copies between nodes use this store


class RayStartError(RuntimeError):
    """Ray did not start; the message has the end of its log."""


def box_environment(paths: BoxPaths, start_timeout_s: float, *, joinable: bool = False) -> dict[str, str]:
    """Return the environment for the processes of a box or node: this process's own variables, Ray's settings, and the
    box's id. joinable: other nodes may join. Then Ray uses only TLS with certificates on both sides
    (appliance/invitation.py); otherwise it listens only on 127.0.0.1.

    Clients of Ray's servers must send a token, because every user of this machine can connect to loopback. Workers are
    not started in advance: there are few actors, and each idle worker takes about 90 MB.
    """
    if not joinable:
        # Ray would replace 127.0.0.1 by the machine's own address and listen on all addresses. With this switch, meant
        # for systems without clusters, Ray stays on loopback.
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
        # Numba caches compiled code next to the source or in the home directory. If neither is writable, as in a
        # container with a read-only root, modules with cached functions cannot be imported.
        "NUMBA_CACHE_DIR": str(paths.caches / "numba"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(paths.ray_token),
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Size and number of log files of each of Ray's processes; the default is five files of 512 MiB.
        "RAY_ROTATION_MAX_BYTES": str(16 * 2**20),
        "RAY_ROTATION_BACKUP_COUNT": "2",
        # A raylet waits until two Python agents have done their imports, and each new worker imports too. Ray's limits
        # of 30 to 60 s are too short on a busy machine; `start` waits for the whole start.
        "RAY_raylet_start_wait_time_s": str(round(start_timeout_s)),
        "RAY_agent_register_timeout_ms": str(round(start_timeout_s * 1000)),
        "RAY_worker_register_timeout_seconds": str(round(start_timeout_s)),
        # Ray's workers run at niceness 15 by default, which every engine forked from them would inherit.
        "RAY_worker_niceness": "0",
        # The box has its own memory policy. Ray's monitor would kill supervisors, with their engines and ranks, when
        # any program fills the memory to 95 %.
        "RAY_memory_monitor_refresh_ms": "0",
        # With the default of 1000 the kernel would kill Ray's workers first, with all processes forked from them.
        "RAY_worker_oom_score_adjustment": str(int(DiesAs.SUPERVISOR)),
        # When Ray stops, the controller has already ended all work on it, so there is nothing to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # A dead node is detected within four seconds instead of twenty.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        # A lost head never returns, because a new head is a new cluster. So other nodes end after these seconds.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        # Ray hides GPUs from actors that reserve none; the box's actors reserve custom resources instead.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def head(node_address: str | None, node_port: int) -> list[str]:
    """Return the head's options. node_address: other nodes join at this address and node_port; None: only loopback."""
    address, port = (node_address, node_port) if node_address else ("127.0.0.1", 0)
    # The monitor belongs to the autoscaler, which is not needed.
    return ["--head", f"--port={port}", f"--node-ip-address={address}", "--include-dashboard=false", "--no-monitor"]


def member(head: str, node_address: str) -> list[str]:
    """Return the options of a machine that joins the head at `head` (host:port)."""
    return [f"--address={head}", f"--node-ip-address={node_address}"]


async def start(
    paths: BoxPaths, where: Sequence[str], device_ids: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> tuple[asyncio.subprocess.Process, str]:
    """Start `ray start --block` with the options of `head` or `member`; return the process and the head's address once
    Ray is usable. Raises RayStartError if it exits or does not answer in time."""
    remove_files(paths)
    for folder in (paths.ray_session, paths.ray_logs):
        folder.mkdir(mode=0o700)
    resources = {f"device:{device_id}": 1 for device_id in device_ids}
    options = [
        "--disable-usage-stats",
        "--include-log-monitor=false",  # the monitor forwards workers' output to drivers, which do not need it
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
    file = paths.ray_session / "ray_current_cluster"  # Ray writes the head's host and port to this file
    try:
        async with asyncio.timeout(timeout_s):
            while not (file.exists() and (address := file.read_text().strip())):
                if process.returncode is not None:
                    raise RayStartError(f"ray start exited with {process.returncode}:\n{tail(log_path)}")
                await asyncio.sleep(0.05)
        return process, address
    except TimeoutError as error:
        raise RayStartError(
            f"ray did not start within {timeout_s:g} s (a slow machine needs a larger [box] start_timeout_s); "
            f"{log_path} ends with:\n{tail(log_path)}"
        ) from error


async def start_process(
    arguments: Sequence[str], output: BinaryIO, env: Mapping[str, str], python: str = sys.executable
) -> asyncio.subprocess.Process:
    """Start Python with these arguments, in its own session; the kernel kills it when this process dies."""
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
    """Delete Ray's session and its logs; call it only after Ray has ended."""
    for folder in (paths.ray_session, paths.ray_logs):
        shutil.rmtree(folder, ignore_errors=True)
