"""Errors of the store.

StoreError
├── DatabaseUnusable    the file is not our database, is damaged, or cannot be opened
├── OtherSchema         another version of this software wrote the file
├── RowNotFound         no row has this id
├── UnknownCursor       `after` is the id of nothing in this list
└── IllegalTransition   a finished job, operation or hand-over was asked to change
"""

from __future__ import annotations

from pathlib import Path


class StoreError(Exception):
    """Base of everything raised by `appliance.store`."""


class DatabaseUnusable(StoreError):
    def __init__(self, path: Path, reason: str):
        super().__init__(
            f"{path} cannot be used as the box's database: {reason}. Restore a backup into another data directory "
            "(`appliance restore`). Without one, keep this file and its -wal in another folder and start with an empty "
            "box: the files that people sent stay where they are, and are known again when the database returns."
        )


class OtherSchema(StoreError):
    def __init__(self, path: Path, table: str):
        super().__init__(
            f"{path} was written by another release: its table {table} has other columns, and there is no way from one "
            "to the other. Start the release that wrote it, or start with an empty data directory (`box.data_dir`)"
        )


class RowNotFound(StoreError, LookupError):
    """A LookupError as well, which is what the scheduler's ports may raise for what is gone: a job whose row had been
    taken away ended the scheduler's loop."""

    def __init__(self, table: str, row_id: str):
        super().__init__(f"no row {row_id!r} in {table}")


class UnknownCursor(StoreError):
    def __init__(self, after: str):
        super().__init__(
            f"No object with id {after!r} is in this list; 'after' is the id of the last object of the page before"
        )


class IllegalTransition(StoreError):
    def __init__(self, table: str, row_id: str, found: str, wanted: str):
        super().__init__(f"{row_id} in {table} is {found} and stays so; it cannot become {wanted}")
        self.found = found
