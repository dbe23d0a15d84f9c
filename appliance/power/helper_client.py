"""Asks the power helper. What was set holds until the connection is closed, or this process ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.power.helper import MOST_BYTES

ANSWERS_WITHIN_S = 10.0


class HelperAway(RuntimeError):
    """The helper does not answer; the message says why."""


class HelperClient:
    """One connection, made when it is first needed and again when the helper has gone."""

    def __init__(self, path: Path):
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def set(self, devices: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """The limits that are wanted by UUID of their device; others are restored. Returns which could not be set, and
        why. Raises HelperAway."""
        answer = await self._ask({"do": "set", "devices": devices})
        refused: dict[str, str] = answer["refused"]
        return refused

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(self._path, limit=MOST_BYTES)
                reader, writer = self._streams
                writer.write(json.dumps(question).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            if not line:
                raise ConnectionError("it has closed the connection")
            answer: dict[str, Any] = json.loads(line)
        except (OSError, TimeoutError, ValueError) as error:
            self.close()
            why = str(error) or f"no answer within {ANSWERS_WITHIN_S:.0f} s"
            raise HelperAway(f"the power helper at {self._path}: {why}") from error
        if "error" in answer:
            raise HelperAway(f"the power helper at {self._path}: {answer['error']}")
        return answer

    def close(self) -> None:
        """The helper then restores what was set."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
