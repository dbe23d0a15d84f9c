"""The doctor beside a running box: one process for all who ask, its failures in words."""

from __future__ import annotations

import sys

import pytest

from appliance.controller.context import context
from appliance.controller.context.context import Doctor
from appliance.controller.interfaces.errors import OperationFailed


async def test_a_doctor_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LIMIT_S", 0.2)
    doctor = Doctor([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(OperationFailed, match="did not end"):
        await doctor.look()
