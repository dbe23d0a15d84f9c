"""Reads the health of a node's devices, and decides from the readings when a device must not be used any more.

Rules
- At once: a fault that its driver reports, a device that does not answer, one that is set up so that the box cannot use
  it.
- At once: uncorrected ECC errors that were not there when the watch began.
- Hotter than its slowdown temperature for `hot_for_s`: the cooling has failed, not the load.
- Slowed by its board or its power supply for `slow_for_s` while most devices of its node are not: all ranks of a job
  wait for such a device. Where most are slowed, draining them would stop the box.
- Slower than its job's other devices, at a quarter or more, for `slow_for_s`: all wait for it at each step's end.
- Heat, slowness, silence and settings may pass: such a device is tried again automatically. Broken hardware waits for
  a person.
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
"""How long a look waits for the drivers: shorter than the box waits for a node's answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a device must not be used, in one sentence, and whether that may pass without human action."""

    reason: str
    may_pass: bool


def failing(readings: Mapping[str, tuple[Reading, ...]], config: SchedulerConfig) -> dict[str, Fault]:
    """Every device that must not be used, by its id. `readings`: by device, oldest first; the first is from the start
    of the watch."""
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
    """Devices that compute a quarter longer than the median of their job's in nine of ten steps: sums would also rise
    by a few long rows. seconds: of each rank in each step; too few steps say nothing."""
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
    """Reads the devices of one node, which are of one kind, on demand; nothing for kinds without health data."""

    def __init__(self, devices: tuple[Device, ...]):
        self._watch = kind_of(devices[0].kind).watch({device.index: device.id for device in devices})
        self._reading: asyncio.Task[tuple[Reading, ...]] | None = None
        self._trouble = ""  # of the last look, to log each once

    async def look(self, released: Collection[str] = ()) -> tuple[Reading, ...]:
        """As `read`, beside the event loop and one at a time. Empty while a driver does not answer: a call about a GPU
        that hangs may never end, and each would keep a thread. Its late answer is for the next look, because a driver
        reports an error once. Raises the driver's error."""
        reading = self._reading = self._reading or asyncio.create_task(asyncio.to_thread(self.read, released))
        done, _ = await asyncio.wait({reading}, timeout=PATIENCE_S)
        if done and self._reading is reading:  # another look may have taken its answer, and begun the next
            self._reading = None
        error = reading.exception() if done else TimeoutError(f"no answer for {PATIENCE_S} s")
        trouble = "" if error is None else f"{type(error).__name__}: {error}"
        if trouble and trouble != self._trouble:  # the box takes a node that raises for one that does not answer
            log.warning("a driver raised %s; this node's devices are not watched meanwhile", trouble)
        self._trouble = trouble
        return tuple(r for r in reading.result() if r.device_id not in released) if done else ()

    def read(self, released: Collection[str] = ()) -> tuple[Reading, ...]:
        """One reading per device that reports health. released: ids of devices to leave out and not to keep open. Takes
        milliseconds: call it off the event loop."""
        return () if self._watch is None else tuple(self._watch(released))
