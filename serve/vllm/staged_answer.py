"""Asking the workers of one engine for the fingerprint of a staged version, slice by slice between its steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


async def ask_staged(collective_rpc: Callable[[str], Awaitable[list[Any]]]) -> dict[str, Any]:
    """The answer of the first worker (`tokens`, `logprobs` in nats), or `{"refused": why}` if one of them can be asked
    in a pause only. `collective_rpc` calls a method of every worker and returns what each answered.

    No worker computes before all are ready: the layers of tensor parallel workers wait for each other, and the next
    call goes out when all have answered the last.
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
