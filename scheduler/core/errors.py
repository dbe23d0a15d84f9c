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
    """An invalid mode window; `param` names the invalid field of mode_schedule.Window."""

    def __init__(self, message: str, param: str = "cron"):
        super().__init__(message)
        self.param = param


class NodeNameTaken(SchedulerError):
    """Two nodes of one box with the same name."""

    def __init__(self, name: str, address: str):
        super().__init__(f"the box already has a node {name}, at {address}: join under another name")


class EffectFailed(SchedulerError):
    """A verb failed to achieve its effect.

    Args:
        reason: one sentence for users.
        blame: whose fault it is.
        of_settings: the engine refuses its settings; neither memory, a device nor another process is at fault.

    `step`: verb and target of the step that failed; `seq`: its number. `cancelled`: the loop ended the step, because
    its reason is gone. `undone`: False if the steps before it could not be undone.
    """

    step, seq, cancelled, undone = "", 0, False, True

    def __init__(self, reason: str, blame: Blame = "own", *, of_settings: bool = False):
        super().__init__(reason)
        self.reason, self.blame, self.of_settings = reason, blame, of_settings


class Stopped(SchedulerError):
    """The loop has ended; start a new one."""
