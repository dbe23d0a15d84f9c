"""Whether a running engine may take a version at all, judged from the files beside the weights. Pure file reading.

Shapes alone do not tell: another rope base or head count of equal shapes would serve wrong answers silently, and
another tokenizer or chat template would be ignored by the already running frontend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serve.errors import VersionMismatch, VersionUnreadable

# Keys of config.json that say how the file was written, not what the model computes.
IGNORED_CONFIG_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map", "_attn_implementation"}
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "vocab.json", "merges.txt")
# Keys of tokenizer_config.json that change how text is rendered or split.
TOKENIZER_KEYS = ("chat_template", "bos_token", "eos_token", "pad_token", "add_bos_token", "add_eos_token")


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a version. Raises VersionUnreadable."""
    return _read_json(Path(path) / "config.json", required=True)


def read_chat_template(path: str | Path) -> str | None:
    """The chat template a tokenizer loaded from `path` would use, None if there is none."""
    template = Path(path) / "chat_template.jinja"
    if template.exists():
        return template.read_text()
    found = _read_json(Path(path) / "tokenizer_config.json", required=False).get("chat_template")
    return found if isinstance(found, str) else None


def check_same_model(serving: str | Path, offered: str | Path) -> None:
    """Raises VersionMismatch when `offered` needs a new engine, VersionUnreadable when it is no checkpoint."""
    differences = [
        f"config.json: {key} is {_show(new)}, the running engine has {_show(old)}"
        for key, old, new in _different(read_config(serving), read_config(offered))
        if key not in IGNORED_CONFIG_KEYS
    ]
    for name in TOKENIZER_FILES:
        if _bytes(Path(serving) / name) != _bytes(Path(offered) / name):
            differences.append(f"{name} differs")
    old_keys, new_keys = (
        {key: _read_json(Path(path) / "tokenizer_config.json", required=False).get(key) for key in TOKENIZER_KEYS}
        for path in (serving, offered)
    )
    differences += [f"tokenizer_config.json: {key} differs" for key, _, _ in _different(old_keys, new_keys)]
    generation = (
        _read_json(Path(path) / "generation_config.json", required=False) for path in (serving, offered)
    )
    differences += [
        f"generation_config.json: {key} is {_show(new)}, the running engine has {_show(old)}"
        for key, old, new in _different(*generation)
        if key not in IGNORED_CONFIG_KEYS and key != "_from_model_config"
    ]
    if differences:
        raise VersionMismatch(
            f"version {offered} cannot be swapped into the running engine: {'; '.join(differences[:6])}. "
            "Start a new engine for it instead."
        )


def _different(old: dict, new: dict) -> list[tuple[str, Any, Any]]:
    return [(key, old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        if not required:
            return {}
        raise VersionUnreadable(f"{path} does not exist; a version is a HF checkpoint directory") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise VersionUnreadable(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise VersionUnreadable(f"{path} holds {type(data).__name__}, expected an object")
    return data
