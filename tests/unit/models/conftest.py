"""Imports try a folder in two processes. Here templates are tried in the test's own, and the one that imports torch is
not started (tests/integration/train/test_checkpoint_trial.py has it)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.models import trial
from appliance.models.library import ModelLibrary
from appliance.models.template_trial import try_here
from tests.unit.models import checkpoints
from tests.unit.models.found import found


@pytest.fixture
def library(tmp_path: Path) -> ModelLibrary:
    return ModelLibrary(tmp_path / "models")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "source")


@pytest.fixture
def own_process() -> None:
    """For a test whose templates are tried in a process of their own."""


@pytest.fixture(autouse=True)
def templates_tried_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    run_trial = trial.run_trial

    def run(subject: str, module: str, *options: str, stdin_text: str = "", **more: Any) -> dict[str, Any]:
        if module == "appliance.models.template_trial":
            return try_here(**json.loads(stdin_text))
        return run_trial(subject, module, *options, stdin_text=stdin_text, **more)

    if "own_process" not in request.fixturenames:
        monkeypatch.setattr(trial, "run_trial", run)


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the comparison with the architecture finds; nothing unless a test says otherwise."""
    says = found()

    def told(**changes: Any) -> None:
        says.update(found(**changes))

    monkeypatch.setattr("appliance.models.trial.compare", lambda directory, arch: says)
    return told
