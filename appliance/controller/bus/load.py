"""The gateways' current load, summed over all of them. Pure: no sockets, no clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_NOTES = 32


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Requests for one model. held: waiting at gateways for a replica. tpot_p95_s: of the slowest gateway.
    waiting_prompt_tokens: of requests known to have no first token yet; prompt_tokens: of all. computed_part: tokens
    that engines compute for an estimated one, the most at a gateway; None if no answer told. prefill_tokens_per_s: of
    one replica, the lowest that a gateway measured; None if none could."""

    inflight: int = 0
    held: int = 0
    last_request_s: float | None = None
    tpot_p95_s: float | None = None
    waiting_prompt_tokens: int = 0
    prompt_tokens: int = 0
    computed_part: float | None = None
    prefill_tokens_per_s: float | None = None


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
"""How the rows of several gateways for one model become one ModelLoad."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Requests that arrived for one model, and their prompt tokens as routing estimates them. prompts: the same
    requests by bucket of these tokens; first_tokens: streams by bucket of the time to their first token
    (`appliance.gateway.core.load`)."""

    requests: int = 0
    prompt_tokens: int = 0
    prompts: Mapping[int, int] = field(default_factory=dict)
    first_tokens: Mapping[int, int] = field(default_factory=dict)

    def since(self, before: Arrived) -> Arrived:
        """What came after `before`, an earlier count of the same process."""
        return Arrived(
            max(self.requests - before.requests, 0),
            max(self.prompt_tokens - before.prompt_tokens, 0),
            Counter(self.prompts) - Counter(before.prompts),
            Counter(self.first_tokens) - Counter(before.first_tokens),
        )

    def plus(self, other: Arrived) -> Arrived:
        return Arrived(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            Counter(self.prompts) + Counter(other.prompts),
            Counter(self.first_tokens) + Counter(other.first_tokens),
        )


@dataclass(frozen=True, slots=True)
class VersionLoad:
    """Counts for one version since a canary began. first_byte, duration: those that succeeded, by bucket of their time
    (`appliance.gateway.core.load`)."""

    requests: int = 0
    errors: int = 0
    first_byte: Mapping[int, int] = field(default_factory=dict)
    duration: Mapping[int, int] = field(default_factory=dict)

    def plus(self, other: VersionLoad) -> VersionLoad:
        return VersionLoad(
            self.requests + other.requests,
            self.errors + other.errors,
            Counter(self.first_byte) + Counter(other.first_byte),
            Counter(self.duration) + Counter(other.duration),
        )


@dataclass(frozen=True, slots=True)
class Load:
    """replicas: requests at each. canaries: by model and start time of its canary, then by version. notes: gateways'
    notes for users. certificate_expires_s: the earliest of the endpoint's certificates, None without TLS."""

    replicas: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, ModelLoad] = field(default_factory=dict)
    canaries: Mapping[tuple[str, float], Mapping[str, VersionLoad]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    certificate_expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A "load" message of one gateway. generation: of the table it has applied. started_s: Unix time at which its
    process began; `arrived` counts since then. replicas: requests at each."""

    gateway: str
    generation: int
    replicas: Mapping[str, int]
    models: Mapping[str, Mapping[str, float]]
    canaries: Mapping[tuple[str, float], Mapping[str, VersionLoad]] = field(default_factory=dict)
    started_s: float = 0.0
    notes: tuple[str, ...] = ()
    certificate_expires_s: float | None = None
    arrived: Mapping[str, Arrived] = field(default_factory=dict)


def parse_report(message: Mapping[str, Any]) -> Report:
    """Raises ValueError for a message of another shape (`appliance.gateway.main.load_report`)."""
    try:
        models, expires_s = message.get("models", {}), message.get("certificate_expires_s")
        return Report(
            str(message["gateway"]),
            int(message["generation"]),
            {name: int(row["inflight"]) for name, row in message.get("replicas", {}).items()},
            {name: {key: row[key] for key in _COMBINED if row.get(key) is not None} for name, row in models.items()},
            {(name, float(row["since_s"])): _versions(row) for name, row in message.get("canaries", {}).items()},
            float(message.get("started_s", 0.0)),
            tuple(message.get("notes", ())[:_MAX_NOTES]),
            None if expires_s is None else float(expires_s),
            {name: _arrived(row) for name, row in models.items() if "arrived_requests" in row},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a load report of another shape: {error!r}") from error


def _arrived(row: Mapping[str, Any]) -> Arrived:
    prompts, first_tokens = (_buckets(row.get(name, {})) for name in ("arrived_prompts", "first_tokens"))
    return Arrived(int(row["arrived_requests"]), int(row.get("arrived_prompt_tokens", 0)), prompts, first_tokens)


def _versions(row: Mapping[str, Any]) -> dict[str, VersionLoad]:
    return {
        version: VersionLoad(
            int(one["requests"]), int(one["errors"]), _buckets(one["first_byte"]), _buckets(one["duration"])
        )
        for version, one in row["versions"].items()
    }


def _buckets(counts: Mapping[str, Any]) -> dict[int, int]:
    return {int(bucket): int(number) for bucket, number in counts.items()}


def total(reports: list[Report]) -> Load:
    replicas = Counter[str]()
    rows: dict[str, list[Mapping[str, float]]] = {}
    canaries: dict[tuple[str, float], dict[str, VersionLoad]] = {}
    for report in reports:
        replicas.update(report.replicas)
        for name, row in report.models.items():
            rows.setdefault(name, []).append(row)
        for key, versions in report.canaries.items():
            sums_of = canaries.setdefault(key, {})
            for version, counts in versions.items():
                sums_of[version] = sums_of.get(version, VersionLoad()).plus(counts)
    return Load(
        replicas,
        {name: of_model(those) for name, those in rows.items()},
        canaries,
        tuple(dict.fromkeys(text for report in reports for text in report.notes)),
        min((r.certificate_expires_s for r in reports if r.certificate_expires_s is not None), default=None),
    )


def of_model(rows: Sequence[Mapping[str, float]]) -> ModelLoad:
    """rows: what each gateway reports of one model."""
    values = {name: [row[name] for row in rows if name in row] for name in _COMBINED}
    return ModelLoad(**{name: _COMBINED[name](those) for name, those in values.items() if those})  # type: ignore[arg-type]


class Arrivals:
    """Requests that arrived since they were last taken, from reports that count since their gateway's start.

    A gateway that was there before `since_s` (Unix time) counts from its first report: a restarted controller would
    take days of traffic for one burst. A name that a report lacks left the table, and counts from nothing later.
    """

    def __init__(self, since_s: float):
        self._since_s = since_s
        self._reported: dict[str, tuple[float, Mapping[str, Arrived]]] = {}  # by gateway: its start, and its counts
        self._new: dict[str, Arrived] = {}

    def add(self, report: Report) -> None:
        started_s, before = self._reported.get(report.gateway, (0.0, {}))
        if report.started_s < started_s:
            return  # of a process that has been replaced
        if report.started_s > started_s:
            before = report.arrived if report.started_s < self._since_s else {}
        self._reported[report.gateway] = report.started_s, report.arrived
        for name, counts in report.arrived.items():
            self._new[name] = self._new.get(name, Arrived()).plus(counts.since(before.get(name, Arrived())))

    def take(self) -> dict[str, Arrived]:
        """By model."""
        new, self._new = self._new, {}
        return new
