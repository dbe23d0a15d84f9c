"""A step of a hand-over, as a value. What its verb asks, does and makes of the box: `verbs`."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.inventory import Lease


@dataclass(frozen=True, slots=True)
class Step:
    """One verb (a row of scheduler.handover.verbs) on one target. `undo` is run when it or a later step of its chain
    fails; `force` instead of failing."""

    verb: str
    target: str
    lease: Lease | None = None
    model: str = ""
    version: str = ""
    tensor_parallel: int = 0
    undo: tuple[Step, ...] = ()
    force: tuple[Step, ...] = ()
