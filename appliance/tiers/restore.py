"""The way back: a version or snapshot into shared memory, from the nearest tier whose copy is whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from appliance.tiers.tiers import Tier, Tiers
from weights.format.errors import IntegrityError, StoreFull, TierUnavailable, VersionExists, VersionNotFound
from weights.format.names import step_of
from weights.memory.lease import StoredVersion
from weights.memory.store import WeightStore
from weights.tiers.record import Name

log = logging.getLogger(__name__)


class TierReturn:
    """The way back from the tiers. May be called from any thread."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def bring_in(self, name: Name, store: WeightStore | None = None) -> StoredVersion:
        """Brings `name` into shared memory (or `store`) unless it is there, from the nearest tier whose copy is whole.

        Damaged copies on the way are logged. Once another was good they are removed, so that the flow writes them
        again. Raises LookupError if no tier has it whole, StoreFull.
        """
        store = store or self._tiers.store
        found = self._in_store(store, name)
        if found is not None:
            return found
        damaged: list[tuple[Tier, IntegrityError]] = []
        faults: list[str] = []
        for tier in self._tiers.all:
            try:
                found = tier.level.of(name.kind).restore(store, name)
            except VersionNotFound:
                continue
            except VersionExists:
                found = store.find(*name)
            except StoreFull:
                raise
            except IntegrityError as error:
                damaged.append((tier, error))
                faults.append(f"damaged in the {tier.level.name} tier ({error})")
                self._tiers.note(tier, f"{name} is damaged: {error}")
                continue
            except (TierUnavailable, OSError) as error:
                faults.append(f"unreachable in the {tier.level.name} tier ({error})")
                continue
            if found is not None:
                for other, fault in damaged:
                    self._quarantine(other, name, fault, tier.level.name)
                return found
        raise LookupError(f"{name} is in no tier that has it whole: {'; '.join(faults) or 'none has it'}")

    def newest_snapshot(self, job_id: str, usable: Callable[[Name, float], bool]) -> list[Name]:
        """The job's snapshots in any tier, the highest step first. usable: of one that was made then."""
        found: set[Name] = set()
        for tier in self._tiers.all:
            try:
                names = tier.level.snapshots.names("snapshot")
                found |= {name for name, made_s in names.items() if name.model == job_id and usable(name, made_s)}
            except (TierUnavailable, OSError) as error:
                self._tiers.note(tier, str(error))
        return sorted(found, key=lambda name: step_of(name.version), reverse=True)

    def _in_store(self, store: WeightStore, name: Name) -> StoredVersion | None:
        """What the store has. A copy there that cannot be read is discarded if a tier has it. Raises IntegrityError."""
        try:
            return store.find(*name)
        except IntegrityError as error:
            log.error("%s is damaged in memory: %s", name, error)
            if not any(name in tier.here for tier in self._tiers.all):
                raise
            store.discard(*name)
            return None

    def _quarantine(self, tier: Tier, name: Name, fault: IntegrityError, good: str) -> None:
        def work() -> None:
            tier.level.of(name.kind).quarantine(name)
            tier.damaged += 1
            tier.dirty = True
            removed = f"{name} was damaged and was removed, to be written again"
            self._tiers.note(tier, f"{removed}; the {good} tier had it whole: {fault}")

        def done(future: Future[None]) -> None:
            if future.exception() is not None:
                self._tiers.note(tier, f"the damaged copy of {name} could not be removed: {future.exception()}")
            if self._tiers.loop is not None:
                self._tiers.loop.call_soon_threadsafe(self._tiers.nudge)

        tier.pool.submit(work).add_done_callback(done)
