"""Fixtures for all unit tests."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from train.data_checks import process
from train.data_checks.check import DataReport


def pytest_collection_finish(session: pytest.Session) -> None:
    """These start in seconds. Tests of what loads one of these packages stand in tests/integration."""
    alone = all("/tests/unit/" in str(item.path) for item in session.items)
    if loaded := alone and {"torch", "vllm", "ray", "deepspeed"} & sys.modules.keys():
        raise pytest.UsageError(f"tests in tests/unit load {', '.join(sorted(loaded))}: move them to tests/integration")


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data is checked and prepared in this process: one of its own imports transformers, or compiled code, for each
    file, for 1 to 2 s of processor time (test_data_checks.py of the controller tries it)."""
    importlib.import_module("torch")  # which the check would say is not there
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr("appliance.controller.files.storage.check_apart", _checked)
    monkeypatch.setattr("appliance.controller.openai.job_routes.report_apart", _reported)


async def _checked(path: Path, **how: Any) -> DataReport:
    return await asyncio.to_thread(process.checked, path, **how)


async def _reported(path: Path, name: str, **options: Any) -> dict[str, Any]:
    try:
        answer = await asyncio.to_thread(process.report_on, path, name, **options)
    except (OSError, ValueError) as error:
        raise process.CheckFailed(str(error)) from error
    told: dict[str, Any] = json.loads(json.dumps(answer))
    return told
