"""Defines the errors of this package as a tree, the most general first.

WeightsError
├── InvalidLayout            tensors or slices that do not fit the format or each other (also a ValueError)
├── InvalidName              an invalid model, version or file name (also a ValueError)
├── StoreError               misuse of the store: use of an ended draft or lease, a root open to other users
│   ├── StoreFull            not enough space in the budget or the file system; the message has the numbers
│   ├── VersionExists        a version of this name exists
│   ├── VersionNotFound      no such version, or the version was removed meanwhile
│   └── VersionLeased        a reader holds a lease, so the version stays
├── TierFull                 a tier's disk is full or would have too little free space; nothing was committed
├── TierUnavailable          a tier cannot be reached, refuses access, or is another tier than this box wrote to
└── IntegrityError           bytes do not match their metadata or are not a regular file; has path and file
    └── ObjectDamaged        an object in a remote tier is missing or truncated; `path` names it
"""

from __future__ import annotations

import copyreg
from typing import Any


class WeightsError(Exception):
    """Base of all errors that this package raises deliberately. They can be pickled, because Ray actors return them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling by default calls the constructor with only the message, which fails for keyword-only arguments.
        return copyreg.__newobj__, (type(self), *self.args), dict(self.__dict__)  # type: ignore[attr-defined]


class InvalidLayout(WeightsError, ValueError): ...


class InvalidName(WeightsError, ValueError): ...


class StoreError(WeightsError): ...


class StoreFull(StoreError): ...


class VersionExists(StoreError): ...


class VersionNotFound(StoreError): ...


class VersionLeased(StoreError): ...


class TierFull(WeightsError): ...


class TierUnavailable(WeightsError): ...


class IntegrityError(WeightsError):
    """`path`, `file`: directory (or object) and file with the fault; `reason`: the fault."""

    def __init__(self, reason: str, *, path: object, file: str | None = None) -> None:
        self.reason, self.path, self.file = reason, str(path), file
        where = self.path if file is None else f"{self.path}/{file}" if self.path != file else file
        super().__init__(f"{where}: {reason}")


class ObjectDamaged(IntegrityError): ...
