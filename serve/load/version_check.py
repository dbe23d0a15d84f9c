"""Checks a version's files before a running engine loads the version, and one computed token after the load.

Equal shapes are not enough: with another rope base or head count the engine would silently give wrong answers, and the
running front end would ignore another tokenizer or chat template.

The manifest of a trained version holds a token that training computed, in its `meta`: `{"fingerprint": {"prompt":
[token ids], "token": id, "logprob": nats}}`, or None if the weights compute NaN or infinite numbers. For a version
without a record, such as an imported version, only the computed numbers are checked to be finite.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.core.errors import FingerprintMismatch, VersionBroken, VersionMismatch, VersionUnreadable, WithoutNumbers
from weights.format.manifest import Manifest
from weights.format.names import MANIFEST_FILE, TOKENIZER_FILES

META_KEY = "fingerprint"
# Keys of config.json and generation_config.json that do not change the model's results.
IGNORED_KEYS = frozenset(
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
    """Return the chat template of the tokenizer in `path`, None if there is none."""
    template = Path(path) / "chat_template.jinja"
    if template.exists():
        return template.read_text()
    setting = _read_json(Path(path) / "tokenizer_config.json", required=False).get("chat_template")
    return setting if isinstance(setting, str) else None


def identity(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return all values except weights that an engine is built from, by file and key. Keep the result in memory,
    because the store may evict the directory while the engine sleeps. Raises VersionUnreadable."""
    directory = Path(path)
    tokenizer = _read_json(directory / "tokenizer_config.json", required=False)
    return {
        "config.json": read_config(directory),
        "generation_config.json": _read_json(directory / "generation_config.json", required=False),
        "tokenizer_config.json": {key: tokenizer.get(key) for key in TOKENIZER_KEYS},
        "tokenizer": {name: _digest(directory / name) for name in TOKENIZER_FILES},
    }


def check_same_model(serving: dict[str, dict[str, Any]], offered: str | Path) -> None:
    """Compare a version with a running engine. serving: the engine's `identity`. Raises VersionMismatch if `offered`
    needs a new engine, VersionUnreadable if `offered` is not a checkpoint."""
    new = identity(offered)
    differences = [
        f"{file}: {key} is {_show(new[file].get(key))}, the running engine has {_show(old.get(key))}"
        for file, old in serving.items()
        for key in sorted({*old, *new[file]})
        if key not in IGNORED_KEYS and old.get(key) != new[file].get(key)
    ]
    if differences:
        raise VersionMismatch(
            f"version {offered} cannot be swapped into the running engine: {'; '.join(differences[:6])}. "
            "Start a new engine for it instead."
        )


@dataclass(frozen=True)
class Token:
    """token: most likely token after `prompt`; logprob: this token's log-probability in nats."""

    prompt: tuple[int, ...]
    token: int
    logprob: float


def recorded_token(version_path: str | Path) -> Token | None:
    """The token that training recorded in the version's manifest, None without a record. Raises WithoutNumbers."""
    path = Path(version_path)
    meta = Manifest.read(path).meta if (path / MANIFEST_FILE).exists() else {}
    if META_KEY not in meta:
        return None
    if (record := meta[META_KEY]) is None:
        raise WithoutNumbers(f"version {path} computes no finite numbers, according to its training")
    return Token(tuple(record["prompt"]), record["token"], record["logprob"])


def check_token(answer: Mapping[int, float], record: Token | None, *, tolerance: float, version: str) -> dict[str, Any]:
    """Compare the most likely next tokens and their log-probabilities in nats with the record.

    tolerance: in nats; kernels round differently. Raises VersionBroken, or FingerprintMismatch.
    """
    if not all(map(math.isfinite, answer.values())):
        raise VersionBroken(f"{version} does not compute finite numbers")
    if record is None:
        return {"verdict": "unrecorded"}
    here = answer.get(record.token)
    if here is None or abs(here - record.logprob) > tolerance:
        result = "is not among the most likely" if here is None else f"has log-probability {here:.3f}"
        raise FingerprintMismatch(
            f"{version} does not answer the fingerprint prompt as recorded: token {record.token} {result}, "
            f"recorded with {record.logprob:.3f}"
        )
    return {"token": record.token, "logprob": here, "verdict": "verified"}


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else None


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
