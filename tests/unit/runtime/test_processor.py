"""What the kernel grants a process of the processor's extensions."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from runtime.devices import cpu, kinds


@pytest.fixture
def asked(monkeypatch):
    """A torch that notes whether it was to ask for AMX, on a processor with these features."""
    calls: list[str] = []

    def on(*features, granted=True):
        torch = SimpleNamespace(cpu=SimpleNamespace(_init_amx=lambda: calls.append("amx") or granted))
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(cpu, "host_features", lambda: frozenset(features))
        kinds.before_computing()
        return calls

    return on


def test_before_computing_with_tiles_asks_for_them(asked):
    assert asked("avx512f", "amx_tile", "amx_bf16") == ["amx"]


def test_before_computing_without_tiles_asks_for_nothing(asked):
    assert asked("avx2", "avx512f", "avx512_bf16") == []


def test_before_computing_with_tiles_refused_goes_on_and_says_so(asked, caplog):
    assert asked("amx_tile", granted=False) == ["amx"]
    assert "SIGILL" in caplog.text
