"""Runs the doctor's checks beside a running box, in a process of its own, for `/admin/v1/doctor`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from appliance.controller.interfaces.errors import OperationFailed
from runtime.processes.ended import run_command

LIMIT_S = 30.0
KEPT_S = 30.0
FAILED = "doctor_failed"


class Doctor:
    """Runs one look at a time and answers with its result for `KEPT_S`."""

    def __init__(self, command: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._command, self._clock = command, clock
        self._looking = asyncio.Lock()
        self._result: dict[str, Any] = {"at_s": float("-inf")}

    async def look(self) -> dict[str, Any]:
        """{"exit_code", "data": findings as `appliance.boot.doctor.Finding` has them, "at_s"}. Raises
        OperationFailed."""
        async with self._looking:
            if not 0 <= self._clock() - self._result["at_s"] < KEPT_S:
                try:
                    status, out, err = await run_command(*self._command, within_s=LIMIT_S)
                except TimeoutError:
                    raise OperationFailed(f"The checks did not end within {LIMIT_S:.0f} s.", code=FAILED) from None
                if status != 0:
                    why = (err.decode(errors="replace").strip() or "they said nothing").splitlines()[-1]
                    raise OperationFailed(f"The checks ended with an error: {why}", code=FAILED)
                self._result = json.loads(out) | {"at_s": self._clock()}
            return self._result
