"""The flow of versions and snapshots from shared memory to disk and to the remote tier; `restore` is the way back.

It is level-triggered: a pass reads what is in each place, asks `weights.tiers.retention` what is missing and what is
too much, and does one thing after the other. Between passes it remembers only when to try again, so a crash at any
point costs nothing: the next pass finds what is left to do. Each tier has its own thread at low priority, so a mount
that hangs holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any

from appliance.store.database import Database
from appliance.store.records import box, tier_removals
from appliance.tiers.facts import Facts, name_of, read_facts
from appliance.tiers.tiers import Level, Tier, Tiers
from runtime.background_tasks import BackgroundTasks
from train.state.cadence import every_s
from weights.format.errors import StoreError, TierFull, TierUnavailable, VersionNotFound, WeightsError
from weights.format.manifest import KINDS
from weights.memory.lease import StoredVersion, take_lease, unpin
from weights.tiers.directory import DirectoryTier
from weights.tiers.pace import Pace
from weights.tiers.packed import PackedTier
from weights.tiers.record import Name
from weights.tiers.retention import TierPlan, plan_tier

log = logging.getLogger(__name__)

EVERY_S = 60.0
BACKOFF_MAX_S = 300.0
END_WAIT_S = 10.0


class TransferStopped(Exception):
    """The box ends while a copy runs; the next pass continues it."""


class TierFlow:
    """`run` works until it is cancelled. All methods belong to the loop's thread.

    `owner` names the box: a remote tier belongs to one. `is_held(name)` says whether the box serves a version now.
    """

    def __init__(
        self,
        db: Database,
        tiers: Tiers,
        *,
        owner: str,
        is_held: Callable[[Name], bool] = lambda name: False,
        background: BackgroundTasks | None = None,
    ) -> None:
        self._db, self._tiers, self._owner, self._is_held = db, tiers, owner, is_held
        self._background = background or BackgroundTasks()
        self._stopping = threading.Event()
        self._deleted: set[Name] = set()
        self._not_before_s: dict[tuple[str, str], float] = {}  # (tier, job): the next copy of a snapshot of its

    async def run(self) -> None:
        """Works until it is cancelled."""
        self._tiers.loop = asyncio.get_running_loop()
        # One task each: an error of one tier holds up none of the others.
        await asyncio.gather(
            *(self._background.keep(f"tier: {tier.level.name}", partial(self._work, tier)) for tier in self._tiers.all)
        )

    async def finish(self) -> bool:
        """Ends the work and copies what the first tier lacks to it, at full speed. False if something is not safe."""
        self._stopping.set()
        for tier in self._tiers.all:
            await asyncio.wait([asyncio.wrap_future(tier.pool.submit(lambda: None))], timeout=END_WAIT_S)
        self._stopping.clear()
        if not self._tiers.all:
            return True
        first = self._tiers.all[0]
        await self.run_once(first.level.name, unthrottled=True)
        return not first.backlog

    async def _work(self, tier: Tier) -> None:
        while True:
            tier.changed.clear()
            wait_s = EVERY_S
            if tier.next_try_s is not None:
                wait_s = tier.next_try_s - self._tiers.clock()
            if tier.next_try_s is None or wait_s <= 0:
                await self.run_once(tier.level.name)
                wait_s = EVERY_S if tier.next_try_s is None else tier.next_try_s - self._tiers.clock()
            try:
                async with asyncio.timeout(max(0.05, wait_s)):
                    await tier.changed.wait()
            except TimeoutError:
                continue

    async def run_once(self, name: str, *, unthrottled: bool = False) -> None:
        """One pass over the tier of this name. Its errors are noted for `Tiers.status` and delay the next pass."""
        index = next(i for i, tier in enumerate(self._tiers.all) if tier.level.name == name)
        tier = self._tiers.all[index]
        try:
            await self._pass(tier, self._tiers.all[:index], unthrottled)
        except TransferStopped:
            return
        except (WeightsError, OSError) as error:
            tier.failures += 1
            tier.next_try_s = self._tiers.clock() + min(BACKOFF_MAX_S, 2.0**tier.failures)
            self._tiers.note(tier, f"{error}; trying again in {tier.next_try_s - self._tiers.clock():.0f} s")
        else:
            tier.failures, tier.next_try_s = 0, None

    async def _pass(self, tier: Tier, above: list[Tier], unthrottled: bool) -> None:
        level = tier.level
        if isinstance(level.versions, PackedTier):
            known = f"tier {level.where}"
            await self._on(tier, level.versions.claim, self._owner, box.get(self._db, known) is None)
            box.put(self._db, known, self._owner)
        for row in tier_removals.list_of(self._db, level.name):
            await self._on(tier, level.of(row.kind).remove, Name(row.kind, row.model, row.version))
            tier_removals.delete(self._db, row)
            tier.dirty = True
        tier.here = await self._on(tier, level.names)
        stored = await asyncio.to_thread(self._tiers.in_memory)
        higher = {name: created_s for other in above for name, created_s in other.here.items()}
        created = tier.here | higher | {name: found.manifest.created_s for name, found in stored.items()}
        facts = read_facts(self._db, created, self._is_held)
        plan = self._plan(level, facts, {*stored, *higher}, tier.here)
        tier.backlog = {name: stored[name].nbytes if name in stored else 0 for name in plan.push}
        full: TierFull | None = None
        for name in plan.push:
            if not unthrottled and self._too_soon(tier, name):
                tier.backlog.pop(name, None)
                continue
            began_s = self._tiers.clock()
            try:
                await self._push(tier, name, stored.get(name), above, unthrottled)
            except (VersionNotFound, StoreError) as error:
                log.info("%s was not copied to the %s tier: %s", name, level.name, error)  # gone meanwhile
            except TierFull as error:
                full = error
                break
            except TierUnavailable:
                raise
            except WeightsError as error:
                self._tiers.note(tier, f"{name} cannot be copied: {error}")
                continue
            tier.backlog.pop(name, None)
            if name.kind == "snapshot":
                now_s = self._tiers.clock()
                self._not_before_s[tier.level.name, name.model] = now_s + every_s(now_s - began_s)
        for name in plan.drop if full is None else _spare_newest(plan.drop, tier.here, facts.over):
            await self._on(tier, level.of(name.kind).remove, name)
            tier.here.pop(name, None)
            tier.dirty = True
            log.info("%s left the %s tier: no rule keeps it", name, level.name)
        if not above:
            self._after_first(facts, tier.here, stored, plan)
        if (tier.dirty and not tier.backlog) or full is not None:
            for holding in level.all():
                await self._on(tier, holding.collect)
            tier.dirty = False
        tier.used_bytes = await self._on(tier, lambda: sum(holding.usage_bytes() for holding in level.all()))
        if full is not None:
            raise full

    def _too_soon(self, tier: Tier, name: Name) -> bool:
        """Whether copying this snapshot would take more than 2 % of the time: a running job writes one every few
        seconds. What is not copied yet stays in memory, pinned, and the next one may take its place."""
        not_before_s = self._not_before_s.get((tier.level.name, name.model), 0.0)
        return name.kind == "snapshot" and self._tiers.clock() < not_before_s

    def _plan(self, level: Level, facts: Facts, above: Iterable[Name], here: Mapping[Name, float]) -> TierPlan[Name]:
        push: list[Name] = []
        drop = [name for name in here if name in facts.over]
        above = set(above)
        for kind in KINDS:
            rules = level.snapshot_rules if kind == "snapshot" else level.version_rules
            described = {name: kept for name, kept in facts.kept.items() if name.kind == kind}
            could_push = [kept for name, kept in described.items() if name in above]
            plan = plan_tier(could_push, [name for name in here if name.kind == kind], described, rules)
            push += plan.push
            drop += plan.drop
        return TierPlan(tuple(push), tuple(drop))

    async def _push(
        self, tier: Tier, name: Name, stored: StoredVersion | None, above: list[Tier], unthrottled: bool
    ) -> None:
        target, rate = tier.level.of(name.kind), None if unthrottled else tier.level.rate_bytes_s
        pace = Pace(rate, 0 if stored is None else stored.nbytes, partial(self._go_on, name), self._stopping.wait)

        def push() -> None:
            if isinstance(target, DirectoryTier):
                assert stored is not None, "the first tier has no tier above"
                target.put(stored.path, pace=pace)
            elif stored is not None:
                with take_lease(stored):
                    target.put(stored.path, pace=pace)
                unpin(stored)
            else:
                source = next(other.level.of(name.kind) for other in above if name in other.here)
                if isinstance(source, DirectoryTier):
                    target.put(source.path(name), pace=pace)
                else:
                    target.copy_from(source, name, pace=pace)

        tier.busy = name, pace
        try:
            await self._on(tier, push)
        finally:
            tier.busy = None
            self._deleted.discard(name)
        tier.here[name] = self._tiers.clock()

    def _after_first(
        self, facts: Facts, here: Mapping[Name, float], stored: Mapping[Name, StoredVersion], plan: TierPlan[Name]
    ) -> None:
        """Writes into the store's rows what is on disk, and unpins in memory what is safe or what no rule keeps."""
        versions = self._tiers.all[0].level.versions
        for row in facts.rows:
            name = name_of(row)
            path = None
            if name in here:
                path = str(versions.path(name)) if isinstance(versions, DirectoryTier) else versions.where
            facts.say_on_disk(self._db, row, path)
        for name, found in stored.items():
            if name in facts.kept and (name in here or name not in plan.push) and found.path.is_dir() and found.pinned:
                try:
                    unpin(found)
                except VersionNotFound:
                    continue

    def _go_on(self, name: Name, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise TransferStopped
        if name in self._deleted:
            raise VersionNotFound(f"{name} was deleted while it was copied")

    async def _on(self, tier: Tier, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(tier.pool, work, *arguments)

    def stop_copying(self, name: Name) -> None:
        """End copies of `name`, which is about to be deleted. Call it on the loop's thread."""
        if any(tier.busy is not None and tier.busy[0] == name for tier in self._tiers.all):
            self._deleted.add(name)

    def forget(self, name: Name) -> None:
        """A person deleted `name`: it leaves every tier, later also one that cannot be reached now. Call it on the
        loop's thread."""
        for tier in self._tiers.all:
            tier_removals.insert(self._db, tier.level.name, *name)
        self._tiers.nudge()


def _spare_newest(drop: Iterable[Name], here: Mapping[Name, float], over: Set[Name]) -> list[Name]:
    """What may leave a full tier before what replaces it is in: not the newest that the tier has of a model or of a job
    that goes on."""
    newest: dict[tuple[str, str], Name] = {}
    for name in sorted(here, key=lambda name: here[name]):
        newest[name.kind, name.model] = name
    return [name for name in drop if name in over or newest[name.kind, name.model] != name]
