"""Limits what one owner may store and run at once: each kind of object is counted before another one is admitted.

Limits apply to the owner, not to the key: ten keys do not allow ten times as much. Admins and the box itself are not
limited. A file is checked when it is announced and, in the transaction that keeps it, once it has arrived.
"""

from __future__ import annotations

from appliance.controller.access.disk import Disk
from appliance.controller.bus.bus import Bus
from appliance.controller.interfaces.config import ControllerConfig, OwnerBounds
from appliance.controller.interfaces.errors import NEVER_RETRY, ApiError, LimitReached
from appliance.controller.interfaces.principal import ADMIN, Principal
from appliance.store.database import Database
from appliance.store.records import keys
from appliance.store.upkeep import holdings


class Quotas:
    """Checks raise ApiError: 429 for a number, 413 for bytes, 507 where the disk is short whoever asks."""

    def __init__(self, db: Database, config: ControllerConfig, disk: Disk, bus: Bus):
        """bus: for the length of the gateways' table."""
        self._db, self._config, self.disk, self._bus = db, config, disk, bus
        self._answers: dict[str, tuple[str, int]] = {}  # batch -> owner, bytes beyond those that its input keeps free

    def bounds(self, key_id: str) -> OwnerBounds:
        """The limits of this key: the box's own, unless the key overrides them."""
        row = keys.find(self._db, key_id)
        return self._config.bounds.model_copy(update=row.bounds) if row and row.bounds else self._config.bounds

    # --- one more of a kind

    def check_upload(self, caller: Principal, announced_bytes: int) -> None:
        """Admit one more upload in parts. It counts twice: until completion the disk holds its parts and the file."""
        self.disk.check(2 * announced_bytes)
        if (key_id := _bounded(caller)) is None:
            return
        bounds = self.bounds(key_id)
        _number(
            "uploads",
            "uploads in progress",
            holdings.uploads(self._db, key_id)[0],
            bounds.uploads,
            "Complete or cancel one first.",
        )
        self._files(key_id, bounds)
        self._bytes(key_id, bounds, 2 * announced_bytes)

    def check_batch(self, caller: Principal, input_bytes: int) -> None:
        """One more batch. Its answers become files of the owner, so there must be room for one as large as its input:
        error files of batches that cost nothing once filled the disk past every bound."""
        self.disk.check(input_bytes)
        if (key_id := _bounded(caller)) is None:
            return
        bounds = self.bounds(key_id)
        _number(
            "batches",
            "batches in progress",
            holdings.batches(self._db, key_id),
            bounds.batches,
            "Wait for the end of one or cancel it.",
            retry=True,
        )
        self._files(key_id, bounds)
        self._bytes(key_id, bounds, holdings.ANSWERS_PER_INPUT * input_bytes)

    def check_eval(self, caller: Principal, size: int) -> None:
        """Checks one more evaluation, of `size` bytes."""
        self.disk.check(size)
        if (key_id := _bounded(caller)) is not None:
            bounds, (number, used) = self.bounds(key_id), holdings.evals(self._db, key_id)
            _number("evals", "evals", number, bounds.evals, "Delete one first.")
            self._eval_bytes(bounds, used + size)

    def check_eval_run(self, caller: Principal) -> None:
        """Checks one more run of an evaluation."""
        self.disk.check()
        if (key_id := _bounded(caller)) is None:
            return
        bounds, (unfinished, size) = self.bounds(key_id), holdings.eval_runs(self._db, key_id)
        size += holdings.evals(self._db, key_id)[1]
        _number(
            "eval_runs",
            "runs of evals that have not ended",
            unfinished,
            bounds.eval_runs,
            "Wait for the end of one or cancel it.",
            retry=True,
        )
        self._eval_bytes(bounds, size)

    def check_eval_goes_on(self, key_id: str | None) -> None:
        """A run in progress may write more: nobody knows the size of answers and grades beforehand."""
        self.disk.check()
        row = keys.find(self._db, key_id) if key_id is not None else None
        if row is not None and ADMIN not in row.scopes:
            self._eval_bytes(self.bounds(row.id), holdings.eval_runs(self._db, row.id)[1])

    def _eval_bytes(self, bounds: OwnerBounds, size: int) -> None:
        if size >= bounds.eval_bytes:
            raise _full(
                "eval_bytes",
                f"Your evals and their runs hold {size} of at most {bounds.eval_bytes} bytes. Delete one first.",
            )

    def check_names(self, caller: Principal) -> None:
        """More names that can be called, or more owners who may call them: the gateways get all in one table, and a
        table longer than they read would keep revoked keys alive.

        Once it is full, owners with more than an equal share of it have reached their bound; the others may go on, and
        together fill it at most once more."""
        key_id, table, full = _bounded(caller), self._bus, self._config.bus_line_bytes // _SHARE_OF_LINE
        if key_id is None or table.table_bytes <= full:
            return
        owner, part = self._owner(key_id), full // max(1, keys.count_owners(self._db))
        used = table.bytes_of(owner, holdings.names(self._db, owner))
        if used > part:
            raise LimitReached(
                f"The gateways' table is full, and your models and checkpoints take {used} bytes of it, more than your "
                f"part of {part}. Delete models that you do not need.",
                param="models",
            )

    def check_job(self, caller: Principal) -> None:
        """Checks one more job, and the model that it will make beside those that there are."""
        self.disk.check()
        self.check_names(caller)
        if (key_id := _bounded(caller)) is None:
            return
        bounds, unfinished = self.bounds(key_id), holdings.jobs(self._db, key_id)
        _number(
            "jobs",
            "fine-tuning jobs that have not ended",
            unfinished,
            bounds.jobs,
            "Wait for the end of one or cancel it.",
            retry=True,
        )
        made, size = holdings.models(self._db, key_id)
        _number("models", "fine-tuned models", made + unfinished, bounds.models, "Delete one first.")
        if size >= bounds.model_bytes:
            raise _full(
                "model_bytes",
                f"Versions of your fine-tuned models hold {size} of at most {bounds.model_bytes} bytes. Delete a model "
                "first.",
            )

    def check_job_data(self, caller: Principal, held: int, more: int) -> None:
        """Admit one more job, besides those whose file copies take `held` bytes; its own will take `more`."""
        self.disk.check(more)
        if (key_id := _bounded(caller)) is None:
            return
        limit = self.bounds(key_id).file_bytes
        if held + more > limit:
            raise _full(
                "file_bytes",
                f"Jobs of your keys that have not ended hold copies of {held} of at most {limit} bytes; {more} "
                "more do not fit. Wait for one to end or cancel one.",
            )

    def check_background(self, caller: Principal, size: int) -> None:
        self.disk.check(size)
        if (key_id := _bounded(caller)) is None:
            return
        bounds, (number, used) = self.bounds(key_id), holdings.background(self._db, key_id)
        _number(
            "background",
            "responses in background that have not ended",
            number,
            bounds.background,
            "Wait for one to end or cancel one.",
            retry=True,
        )
        if used + size > bounds.responses_bytes:
            raise LimitReached(
                f"Your keys' responses in background that have not ended hold {used} of at most "
                f"{bounds.responses_bytes} bytes; {size} more do not fit. Wait for one to end or cancel one. "
                f"{_ASK.format('responses_bytes')}",
                param="responses_bytes",
                retry=True,
            )

    # --- bytes

    def check_file(self, caller: Principal, size: int) -> None:
        """Checks one more file."""
        if (key_id := _bounded(caller)) is None:
            return
        bounds = self.bounds(key_id)
        self._files(key_id, bounds)
        self._bytes(key_id, bounds, size)

    def answers_hold(self, batch_id: str, owner: str, beyond: int) -> None:
        """The answers of an unfinished batch have this many bytes more than its input has kept free for them. 0: or it
        has ended, and they are files."""
        self._answers.pop(batch_id, None)
        if beyond:
            self._answers[batch_id] = owner, beyond

    def no_room_for_answers(self, key_id: str | None) -> str:
        """Why batches of this key have to wait before more of their lines are answered; empty if they need not."""
        if self.disk.room_bytes() <= 0:
            return "the disk of the box is short of space"
        row = keys.find(self._db, key_id) if key_id is not None else None
        if row is None or ADMIN in row.scopes or not self._beyond(row.owner):
            return ""
        used, limit = self._used(row.id), self.bounds(row.id).file_bytes
        if used <= limit:
            return ""
        return f"files of its owner's keys have {used} of at most {limit} bytes, the answers so far included"

    def _beyond(self, owner: str) -> int:
        return sum(size for whose, size in self._answers.values() if whose == owner)

    def _files(self, key_id: str, bounds: OwnerBounds) -> None:
        there = holdings.files(self._db, key_id)[0] + holdings.uploads(self._db, key_id)[0]
        _number("files", "files", there, bounds.files, "Delete some first.")

    def _bytes(self, key_id: str, bounds: OwnerBounds, more: int) -> None:
        used = self._used(key_id)
        if used + more > bounds.file_bytes:
            raise _full(
                "file_bytes",
                f"Files of your keys have {used} of at most {bounds.file_bytes} bytes, uploads in progress "
                f"included; {more} more do not fit. Delete files first.",
            )

    def _used(self, key_id: str) -> int:
        """Bytes of files."""
        there, coming = holdings.files(self._db, key_id)[1], holdings.uploads(self._db, key_id)[1]
        return there + 2 * coming + self._beyond(self._owner(key_id))

    def _owner(self, key_id: str) -> str:
        row = keys.find(self._db, key_id)
        return row.owner if row else key_id


# Running jobs may still publish: the rest has room for their models.
_SHARE_OF_LINE = 4
_ASK = "An admin can give a key a higher bound `{}`."


def _full(bound: str, text: str) -> ApiError:
    return ApiError(413, f"{text} {_ASK.format(bound)}", code="limit_reached", param=bound, headers=dict(NEVER_RETRY))


def _number(bound: str, what: str, used: int, limit: int, advice: str, *, retry: bool = False) -> None:
    if used >= limit:
        text = f"Your keys have {used} {what} of at most {limit}. {advice} {_ASK.format(bound)}"
        raise LimitReached(text, param=bound, retry=retry)


def _bounded(caller: Principal) -> str | None:
    """The key whose owner is limited; None: no limits."""
    return None if ADMIN in caller.scopes else caller.key_id
