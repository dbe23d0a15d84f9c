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
    """Fail if unit tests load a slow package; tests of such code belong in tests/integration."""
    alone = all("/tests/unit/" in str(item.path) for item in session.items)
    if loaded := alone and {"torch", "vllm", "ray", "deepspeed"} & sys.modules.keys():
        raise pytest.UsageError(f"tests in tests/unit load {', '.join(sorted(loaded))}: move them to tests/integration")


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check and prepare data in this process; a separate process would spend 1 to 2 s per file on imports."""
    importlib.import_module("torch")  # later the check sets sys.modules["torch"] to None
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
