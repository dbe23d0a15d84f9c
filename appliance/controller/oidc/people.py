"""The key of a person who comes by an OpenID provider: made at the first login, its scopes after the groups of each.

Nobody ever has the key itself; it is what limits, usage, jobs, the audit log and revocation know a person by. Its owner
has a part of the subject's hash in the name: a name that a provider gives to somebody else later is another owner here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from appliance.controller.access.naming import OWNER_PATTERN
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.config import OidcSettings
from appliance.controller.oidc.provider import refused
from appliance.store.records import keys, page_sessions
from appliance.store.rows import KeyRow

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@-]+")
_NAME_CHARACTERS = 48
SHOWN_CHARACTERS = 12
"""Characters of a subject's hash that are shown."""


def key_of(context: ControllerContext, settings: OidcSettings, claims: Mapping[str, Any]) -> KeyRow:
    """The live key of who these claims are of, with the scopes of their groups. Raises ApiError 403 for whose key was
    revoked, and for a person in no group that may do anything, or in none any more: their earlier logins end, and what
    they have asked for goes on without a scope."""
    scopes, db = scopes_of(settings, claims), context.db
    subject = subject_of(settings, claims)
    if not scopes:
        left = keys.of_subject(db, subject)
        if left is not None and page_sessions.end_of_key(db, left.id) + len(left.scopes):
            keys.update(db, left.id, scopes=[])
            context.spending.publish_keys()
        raise refused("none of your groups may do anything on this box")
    with db.transaction():
        row = keys.of_subject(db, subject)
        if row is None:
            name = _name(settings, claims, subject)
            row, _ = keys.create(db, name, scopes, name, subject=subject)
        elif row.revoked_s is not None:
            raise refused("your access to this box was revoked")
        elif row.scopes != scopes:
            keys.update(db, row.id, scopes=scopes)
    return keys.find(db, row.id) or row


def subject_of(settings: OidcSettings, claims: Mapping[str, Any]) -> str:
    """SHA-256 of who it is there, in hex."""
    return hashlib.sha256(f"{settings.issuer}\n{claims['sub']}".encode("utf-8", "surrogatepass")).hexdigest()


def scopes_of(settings: OidcSettings, claims: Mapping[str, Any]) -> list[str]:
    claim = claims.get(settings.groups_claim)
    listed = [claim] if isinstance(claim, str) else claim if isinstance(claim, list) else []
    groups = {one for one in listed if isinstance(one, str)}
    given = {scope for group in groups for scope in settings.groups.get(group, ())}
    return [scope for scope in keys.SCOPES if scope in given]


def _name(settings: OidcSettings, claims: Mapping[str, Any], subject: str) -> str:
    claim = next((claims[name] for name in (settings.name_claim, "email", "sub") if claims.get(name)), "")
    name = _NOT_IN_NAMES.sub("-", str(claim))[:_NAME_CHARACTERS].strip("-._@") or "person"
    found = f"{name}-{subject[:SHOWN_CHARACTERS]}"
    assert re.match(OWNER_PATTERN, found), "made of what names may have"
    return found
