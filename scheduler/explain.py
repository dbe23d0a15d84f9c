"""Sentences for people: why a hand-over happens and what each of its chains does."""

from __future__ import annotations

from typing import Any

from scheduler.handover import Chain, Handover
from scheduler.plan import Allocation
from scheduler.workload import Policy


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def sentence(chain: Chain) -> str:
    """What one chain does, in one sentence without a full stop."""
    verbs = [s.verb for s in chain.steps]
    who = str(chain.holder)
    if chain.side == "take" and chain.holder.kind == "job":
        return f"{who} runs on {_count(len(chain.devices), 'device')} ({', '.join(chain.devices)})"
    if chain.side == "take":
        how = "wakes" if "wake_replica" in verbs else "starts"
        return f"{who} {how} with {chain.steps[1].model} on {', '.join(chain.devices)}"
    if chain.side == "swap":
        if "swap_replica" in verbs:
            return f"{who} changes to version {chain.steps[0].version}"
        return f"{who} takes requests again"
    if "suspend_group" in verbs:
        return f"{who} is suspended at its next step"
    if "sleep_replica" in verbs:
        return f"{who} finishes its requests and goes to sleep"
    if "stop_group" in verbs:
        return f"{who} is over and leaves its devices"
    if "stop_replica" in verbs:
        return f"{who} is stopped"
    return f"{who} leaves its devices"


def sentences(handover: Handover) -> list[str]:
    """One sentence per chain, in the order in which they begin."""
    return [f"{text[0].upper()}{text[1:]}." for text in map(sentence, handover.chains)]


def reason_of(handover: Handover, policy: Policy) -> str:
    """One line for the history: the mode, and what changes."""
    mode = f"mode {policy.kind}" + (f" {policy.train_devices}" if policy.kind == "split" else "")
    texts = [sentence(c) for c in handover.chains]
    more = f"; and {len(texts) - 4} more" if len(texts) > 4 else ""
    return f"{mode}: {'; '.join(texts[:4])}{more}"


def explain(handover: Handover, allocation: Allocation, policy: Policy) -> dict[str, Any]:
    """What would be done and why, as plain values: one sentence per chain, per waiting job, per model kept short."""
    running = {g.job_id: list(g.devices) for g in allocation.groups}
    opened: dict[str, list[list[str]]] = {}
    for replica in allocation.open_replicas:
        opened.setdefault(replica.model, []).append(list(replica.devices))
    return {
        "policy": policy.kind,
        "steps": sentences(handover),
        "waiting": dict(allocation.waiting),
        "notes": dict(allocation.notes),
        "jobs": running,
        "models": opened,
    }
