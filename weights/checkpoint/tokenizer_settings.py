"""Checks the settings of a tokenizer. Pure.

transformers hands everything in tokenizer_config.json and special_tokens_map.json to the tokenizer's class as
arguments, and some of them name a file: with `"vocab": "/…/first-key"` the box's first key became a token of the model,
which answered with it to whoever asked. So a checkpoint's tokenizer consists of the files with the usual names in its
own directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from weights.checkpoint.errors import TokenizerRefused

CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
# transformers puts the checkpoint's own in their place, or never reads them; `save_pretrained` used to write them.
_NOT_HEARD = frozenset(
    {"tokenizer_file", "special_tokens_map_file", "added_tokens_file", "tokenizer_config_file", "name_or_path"}
)
OF_FILES = re.compile(r"(?:.*_)?(?:files?|paths?|dirs?|spm|option|proto)")
"""Names of settings that say which files are read."""
# Arguments by their place, and other files than the usual ones.
_NEVER = frozenset({"init_inputs", "fast_tokenizer_files"})
_TABLES = frozenset({"vocab", "merges"})
"""A table of tokens, or the name of a file with one."""
_TOKENS = re.compile(r".*_tokens?")


def check_config(config: Mapping[str, Any]) -> None:
    """Raises TokenizerRefused for a tokenizer_config.json that names files to read."""
    for key, value in config.items():
        if key in _NEVER and value or key not in _NOT_HEARD and _names_file(key, value):
            raise _refused(CONFIG_FILE, key)
        if key.endswith("_kwargs"):
            for inner, one in within(key, value):
                if _names_file(inner, one) or (isinstance(one, str) and "/" in one):
                    raise _refused(CONFIG_FILE, f"{key}.{inner}")


def check_map(special: Mapping[str, Any]) -> None:
    """Raises TokenizerRefused for a special_tokens_map.json that contains anything but tokens: its entries override
    those of tokenizer_config.json, including files and chat templates."""
    for key, value in special.items():
        if value and not _TOKENS.fullmatch(key):
            raise _refused(MAP_FILE, key)


def _names_file(key: str, value: Any) -> bool:
    if key in _TABLES:
        return isinstance(value, str)
    return bool(value) and isinstance(value, str | list) and OF_FILES.fullmatch(key) is not None


def within(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values at the ends, each by the last name on the way to it."""
    left = [(key, value)]
    while left:
        name, here = left.pop()
        if isinstance(here, dict):
            left += [(str(inner), one) for inner, one in here.items()]
        elif isinstance(here, list):
            left += [(name, one) for one in here]
        else:
            yield name, here


def _refused(file: str, key: str) -> TokenizerRefused:
    return TokenizerRefused(
        file,
        f"has {key[:80]!r}, by which a tokenizer may read other files than the checkpoint's own; remove it from the "
        "file and import again",
    )
