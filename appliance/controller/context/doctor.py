"""Runs the doctor's checks beside a running box, in a process of its own, for `/admin/v1/doctor`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from appliance.controller.interfaces.errors import OperationFailed
from runtime.processes.ended import heard_out

LIMIT_S = 30.0
KEPT_S = 30.0


class Doctor:
    """Runs one look at a time and answers with its result for `KEPT_S`, a failure too: otherwise anybody who may read
    could start processes without end."""

    def __init__(self, command: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._command, self._clock = command, clock
        self._looking = asyncio.Lock()
        self._result: dict[str, Any] | OperationFailed | None = None
        self._at_s = 0.0

    async def look(self) -> dict[str, Any]:
        """{"exit_code", "data": findings as `appliance.boot.doctor.Finding` has them, "at_s"}. Raises
        OperationFailed."""
        async with self._looking:
            if self._result is None or not 0 <= self._clock() - self._at_s < KEPT_S:
                self._result = await self._run()
                self._at_s = self._clock()
            if isinstance(self._result, OperationFailed):
                raise self._result.with_traceback(None)
            return {**self._result, "at_s": self._at_s}

    async def _run(self) -> dict[str, Any] | OperationFailed:
        try:
            status, out, err = await heard_out(*self._command, within_s=LIMIT_S)
        except TimeoutError:
            return OperationFailed(f"The checks did not end within {LIMIT_S:.0f} s.", code="doctor_failed")
        if status != 0:
            why = (err.decode(errors="replace").strip() or "they said nothing").splitlines()[-1]
            return OperationFailed(f"The checks ended with an error: {why}", code="doctor_failed")
        return json.loads(out)
