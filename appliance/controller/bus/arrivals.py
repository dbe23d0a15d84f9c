"""Sums arrived requests over gateway processes that come, go and restart. Pure: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from appliance.controller.bus.load import Arrived, Report


@dataclass(slots=True)
class _Process:
    """The last report of one gateway process. started_s: distinguishes it from an earlier one of the same name."""

    started_s: float
    counts: dict[str, Arrived]


class Arrivals:
    """Totals by model since `since_s` (Unix time), from reports that count since each gateway's start.

    A total never falls while its model is in the table, and goes with it: a gateway counts a model that returns from
    nothing. Counts from before the bus opened are left out, or a restarted controller would take days of
    traffic for one burst. A report may come twice or late (two connections of one gateway): within one process no count
    decreases, so the largest is the newest.
    """

    def __init__(self, since_s: float):
        self._since_s = since_s
        self._processes: dict[str, _Process] = {}
        self._totals: dict[str, Arrived] = {}
        self._models: Collection[str] | None = None

    @property
    def totals(self) -> Mapping[str, Arrived]:
        return self._totals

    def keep(self, models: Collection[str]) -> None:
        """The models of the table: there are totals of no others. Until it is called, of all that are reported."""
        self._models = models
        self._totals = {name: total for name, total in self._totals.items() if name in models}

    def heard(self, report: Report) -> None:
        process = self._processes.get(report.gateway)
        if process is not None and process.started_s > report.started_s:
            return  # a late report of a process that has been replaced
        if process is None or process.started_s < report.started_s:
            before = {} if report.started_s >= self._since_s else dict(report.arrived)
            process = self._processes[report.gateway] = _Process(report.started_s, before)
        arrived = report.arrived
        for name in process.counts.keys() - arrived.keys():
            process.counts.pop(name, None)
        for name, now in arrived.items():
            before_ = process.counts.get(name, Arrived())
            if now.requests > before_.requests or sum(now.first_tokens.values()) > sum(before_.first_tokens.values()):
                process.counts[name] = now
                if self._models is not None and name not in self._models:
                    continue  # of a gateway that has yet to hear of the table without it
                self._totals[name] = self._totals.get(name, Arrived()).plus(now.since(before_))
