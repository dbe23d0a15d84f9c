"""Errors of the scheduler.

SchedulerError
├── InvalidSchedule      a mode window with an invalid cron expression, time zone or policy
├── NodeNameTaken        a node joined under the name of another node of the box
├── EffectFailed         a verb failed; the only exception an Effects implementation may raise
└── Stopped              the loop has ended
"""

from __future__ import annotations

from typing import Literal

Blame = Literal["own", "input", "outside", "memory", "version"]
"""Whose fault a failure is. own: the job's or the model's engine. input: bad input, so a retry cannot help. outside: a
supervisor, a node, a fence, a tier. memory: the host ran out of memory. version: the running engine cannot load this
version, but a new one may. The last three do not count against the job or model."""


class SchedulerError(Exception):
    """Base class of all errors of `scheduler`."""


class InvalidSchedule(SchedulerError, ValueError):
    """An invalid mode window; `param` names the invalid field of `mode_schedule.Window`."""

    def __init__(self, message: str, param: str = "cron"):
        super().__init__(message)
        self.param = param


class NodeNameTaken(SchedulerError):
    """A node has the same name as another node of the box."""

    def __init__(self, name: str, address: str):
        super().__init__(f"the box already has a node {name}, at {address}: join under another name")


class EffectFailed(SchedulerError):
    """A verb failed to achieve its effect.

    Args:
        reason: one sentence for users.
        blame: whose fault it is.
        of_settings: True if the engine refuses its settings, so no memory, device or other process is at fault.

    `step`: verb and target of the step that failed; `seq`: its number. `cancelled`: True if the loop ended a step that
    was no longer needed. `undone`: False if earlier steps could not be undone.
    """

    step, seq, cancelled, undone = "", 0, False, True

    def __init__(self, reason: str, blame: Blame = "own", *, of_settings: bool = False):
        super().__init__(reason)
        self.reason, self.blame, self.of_settings = reason, blame, of_settings


class Stopped(SchedulerError):
    """The scheduler loop has ended; the caller must start a new loop."""
