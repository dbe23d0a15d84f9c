"""Reads what verbs take on a box out of its own hand-over records, so that a simulation pays what that box pays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from scheduler.core.config import SchedulerConfig
from scheduler.simulator.effects import VerbTimes

LEAST_STEPS = 3
"""Fewer steps of a verb say too little; its default stays."""

_TIMES = {
    "acquire": "lease_s",
    "release": "lease_s",
    "start_replica": "start_s",
    "wake_replica": "wake_s",
    "sleep_replica": "sleep_s",
    "open_replica": "open_s",
    "suspend_group": "suspend_s",
    "start_group": "start_group_s",
    "stop_replica": "stop_s",
    "stop_group": "stop_s",
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """times: medians of the steps that were done. steps: how many each of these times comes from; a time that is not in
    it has its default."""

    times: VerbTimes
    steps: Mapping[str, int]

    def config(self, config: SchedulerConfig) -> SchedulerConfig:
        """The settings, with the costs that `auto` reckons with moved by what verbs take beyond their defaults."""
        usual, here = VerbTimes(), self.times
        suspend_s = here.suspend_s - usual.suspend_s
        pause_s = config.job_pause_s + suspend_s + here.start_group_s - usual.start_group_s
        reaction_s = config.reaction_s + suspend_s + here.wake_s - usual.wake_s
        return config.model_copy(update={"job_pause_s": max(pause_s, 0.01), "reaction_s": max(reaction_s, 0.01)})


def recorded(handovers: Iterable[Mapping[str, Any]]) -> Recorded:
    """handovers: as `GET /admin/v1/handovers` gives them, with the verb, state and seconds of each step."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for handover in handovers:
        for step in handover["steps"]:
            name = _TIMES.get(step["verb"])
            if name is not None and step["state"] == "done" and step["seconds"] is not None:
                seconds[name].append(step["seconds"])
    known = {name: found for name, found in sorted(seconds.items()) if len(found) >= LEAST_STEPS}
    times = replace(VerbTimes(), **{name: median(found) for name, found in known.items()})
    return Recorded(times, {name: len(found) for name, found in known.items()})
