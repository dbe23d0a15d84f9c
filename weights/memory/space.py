"""Counts what a store holds and chooses what to evict. The scan reads the file system; the choice is pure."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from weights.format.names import PINNED_FILE


@dataclass(frozen=True)
class Held:
    """One directory of the store: `nbytes` is the size of its files, reserved or written."""

    path: Path
    nbytes: int
    last_used_ns: int
    pinned: bool


@dataclass(frozen=True)
class Usage:
    """Bytes of a store: committed versions, drafts (and what is being removed), and the pool."""

    committed_bytes: int
    draft_bytes: int
    pool_bytes: int
    budget_bytes: int | None

    @property
    def used_bytes(self) -> int:
        return self.committed_bytes + self.draft_bytes + self.pool_bytes


def held_at(path: Path) -> Held | None:
    """The directory at `path`; None if it is gone."""
    nbytes, pinned = 0, False
    try:
        last_used_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
        for entry in os.scandir(path):
            pinned = pinned or entry.name == PINNED_FILE
            nbytes += entry.stat(follow_symlinks=False).st_size
    except (FileNotFoundError, NotADirectoryError):  # removed while we looked
        return None
    return Held(path, nbytes, last_used_ns, pinned)


def directories(parent: Path) -> list[Path]:
    """Real directories directly under `parent`, sorted; empty if it is gone."""
    try:
        return sorted(Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def choose_evictions(candidates: Iterable[Held], excess_bytes: int) -> list[Held]:
    """The least recently used unpinned candidates whose removal frees `excess_bytes`; all of them if even
    that is too little. Pure."""
    chosen: list[Held] = []
    for held in sorted(candidates, key=lambda held: held.last_used_ns):
        if excess_bytes <= 0:
            break
        if not held.pinned:
            chosen.append(held)
            excess_bytes -= held.nbytes
    return chosen
