"""Measures devices of this machine in processes of their own, which see no other device (`serve.load.device_rates`)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runtime.devices.kinds import kind_of
from runtime.processes.ended import heard_out, how_it_ended
from scheduler.core.inventory import Device

LIMIT_S = 180.0
NO_MEMORY = "out of memory"  # torch's words, of a device


class NotMeasured(RuntimeError):
    """A device could not be measured; the message says why, and goes on from "its measurement" or its node. by_device:
    the device may be why. It is not where its node is, or where others hold its memory."""

    by_device = False

    @classmethod
    def of_device(cls, message: str) -> NotMeasured:
        error = cls(message)
        error.by_device = NO_MEMORY not in message
        return error


class DeviceProcesses:
    """devices: all of this machine. Cancelled, a measurement ends at once."""

    def __init__(self, devices: Sequence[Device], *, numa_bind: bool, folder: Path, limit_s: float = LIMIT_S):
        """folder: where the processes of one measure meet."""
        self._devices = {device.id: device for device in devices}
        self._numa_bind, self._folder, self._limit_s = numa_bind, folder, limit_s

    async def alone(self, device_id: str) -> tuple[dict[str, float], list[str]]:
        """The rates of one device by measure, and what it did wrong. Raises NotMeasured."""
        answer = await self._run(self._devices[device_id])
        return answer["rates"], answer["wrong"]

    async def together(self, device_ids: list[str]) -> dict[str, float]:
        """The rate of an all-reduce over these devices, under its measure. Raises NotMeasured."""
        with TemporaryDirectory(prefix="rates-", dir=self._folder) as folder:
            meet = str(Path(folder) / "meet")
            ranks = [
                asyncio.ensure_future(
                    self._run(
                        self._devices[device_id],
                        *("--rank", str(rank), "--world", str(len(device_ids)), "--meet", meet),
                    )
                )
                for rank, device_id in enumerate(device_ids)
            ]
            try:
                answers = await asyncio.gather(*ranks)
            finally:
                for rank in ranks:  # of one that failed the others would wait for a minute
                    rank.cancel()
                await asyncio.gather(*ranks, return_exceptions=True)
        return {f"all-reduce of {len(device_ids)}": min(answer["all-reduce"] for answer in answers)}

    async def _run(self, device: Device, *options: str) -> dict[str, Any]:
        kind = kind_of(device.kind)
        threads = max(1, len(os.sched_getaffinity(0)) // len(self._devices)) if kind.on_host else 1
        arguments = [kind.name, "--threads", str(threads), *options]
        if self._numa_bind and device.numa_node is not None:
            arguments += ["--numa-node", str(device.numa_node)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            **kind.visibility([device.index]),
            **kind.collectives_environment("lo"),
        }
        command = (sys.executable, "-P", "-m", "serve.load.device_rates", *arguments)
        try:
            status, said, complained = await heard_out(*command, within_s=self._limit_s, env=environment)
        except TimeoutError as error:
            raise NotMeasured.of_device(f"its measurement did not end within {self._limit_s:.0f} s") from error
        if status != 0:
            why = (complained.decode(errors="replace").strip() or f"it {how_it_ended(status)}").splitlines()
            raise NotMeasured.of_device(f"its measurement failed: {why[-1]}")
        return json.loads(said.splitlines()[-1])
