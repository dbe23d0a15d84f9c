"""Fixtures for all unit tests."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from train.data.check import DataReport
from train.data_checks import process


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data is checked and prepared in this process: one of its own imports transformers, or compiled code, for each
    file, for 1 to 2 s of processor time (test_data_checks.py of the controller tries it)."""
    importlib.import_module("torch")  # which the check would say is not there
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr("appliance.controller.files.storage.check_apart", _checked)
    monkeypatch.setattr("appliance.controller.data_checks.DataWork._process", _carried_out)


async def _checked(path: Path, **how: Any) -> DataReport:
    return await asyncio.to_thread(process.checked, path, **how)


async def _carried_out(work: Any, file_id: str, options: dict[str, Any]) -> dict[str, Any]:
    request = {"file": str(work._context.files_dir / file_id), "name": file_id, "check": options}
    try:
        answer = await asyncio.to_thread(process.carried_out, request)
    except process.BadOption:
        raise
    except (process.CheckFailed, OSError, ValueError) as error:
        raise process.CheckFailed(str(error).replace(f"{work._context.files_dir}/", "")) from error
    told: dict[str, Any] = json.loads(json.dumps(answer))
    return told
