"""Decides whether a request whose attempt failed is sent again; handler.py does it (`_failed`). Pure.

An engine that dies takes every request on it down, and may have died of one of them. These rules keep one request from
ending engine after engine, and innocent requests from being lost with them:

- A request is sent to at most one more engine after one has died under it (MAX_DEATHS).
- Its second attempt *stands trial* if it had come to the dead engine just before and got nothing (`is_suspect`): it
  goes to an engine where no other request stands trial, until it has a byte of an answer or TRIAL_S have passed. An
  engine that dies meanwhile died of that one (routing.router.Router.died), and a second death counts for no other.
- A replica dies once: where the path to it breaks off again under the same request, that is an echo. (The tunnel to a
  node whose agent had been killed took the request once more before anybody knew, and the client was told that two
  engines had died of it.)
- An attempt that reached no engine ended none: the tunnel says so where a node is gone. (Each of its streams was sent
  on to the node's next engine, and the clients were told that two engines had died of them.)
"""

from __future__ import annotations

import enum
from typing import Final

MAX_ATTEMPTS: Final = 3
"""For any reason, including deaths that are attributed to other requests."""
MAX_DEATHS: Final = 2
MAX_ECHOES: Final = 4
"""Spread over seconds (routing.router.SUSPECT_FIRST_S): as long as it takes until a dead replica leaves the table."""
MAX_UNREACHED: Final = 10
"""A node that is gone may have had eight replicas."""
TRIAL_S: Final = 1.0
"""An engine that a request kills dies while it reads the prompt, or in the first steps after it."""


class Verdict(enum.Enum):
    AGAIN = "the same request is sent again"
    CONTINUE = "another engine generates the rest of the stream"
    FAIL = "the client gets the error of this attempt"
    CONDEMN = "the client is told that engines died of its request"


def is_suspect(waited_s: float, relayed: bool) -> bool:
    """Whether an engine that died may have died of this request. waited_s: since it was sent there."""
    return not relayed and waited_s < TRIAL_S


def verdict_on(sent: int, deaths: int, echoes: int, *, relayed: bool, resumable: bool, unreached: int = 0) -> Verdict:
    """sent: attempts so far, the failed one included. deaths: engines that died of them. echoes: attempts that broke
    off at a replica which had done so before; unreached: those that reached none. relayed: the client has bytes of the
    answer; resumable: of a stream that another engine can go on with."""
    if deaths >= MAX_DEATHS:
        return Verdict.CONDEMN
    if sent - echoes - unreached >= MAX_ATTEMPTS or (relayed and not resumable):
        return Verdict.FAIL
    if echoes >= MAX_ECHOES or unreached >= MAX_UNREACHED:
        return Verdict.FAIL
    return Verdict.CONTINUE if relayed else Verdict.AGAIN
