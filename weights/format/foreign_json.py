"""Reads settings from an untrusted config.json of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_SIZE = (1 << 31) - 1
"""The largest dimension of a model. Products of a few dimensions stay within a float."""
CONFIG_FILE = "config.json"


def config_in(*folders: str | Path | None) -> dict[str, Any] | None:
    """Return the first readable config.json in these folders; None if there is none."""
    for folder in folders:
        with suppress(OSError, ValueError):
            if folder and isinstance(config := json.loads(Path(folder, CONFIG_FILE).read_bytes()), dict):
                return config
    return None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's config, which for a multimodal model is a part of the config."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def size(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these settings that is an integer; 0 if none is, or if the integer is out of range."""
    number = next((value for name in names if type(value := config.get(name)) is int), 0)
    return number if 0 <= number <= MOST_SIZE else 0


def weight_bits(quantization: Mapping[str, Any]) -> int:
    """Return the bits per weight in a compressed-tensors `quantization_config`; 0 for other formats or if unknown."""
    groups = quantization.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = schemes[0].get("weights") if schemes and isinstance(schemes[0], dict) else None
    return size(weights, "num_bits") if isinstance(weights, dict) else 0


def is_exceeding(value: Any, levels: int, most_fields: float = math.inf) -> bool:
    """Return whether a parsed JSON value is nested more deeply, or has an object with more fields, than allowed."""
    level = [value]
    for _ in range(levels + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        if any(isinstance(node, dict) and len(node) > most_fields for node in level):
            return True
        if not level:
            return False
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return True
