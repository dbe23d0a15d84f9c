"""The gateways' current load, summed over all of them. Pure: no sockets, no clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SUMMED_MODEL = ("inflight", "held", "waiting_prompt_tokens", "prompt_tokens")
_LATEST_MODEL = ("last_request_s",)
_WORST_MODEL = ("ttft_p95_s", "tpot_p95_s", "computed_part")
_SLOWEST_MODEL = ("prefill_tokens_per_s",)
_MAX_NOTES = 32


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Requests at one replica."""

    inflight: int = 0


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Requests for one model. held: waiting at gateways for a replica. ttft_p95_s, tpot_p95_s: of the slowest gateway.
    waiting_prompt_tokens: of requests known to have no first token yet; prompt_tokens: of all. computed_part: tokens
    that engines compute for an estimated one, the most at a gateway; None if no answer told. prefill_tokens_per_s: of
    one replica, the lowest that a gateway measured; None if none could."""

    inflight: int = 0
    held: int = 0
    last_request_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p95_s: float | None = None
    waiting_prompt_tokens: int = 0
    prompt_tokens: int = 0
    computed_part: float | None = None
    prefill_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """Requests that arrived for one model, and their prompt tokens as routing estimates them. prompts: the same
    requests by bucket of these tokens; first_tokens: streams by bucket of the time to their first token
    (`appliance.gateway.observe.load`)."""

    requests: int = 0
    prompt_tokens: int = 0
    prompts: Mapping[int, int] = field(default_factory=dict)
    first_tokens: Mapping[int, int] = field(default_factory=dict)

    def since(self, before: Arrived) -> Arrived:
        """What came after `before`, an earlier count of the same process."""
        return Arrived(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
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
    (`appliance.gateway.observe.load`)."""

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
    """canaries: by model and start time of its canary, then by version. arrived: by model, since the bus was opened
    (`appliance.controller.bus.arrivals`). notes: gateways' notes for users. certificate_expires_s: the earliest of the
    endpoint's certificates, None without TLS."""

    replicas: Mapping[str, ReplicaLoad] = field(default_factory=dict)
    models: Mapping[str, ModelLoad] = field(default_factory=dict)
    canaries: Mapping[tuple[str, float], Mapping[str, VersionLoad]] = field(default_factory=dict)
    arrived: Mapping[str, Arrived] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    certificate_expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A "load" message of one gateway, checked. generation: of the table it has applied. started_s: Unix time at which
    its process began; `arrived` counts since then."""

    gateway: str
    generation: int
    replicas: Mapping[str, Mapping[str, float]]
    models: dict[str, dict[str, float]]
    canaries: Mapping[tuple[str, float], Mapping[str, VersionLoad]] = field(default_factory=dict)
    started_s: float = 0.0
    notes: tuple[str, ...] = ()
    certificate_expires_s: float | None = None
    prompts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    first_tokens: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def arrived(self) -> dict[str, Arrived]:
        return {
            name: Arrived(
                int(row["arrived_requests"]),
                int(row.get("arrived_prompt_tokens", 0)),
                self.prompts.get(name, {}),
                self.first_tokens.get(name, {}),
            )
            for name, row in self.models.items()
            if "arrived_requests" in row
        }


def parse_report(message: Mapping[str, Any]) -> Report:
    """Raises ValueError naming what is wrong."""
    gateway, generation = message.get("gateway"), message.get("generation")
    if not isinstance(gateway, str) or not 1 <= len(gateway) <= 128:
        raise ValueError(f"gateway: {gateway!r} given, expected a name")
    if not isinstance(generation, int) or isinstance(generation, bool):
        raise ValueError(f"generation: {generation!r} given, expected a whole number")
    started_s = message.get("started_s", 0.0)
    if not isinstance(started_s, int | float) or isinstance(started_s, bool):
        raise ValueError(f"started_s: {started_s!r} given, expected seconds since 1970")
    expires_s = message.get("certificate_expires_s")
    if expires_s is not None and (not isinstance(expires_s, int | float) or isinstance(expires_s, bool)):
        raise ValueError(f"certificate_expires_s: {expires_s!r} given, expected seconds since 1970 or null")
    return Report(
        gateway,
        generation,
        _rows(message, "replicas"),
        _rows(message, "models"),
        _canaries(message.get("canaries", {})),
        float(started_s),
        _notes(message.get("notes", [])),
        None if expires_s is None else float(expires_s),
        _by_bucket(message, "arrived_prompts"),
        _by_bucket(message, "first_tokens"),
    )


def _by_bucket(message: Mapping[str, Any], name: str) -> dict[str, dict[int, int]]:
    try:
        return {
            model: {int(bucket): int(number) for bucket, number in row.get(name, {}).items()}
            for model, row in message.get("models", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"models: {name}: expected counts by bucket ({error!r})") from error


def _notes(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise ValueError(f"notes: {given!r:.80} given, expected texts")
    return tuple(given[:_MAX_NOTES])


def _rows(message: Mapping[str, Any], name: str) -> dict[str, dict[str, float]]:
    given = message.get(name, {})
    if not isinstance(given, dict) or not all(isinstance(row, dict) for row in given.values()):
        raise ValueError(f"{name}: expected an object of objects")
    return {
        key: {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for key, row in given.items()
    }


def _canaries(given: Any) -> dict[tuple[str, float], dict[str, VersionLoad]]:
    try:
        return {
            (name, float(row["since_s"])): {version: _version(counts) for version, counts in row["versions"].items()}
            for name, row in given.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"canaries: expected counts by model and version ({error!r})") from error


def _version(row: Mapping[str, Any]) -> VersionLoad:
    times = [{int(key): int(number) for key, number in row[name].items()} for name in ("first_byte", "duration")]
    return VersionLoad(int(row["requests"]), int(row["errors"]), *times)


def total(
    reports: list[Report],
    arrived: Mapping[str, Arrived] | None = None,
) -> Load:
    replicas: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, row in report.replicas.items():
            _add(replicas.setdefault(name, {}), row, ("inflight",))
    canaries: dict[tuple[str, float], dict[str, VersionLoad]] = {}
    for report in reports:
        for key, versions in report.canaries.items():
            sums_of = canaries.setdefault(key, {})
            for version, counts in versions.items():
                sums_of[version] = sums_of.get(version, VersionLoad()).plus(counts)
    return Load(
        {name: ReplicaLoad(**row) for name, row in replicas.items()},
        of_models(reports),
        canaries,
        dict(arrived or {}),
        tuple(dict.fromkeys(text for report in reports for text in report.notes)),
        min((r.certificate_expires_s for r in reports if r.certificate_expires_s is not None), default=None),
    )


def of_models(reports: list[Report]) -> dict[str, ModelLoad]:
    rows: dict[str, list[Mapping[str, float]]] = {}
    for report in reports:
        for name, row in report.models.items():
            rows.setdefault(name, []).append(row)
    return {name: of_model(those) for name, those in rows.items()}


def of_model(rows: Sequence[Mapping[str, float]]) -> ModelLoad:
    """rows: what each gateway says of one model."""
    sums: dict[str, Any] = {}
    for row in rows:
        _add(sums, row, _SUMMED_MODEL)
        for key in (*_LATEST_MODEL, *_WORST_MODEL):
            if key in row:
                sums[key] = max(row[key], sums.get(key, row[key]))
        for key in _SLOWEST_MODEL:
            if key in row:
                sums[key] = min(row[key], sums.get(key, row[key]))
    return ModelLoad(**sums)


def _add(sums: dict[str, Any], row: Mapping[str, float], keys: tuple[str, ...]) -> None:
    for key in keys:
        sums[key] = sums.get(key, 0) + int(row.get(key, 0))
