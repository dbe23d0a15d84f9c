"""Why a tracker does not hear of a job at the moment; it is told later."""

from __future__ import annotations


class TrackerFailed(RuntimeError):
    """It is away, slow, or refused what it was told; the message says which."""


class TrackerRefused(TrackerFailed):
    """It is there and takes no run of this job, such as one of a team that the box's key may not write to."""
