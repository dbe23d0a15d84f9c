"""Reads JSON that anybody may have written, such as a model's config.json, within bounds.

Parsing many small values takes twenty times their bytes and holds the interpreter. Nesting that one thread can just
parse is too much for another with a deeper stack. A number of 300 digits is a whole number like any other until it
becomes a float. So what exceeds these bounds is refused, or counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_VALUES, MOST_DEPTH = 1 << 18, 64
MOST_SIZE = (1 << 31) - 1
"""The largest dimension of a model. Products of a few stay within a float."""
CONFIG_FILE = "config.json"
_CONFIG_BYTES = 4 << 20


def loads(raw: bytes) -> Any:
    """What `json.loads` returns. Raises ValueError saying what is wrong with the text."""
    if (values := sum(map(raw.count, (b",", b"[", b"{")))) > MOST_VALUES:
        raise ValueError(f"it has {values} values, at most {MOST_VALUES} are read")
    try:
        found = json.loads(raw.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_deeper(found, MOST_DEPTH):
        raise ValueError(f"it is nested too deeply, in more than {MOST_DEPTH} levels")
    return found


def config_in(*folders: str | Path | None) -> dict[str, Any] | None:
    """The config.json of the first of these folders that has a readable one; None without any."""
    for folder in folders:
        path = Path(folder, CONFIG_FILE) if folder else None
        try:
            if path is None or path.stat().st_size > _CONFIG_BYTES:
                continue
            found = loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What describes the language model: of a multimodal model a part of its config."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a whole number; 0 without any, or where a model cannot have it."""
    found = next((value for name in names if type(value := config.get(name)) is int), 0)
    return found if 0 <= found <= MOST_SIZE else 0


def weight_bits(quantization: Mapping[str, Any]) -> int:
    """Of the weights by a `quantization_config` of compressed-tensors; 0 of others, and where it does not tell."""
    groups = quantization.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = schemes[0].get("weights") if schemes and isinstance(schemes[0], dict) else None
    return size(weights, "num_bits") if isinstance(weights, dict) else 0


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects of a parsed JSON text stand in each other at more levels than that."""
    level = [value]
    for _ in range(levels + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        if not level:
            return False
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return True
