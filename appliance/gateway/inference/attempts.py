"""Decides whether a request whose attempt failed is sent again. Pure.

An engine that dies takes every request on it down, and may have died of one of them. So a request is sent to at most
one more engine after one has died under it, and to three for any other reason.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

MAX_ATTEMPTS: Final = 3
MAX_DEATHS: Final = 2
MAX_UNREACHED: Final = 10
"""A node that is gone may have had eight replicas."""


class Verdict(enum.Enum):
    AGAIN = "the same request is sent again"
    CONTINUE = "another engine generates the rest of the stream"
    FAIL = "the client gets the error of this attempt"
    CONDEMN = "the client is told that engines died of its request"


@dataclass(slots=True)
class Attempts:
    """What has been tried of one request. sent: to an engine, and failed there. lost: replicas that broke off.
    unreached: how many it never got to, the tunnel to their node being gone. refused_by: a canary that refused it."""

    sent: int = 0
    unreached: int = 0
    lost: list[str] = field(default_factory=list)
    refused_by: str = ""

    def verdict(self, *, relayed: bool, resumable: bool) -> Verdict:
        """relayed: the client has bytes of the answer. resumable: of a stream that another engine can go on with."""
        if len(self.lost) >= MAX_DEATHS:
            return Verdict.CONDEMN
        if self.sent >= MAX_ATTEMPTS or (relayed and not resumable):
            return Verdict.FAIL
        return Verdict.CONTINUE if relayed else Verdict.AGAIN
