"""Tells an event loop what is gone, on whatever thread and in the midst of whatever that happens."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from typing import Any


def when_gone(thing: Any, call: Callable[[], Any]) -> None:
    """The running loop calls it soon after `thing` is gone.

    `weakref.finalize` would call it where the last reference goes, or where Python collects cycles: on a thread that
    reads, or between the two halves of the very change that it would make.
    """
    weakref.finalize(thing, _soon, asyncio.get_running_loop(), call)  # type: ignore[misc]


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody counts any more
        loop.call_soon_threadsafe(call)
