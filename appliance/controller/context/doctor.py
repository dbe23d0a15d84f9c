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
        self._found: dict[str, Any] | OperationFailed | None = None
        self._at_s = 0.0

    async def look(self) -> dict[str, Any]:
        """{"exit_code", "data": findings as `appliance.doctor.checks.Finding` has them, "at_s"}. Raises
        OperationFailed."""
        async with self._looking:
            if self._found is None or not 0 <= self._clock() - self._at_s < KEPT_S:
                try:
                    found = await self._run()
                except OperationFailed as error:
                    self._found, self._at_s = error, self._clock()
                else:
                    self._at_s = self._clock()
                    self._found = {**found, "at_s": self._at_s}
            if isinstance(self._found, OperationFailed):
                raise self._found.with_traceback(None)
            return self._found

    async def _run(self) -> dict[str, Any]:
        try:
            status, said, complained = await heard_out(*self._command, within_s=LIMIT_S)
        except TimeoutError as error:
            raise OperationFailed(f"The checks did not end within {LIMIT_S:.0f} s.", code="doctor_failed") from error
        if status != 0:
            why = (complained.decode(errors="replace").strip() or "they said nothing").splitlines()[-1]
            raise OperationFailed(f"The checks ended with an error: {why}", code="doctor_failed")
        return json.loads(said)
