"""Collects a staged version's fingerprint from an engine's workers, slice by slice between its steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


async def ask_staged(collective_rpc: Callable[[str], Awaitable[list[Any]]]) -> dict[str, Any]:
    """Return the first worker's answer (`tokens`, `logprobs` in nats), or `{"refused": why}` if a worker can only
    compute it in a pause. `collective_rpc` calls a method of every worker and returns all results.

    No worker computes before all are ready, because the layers of tensor parallel workers wait for each other; each
    call goes out after all workers have answered the last one.
    """
    ready: list[dict[str, Any] | None] = [None]
    while None in ready:
        ready = await collective_rpc("shm_ready_fingerprint")
    for worker in ready:
        if "refused" in worker:
            return worker
    answer = None
    while answer is None:
        answer = (await collective_rpc("shm_advance_fingerprint"))[0]
    return answer
