"""Limits what one owner may store and have under way: counted before more is admitted.

Limits apply to the owner, not to the key: ten keys do not allow ten times as much. Admins and the box itself are not
limited. A file is checked when it is announced and, in the transaction that keeps it, once it has arrived.
"""

from __future__ import annotations

from appliance.controller.access.disk import Disk
from appliance.controller.interfaces.config import ControllerConfig, OwnerBounds
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, LimitReached
from appliance.controller.interfaces.principal import Principal
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.rows import UNFINISHED

ANSWERS_PER_INPUT = 3
"""Answers of a batch are longer than its lines: an error is three times as long as a short one."""
# A key that is not in the table (the box of a test) is an owner of its own.
_OF = "key_id IN (SELECT ?1 UNION SELECT id FROM keys WHERE owner = (SELECT owner FROM keys WHERE id = ?1))"
_TUNED = "models WHERE kind = 'fine-tuned' AND owner IN (SELECT owner FROM keys WHERE id = ?1)"
_UNFINISHED = {table: f"{table} WHERE {where} AND {_OF}" for table, where in UNFINISHED.items()}
# An upload in progress counts twice what it announced (the disk holds its parts and the file), an unfinished batch with
# its answers.
_STORED = (
    *((1, f"{table} WHERE {_OF}") for table in ("files", "evals", "eval_runs")),
    (1, f"versions WHERE model IN (SELECT id FROM {_TUNED})"),
    (2, _UNFINISHED["uploads"]),
    (ANSWERS_PER_INPUT, f"files JOIN (SELECT input_file_id FROM {_UNFINISHED['batches']}) ON input_file_id = files.id"),
)


class Quotas:
    """Raises ApiError: 429 for a number, 413 for bytes, 507 where the disk is short whoever asks."""

    def __init__(self, db: Database, config: ControllerConfig, disk: Disk):
        self._db, self._config, self.disk = db, config, disk

    def bounds(self, key_id: str) -> OwnerBounds:
        """The limits of this key: the box's own, unless the key overrides them."""
        row = keys.find(self._db, key_id)
        return self._config.bounds.model_copy(update=row.bounds) if row and row.bounds else self._config.bounds

    def check(self, caller: Principal, more_bytes: int = 0, *, begins: bool = False, makes_model: bool = False) -> None:
        """Admits this many more bytes.

        Args:
            begins: it is work that ends: a job, a batch, a run of an evaluation, a response in background, an upload.
            makes_model: it ends with a fine-tuned model.
        """
        self.disk.check(more_bytes)
        if caller.is_admin or caller.key_id is None:
            return
        bounds, count, ask = self.bounds(caller.key_id), "count(*)", "An admin can give a key a higher bound `{}`."
        if begins:
            number = self._sum(caller.key_id, count, *_UNFINISHED.values())
            if number >= bounds.unfinished:
                raise LimitReached(
                    f"Your keys have {number} jobs, batches, runs of evals, responses in background and uploads under "
                    f"way, of at most {bounds.unfinished}. Wait for one to end or cancel one. "
                    + ask.format("unfinished"),
                    param="unfinished",
                    retry=True,
                )
        # With the models that unfinished jobs are going to make.
        if makes_model and (number := self._sum(caller.key_id, count, _TUNED, _UNFINISHED["jobs"])) >= bounds.models:
            text = f"Your keys have {number} fine-tuned models of at most {bounds.models}. Delete some first."
            raise LimitReached(f"{text} {ask.format('models')}", param="models")
        size = sum(times * self._sum(caller.key_id, "sum(bytes)", where) for times, where in _STORED)
        if size + max(more_bytes, 1) > bounds.bytes:
            more = f"; {more_bytes} more do not fit" if more_bytes else ""
            text = f"Your files, models and evals hold {size} of at most {bounds.bytes} bytes{more}. Delete some first."
            text = f"{text} {ask.format('bytes')}"
            raise ApiError(413, text, code="limit_reached", param="bytes", headers=dict(NEVER_RETRY))

    def _sum(self, key_id: str, what: str, *tables: str) -> int:
        """what: of the rows of each of these tables, over all keys of this key's owner."""
        return sum(int(self._db.value(f"SELECT coalesce({what}, 0) FROM {table}", [key_id])) for table in tables)
