"""Builds the scheduler part of `status`: the loop's view, with loads, memory and notes for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.controller.bus.bus import Bus
from appliance.controller.interfaces.ports import SchedulerStatus
from appliance.memory.box_memory import BoxMemory
from runtime.devices.cpu import host_memory_bytes
from scheduler.loop.loop import SchedulerLoop
from scheduler.ray.effects import RayEffects
from weights.memory.store import WeightStore

RSS_EVERY_S = 5.0


class BoxStatus:
    """serving_floor, bounds, asleep_per_device: as configured. settings_notes: why the box itself changed settings, by
    model."""

    def __init__(
        self,
        loop: SchedulerLoop,
        effects: RayEffects,
        bus: Bus,
        weights: WeightStore,
        host: BoxMemory,
        serving_floor: int,
        bounds: dict[str, Any],
        asleep_per_device: int,
        settings_notes: Callable[[], Mapping[str, str]] = dict,
    ):
        self._loop, self._effects, self._bus, self._weights, self._host = loop, effects, bus, weights, host
        self._serving_floor, self._bounds, self._asleep_per_device = serving_floor, bounds, asleep_per_device
        self._rss: dict[str, int] = {}
        self._settings_notes = settings_notes

    async def read_memory(self) -> None:
        """Each replica's resident memory (bytes); called every `RSS_EVERY_S`. Of an engine that does not answer in
        time, as in a step of many long prompts, it stays what it was."""
        found = self._rss | await self._effects.resident_bytes()
        self._rss = {one["id"]: found[one["id"]] for one in self._loop.status()["replicas"] if one["id"] in found}

    def read(self) -> SchedulerStatus:
        now, usage, host = self._loop.status(), self._weights.usage(), self._host.status()
        return {
            "devices": now["devices"],
            "replicas": [
                {
                    **replica,
                    "inflight": self._bus.inflight(replica["id"]),
                    "rss_bytes": self._rss.get(replica["id"], 0),
                }
                for replica in now["replicas"]
            ],
            "memory": {
                "budget_bytes": usage.budget_bytes,
                "used_bytes": usage.used_bytes,
                "room_bytes": self._weights.room_bytes(),
                "host_bytes": host_memory_bytes(),
                "reserve_bytes": host["reserve_bytes"],
                "host": host,
                "nodes": self._host.nodes(),
                "asleep_per_device": self._asleep_per_device,
            },
            "handover": str(now["handovers"][-1]) if now["handovers"] else None,
            "serving_floor": self._serving_floor,
            "queue": now["jobs"],
            "bounds": self._bounds,
            "troubles": now["troubles"],
            "notes": [
                *self._host.notes(),
                *(f"{trouble['model']}: {trouble['message']}" for trouble in now["troubles"]),
                *(f"{model}: {text}" for model, text in now["notes"].items()),
                *(f"{model}: {text}" for model, text in now["reloads"].items()),
                *(f"{model}: {text}" for model, text in self._settings_notes().items()),
                *now["waits"],
            ],
            "reloads": now["reloads"],
            "plan_s": now["plan_s"],
        }
