"""Tries what engines, ranks and counts of tokens would run of a checkpoint: its chat templates and its tokenizer.

Everything here blocks, for seconds.
"""

from __future__ import annotations

from pathlib import Path

from appliance.models.checkpoint import chat_templates
from appliance.models.template_trial import Tried, try_template
from appliance.models.trial_process import TrialFailed, TrialProcess
from train.convert.tokenizer_trial import CPU_S, MEMORY_BYTES
from weights.checkpoint.errors import TokenizerRefused
from weights.checkpoint.folder import read_json, read_tokenizer_config
from weights.checkpoint.settings import MAP_FILE
from weights.format.names import VOCABULARIES
from weights.format.tool_template import with_tools

WALL_S = 600.0
TOKENIZER_FILE = "tokenizer.json"
ROLES = frozenset({"bos_token", "eos_token", "unk_token", "pad_token"})


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


def try_tokenizer(directory: Path) -> None:
    """Read some texts by the tokenizer in `directory`, in a child process: by its tokenizer.json, and, where it has
    other vocabularies too or none but such, as transformers loads it. Raises TokenizerRefused for one that exceeds the
    limits, and for one without tokenizer.json that cannot be loaded."""
    found = [name for names in VOCABULARIES for name in names if (directory / name).is_file()]
    tried = [(directory / TOKENIZER_FILE, TOKENIZER_FILE)] if TOKENIZER_FILE in found else []
    tried += [(directory, name) for name in found if name != TOKENIZER_FILE][:1]
    for path, name in tried:
        try:
            with TrialProcess(name, "train.convert.tokenizer_trial", str(path)) as trial:
                refused = trial.result(limit_s=WALL_S)["refused"]
        except TrialFailed as error:
            limits = f"{CPU_S} s of CPU or {MEMORY_BYTES >> 30} GiB of memory"
            raise TokenizerRefused(
                name, f"reading short texts took more than {limits}, or ended its process"
            ) from error
        if refused:
            raise TokenizerRefused(name, refused)


def special_tokens(directory: Path) -> dict[str, str]:
    """The tokens of the roles that templates may write, by what the files say."""
    roles = directory / MAP_FILE
    told = {**(read_json(roles, MAP_FILE) if roles.is_file() else {}), **read_tokenizer_config(directory)}
    texts = {
        role: told[role].get("content") if isinstance(told[role], dict) else told[role] for role in ROLES & told.keys()
    }
    return {role: text for role, text in texts.items() if isinstance(text, str)}
