"""Removes the file with the first key's secret once that secret has ended."""

from __future__ import annotations

import logging
from pathlib import Path

from appliance.controller.context.context import ControllerContext
from appliance.paths import BoxPaths
from appliance.store.records import keys
from appliance.store.rows import KeyRow

log = logging.getLogger("appliance.controller")


def drop_first_key(context: ControllerContext, row: KeyRow) -> str | None:
    """Removes the file with the box's first key if it has the secret that this key had, which is refused now: who set
    the box up later from that file got 401. Returns its path, None if it has another, is gone or cannot be read: the
    key has ended all the same, and gateways have still to be told."""
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
