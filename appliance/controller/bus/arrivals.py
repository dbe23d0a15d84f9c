"""Sums arrived requests over gateway processes that come, go and restart. Pure: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.controller.bus.load import Arrived, Report


@dataclass(slots=True)
class _Process:
    """The last report of one gateway process. started_s: distinguishes it from an earlier one of the same name."""

    started_s: float
    counts: dict[str, Arrived]


class Arrivals:
    """Totals by model since `since_s` (Unix time), from reports that count since each gateway's start.

    A total never falls. Counts from before the bus opened are left out, or a restarted controller would take days of
    traffic for one burst. A report may come twice or late (two connections of one gateway): within one process no count
    decreases, so the largest is the newest.
    """

    def __init__(self, since_s: float):
        self._since_s = since_s
        self._processes: dict[str, _Process] = {}
        self._totals: dict[str, Arrived] = {}

    @property
    def totals(self) -> Mapping[str, Arrived]:
        return self._totals

    def heard(self, report: Report) -> None:
        process = self._processes.get(report.gateway)
        if process is not None and process.started_s > report.started_s:
            return  # a late report of a process that has been replaced
        if process is None or process.started_s < report.started_s:
            before = {} if report.started_s >= self._since_s else dict(report.arrived)
            process = self._processes[report.gateway] = _Process(report.started_s, before)
        for name, now in report.arrived.items():
            before_ = process.counts.get(name, Arrived())
            if now.requests > before_.requests or sum(now.first_tokens.values()) > sum(before_.first_tokens.values()):
                process.counts[name] = now
                self._totals[name] = self._totals.get(name, Arrived()).plus(now.since(before_))
