"""Ends waits for the engine core when the core dies, because a dead core never answers a call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from serve.core.errors import EngineFailed


async def while_alive(doing: Coroutine[Any, Any, Any], dead: asyncio.Future[None], name: str) -> Any:
    """Return the result of `doing`. Raises EngineFailed if `dead` is done first."""
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineFailed(f"{name}: the engine's core died")
    finally:
        task.cancel()
