"""The box's own Ray: a head node, on loopback unless other nodes may join it, with a token, fencing exact devices by
name."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from appliance.paths import BoxPaths
from runtime.processes.kernel import die_with_parent, tail
from runtime.processes.oom import DiesAs
from runtime.relay import NodeCertificate

NAMESPACE = "appliance"
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; weights never travel through the object store


class RayStartError(RuntimeError):
    """Ray's head did not come up; the message holds the end of its log."""


def environment(paths: BoxPaths, start_timeout_s: float, certificate: NodeCertificate | None = None) -> dict[str, str]:
    """Settings every process that joins this Ray needs. `certificate`: of this node, where other nodes may join;
    all that Ray's processes say to each other is TLS then, and both sides show one. On 127.0.0.1 Ray listens nowhere
    else.

    Token authentication: whoever reaches one of Ray's servers has to show it, and loopback is open to every user of
    this machine. Workers are not started ahead, since actors are few and each idle worker costs about 90 MB.
    """
    # Ray replaces 127.0.0.1 by the machine's own address where it has one, and then listens on all of them. Its switch
    # for systems without clusters takes loopback at its word.
    secure = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if certificate is None else {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(certificate.authority),
        "RAY_TLS_SERVER_CERT": str(certificate.certificate),
        "RAY_TLS_SERVER_KEY": str(certificate.key),
    }  # fmt: skip
    return {
        **secure,
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
        # Freed devices are known after one report; a lease asked for before that waits most of a second
        # (scheduler/ray/device_reservations.py).
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
) -> tuple[asyncio.subprocess.Process, str]:
    """Start `ray start --head --block`; returns it and its address once other processes can join it.

    `node_address`: where other nodes can join, at `node_port`; None: nobody can, Ray stays on loopback.
    Raises RayStartError when it exits or does not answer within `timeout_s` seconds.
    """
    where = ["--head", f"--port={node_port if node_address else 0}", f"--node-ip-address={node_address or '127.0.0.1'}"]
    # No autoscaler either: the monitor is its process.
    process = await _start(paths, [*where, "--include-dashboard=false", "--no-monitor"], device_ids, log_path, env)
    return process, await _address(paths, process, log_path, timeout_s)


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
    process = await _start(paths, [f"--address={head}", f"--node-ip-address={node_address}"], device_ids, log_path, env)
    await _address(paths, process, log_path, timeout_s)
    return process


async def _start(
    paths: BoxPaths, where: Sequence[str], device_ids: Sequence[str], log_path: Path, env: Mapping[str, str]
) -> asyncio.subprocess.Process:
    remove_files(paths)
    for folder in (paths.ray_session, paths.ray_logs):
        folder.mkdir(mode=0o700)
    resources = {f"device:{device_id}": 1 for device_id in device_ids}
    with open(log_path, "ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "scheduler.ray.start", str(paths.ray_logs), "start", *where, "--block",
            "--disable-usage-stats",
            "--include-log-monitor=false",  # it brings the output of workers to drivers, and ours want none
            "--num-cpus=2", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={paths.ray_session}", f"--resources={json.dumps(resources)}",
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            env=dict(env), start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip


async def _address(paths: BoxPaths, process: asyncio.subprocess.Process, log_path: Path, timeout_s: float) -> str:
    """Host and port of the head that Ray here belongs to, once it is up. Ray writes them into its own folder."""
    told = paths.ray_session / "ray_current_cluster"
    try:
        async with asyncio.timeout(timeout_s):
            while not (told.exists() and (address := told.read_text().strip())):
                if process.returncode is not None:
                    raise RayStartError(f"ray start exited with {process.returncode}:\n{tail(log_path)}")
                await asyncio.sleep(0.05)
        return address
    except TimeoutError as error:
        raise RayStartError(
            f"ray did not start within {timeout_s:g} s ([box] start_timeout_s; a slow machine needs more); "
            f"{log_path} ends with:\n{tail(log_path)}"
        ) from error


def remove_files(paths: BoxPaths) -> None:
    """Delete Ray's session and its logs; call it when Ray has ended."""
    for folder in (paths.ray_session, paths.ray_logs):
        shutil.rmtree(folder, ignore_errors=True)
