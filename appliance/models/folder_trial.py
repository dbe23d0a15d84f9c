"""Tries what engines, ranks and counts of tokens would run of a checkpoint: its chat templates and its tokenizer.

Everything here blocks, for seconds.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from appliance.models.checkpoint import PROCESSORS, chat_templates
from appliance.models.template_trial import Tried, try_template
from appliance.models.tokenizer_trial import try_tokenizer
from weights.checkpoint.folder import read_json, read_tokenizer_config
from weights.checkpoint.tokenizer_settings import CONFIG_FILE, MAP_FILE
from weights.format.foreign_json import config_in
from weights.format.names import TOKENIZER_FILES
from weights.format.tool_template import with_tools

RULES = 1
"""The number of these trials. Raise it whenever one of them refuses more than before: every version is tried again
before it is opened."""
ROLES = frozenset({"bos_token", "eos_token", "unk_token", "pad_token"})
_TRIED = tuple(sorted({*TOKENIZER_FILES, *PROCESSORS, CONFIG_FILE, MAP_FILE}))


def try_folder(directory: Path) -> Tried:
    """What the template of plain conversations makes of some, as engines and ranks render it. Raises
    CheckpointRefused."""
    template, others = chat_templates(directory)
    tried, special = Tried(), special_tokens(directory)
    if template is not None:
        tried = try_template(template, special)
        if (shown := with_tools(template)) != template:
            tried = Tried(tried.warning, try_template(str(shown), special).rendered)
    for other in others:
        try_template(other, special)
    try_tokenizer(directory)
    return tried


def special_tokens(directory: Path) -> dict[str, str]:
    """The tokens of the roles that templates may write, by what the files say."""
    roles = directory / MAP_FILE
    told = {**(read_json(roles, MAP_FILE) if roles.is_file() else {}), **read_tokenizer_config(directory)}
    texts = {
        role: told[role].get("content") if isinstance(told[role], dict) else told[role] for role in ROLES & told.keys()
    }
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def checksum_of_tried(directory: Path) -> str:
    """The checksum of all that trials read. Of config.json, which is not that of the base of a job's model, they read
    the one word that decides which tokenizer transformers makes of the files."""
    whole = hashlib.sha256(str((config_in(directory) or {}).get("model_type"))[:100].encode())
    for name in _TRIED:
        try:
            with open(directory / name, "rb") as file:
                whole.update(f"{name} {os.fstat(file.fileno()).st_size}\n".encode())
                while chunk := file.read(1 << 20):
                    whole.update(chunk)
        except FileNotFoundError:
            continue
    return whole.hexdigest()
