"""Packages of vLLM's models whose own import needs what a machine without GPUs lacks."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import vllm.models


def unimported(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have their modules imported one by one, without the packages' own import."""
    for name in names:
        package = ModuleType(f"vllm.models.{name}")
        package.__path__ = [f"{vllm.models.__path__[0]}/{name.replace('.', '/')}"]
        monkeypatch.setitem(sys.modules, package.__name__, package)
