"""A further node of a box: it joins Ray to the box's head and announces its devices and memory, until told to stop.

    python -m appliance.boot.node --config FILE --head HOST:PORT --name NAME [--token-path FILE] [--renew]

`--token-path`: a one-time token of the box, or its `ray.token`; not needed if this node has its certificate already.
`--renew`: it gets another one for that; within 60 days of its end it does so by itself.

Nothing is decided here: the controller at home starts engines through Ray's actors on this node. When this process
ends, everything below it ends too, and the box goes on with the devices it has left.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.boot import ray_head
from appliance.boot.supervised_process import kill_leftovers, own_files_only
from appliance.config import BoxConfig, enrolment_port, load_resolved
from appliance.nodes.certificate_authority import RENEW_BEFORE, Credentials, Unfit
from appliance.nodes.enrolment import NotEnrolled, enrol, renew
from appliance.paths import BoxPaths, UnsafeFolder
from appliance.wiring.node_config import node_config_of
from runtime.devices.kind import DevicesRefused
from runtime.logs import configure_logging
from runtime.network.tunnel import NodeCertificate
from runtime.processes.kernel import kill_group
from scheduler.core.errors import NodeNameTaken
from scheduler.devices.discovery import check_build, discover_devices, foreign_use
from serve.core import segments

log = logging.getLogger("appliance.boot.node")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.boot.node", description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--head", required=True)
    parser.add_argument("--token-path", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--renew", action="store_true")
    options = parser.parse_args(argv)
    config = load_resolved(options.config)
    paths = BoxPaths.of(Path(config.box.data_dir))
    own_files_only()
    configure_logging("node", node=options.name)
    try:
        paths.create()
    except UnsafeFolder as error:
        log.error("this node did not join: %s", error)
        return 1
    os.chdir(paths.data_dir)  # processes started from here look for modules in the working directory first
    with open(paths.lock_file, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.error("a box or node already runs on %s; give this one another --data-dir", paths.data_dir)
            return 5
        try:
            certificate = _enrolled(
                paths, options.head, options.token_path, options.name, config.box.node_address, options.renew
            )
            return asyncio.run(_run(config, paths, options.head, options.name, certificate))
        except (ray_head.RayStartError, NodeNameTaken, NotEnrolled, Unfit, DevicesRefused) as error:
            log.error("this node did not join: %s", error)
            shutil.rmtree(paths.shm_root, ignore_errors=True)
            return 1


def _enrolled(
    paths: BoxPaths, head: str, token_path: Path | None, name: str, address: str, renewing: bool
) -> NodeCertificate:
    """This node's certificate: the one it has, or the one the box gives for the token or for the old one. Raises
    NotEnrolled, Unfit."""
    credentials = Credentials(paths.certificates)
    host, _, port = head.rpartition(":")
    box = host.strip("[]"), enrolment_port(int(port))
    if token_path is None:
        why = credentials.fit(name, address)
        if why:
            raise NotEnrolled(f"{why}; `appliance node token` on the box prints a token for --token")
        if renewing or credentials.fit(name, address, datetime.now(UTC) + RENEW_BEFORE):
            try:
                asyncio.run(renew(credentials, box, name, address))
            except (NotEnrolled, Unfit) as error:
                if renewing:
                    raise
                log.warning("the certificate ends soon, and the box gave no other one: %s", error)
        return credentials.files
    token = token_path.read_text().strip()
    ray_token = asyncio.run(enrol(credentials, box, token, name, address))
    with os.fdopen(os.open(paths.ray_token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(ray_token)
    return credentials.files


async def _run(config: BoxConfig, paths: BoxPaths, head: str, name: str, certificate: NodeCertificate) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    kill_leftovers(paths.box_id)
    segments.remove_below(paths.replica_sockets)
    shutil.rmtree(paths.worlds, ignore_errors=True)
    shutil.rmtree(paths.away_jobs, ignore_errors=True)
    devices = discover_devices(config.box.devices, name, config.box.untried_devices)
    check_build(devices)
    for words in foreign_use(devices):
        log.warning("%s", words)
    timeout_s = config.box.start_timeout_s
    environment = ray_head.box_environment(paths, timeout_s, certificate)
    os.environ.update(environment)
    # Ray reads how to authenticate when it is imported: if it was imported above, it would not show the token.
    from scheduler.ray.nodes import announced_from, emptied

    node_config = node_config_of(config, paths, devices)
    ray = await ray_head.join(
        paths,
        head,
        node_config.address,
        [device.id for device in devices],
        paths.logs / "ray.log",
        environment,
        timeout_s,
    )
    try:
        await announced_from(node_config, head)
        print(f"{name} joined the box at {head} with {len(devices)} devices; Ctrl-C takes it out again", flush=True)
        ended = asyncio.create_task(ray.wait())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            return 1
        print("leaving: the box moves what runs here elsewhere first; Ctrl-C again ends it at once", flush=True)
        leaving, hurrying = asyncio.create_task(emptied(node_config, head)), asyncio.create_task(hurry.wait())
        await _left(leaving, {hurrying, ended}, config.scheduler.drain_timeout_s)
        return 0
    finally:
        if ray.returncode is None:
            ray.terminate()
            await ray.wait()
        kill_group(ray.pid)
        kill_leftovers(paths.box_id)
        segments.remove_below(paths.replica_sockets)
        ray_head.remove_files(paths)
        for folder in (paths.shm_root, paths.away_jobs):
            shutil.rmtree(folder, ignore_errors=True)


async def _left(leaving: asyncio.Task[Any], sooner: set[asyncio.Task[Any]], limit_s: float) -> None:
    await asyncio.wait({leaving, *sooner}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if not leaving.done():
        log.warning("what still runs here is ended with this node")
        leaving.cancel()


if __name__ == "__main__":
    sys.exit(main())
