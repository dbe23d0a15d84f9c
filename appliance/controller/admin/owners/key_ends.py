"""What ends with an API key, however it ends: its logins and its tasks; its jobs are paused."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from appliance.controller.access.model_access import caller_of
from appliance.controller.context.audit import record
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.wanted import pause_jobs_of
from appliance.paths import BoxPaths
from appliance.store.records import keys
from appliance.store.rows import KeyRow

log = logging.getLogger("appliance.controller")


def end_key(
    context: ControllerContext, key_id: str, caller: Principal | None = None, action: str = ""
) -> dict[str, list[str]]:
    """Revoke a key. The caller publishes the keys afterwards, once for all that end together.

    Args:
        action: of the audit row, by `caller`; empty: there is none.

    Returns the ids of what was stopped, by kind: nothing for a key that was revoked before. Raises RowNotFound.
    """
    stopped: dict[str, list[str]] = {"jobs": [], "batches": [], "responses": []}  # and of other kinds
    with context.db.transaction():
        is_fresh = not keys.is_revoked(context.db, key_id)
        row = keys.revoke(context.db, key_id)
        if is_fresh:
            stopped["jobs"] = pause_jobs_of(context.db, row.id)
            stopped |= context.tasks.of_key(row.id)
        if caller is not None and action:
            detail: dict[str, Any] = {kind: ids for kind, ids in stopped.items() if ids}
            record(context, caller, action, row.id, name=row.name, **detail)
    context.tasks.end_key(row.id)
    drop_first_key(context, row)
    return stopped


async def end_expired(context: ControllerContext) -> None:
    """Revoke the keys whose time is over. The gateways refuse them by themselves from then on, so the table of all
    keys is written once for all of them: a course's three hundred end in the same second."""
    ended = keys.list_ending(context.db, time.time())
    try:
        for row in ended:
            end_key(context, row.id, caller_of(context.db, None), "key.expire")
    finally:
        if ended:
            context.spending.publish_keys()
            context.scheduler.nudge(f"{len(ended)} keys have expired")


def drop_first_key(context: ControllerContext, row: KeyRow) -> str | None:
    """Removes the file with the box's first key if it has the secret that this key had, which is refused now: who set
    the box up later from that file got 401. Returns its path, None if it has another, is gone or cannot be read."""
    path = BoxPaths.of(Path(context.box["data_dir"])).first_key
    try:
        if keys.fingerprint(path.read_text().strip()) != row.sha256:
            return None
        path.unlink()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s, which may have a key that has ended, stays: %s", path, error)
        return None
    return str(path)
