"""Reads the health of a node's devices, and decides which devices must not be used any more.

Rules
- At once: the driver reports a fault, the device does not answer, or the box cannot use its configuration.
- At once: the device has had uncorrected ECC errors since the watch began.
- After `hot_for_s` above its slowdown temperature: the cooling has failed; load alone does not cause this.
- After `slow_for_s` slowed by its board or power supply while most devices of its node are not: all ranks of a job wait
  for a slow device. If most devices are slowed, draining them would stop the box.
- After `slow_for_s` at least a quarter slower than the other devices of its job: all ranks wait for it at each step.
- After heat, slowness, silence or a wrong configuration, a device is retried automatically. Broken hardware waits for
  an operator.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median_low

from runtime.devices.kind import Reading
from runtime.devices.kinds import kind_of
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Device, node_of

log = logging.getLogger(__name__)

PATIENCE_S = 0.8
"""Seconds to wait for the drivers' answer: shorter than the box waits for a node's answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a device must not be used, in one sentence, and whether the fault may pass by itself."""

    reason: str
    may_pass: bool


def failing(readings: Mapping[str, tuple[Reading, ...]], config: SchedulerConfig) -> dict[str, Fault]:
    """The fault of every device that must not be used, by device id. `readings`: by device, oldest first; the first is
    from the start of the watch."""
    faults = {}
    for device_id, history in readings.items():
        if history and (fault := _fault_of_driver(history, config.hot_for_s)):
            faults[device_id] = fault
    for device_id, reason in _slowed(readings, config.slow_for_s).items():
        faults.setdefault(device_id, Fault(reason, may_pass=True))
    return faults


def _fault_of_driver(history: tuple[Reading, ...], hot_for_s: float) -> Fault | None:
    last = history[-1]
    if last.lost:
        return Fault(f"does not answer any more ({last.lost})", may_pass=True)
    if last.unfit:
        return Fault(last.unfit, may_pass=True)
    faults = dict.fromkeys(fault for reading in history for fault in reading.faults)
    if faults:
        return Fault("; ".join(faults), may_pass=False)
    if last.ecc_uncorrected is not None and history[0].ecc_uncorrected is not None:
        more = last.ecc_uncorrected - history[0].ecc_uncorrected
        if more > 0:
            return Fault(f"had {more} uncorrected memory error{'s' * (more > 1)}", may_pass=False)
    hot_since_s = None
    for reading in reversed(history):
        if reading.temperature_c is None or reading.slowdown_c is None or reading.temperature_c < reading.slowdown_c:
            break
        hot_since_s = reading.at_s
    if hot_since_s is not None and last.at_s - hot_since_s >= hot_for_s:
        reason = f"was at {last.temperature_c} °C for {last.at_s - hot_since_s:.0f} s, over its {last.slowdown_c} °C"
        return Fault(reason, may_pass=True)
    return None


def _slowed(readings: Mapping[str, tuple[Reading, ...]], slow_for_s: float) -> dict[str, str]:
    reasons, devices = {}, Counter(map(node_of, readings))
    for device_id, history in readings.items():
        slow = tuple(takewhile(lambda reading: {"hardware", "power_brake"} & {*reading.throttled}, reversed(history)))
        if slow and (lasted_s := slow[0].at_s - slow[-1].at_s) >= slow_for_s:
            reasons[device_id] = f"was slowed by its board or power supply for {lasted_s:.0f} s"
    slowed = Counter(map(node_of, reasons))
    few = {node for node, count in slowed.items() if 2 * count < devices[node]}
    return {device_id: reason for device_id, reason in reasons.items() if node_of(device_id) in few}


def straggling(seconds: Sequence[Sequence[float]], devices: Sequence[str]) -> dict[str, Fault]:
    """Devices that take a quarter longer than the job's median device in nine of ten steps (a few long rows would also
    raise sums). seconds: by step and rank. Empty with fewer than 20 steps."""
    shares = [[rank_s / median_low(step) for rank_s in step] for step in seconds if min(step) > 0]
    if len(shares) < 20:
        return {}
    usual = (sorted(of_rank)[len(of_rank) // 10] for of_rank in zip(*shares, strict=True))
    return {
        device: Fault(f"computed {share - 1:.0%} longer than the other devices of its job", may_pass=True)
        for device, share in zip(devices, usual, strict=True)
        if share > 1.25
    }


class DeviceReadings:
    """Reads the health of a node's devices, all of one kind, on demand. Empty for kinds without health data."""

    def __init__(self, devices: tuple[Device, ...]):
        self._watch = kind_of(devices[0].kind).watch({device.index: device.id for device in devices})
        self._reading: asyncio.Task[tuple[Reading, ...]] | None = None
        self._trouble = ""  # the last reading's error, to log each error once

    async def look(self, released: Collection[str] = ()) -> tuple[Reading, ...]:
        """Call `read` in a thread, one call at a time, because a call about a hung GPU may block forever. Empty while a
        driver does not answer. The next call returns a late answer, because a driver reports an error only once. Raises
        the driver's error."""
        reading = self._reading = self._reading or asyncio.create_task(asyncio.to_thread(self.read, released))
        done, _ = await asyncio.wait({reading}, timeout=PATIENCE_S)
        if done and self._reading is reading:  # another caller may have taken the result and started the next reading
            self._reading = None
        error = reading.exception() if done else TimeoutError(f"no answer for {PATIENCE_S} s")
        trouble = "" if error is None else f"{type(error).__name__}: {error}"
        if trouble and trouble != self._trouble:  # the box treats a node that raises like a node that does not answer
            log.warning("a driver raised %s; the devices of this node are not monitored until it answers", trouble)
        self._trouble = trouble
        return tuple(r for r in reading.result() if r.device_id not in released) if done else ()

    def read(self, released: Collection[str] = ()) -> tuple[Reading, ...]:
        """One reading per device that reports health. released: ids of devices to skip and to close. Takes
        milliseconds: call it off the event loop."""
        return () if self._watch is None else tuple(self._watch(released))
