"""A step of a hand-over, as a value. `verbs` defines its precondition, action and effect on the box."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.inventory import Lease


@dataclass(frozen=True, slots=True)
class Step:
    """One verb (a row of scheduler.handover.verbs) on one target. `undo` runs when it or a later step of its chain
    fails; `force` runs instead of failing."""

    verb: str
    target: str
    lease: Lease | None = None
    model: str = ""
    version: str = ""
    tensor_parallel: int = 0
    settings: str = ""
    undo: tuple[Step, ...] = ()
    force: tuple[Step, ...] = ()
