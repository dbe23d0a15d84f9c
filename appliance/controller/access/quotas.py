"""Limits what one owner may store and run at once: each kind of object is counted before another one is admitted.

Limits apply to the owner, not to the key: ten keys do not allow ten times as much. Admins and the box itself are not
limited. A file is checked when it is announced and, in the transaction that keeps it, once it has arrived.
"""

from __future__ import annotations

from typing import NamedTuple

from appliance.controller.access.disk import Disk
from appliance.controller.interfaces.config import ControllerConfig, OwnerBounds
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, LimitReached
from appliance.controller.interfaces.principal import ADMIN, Principal
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.upkeep import holdings


class _Limited(NamedTuple):
    """Who asks, where limits apply."""

    key_id: str
    owner: str
    bounds: OwnerBounds


class Quotas:
    """Checks raise ApiError: 429 for a number, 413 for bytes, 507 where the disk is short whoever asks."""

    def __init__(self, db: Database, config: ControllerConfig, disk: Disk):
        self._db, self._config, self.disk = db, config, disk

    def bounds(self, key_id: str) -> OwnerBounds:
        """The limits of this key: the box's own, unless the key overrides them."""
        row = keys.find(self._db, key_id)
        return self._config.bounds.model_copy(update=row.bounds) if row and row.bounds else self._config.bounds

    # --- one more of a kind

    def check_file(self, caller: Principal, size: int) -> None:
        if (of := self._of(caller)) is not None:
            self._number(of, "files", self._files(of))
            self._bytes(of, size)

    def check_upload(self, caller: Principal, announced_bytes: int) -> None:
        """An upload counts twice: until completion the disk holds its parts and the file."""
        self.disk.check(2 * announced_bytes)
        if (of := self._of(caller)) is not None:
            self._number(of, "uploads", holdings.uploads(self._db, of.key_id)[0])
            self.check_file(caller, 2 * announced_bytes)

    def check_batch(self, caller: Principal, input_bytes: int) -> None:
        """Its answers become files of the owner, so there must be room for them."""
        self.disk.check(input_bytes)
        if (of := self._of(caller)) is not None:
            self._number(of, "batches", holdings.batches(self._db, of.key_id))
            self.check_file(caller, holdings.ANSWERS_PER_INPUT * input_bytes)

    def check_eval(self, caller: Principal, size: int) -> None:
        self.disk.check(size)
        if (of := self._of(caller)) is not None:
            number, used = holdings.evals(self._db, of.key_id)
            self._number(of, "evals", number)
            self._eval_bytes(of, used + size)

    def check_eval_run(self, caller: Principal) -> None:
        self.disk.check()
        if (of := self._of(caller)) is not None:
            unfinished, size = holdings.eval_runs(self._db, of.key_id)
            self._number(of, "eval_runs", unfinished)
            self._eval_bytes(of, size + holdings.evals(self._db, of.key_id)[1])

    def check_eval_goes_on(self, key_id: str | None) -> None:
        """A run in progress may write more: nobody knows the size of answers and grades beforehand."""
        self.disk.check()
        row = keys.find(self._db, key_id) if key_id is not None else None
        if row is not None and ADMIN not in row.scopes:
            of = _Limited(row.id, row.owner, self.bounds(row.id))
            self._eval_bytes(of, holdings.eval_runs(self._db, row.id)[1])

    def check_job(self, caller: Principal) -> None:
        """Checks one more job, and the model that it will make."""
        self.disk.check()
        if (of := self._of(caller)) is None:
            return
        unfinished, (made, size) = holdings.jobs(self._db, of.key_id), holdings.models(self._db, of.key_id)
        self._number(of, "jobs", unfinished)
        self._number(of, "models", made + unfinished)
        if size >= of.bounds.model_bytes:
            held = f"Versions of your fine-tuned models hold {size} of at most {of.bounds.model_bytes} bytes."
            raise _full("model_bytes", f"{held} Delete a model first.")

    def check_job_data(self, caller: Principal, held: int, more: int) -> None:
        """Admit one more job, besides those whose file copies take `held` bytes; its own will take `more`."""
        self.disk.check(more)
        if (of := self._of(caller)) is not None and held + more > of.bounds.file_bytes:
            raise _full(
                "file_bytes",
                f"Jobs of your keys that have not ended hold copies of {held} of at most {of.bounds.file_bytes} bytes; "
                f"{more} more do not fit. {_WAIT}",
            )

    def check_background(self, caller: Principal, size: int) -> None:
        self.disk.check(size)
        if (of := self._of(caller)) is None:
            return
        number, used = holdings.background(self._db, of.key_id)
        self._number(of, "background", number)
        if used + size > of.bounds.responses_bytes:
            raise LimitReached(
                f"Your keys' responses in background that have not ended hold {used} of at most "
                f"{of.bounds.responses_bytes} bytes; {size} more do not fit. {_WAIT} {_ASK.format('responses_bytes')}",
                param="responses_bytes",
                retry=True,
            )

    # --- sums

    def _of(self, caller: Principal) -> _Limited | None:
        """None: no limits."""
        if ADMIN in caller.scopes or caller.key_id is None:
            return None
        row = keys.find(self._db, caller.key_id)
        return _Limited(caller.key_id, row.owner if row else caller.key_id, self.bounds(caller.key_id))

    def _number(self, of: _Limited, bound: str, used: int) -> None:
        what, advice = _KINDS[bound]
        if used >= (limit := getattr(of.bounds, bound)):
            text = f"Your keys have {used} {what} of at most {limit}. {advice} {_ASK.format(bound)}"
            raise LimitReached(text, param=bound, retry=advice == _WAIT)

    def _files(self, of: _Limited) -> int:
        return holdings.files(self._db, of.key_id)[0] + holdings.uploads(self._db, of.key_id)[0]

    def _bytes(self, of: _Limited, more: int) -> None:
        there, coming = holdings.files(self._db, of.key_id)[1], holdings.uploads(self._db, of.key_id)[1]
        used, limit = there + 2 * coming, of.bounds.file_bytes
        if used + more > limit:
            raise _full(
                "file_bytes",
                f"Files of your keys have {used} of at most {limit} bytes, uploads in progress included; {more} more "
                "do not fit. Delete files first.",
            )

    def _eval_bytes(self, of: _Limited, size: int) -> None:
        if size >= of.bounds.eval_bytes:
            held = f"Your evals and their runs hold {size} of at most {of.bounds.eval_bytes} bytes."
            raise _full("eval_bytes", f"{held} Delete one first.")


_ASK = "An admin can give a key a higher bound `{}`."
_WAIT = "Wait for one to end or cancel one."
_KINDS = {
    "files": ("files", "Delete some first."),
    "uploads": ("uploads in progress", "Complete or cancel one first."),
    "batches": ("batches in progress", _WAIT),
    "evals": ("evals", "Delete one first."),
    "eval_runs": ("runs of evals that have not ended", _WAIT),
    "jobs": ("fine-tuning jobs that have not ended", _WAIT),
    "models": ("fine-tuned models", "Delete one first."),
    "background": ("responses in background that have not ended", _WAIT),
}
"""By bound: what is counted, and what to do."""


def _full(bound: str, text: str) -> ApiError:
    return ApiError(413, f"{text} {_ASK.format(bound)}", code="limit_reached", param=bound, headers=dict(NEVER_RETRY))
