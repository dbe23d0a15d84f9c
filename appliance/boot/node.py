"""A further node of a box: joins the box's Ray cluster and announces its devices and memory, until it is stopped.

    python -m appliance.boot.node --config FILE --invitation FILE

The node decides nothing: the controller on the box's own machine starts engines through Ray's actors here. When this
process ends, its child processes end too; the box continues on other nodes' devices.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from appliance.boot import ray_head
from appliance.boot.supervised_process import clear_leftovers, locked
from appliance.config import BoxConfig, load_resolved
from appliance.invitation import Invitation, InvitationError
from appliance.paths import BoxPaths, UnsafeFolder
from runtime.devices.kind import DevicesRefused
from runtime.logs import configure_logging
from scheduler.core.errors import NodeNameTaken
from scheduler.devices.discovery import check_build, discover_devices, foreign_use

log = logging.getLogger("appliance.boot.node")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.boot.node", description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--invitation", type=Path, required=True)
    options = parser.parse_args(argv)
    config = load_resolved(options.config)
    paths = BoxPaths.of(Path(config.box.data_dir))
    os.umask(0o077)  # makes new files private; some libraries would create files that all users can read
    configure_logging("node")
    try:
        invitation = Invitation.read(options.invitation)
        paths.create()
        os.chdir(paths.data_dir)  # child processes import modules from the working directory first
        with locked(paths):
            try:
                invitation.accept(paths)
                return asyncio.run(_run(config, paths, invitation))
            finally:
                shutil.rmtree(paths.shm_root, ignore_errors=True)
    except BlockingIOError:
        log.error("a box or node is already running on %s; give this node another --data-dir", paths.data_dir)
        return 5
    except (InvitationError, UnsafeFolder, ray_head.RayStartError, NodeNameTaken, DevicesRefused) as error:
        log.error("this node did not join: %s", error)
        return 1


async def _run(config: BoxConfig, paths: BoxPaths, invitation: Invitation) -> int:
    head, name = invitation.head, invitation.name
    config = config.model_copy(update={"box": config.box.model_copy(update={"node_address": invitation.address})})
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    clear_leftovers(paths)
    shutil.rmtree(paths.away_jobs, ignore_errors=True)
    devices = discover_devices(config.box.devices, name)
    check_build(devices)
    for words in foreign_use(devices):
        log.warning("%s", words)
    timeout_s = config.box.start_timeout_s
    environment = ray_head.box_environment(paths, timeout_s, joinable=True)
    os.environ.update(environment)
    # Ray reads its authentication settings at import; imported before they are set, it would not send the token.
    from appliance.node_config import node_config_of
    from scheduler.ray.nodes import announced_from, emptied

    node_config = node_config_of(config, paths, devices)
    where, ids = ray_head.member(head, node_config.address), [device.id for device in devices]
    ray: asyncio.subprocess.Process | None = None
    try:
        ray, _ = await ray_head.start(paths, where, ids, environment, timeout_s)
        await announced_from(node_config, head)
        print(f"{name} joined the box at {head} with {len(devices)} devices; Ctrl-C removes it again", flush=True)
        ended = asyncio.create_task(ray.wait())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            return 1
        print("leaving: the box first moves its work to other nodes; press Ctrl-C again to end at once", flush=True)
        leaving, hurrying = asyncio.create_task(emptied(node_config, head)), asyncio.create_task(hurry.wait())
        limit_s = config.scheduler.drain_timeout_s
        await asyncio.wait({leaving, hurrying, ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not leaving.done():
            log.warning("remaining engines and jobs here end with this node")
            leaving.cancel()
        return 0
    finally:
        if ray is not None and ray.returncode is None:
            ray.terminate()
            await ray.wait()
        clear_leftovers(paths)  # processes may remain even if Ray did not start
        ray_head.remove_files(paths)
        shutil.rmtree(paths.away_jobs, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
