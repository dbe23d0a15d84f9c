"""Finds the rank or scale that an adapter's config gives for one layer, by the layer's name or its end.

vLLM and peft hold the keys of `rank_pattern` and `alpha_pattern` against the names of all layers as regular
expressions, in a step of the engine: `(?:(.)|(.)|(.)){30}[A-Z]` ends no step any more, and a new expression for each of
many layers takes minutes. Here a key is a name, and an import takes no other (appliance.models.adapter).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm.lora.peft_helper import PEFTHelper

_NAME = re.compile(r"\^?[A-Za-z0-9_.]+")


def apply() -> None:
    """Call once per process, before it loads an adapter."""
    PEFTHelper._match_pattern = staticmethod(value_for)


def value_for(pattern: Mapping[str, Any], layer: str) -> Any:
    """The value of the first key that is the layer's name or, without "^", its last parts; None without one. Raises
    ValueError for a key that is not a name."""
    for key, value in pattern.items():
        if not _NAME.fullmatch(key):
            raise ValueError(f"rank_pattern and alpha_pattern take names of layers, not {key[:80]!r}")
        name = key.removeprefix("^")
        if layer == name or (name == key and layer.endswith(f".{name}")):
            return value
    return None
