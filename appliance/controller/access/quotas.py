"""Limits what one owner may store and run at once: each kind of object is counted before another one is admitted.

Limits apply to the owner, not to the key: ten keys do not allow ten times as much. Admins and the box itself are not
limited. A file is checked when it is announced and, in the transaction that keeps it, once it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from appliance.controller.access.disk import Disk
from appliance.controller.interfaces.config import ControllerConfig, OwnerBounds
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, LimitReached
from appliance.controller.interfaces.principal import ADMIN, Principal
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.upkeep import holdings

Used = tuple[int, int]
"""Number and bytes."""


class _Kind(NamedTuple):
    """One kind of object.

    Args:
        used: (db, key's id) -> what all keys of its owner have.
        number, size: the bounds on them; empty: there is none.
        what, advice: for the message.
    """

    used: Callable[[Database, str], Used]
    number: str
    size: str
    what: str
    advice: str


class Quotas:
    """Raises ApiError: 429 for a number, 413 for bytes, 507 where the disk is short whoever asks."""

    def __init__(self, db: Database, config: ControllerConfig, disk: Disk):
        self._db, self._config, self.disk = db, config, disk

    def bounds(self, key_id: str) -> OwnerBounds:
        """The limits of this key: the box's own, unless the key overrides them."""
        row = keys.find(self._db, key_id)
        return self._config.bounds.model_copy(update=row.bounds) if row and row.bounds else self._config.bounds

    def check(self, caller: Principal, kind: str, more_bytes: int = 0, used: Used | None = None) -> None:
        """Admits one more of a kind, or more bytes of it.

        Args:
            kind: a name in `_KINDS`.
            more_bytes: size of the new object.
            used: in place of what the store counts.
        """
        self.disk.check(more_bytes)
        if ADMIN in caller.scopes or caller.key_id is None:
            return
        of, bounds = _KINDS[kind], self.bounds(caller.key_id)
        number, size = of.used(self._db, caller.key_id) if used is None else used
        if of.number and number >= (limit := getattr(bounds, of.number)):
            text = f"Your keys have {number} {of.what} of at most {limit}. {of.advice} {_ASK.format(of.number)}"
            raise LimitReached(text, param=of.number, retry=of.advice == _WAIT)
        if of.size and size + max(more_bytes, 1) > (limit := getattr(bounds, of.size)):
            more = f"; {more_bytes} more do not fit" if more_bytes else ""
            text = f"Your {of.what} hold {size} of at most {limit} bytes{more}. {of.advice} {_ASK.format(of.size)}"
            if kind == "background":
                raise LimitReached(text, param=of.size, retry=True)
            raise ApiError(413, text, code="limit_reached", param=of.size, headers=dict(NEVER_RETRY))

    def check_upload(self, caller: Principal, announced_bytes: int) -> None:
        """An upload counts twice: until completion the disk holds its parts and the file."""
        self.check(caller, "uploads")
        self.check(caller, "files", 2 * announced_bytes)

    def check_batch(self, caller: Principal, input_bytes: int) -> None:
        """Its answers become files of the owner, so there must be room for them."""
        self.check(caller, "batches")
        self.check(caller, "files", holdings.ANSWERS_PER_INPUT * input_bytes)

    def check_job(self, caller: Principal) -> None:
        """Checks one more job, and the model that it will make."""
        self.check(caller, "jobs")
        self.check(caller, "models")


def _files(db: Database, key_id: str) -> Used:
    (number, size), (pending, announced) = holdings.files(db, key_id), holdings.uploads(db, key_id)
    return number + pending, size + 2 * announced


def _models(db: Database, key_id: str) -> Used:
    number, size = holdings.models(db, key_id)
    return number + holdings.jobs(db, key_id), size


def _eval_runs(db: Database, key_id: str) -> Used:
    unfinished, size = holdings.eval_runs(db, key_id)
    return unfinished, size + holdings.evals(db, key_id)[1]


_ASK = "An admin can give a key a higher bound `{}`."
_WAIT, _DELETE = "Wait for one to end or cancel one.", "Delete some first."
_KINDS = {
    "files": _Kind(_files, "files", "file_bytes", "files", _DELETE),
    "uploads": _Kind(holdings.uploads, "uploads", "", "uploads in progress", "Complete or cancel one first."),
    "batches": _Kind(lambda db, key: (holdings.batches(db, key), 0), "batches", "", "batches in progress", _WAIT),
    "jobs": _Kind(lambda db, key: (holdings.jobs(db, key), 0), "jobs", "", "unfinished fine-tuning jobs", _WAIT),
    "job_data": _Kind(_files, "", "file_bytes", "unfinished jobs' copies of files", _WAIT),
    "models": _Kind(_models, "models", "model_bytes", "fine-tuned models", _DELETE),
    "evals": _Kind(holdings.evals, "evals", "eval_bytes", "evals", _DELETE),
    "eval_runs": _Kind(_eval_runs, "eval_runs", "eval_bytes", "unfinished runs of evals", _WAIT),
    "eval_items": _Kind(holdings.eval_runs, "", "eval_bytes", "evals and their runs", _DELETE),
    "background": _Kind(holdings.background, "background", "responses_bytes", "unfinished responses", _WAIT),
}
