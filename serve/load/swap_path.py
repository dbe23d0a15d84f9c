"""In which of three ways a version gets into a running engine: a pure decision, and the memory that it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOW = ("auto", "staged", "in-place", "layerwise")


def choose_path(how: str, facts: Mapping[str, Any], free_bytes: int, memory_factor: float) -> tuple[str, str]:
    """("staged", "in-place" or "layerwise", and why). `how`: what was asked for, one of HOW. `facts`: from
    ShmWeightTransferEngine.check. To stage a version, `memory_factor` times its bytes have to be free."""
    if facts["layerwise_reason"] is not None:
        return "layerwise", facts["layerwise_reason"]
    if how in ("in-place", "layerwise"):
        return how, "asked for"
    if not facts["stageable"]:
        return "in-place", "on a GPU the addresses that captured graphs hold have to stay"
    if how == "staged":
        return how, "asked for"
    need_bytes = int(facts["bytes"] * memory_factor)
    path = "staged" if free_bytes >= need_bytes else "in-place"
    return path, f"{free_bytes} bytes free, {need_bytes} needed beside the serving weights"


def memory_bytes() -> tuple[int, int]:
    """(available, in all) of the host."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    found = {line[0]: int(line[1]) * 1024 for line in lines}
    return found["MemAvailable:"], found["MemTotal:"]
