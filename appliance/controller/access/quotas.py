"""Limits what one owner may store and have under way: counted before more is admitted.

Limits apply to the owner, not to the key: ten keys do not allow ten times as much. Admins and the box itself are not
limited. A file is checked when it is announced and, in the transaction that keeps it, once it has arrived.
"""

from __future__ import annotations

from appliance.controller.access.disk import Disk
from appliance.controller.interfaces.config import ControllerConfig, OwnerBounds
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, LimitReached
from appliance.controller.interfaces.principal import ADMIN, Principal
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.upkeep import holdings


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
        if ADMIN in caller.scopes or caller.key_id is None:
            return
        key_id, bounds = caller.key_id, self.bounds(caller.key_id)
        if begins and (number := holdings.unfinished(self._db, key_id)) >= bounds.unfinished:
            text = (
                f"Your keys have {number} jobs, batches, runs of evals, responses in background and uploads under way, "
                f"of at most {bounds.unfinished}. Wait for one to end or cancel one. {_ASK.format('unfinished')}"
            )
            raise LimitReached(text, param="unfinished", retry=True)
        if makes_model and (number := holdings.models(self._db, key_id)) >= bounds.models:
            text = f"Your keys have {number} fine-tuned models of at most {bounds.models}. Delete some first."
            raise LimitReached(f"{text} {_ASK.format('models')}", param="models")
        if (size := holdings.size(self._db, key_id)) + max(more_bytes, 1) > bounds.bytes:
            more = f"; {more_bytes} more do not fit" if more_bytes else ""
            text = f"Your files, models and evals hold {size} of at most {bounds.bytes} bytes{more}. Delete some first."
            text = f"{text} {_ASK.format('bytes')}"
            raise ApiError(413, text, code="limit_reached", param="bytes", headers=dict(NEVER_RETRY))


_ASK = "An admin can give a key a higher bound `{}`."
