"""Answers of /v1/responses, each with its own input and the earlier answer that it continues, and chat completions that
are kept beside them: both in one table, under the same bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import orjson

from appliance.store.database import Database, Page, Part, owned_by, sql_list
from appliance.store.rows import UNFINISHED_RESPONSE, ResponseRow
from appliance.store.table import Table

# By an index that has all that is asked, and that SQLite would not choose: a row has it behind its texts.
_CHAIN = """
    WITH RECURSIVE chain (id, previous_id, bytes, depth) AS (
        SELECT id, previous_id, bytes, 0 FROM responses INDEXED BY responses_chain
        WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)
        UNION ALL
        SELECT earlier.id, earlier.previous_id, earlier.bytes, depth + 1
        FROM chain JOIN responses AS earlier INDEXED BY responses_chain
        ON earlier.id = chain.previous_id AND (?2 IS NULL OR earlier.owner = ?2)
        WHERE depth < ?3
    )
"""
COMPLETION = "chat.completion"
_UNFINISHED = sql_list(UNFINISHED_RESPONSE)
_TABLE = Table("responses", ResponseRow)
find, update = _TABLE.find, _TABLE.update


def bytes_of(*texts: str | None) -> int:
    """As they are stored: a character takes up to four bytes."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts if text is not None)


def insert(db: Database, row: ResponseRow) -> bool:
    """Does nothing and returns False if there is one with this id, because a copy may arrive twice."""
    if db.execute("SELECT 1 FROM responses WHERE id = ?", [row.id]).fetchone() is not None:
        return False
    _TABLE.insert(db, row)
    return True


def exists(db: Database, response_id: str, viewer: str | None = None) -> bool:
    """Looks for it without reading it: 200 of one owner may have a gigabyte. viewer: whether it is this owner's."""
    found = db.value(
        "SELECT 1 FROM responses INDEXED BY responses_chain WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)",
        [response_id, viewer],
    )
    return found is not None


def chain_bytes(db: Database, response_id: str, viewer: str | None, *, max_turns: int) -> int:
    """Bytes of this response and of those that lead to it, as far back as max_turns: of this owner's, or of all for
    None."""
    parameters = [response_id, viewer, max_turns - 1]
    return int(db.value(f"{_CHAIN} SELECT SUM(bytes) FROM chain", parameters) or 0)


def chain_ids(db: Database, response_id: str, viewer: str | None, *, max_turns: int) -> list[str]:
    """Ids of the responses of `chain_bytes`, oldest first and this one last; empty if it is gone. The first continues
    yet another one if that is gone, or if there are more than max_turns."""
    parameters = [response_id, viewer, max_turns - 1]
    return db.column(f"{_CHAIN} SELECT id FROM chain ORDER BY depth DESC", parameters)


def touch(
    db: Database, response_id: str, viewer: str | None, *, max_turns: int, now_s: float, older_than_s: float
) -> None:
    """Note that this response and those that lead to it were continued: each is kept as long as the newest that needs
    it. Rows touched since `older_than_s` stay, because an update writes a row with all its text again."""
    chosen = db.column(
        f"{_CHAIN} SELECT seq FROM chain JOIN responses USING (id) WHERE used_s < ?4",
        [response_id, viewer, max_turns - 1, older_than_s],
    )
    for seq in chosen:  # not in one transaction: a conversation may have 64 MiB
        db.execute("UPDATE responses SET used_s = ? WHERE seq = ?", [now_s, seq])


def standing(db: Database, response_id: str) -> tuple[str, int] | None:
    """Its status and its bytes as they are now, without reading it; None if it is gone."""
    found = db.execute("SELECT status, bytes FROM responses WHERE id = ?", [response_id]).fetchone()
    return None if found is None else (found["status"], found["bytes"])


def delete(db: Database, response_id: str) -> bool:
    """False if it had gone before."""
    return db.execute("DELETE FROM responses WHERE id = ?", [response_id]).rowcount > 0


