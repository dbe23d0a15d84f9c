"""Defines the errors of this package, most general first.

WeightsError
├── InvalidLayout            tensors or slices that do not fit the format, or each other (also ValueError)
├── UnknownTensor            a tensor name that the layout does not have (also KeyError)
├── InvalidName              an invalid model, version or file name (also ValueError)
├── StoreError               of the store itself, not of its bytes; also that its root is not this user's alone
│   ├── StoreFull            not enough room in the budget or the file system; carries the numbers
│   ├── VersionExists        commit onto a name that is taken
│   ├── VersionNotFound      no such version, or it was removed meanwhile
│   ├── VersionLeased        a reader holds a lease, so it stays
│   ├── DraftNotFound        attach to a draft that was committed, aborted or swept
│   └── HandleClosed         use of a draft or lease after its end, or in a child forked while it was held
├── TierFull                 a tier's disk is full, or would fall below its required free space; nothing was committed
├── TierUnavailable          a tier cannot be reached, refuses access, or is not the one this box wrote to
└── IntegrityError           bytes differ from what their metadata says, or are no plain file; carries path and file
    ├── NotSealed            no checksums were recorded, so nothing can be verified
    └── ObjectDamaged        an object at a remote place is missing; `path` names it
"""

from __future__ import annotations

from typing import Any


class WeightsError(Exception):
    """Base of every error this package raises deliberately. All can be pickled, because Ray's actors return them, and
    converted by `error_as_json`, with which ranks report them to each other."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the constructor with only the message, which fails for keyword-only arguments.
        return _rebuilt, (type(self), self.args, dict(self.__dict__))


def _rebuilt(kind: type[WeightsError], args: tuple[Any, ...], state: dict[str, Any]) -> WeightsError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def error_as_json(error: WeightsError) -> dict[str, Any]:
    return {"type": type(error).__name__, "args": list(error.args), "fields": error.__dict__}


def error_from_json(data: Any) -> WeightsError:
    """The inverse of `error_as_json`; a kind that this module does not have becomes WeightsError."""
    kind = globals().get(data["type"])
    if not (isinstance(kind, type) and issubclass(kind, WeightsError)):
        kind = WeightsError
    return _rebuilt(kind, tuple(data["args"]), data["fields"])


class InvalidLayout(WeightsError, ValueError): ...


class UnknownTensor(WeightsError, KeyError):
    def __init__(self, name: str) -> None:
        super().__init__(f"no tensor or file named {name!r} in the layout")

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class InvalidName(WeightsError, ValueError): ...


class StoreError(WeightsError): ...


class StoreFull(StoreError):
    """The failed call leaves nothing behind. All numbers are bytes; `budget_bytes` is None without a budget,
    `free_bytes` is what the file system had free."""

    def __init__(
        self,
        *,
        needed_bytes: int,
        used_bytes: int,
        budget_bytes: int | None,
        free_bytes: int,
        leased_bytes: int = 0,
        pinned_bytes: int = 0,
        draft_bytes: int = 0,
    ) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        budget = "none" if budget_bytes is None else f"{budget_bytes} bytes"
        super().__init__(
            f"no room for {needed_bytes} bytes: budget {budget}, in use {used_bytes} bytes "
            f"(leased {leased_bytes}, without a copy on disk {pinned_bytes}, being written {draft_bytes}), "
            f"free on the file system {free_bytes} bytes. Release or remove a version, persist one so that "
            "it can be evicted, or raise the memory budget"
        )


class VersionExists(StoreError): ...


class VersionNotFound(StoreError): ...


class VersionLeased(StoreError): ...


class DraftNotFound(StoreError): ...


class HandleClosed(StoreError): ...


class TierFull(WeightsError): ...


class TierUnavailable(WeightsError): ...


class IntegrityError(WeightsError):
    """`path`, `file` and `tensor` say where; `reason` says what."""

    def __init__(self, reason: str, *, path: object, file: str | None = None, tensor: str | None = None) -> None:
        self.reason = reason
        self.path = str(path)
        self.file = file
        self.tensor = tensor
        where = self.path if file is None else f"{self.path}/{file}" if self.path != file else file
        if tensor is not None:
            where += f", tensor {tensor!r}"
        super().__init__(f"{where}: {reason}")


class NotSealed(IntegrityError): ...


class ObjectDamaged(IntegrityError): ...
