"""The gateways' messages, and their load summed over all of them. Pure: no sockets, no clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, json

_MAX_NOTES = 32


class ModelLoad(Struct, frozen=True):
    """Requests for one model, at one gateway or at all. held: waiting at gateways for a replica. tpot_p95_s: of the
    slowest gateway. waiting_prompt_tokens: of requests known to have no first token yet; prompt_tokens: of all.
    computed_part: tokens that engines compute for an estimated one, the most at a gateway. prefill_tokens_per_s: of one
    replica, the lowest that a gateway measured. None where unknown.

    arrived_prompts: of one gateway since it began, requests by bucket of their prompt tokens
    (`appliance.gateway.core.load`)."""

    inflight: int = 0
    held: int = 0
    last_request_s: float | None = None
    tpot_p95_s: float | None = None
    waiting_prompt_tokens: int = 0
    prompt_tokens: int = 0
    computed_part: float | None = None
    prefill_tokens_per_s: float | None = None
    arrived_prompts: dict[int, int] = {}


_COMBINED: Mapping[str, Callable[[Iterable[float]], float]] = {
    "inflight": sum,
    "held": sum,
    "waiting_prompt_tokens": sum,
    "prompt_tokens": sum,
    "last_request_s": max,
    "tpot_p95_s": max,
    "computed_part": max,
    "prefill_tokens_per_s": min,
}
"""How the rows of several gateways for one model become one."""


class VersionLoad(Struct, frozen=True):
    """Counts for one version since a canary began. first_byte, duration: those that succeeded, by bucket of their time
    (`appliance.gateway.core.load`)."""

    requests: int = 0
    errors: int = 0
    first_byte: dict[int, int] = {}
    duration: dict[int, int] = {}

    def plus(self, other: VersionLoad) -> VersionLoad:
        return VersionLoad(
            self.requests + other.requests,
            self.errors + other.errors,
            Counter(self.first_byte) + Counter(other.first_byte),
            Counter(self.duration) + Counter(other.duration),
        )


class CanaryLoad(Struct, frozen=True):
    since_s: float
    versions: dict[str, VersionLoad]


class Report(Struct, frozen=True, tag_field="type", tag="load"):
    """generation: of the table that the gateway has applied. started_s: Unix time at which its process began."""

    gateway: str
    generation: int
    replicas: dict[str, dict[str, int]] = {}
    models: dict[str, ModelLoad] = {}
    canaries: dict[str, CanaryLoad] = {}
    started_s: float = 0.0
    notes: list[str] = []
    certificate_expires_s: float | None = None

    def inflight(self, replica_id: str) -> int:
        return self.replicas.get(replica_id, {}).get("inflight", 0)


class Usage(Struct, frozen=True, tag_field="type", tag="usage"):
    rows: list[dict[str, Any]]


MESSAGE = json.Decoder(Report | Usage)
"""Raises msgspec.DecodeError."""


class Load(NamedTuple):
    """replicas: requests at each. canaries: by model and start time of its canary, then by version. notes: gateways'
    notes for users. certificate_expires_s: the earliest of the endpoint's certificates, None without TLS."""

    replicas: Mapping[str, int] = {}
    models: Mapping[str, ModelLoad] = {}
    canaries: Mapping[tuple[str, float], Mapping[str, VersionLoad]] = {}
    notes: tuple[str, ...] = ()
    certificate_expires_s: float | None = None


def total(reports: Sequence[Report]) -> Load:
    replicas = Counter[str]()
    rows: dict[str, list[ModelLoad]] = {}
    canaries: dict[tuple[str, float], dict[str, VersionLoad]] = {}
    for report in reports:
        replicas.update({name: report.inflight(name) for name in report.replicas})
        for name, row in report.models.items():
            rows.setdefault(name, []).append(row)
        for name, canary in report.canaries.items():
            sums = canaries.setdefault((name, canary.since_s), {})
            for version, counts in canary.versions.items():
                sums[version] = sums.get(version, VersionLoad()).plus(counts)
    return Load(
        replicas,
        {name: _combined(of_gateways) for name, of_gateways in rows.items()},
        canaries,
        tuple(dict.fromkeys(text for report in reports for text in report.notes[:_MAX_NOTES])),
        min((r.certificate_expires_s for r in reports if r.certificate_expires_s is not None), default=None),
    )


def _combined(rows: Sequence[ModelLoad]) -> ModelLoad:
    values = {name: [value for row in rows if (value := getattr(row, name)) is not None] for name in _COMBINED}
    return ModelLoad(**{name: _COMBINED[name](known) for name, known in values.items() if known})  # type: ignore[arg-type]


class Arrivals:
    """What arrived since it was last taken, from reports that count since their gateway's start.

    A gateway that was there before `since_s` (Unix time) counts from its first report: a restarted controller would
    take days of traffic for one burst. A name that a report lacks left the table, and counts from nothing later.
    """

    def __init__(self, since_s: float):
        self._since_s = since_s
        self._reported: dict[str, Report] = {}  # the last one of each gateway
        self._new: dict[str, Counter[int]] = {}

    def add(self, report: Report) -> None:
        last = self._reported.get(report.gateway)
        if last is not None and report.started_s < last.started_s:
            return  # of a process that has been replaced
        if last is not None and report.started_s == last.started_s:
            before = last.models
        else:
            before = report.models if report.started_s < self._since_s else {}
        self._reported[report.gateway] = report
        for name, row in report.models.items():
            known = Counter(before.get(name, ModelLoad()).arrived_prompts)
            self._new.setdefault(name, Counter()).update(Counter(row.arrived_prompts) - known)

    def take(self) -> dict[str, Counter[int]]:
        """By model, requests by the buckets of `ModelLoad`."""
        new, self._new = self._new, {}
        return new