def page_completions(
    db: Database,
    *,
    viewer: str | None,
    model: str | None,
    metadata: Mapping[str, str],
    messages: bool,
    **part: Unpack[Part],
) -> Page[ResponseRow]:
    """Chat completions of this model, with all of this metadata; the viewer's, or all for None. messages: with what
    they were asked with."""
    where, parameters = _named(model, metadata)
    return db.page(
        ResponseRow,
        "responses",
        scope=owned_by(viewer),
        where=f"kind = '{COMPLETION}' AND {where}",  # as a parameter it would lead to no partial index
        parameters=parameters,
        unread=() if messages else ("input",),
        **part,
    )


def _named(model: str | None, metadata: Mapping[str, str]) -> tuple[str, list[str]]:
    """SQL for completions of this model with all of this metadata; it asks an index alone."""
    conditions, parameters = ["1"], list[str]()
    if model is not None:
        conditions.append("model = ?")
        parameters.append(model)
    for name, value in metadata.items():
        conditions.append("EXISTS (SELECT 1 FROM json_each(responses.metadata) WHERE key = ? AND value = ?)")
        parameters += [name, value]
    return " AND ".join(conditions), parameters


def set_metadata(db: Database, completion_id: str, metadata: dict[str, str] | None) -> bool:
    """False: it has gone."""
    text = None if metadata is None else orjson.dumps(metadata).decode()
    changed = db.execute(
        "UPDATE responses SET metadata = ?2, bytes = bytes - coalesce(length(CAST(metadata AS BLOB)), 0) + ?3"
        " WHERE id = ?1 AND kind = ?4",
        [completion_id, text, bytes_of(text), COMPLETION],
    )
    return changed.rowcount > 0


def totals(db: Database) -> tuple[int, int]:
    """Number and bytes of all responses."""
    row = db.execute(
        "SELECT coalesce(sum(number), 0) AS number, coalesce(sum(bytes), 0) AS bytes FROM held WHERE kind = 'responses'"
    ).fetchone()
    return row["number"], row["bytes"]


def delete_unused(db: Database, before_s: float) -> None:
    """Delete those neither made nor continued since; unfinished ones stay."""
    db.delete("responses", f"used_s < ? AND status NOT IN ({_UNFINISHED})", [before_s])


def keys_without_owners(db: Database) -> list[str]:
    """Ids of keys that have responses, and whose owner has no live key left."""
    return db.column(
        "SELECT DISTINCT key_id FROM held JOIN keys ON keys.id = key_id WHERE kind = 'responses'"
        " AND revoked_s IS NOT NULL AND owner NOT IN (SELECT owner FROM keys WHERE revoked_s IS NULL)"
    )


def delete_of_key(db: Database, key_id: str) -> None:
    db.delete("responses", "key_id = ?", [key_id])


def shrink(db: Database, to_bytes: int) -> int:
    """Delete the longest unused responses of the owner who holds most, however many keys he has, until `to_bytes` are
    left; returns how many went."""
    deleted, left = 0, totals(db)[1]
    held = dict(db.execute("SELECT whose, sum(bytes) FROM held WHERE kind = 'responses' GROUP BY whose").fetchall())
    while left > to_bytes and held:
        owner = max(held, key=lambda one: held[one])
        rows = _unused(db, owner)
        if not rows:
            del held[owner]  # the rest is being answered
        for response_id, size in rows:
            if left <= to_bytes:
                break
            delete(db, response_id)
            deleted, left, held[owner] = deleted + 1, left - size, held[owner] - size
    return deleted


def shrink_owner(db: Database, owner: str, *, number: int, size: int) -> None:
    """Delete an owner's longest unused until at most `number` are left with at most `size` bytes. Unanswered ones
    stay."""
    held = "SELECT coalesce(sum(number), 0), coalesce(sum(bytes), 0) FROM held WHERE kind = 'responses' AND whose = ?"
    have, have_bytes = db.execute(held, [owner]).fetchone()
    while (have > number or have_bytes > size) and (rows := _unused(db, owner)):
        for response_id, of_it in rows:
            if have > number or have_bytes > size:
                delete(db, response_id)
                have, have_bytes = have - 1, have_bytes - of_it


def _unused(db: Database, owner: str) -> list[tuple[str, int]]:
    """(id, bytes) of an owner's hundred longest unused that are answered."""
    return db.execute(
        f"SELECT id, bytes FROM responses WHERE owner = ? AND status NOT IN ({_UNFINISHED})"
        " ORDER BY used_s, seq LIMIT 100",
        [owner],
    ).fetchall()
