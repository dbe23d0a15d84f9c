"""What a body of JSON may cost: how long it may be and how many values it may hold, for each route; how it is read.

A coroutine checks and writes its body on the controller's loop, which takes time for each byte and value: a bound of
both, per route, bounds that time. Large bodies are parsed on a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from appliance.controller.http.body_weight import check_weight
from appliance.controller.interfaces.errors import BadRequest
from weights.format.foreign_json import is_deeper

KIB, MIB = 1 << 10, 1 << 20
MAX_DEPTH = 160
"""Levels: orjson reads 1,024 and writes 254, which was found out where the body was kept."""
_PARSED_HERE = 64 * KIB
"""A body of this size takes less time than a change of threads."""


@dataclass(frozen=True, slots=True)
class Bound:
    """weight: a list or object counts as 12, a string as 4, any other value as 1."""

    nbytes: int
    weight: int


MOST = Bound(256 * KIB, 1 << 15)
"""The bound of a route that is not named below."""
_GRADER = Bound(3 * MIB, 1 << 16)
"""Its graders have 2 MiB at most (train.graders)."""
BOUNDS: Mapping[str, Bound] = {
    "/v1/fine_tuning/jobs": _GRADER,
    "/v1/fine_tuning/alpha/graders/validate": _GRADER,
    "/v1/fine_tuning/alpha/graders/run": _GRADER,
    "/v1/evals": _GRADER,
    # More items than these come as a file, which is read line by line.
    "/v1/evals/{eval_id}/runs": Bound(3 * MIB, 1 << 17),
    # Names of 10,000 parts.
    "/v1/uploads/{upload_id}/complete": Bound(MIB, 1 << 16),
    # A whole request of inference, in background.
    "/v1/responses": Bound(2 * MIB, 1 << 17),
    # A gateway's copies of answers: as a request of inference and its answer may be.
    "/internal/responses": Bound(64 * MIB, 1 << 22),
    # A chat template.
    "/admin/v1/models/{name:path}/settings": Bound(MIB, 1 << 15),
}


def bound_of(path: str) -> Bound:
    """path: the route's, with its parameters' names."""
    return BOUNDS.get(path, MOST)


async def parsed(text: bytes, weight: int) -> Any:
    """Raises BadRequest for too many values or levels, orjson.JSONDecodeError for what is not JSON."""
    if len(text) <= _PARSED_HERE:
        return _parsed(text, weight)
    return await asyncio.to_thread(_parsed, text, weight)


def _parsed(text: bytes, weight: int) -> Any:
    check_weight(text, weight)
    found = orjson.loads(text)
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and is_deeper(found, MAX_DEPTH):
        raise BadRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return found
