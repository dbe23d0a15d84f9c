"""Answers of /v1/responses, each with its own input and the earlier answer that it continues, and chat completions that
are kept beside them: both in one table, under the same bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack, cast, get_args

from appliance.store.database import HAS_PAIR, Database, Page, Part
from appliance.store.rows import RESPONSES, UNFINISHED, UNFINISHED_RESPONSE, ResponseRow, ResponseStatus

COMPLETION = "chat.completion"
_ENDED = frozenset(get_args(ResponseStatus)) - {*UNFINISHED_RESPONSE}
find, find_visible, update, delete = RESPONSES.find, RESPONSES.find_visible, RESPONSES.update, RESPONSES.delete


def bytes_of(*texts: str | None) -> int:
    """As they are stored: a character takes up to four bytes."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts if text is not None)


def ended_status(status: str | None) -> ResponseStatus:
    """Of an answer: a newer engine may report a status that rows do not have."""
    return cast(ResponseStatus, status) if status in _ENDED else "completed"


def insert(db: Database, row: ResponseRow) -> bool:
    """Does nothing and returns False if there is one with this id, because a copy may arrive twice."""
    if status(db, row.id) is not None:
        return False
    RESPONSES.insert(db, row)
    return True


def status(db: Database, response_id: str) -> str | None:
    """Its status now, without reading the rest; None if it is gone."""
    found: str | None = db.value("SELECT status FROM responses WHERE id = ?", [response_id])
    return found


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
    # The kind as a literal, for the partial index.
    conditions = [f"kind = '{COMPLETION}'", "(? IS NULL OR model = ?)", *[HAS_PAIR] * len(metadata)]
    parameters = [model, model, *(part for pair in metadata.items() for part in pair)]
    where, unread = " AND ".join(conditions), () if messages else ("input",)
    return RESPONSES.page_visible(db, viewer=viewer, where=where, parameters=parameters, unread=unread, **part)


def delete_before(db: Database, before_s: float) -> None:
    """Delete those made before this moment; unfinished ones stay."""
    db.delete("responses", f"created_s < ? AND NOT {UNFINISHED['responses']}", [before_s])


def delete_of_leavers(db: Database) -> None:
    """Delete those whose owner has no live key left."""
    db.delete(
        "responses",
        "key_id IN (SELECT id FROM keys WHERE revoked_s IS NOT NULL"
        " AND owner NOT IN (SELECT owner FROM keys WHERE revoked_s IS NULL))",
    )


def keys_of_owners(db: Database) -> list[str]:
    """For each owner who has some, the key that made the newest."""
    return db.column("SELECT key_id, max(seq) FROM responses GROUP BY owner")


def shrink(db: Database, owner: str, *, number: int, size: int) -> None:
    """Delete an owner's oldest until at most `number` are left with at most `size` bytes. Unanswered ones stay."""
    newer = "sum(1) OVER newer > ?2 OR sum(bytes) OVER newer > ?3 AS is_over"
    held = f"SELECT seq, status, {newer} FROM responses WHERE owner = ?1 WINDOW newer AS (ORDER BY seq DESC)"
    over = f"SELECT seq FROM ({held}) WHERE is_over AND NOT {UNFINISHED['responses']}"
    db.delete("responses", f"seq IN ({over})", [owner, number, size])
