"""Decides which requests that wait for a first token move to a replica that has just opened. Pure.

A replica is woken because others have too much to do; without this it would help new requests alone, and those that
made it necessary would be late all the same. A request without a first token has cost its engine at most a part of its
prompt, and its client has seen nothing. The simulator judges by the same rule (scheduler/core/routing_rules.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from appliance.gateway.routing.router import Load
from scheduler.core.routing_rules import is_sooner_there

T = TypeVar("T")

# A request that has waited for this many times as long as its prompt takes, and a second, is not being computed: the
# engine's cache has no room for it.
_STUCK, _STUCK_S = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """A request that a replica has and that has no first token. sent_s: monotonic clock."""

    item: T
    replica: str
    prompt_tokens: int
    sent_s: float


def moves(
    waiting: Iterable[Waiting[T]],
    opened: Iterable[str],
    loads: Mapping[str, Load],
    prefill_tokens_per_s: float | None,
    now_s: float,
) -> list[T]:
    """Those of one model's requests to place again, the longest waiting first. opened: its replicas that just opened.
    prefill_tokens_per_s: of one replica, None if unknown."""
    pending = {name: load.pending for name, load in loads.items()}
    inflight = {name: load.inflight for name, load in loads.items()}
    new = [name for name in opened if name in pending]
    first: set[str] = set()
    found: list[T] = []
    for one in sorted(waiting, key=lambda w: w.sent_s):
        if not new or one.replica in new or one.replica not in pending:
            continue
        to = min(new, key=lambda name: (pending[name], inflight[name]))
        takes_s = one.prompt_tokens / prefill_tokens_per_s if prefill_tokens_per_s else None
        stuck = takes_s is not None and now_s - one.sent_s > _STUCK * takes_s + _STUCK_S
        if one.replica not in first:
            first.add(one.replica)
            if not stuck:
                continue  # its prompt is being computed
        both = {"pending": (pending[one.replica], pending[to]), "inflight": (inflight[one.replica], inflight[to])}
        if is_sooner_there(one.prompt_tokens, **both, stuck=stuck):
            found.append(one.item)
            pending[one.replica] -= one.prompt_tokens
            pending[to] += one.prompt_tokens
            inflight[one.replica] -= 1
            inflight[to] += 1
    return found
