"""Runs work on whole client files, which may take minutes: one piece at a time per owner, on threads of its own.

The thread pool of all request I/O has forty threads: with it, forty large files of one owner would block the uploads
and downloads of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from train.data.check import DataReport, Heard, check_training_file
from train.methods.check_process import ANY, check_apart
from train.methods.method import Method
from train.methods.methods import convert

# Checking a smaller file is faster than starting a process, and blocks other threads no longer than a request may.
APART_FROM_BYTES = 1 << 20
P = ParamSpec("P")
T = TypeVar("T")


class FileWork:
    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, CapacityLimiter] = WeakValueDictionary()

    async def run(self, owner: str, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Runs `work(...)` when it is this piece's turn among those of its owner."""
        turn = self._turns.setdefault(owner, CapacityLimiter(1))
        return await to_thread.run_sync(lambda: work(*args, **named), limiter=turn)

    async def check(
        self,
        owner: str,
        path: Path,
        chat_path: Path | None = None,
        method: Method | None = None,
        tokenizer: Path | None = None,
        cut_at: int | None = None,
        heard: Heard | None = None,
    ) -> DataReport:
        """Check a training file, for a method once a job names one; with `chat_path`, also write it there in the
        method's format; with `tokenizer`, the directory of a model, count its tokens, and with `cut_at` refuse what the
        method has nothing left of within this many. `heard` is called on a thread. Raises OSError."""
        if tokenizer is not None or path.stat().st_size >= APART_FROM_BYTES:
            return await self.run(
                owner, check_apart, path, chat_path, method.name if method else ANY, tokenizer, cut_at, heard
            )
        how, refuses = (method.convert, method.refuses) if method else (convert, None)
        return await self.run(owner, check_training_file, path, chat_path=chat_path, convert=how, refuses=refuses)
