"""Decides what batches may take. Pure: a batch yields to interactive requests and to training.

An awake engine takes lines while interactive requests leave it idle, in every mode: it holds its devices anyway. One
line of a model runs beside any number of interactive requests: without it, somebody with four open streams kept
everybody's batches, background responses and judges waiting without end. A model without an awake engine is woken for a
batch only if that takes nothing from others:

- mode serve and split: the devices belong to serving; while no other model has requests, or a device is free;
- mode auto: the same, but only while no job wants devices;
- mode train: never. A batch waits for another mode, or until an interactive request wakes an engine.

Rollouts of a training job take no device from training either, above all none of their own job: `may_wake_to_sample`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from appliance.controller.bus.load import Load
from appliance.controller.interfaces.ports import BatchCapacity
from scheduler.core.workload import Demand


def room(
    names: Iterable[str], engines: Sequence[str], load: Load, *, lines_per_engine: int, busy_inflight: int
) -> BatchCapacity:
    """Lines that the open `engines` (replica ids) of a model may process, all batches together; 0 if interactive
    requests leave nothing (`at_least_one`).

    names: by which the engines are addressed: the model's, and those of adapters on them.
    """
    if not engines:
        return BatchCapacity(0, "no engine of the model is awake")
    if any(load.models[name].held for name in names if name in load.models):
        return BatchCapacity(0, "interactive requests of the model are waiting")
    lines = 0
    for engine in engines:
        inflight = load.replicas[engine].inflight if engine in load.replicas else 0
        lines += lines_per_engine * max(0, busy_inflight - inflight) // busy_inflight
    return BatchCapacity(lines, "" if lines else "the engines of the model are busy with interactive requests")


def at_least_one(found: BatchCapacity) -> BatchCapacity:
    """What batches get of open engines with this free capacity: at least one line, whatever interactive requests there
    are."""
    return found if found.lines else BatchCapacity(1, found.why)


def slots(
    lines: int, wanting: Mapping[str, int], flying: Mapping[str, int], last_sent: Mapping[str, int]
) -> Counter[str]:
    """How many lines each owner may send now to engines that process so many, given how many each wants: one by one to
    the owner with fewest there; ties go to who sent least recently. last_sent: a number that grows with each line sent.

    Where one owner has all lines, another owner sends one line beyond the limit: otherwise he would wait until one of
    them ended, each as long as an answer may be."""
    given: Counter[str] = Counter()
    there = [owner for owner, number in flying.items() if number]
    free = lines - sum(flying.values())
    if lines and free <= 0 and len(there) == 1 and any(wanting[owner] for owner in wanting.keys() - there):
        wanting, free = {owner: wanted for owner, wanted in wanting.items() if owner not in there}, 1
    for _ in range(max(free, 0)):
        asking = [owner for owner, wanted in wanting.items() if given[owner] < wanted]
        if not asking:
            break
        given[min(asking, key=lambda owner: (flying.get(owner, 0) + given[owner], last_sent.get(owner, 0)))] += 1
    return given


def may_wake(policy: str, jobs_want_devices: bool, others_have_requests: bool, free_devices: int) -> bool:
    """Whether a model may be woken, or kept awake, for a batch. others_have_requests: another model has requests."""
    if policy == "train" or (policy == "auto" and jobs_want_devices):
        return False
    return not others_have_requests or free_devices > 0


def may_wake_to_sample(policy: str, floor: int, others_have_requests: bool, free_devices: int) -> bool:
    """Whether a model may be woken for the rollouts of a job that trains. floor: devices that serving keeps whatever
    training wants; a model asleep claims one of them, or one that nobody holds, where no other model has requests."""
    theirs = policy in ("serve", "split") or floor > 0
    return free_devices > 0 or (theirs and not others_have_requests)


def with_wish(demand: Demand, awake: bool, now_s: float) -> Demand:
    """Demand of a model that a batch may wake: asleep, one more request; awake, it counts as just used, which keeps it
    from idling to sleep but claims nothing."""
    if awake:
        return replace(demand, last_request_s=now_s)
    return replace(demand, held=demand.held + 1)


def models_with_requests(load: Load) -> set[str]:
    """The models that have requests."""
    return {name for name, row in load.models.items() if row.inflight or row.held}


def open_engines(table_row: Mapping | None, version: str | None = None) -> dict[str, str]:
    """Replica id to socket of the open replicas in a model's row of the routing table whose engines give signs of
    life; version: only those that serve it."""
    replicas = table_row.get("replicas", ()) if table_row else ()
    return {
        replica["id"]: replica["socket"]
        for replica in replicas
        if replica["state"] == "open" and not replica.get("avoid") and version in (None, replica["version"])
    }
