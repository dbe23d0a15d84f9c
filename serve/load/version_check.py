"""Checks whether a running engine may load a version, by its files. It only reads them.

Shapes alone are not enough. With a different rope base or head count of equal shapes the engine would silently give
wrong answers, and the running frontend would ignore a different tokenizer or chat template.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.core.errors import VersionMismatch, VersionUnreadable
from weights.format.names import TOKENIZER_FILES

# Keys of config.json that describe how the file was written, not what the model computes.
IGNORED_CONFIG_KEYS = frozenset(
    (
        "_name_or_path transformers_version torch_dtype dtype use_cache auto_map _attn_implementation "
        "_from_model_config"
    ).split()
)
# Keys of tokenizer_config.json that change how text is rendered or split.
TOKENIZER_KEYS = ("chat_template", "bos_token", "eos_token", "pad_token", "add_bos_token", "add_eos_token")


def read_config(path: str | Path) -> dict[str, Any]:
    """Return config.json of a version. Raises VersionUnreadable."""
    return _read_json(Path(path) / "config.json", required=True)


def read_chat_template(path: str | Path) -> str | None:
    """The chat template a tokenizer loaded from `path` would use, None if there is none."""
    template = Path(path) / "chat_template.jinja"
    if template.exists():
        return template.read_text()
    found = _read_json(Path(path) / "tokenizer_config.json", required=False).get("chat_template")
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class ModelIdentity:
    """The files other than weights from which a running engine was built; kept in memory, because the store may evict
    their directory while the engine sleeps."""

    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: dict[str, Any]
    tokenizer_files: dict[str, str | None]

    @classmethod
    def read(cls, path: str | Path) -> ModelIdentity:
        """Raises VersionUnreadable."""
        directory = Path(path)
        tokenizer = _read_json(directory / "tokenizer_config.json", required=False)
        return cls(
            read_config(directory),
            _read_json(directory / "generation_config.json", required=False),
            {key: tokenizer.get(key) for key in TOKENIZER_KEYS},
            {name: _digest(directory / name) for name in TOKENIZER_FILES},
        )


def check_same_model(serving: ModelIdentity, offered: str | Path) -> None:
    """Raises VersionMismatch if `offered` needs a new engine, VersionUnreadable if it is not a checkpoint."""
    new = ModelIdentity.read(offered)
    differences = []
    for file, old_values, new_values in (
        ("config.json", serving.config, new.config),
        ("generation_config.json", serving.generation, new.generation),
        ("tokenizer_config.json", serving.tokenizer, new.tokenizer),
    ):
        differences += [
            f"{file}: {key} is {_show(new_value)}, the running engine has {_show(old_value)}"
            for key, old_value, new_value in _different(old_values, new_values)
            if key not in IGNORED_CONFIG_KEYS
        ]
    differences += [f"{name} differs" for name, _, _ in _different(serving.tokenizer_files, new.tokenizer_files)]
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


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


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
