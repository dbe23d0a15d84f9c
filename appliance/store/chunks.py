"""Deletes rows that hold many bytes, or that are many, a few at a time.

Freeing a gigabyte of pages takes SQLite half a minute, and the thread that waits for it serves every owner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from appliance.store.database import Database

CHUNK_BYTES, CHUNK_ROWS = 256 << 10, 500


def delete_some(db: Database, table: str, where: str, parameters: Sequence[Any], size: str) -> bool:
    """Delete rows until they held CHUNK_BYTES, one at least. size: SQL for the bytes of a row. False: none was left."""
    found = db.execute(f"SELECT seq, {size} AS size FROM {table} WHERE {where} LIMIT {CHUNK_ROWS}", parameters)
    chosen, held = [], 0
    for row in found:
        chosen.append([row["seq"]])
        if (held := held + row["size"]) >= CHUNK_BYTES:
            break
    found.close()  # it may have more to give, and would keep its snapshot of the store
    db.many(f"DELETE FROM {table} WHERE seq = ?", chosen)
    return bool(chosen)


def delete_few(db: Database, table: str, where: str, parameters: Sequence[Any]) -> bool:
    """Delete CHUNK_ROWS rows, small ones, that meet the condition. False: none was left."""
    chosen = f"SELECT seq FROM {table} WHERE {where} LIMIT {CHUNK_ROWS}"
    return db.execute(f"DELETE FROM {table} WHERE seq IN ({chosen})", parameters).rowcount > 0


async def little_by_little(step: Callable[[], bool]) -> None:
    """Call `delete` until it says that nothing is left; after each call the loop is free for others for as long as the
    call took."""
    while True:
        began_s = time.monotonic()
        if not step():
            return
        await asyncio.sleep(time.monotonic() - began_s)
