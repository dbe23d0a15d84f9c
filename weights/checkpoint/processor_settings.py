"""Checks the settings of a processor of images or sounds. Pure.

transformers loads the `audio_tokenizer` that they name, which may be a model anywhere on the machine, even a pickle,
and some processors open a file that their settings name. So a checkpoint's processor may use only files of its own
directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weights.checkpoint.errors import UnsafeLink
from weights.checkpoint.tokenizer_settings import OF_FILES, within

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
NEVER_TAKEN = "audio_tokenizer_config.json"
"""Names the same model, and goes before what they say."""
_AUDIO_TOKENIZER = "audio_tokenizer"
_NOT_HEARD = frozenset({"name_or_path", "_name_or_path"})
"""Where it was saved from."""
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._ -]{0,99}")


def check(settings: Mapping[str, Any], name: str) -> None:
    """`settings`: of the file `name`, one of FILES. Raises UnsafeLink if they name something outside the checkpoint."""
    if settings.get(_AUDIO_TOKENIZER):
        raise _refused(name, _AUDIO_TOKENIZER)
    for key, value in within("", settings):
        names_file = key == "font" or (key not in _NOT_HEARD and OF_FILES.fullmatch(key) is not None)
        if names_file and isinstance(value, str) and value and not _PLAIN.fullmatch(value):
            raise _refused(name, key)


def _refused(name: str, key: str) -> UnsafeLink:
    return UnsafeLink(
        name,
        f"has {key[:80]!r}, by which a processor reads other files than the checkpoint's own; remove it from the file "
        "and import again",
    )
