"""Imports try a folder in two processes: each is tried once, as a box does with what it has tried before."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.models.folder_trial import checksum_of_tried, try_folder

_TRIED: dict[tuple[str, Any], str | None] = {}


@pytest.fixture(autouse=True)
def tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most imports of these tests are of the same few files; those that are refused are tried each time."""

    def tried(directory: Path) -> str | None:
        known = checksum_of_tried(directory), subprocess.run  # which a test may have replaced
        if known not in _TRIED:
            _TRIED[known] = try_folder(directory)
        return _TRIED[known]

    monkeypatch.setattr("appliance.models.library.try_folder", tried)
