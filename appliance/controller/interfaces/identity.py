"""Identity of a request's sender, determined by the listener that accepted it (`appliance.controller.http.peers`)."""

from __future__ import annotations

from dataclasses import dataclass

ADMIN, GATEWAY = "admin", "gateway"


@dataclass(frozen=True, slots=True)
class Identity:
    """key_id None: the box itself. A gateway acting for itself has GATEWAY as its key's id and as its only scope.
    session: the login of the page by which the key's owner came, None: by the key. secret: SHA-256 of that, as the
    gateway knew it; None: it was not said."""

    key_id: str | None
    scopes: frozenset[str]
    session: str | None = None
    secret: str | None = None


BOX = Identity(None, frozenset({ADMIN}))
