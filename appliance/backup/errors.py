"""Why a backup could not be taken or used; each message says what to do."""

from __future__ import annotations


class BackupError(RuntimeError):
    """Base of the errors of backups. Those of the place itself are `weights.format.errors.TierUnavailable` and
    `TierFull`."""


class NoBackup(BackupError):
    """There is no such backup, or none at all."""


class BackupDamaged(BackupError):
    """Bytes of a backup are missing or are not those that were written."""


class NotThisBox(BackupError):
    """The place has another box's backups."""


class BackupRunning(BackupError):
    """Another process takes a backup of this box now."""


class NotEmpty(BackupError):
    """A backup is restored into a new directory only."""


class WrongKey(BackupError):
    """The backups at the place are encrypted with another key, or no key was named."""


class WrongPlace(BackupError):
    """The backups were made at a place of another name, but are shown as those of this place."""
