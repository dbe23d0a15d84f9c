"""Checks the settings of a tokenizer, and of a processor of images or sounds. Pure.

transformers hands everything in them to the classes that it makes as arguments, and some of them name a file: with
`"vocab": "/…/first-key"` the box's first key became a token of the model, which answered with it to whoever asked.
A processor's `audio_tokenizer` may be a model anywhere on the machine, even a pickle. So tokenizers and processors
consist of the files with the usual names in the checkpoint's own directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from weights.checkpoint.errors import TokenizerRefused, UnsafeLink

CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
NEVER_TAKEN = "audio_tokenizer_config.json"
"""Names an audio tokenizer, and goes before what the processor's files say."""
# transformers puts the checkpoint's own in their place, or never reads them; `save_pretrained` used to write them.
_NOT_HEARD = frozenset(
    {"tokenizer_file", "special_tokens_map_file", "added_tokens_file", "tokenizer_config_file", "name_or_path"}
)
_SAVED_FROM = frozenset({"name_or_path", "_name_or_path"})
_OF_FILES = re.compile(r"(?:.*_)?(?:files?|paths?|dirs?|spm|option|proto)|font")
"""Names of settings that say which files are read."""
# Arguments by their place, and other files than the usual ones.
_NEVER = frozenset({"init_inputs", "fast_tokenizer_files"})
_TABLES = frozenset({"vocab", "merges"})
"""A table of tokens, or the name of a file with one."""
_TOKENS = re.compile(r".*_tokens?")
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._ -]{0,99}")


def check_tokenizer(config: Mapping[str, Any]) -> None:
    """Raises TokenizerRefused for a tokenizer_config.json that names files to read."""
    for key, value in config.items():
        if key in _NEVER and value or key not in _NOT_HEARD and _names_file(key, value):
            raise TokenizerRefused(CONFIG_FILE, _refusal(key))
        if key.endswith("_kwargs"):
            for inner, one in _within(key, value):
                if _names_file(inner, one) or (isinstance(one, str) and "/" in one):
                    raise TokenizerRefused(CONFIG_FILE, _refusal(f"{key}.{inner}"))


def check_map(special: Mapping[str, Any]) -> None:
    """Raises TokenizerRefused for a special_tokens_map.json that contains anything but tokens: its entries override
    those of tokenizer_config.json, including files and chat templates."""
    for key, value in special.items():
        if value and not _TOKENS.fullmatch(key):
            raise TokenizerRefused(MAP_FILE, _refusal(key))


def check_processor(settings: Mapping[str, Any], name: str) -> None:
    """`settings`: of the file `name`, one of PROCESSOR_FILES. Raises UnsafeLink if they name something outside the
    checkpoint."""
    if settings.get("audio_tokenizer"):
        raise UnsafeLink(name, _refusal("audio_tokenizer"))
    for key, value in _within("", settings):
        if key not in _SAVED_FROM and _names_file(key, value) and not _PLAIN.fullmatch(value):
            raise UnsafeLink(name, _refusal(key))


def _names_file(key: str, value: Any) -> bool:
    if key in _TABLES:
        return isinstance(value, str)
    return bool(value) and isinstance(value, str | list) and _OF_FILES.fullmatch(key) is not None


def _within(key: str, value: Any) -> Iterator[tuple[str, Any]]:
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


def _refusal(key: str) -> str:
    return (
        f"has {key[:80]!r}, by which other files than the checkpoint's own may be read; remove it from the file and "
        "import again"
    )
