"""Reads settings of a model's config.json that anybody may have written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_SIZE = (1 << 31) - 1
"""The largest dimension of a model. Products of a few stay within a float."""
CONFIG_FILE = "config.json"


def config_in(*folders: str | Path | None) -> dict[str, Any] | None:
    """The config.json of the first of these folders that has a readable one; None without any."""
    for folder in folders:
        with suppress(OSError, ValueError):
            if folder and isinstance(config := json.loads(Path(folder, CONFIG_FILE).read_bytes()), dict):
                return config
    return None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What describes the language model: of a multimodal model a part of its config."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a whole number; 0 without any, or where a model cannot have it."""
    number = next((value for name in names if type(value := config.get(name)) is int), 0)
    return number if 0 <= number <= MOST_SIZE else 0


def weight_bits(quantization: Mapping[str, Any]) -> int:
    """Of the weights by a `quantization_config` of compressed-tensors; 0 of others, and where it does not tell."""
    groups = quantization.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = schemes[0].get("weights") if schemes and isinstance(schemes[0], dict) else None
    return size(weights, "num_bits") if isinstance(weights, dict) else 0


def is_exceeding(value: Any, levels: int, most_fields: float = math.inf) -> bool:
    """Whether a parsed JSON text nests lists and objects in more levels, or has an object with more fields."""
    level = [value]
    for _ in range(levels + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        if any(isinstance(node, dict) and len(node) > most_fields for node in level):
            return True
        if not level:
            return False
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return True
