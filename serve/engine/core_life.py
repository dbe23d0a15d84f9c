"""What waits for the engine's core ends when the core dies: what was asked of it then is never answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from serve.core.errors import EngineFailed


async def while_alive(doing: Coroutine[Any, Any, Any], dead: asyncio.Future[None], name: str) -> Any:
    """What `doing` returns. Raises EngineFailed when `dead` is done before it."""
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineFailed(f"{name}: the engine's core died")
    finally:
        task.cancel()
