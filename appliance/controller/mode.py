"""The mode of the box: one JSON value in the store."""

from __future__ import annotations

import time
from dataclasses import asdict

from appliance.controller.ports import Mode, PolicyName
from appliance.store import box
from appliance.store.database import Database


def read_mode(db: Database) -> Mode:
    """The mode set last; a box on which none was ever set is in `auto`."""
    stored = box.get(db, "mode")
    return Mode("auto") if stored is None else Mode(**stored)


def write_mode(db: Database, policy: PolicyName, train_devices: int | None) -> Mode:
    """`since_s` moves only when something changes: setting the same mode again is no change."""
    before = read_mode(db)
    if (before.policy, before.train_devices) == (policy, train_devices) and box.get(db, "mode") is not None:
        return before
    mode = Mode(policy, train_devices, time.time())
    box.put(db, "mode", asdict(mode))
    return mode
