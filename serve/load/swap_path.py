"""Decides in which of three ways a running engine loads a version, by a pure function of memory and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOW = ("auto", "staged", "in-place", "layerwise")


def choose_path(how: str, facts: Mapping[str, Any], free_bytes: int, memory_factor: float) -> tuple[str, str]:
    """Return ("staged", "in-place" or "layerwise", and why). `how`: the requested way, one of HOW. `facts`: from
    ShmWeightTransferEngine.check. Staging needs `memory_factor` times the version's bytes free."""
    if facts["layerwise_reason"] is not None:
        return "layerwise", facts["layerwise_reason"]
    if how in ("in-place", "layerwise"):
        return how, "asked for"
    if not facts["stageable"]:
        return "in-place", "on a GPU captured graphs need their addresses unchanged"
    if how == "staged":
        return how, "asked for"
    need_bytes = int(facts["bytes"] * memory_factor)
    path = "staged" if free_bytes >= need_bytes else "in-place"
    return path, f"{free_bytes} bytes free, {need_bytes} needed in addition to the serving weights"


def memory_bytes() -> tuple[int, int]:
    """Return the host's (available, total) bytes of memory."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    found = {line[0]: int(line[1]) * 1024 for line in lines}
    return found["MemAvailable:"], found["MemTotal:"]
