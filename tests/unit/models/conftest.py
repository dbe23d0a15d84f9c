"""Fixtures that import models without trial processes; test_checkpoint_trial.py tests the trial stubbed here."""

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
    """Tests that request this fixture try templates in a separate process."""


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
    """Stub the checkpoint trial, by default without findings; return a function that changes its findings."""
    says = found()

    def told(**changes: Any) -> None:
        says.update(found(**changes))

    monkeypatch.setattr("appliance.models.trial.compare", lambda directory, arch: says)
    return told
