"""Imports try a folder in processes: two are tried once, as a box does with what it has tried before, and one is not
started, because it imports torch (tests/unit/train/test_checkpoint_trial.py has it)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.models.template_trial import Tried
from appliance.models.trial import try_folder
from tests.unit.models.found import found
from weights.format.foreign_json import config_in

_TRIED: dict[tuple[str, Any], Tried] = {}


@pytest.fixture(autouse=True)
def tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most imports of these tests are of the same few files; those that are refused are tried each time."""

    def tried(directory: Path) -> Tried:
        unread = (".safetensors", ".index.json", ".md")
        files = {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.endswith(unread)}
        files.pop("config.json", None)  # of which they read the one word that decides which tokenizer is made
        family = (config_in(directory) or {}).get("model_type")
        known = str(family), frozenset(files.items()), subprocess.Popen  # which a test may have replaced
        if known not in _TRIED:
            _TRIED[known] = try_folder(directory)
        return _TRIED[known]

    monkeypatch.setattr("appliance.models.trial.try_folder", tried)


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the comparison with the architecture finds; nothing unless a test says otherwise."""
    says = found()

    def told(**changes: Any) -> None:
        says.update(found(**changes))

    monkeypatch.setattr("appliance.models.trial.compare", lambda directory, arch: says)
    return told
