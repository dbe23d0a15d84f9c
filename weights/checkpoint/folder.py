"""Checks a model's folder at import: no pickles, no code, no links and no references to files elsewhere.

CheckpointRefused       the checkpoint cannot or must not be used; every error names the file
├── NotACheckpoint      config.json or weights are missing or invalid
├── PickleRefused       weights as pickles, which run code when loaded
├── RemoteCodeRefused   `auto_map`: the checkpoint would run its own Python code
├── UnsafeLink          a symbolic link or special file, or a reference to a file outside the checkpoint
├── UnsupportedModel    an architecture that neither generates nor embeds text
└── TokenizerRefused    a tokenizer whose output explodes or never ends
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weights.format.errors import WeightsError
from weights.format.foreign_json import is_exceeding

CONFIG_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS = "config.json", "tokenizer_config.json", "special_tokens_map.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# Other JSON files are parsed only if they mention code.
_SETTINGS = (CONFIG_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS, *PROCESSOR_FILES, "modules.json")
_CODE = (b"auto_map", b"custom_generate", b"\\u")
MAX_CONFIG_BYTES = 16 << 20
MAX_VALUES, MAX_DEPTH = 1 << 18, 64  # parsed small values take twenty times the file's size in memory
MAX_TOKENIZER_BYTES = 256 << 20
# File formats that run code when they are loaded.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Vocabularies, which only tokenizers read. They are not parsed here: parsing would hold the GIL for half a second per
# 30 MB, and the loaders check vocabularies anyway.
_NO_SETTINGS = ("tokenizer.json", "vocab.json", "tekken.json", "manifest.json")
# Keys that record where a checkpoint was saved or trained; no library opens these paths.
_SAVED_FROM = frozenset(
    "name_or_path _name_or_path base_model_name_or_path tokenizer_file special_tokens_map_file added_tokens_file "
    "tokenizer_config_file".split()
)
# Files that list tokens. Mistral's tekken.json is handled apart, because it does not list every special token.
_WITH_TOKENS = ("tokenizer.json", "vocab.json", "added_tokens.json", TOKENIZER_CONFIG, SPECIAL_TOKENS)
_PIECES, _TEKKEN, _OF_TEKKEN = "tokenizer.model", "tekken.json", "[TOOL_CALLS]"
_FAMILY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class CheckpointRefused(WeightsError):
    """The checkpoint itself is at fault; `file`: the file at fault."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file}: {reason}" if file else reason)
        self.file, self.reason = file, reason


class NotACheckpoint(CheckpointRefused): ...


class PickleRefused(CheckpointRefused): ...


class RemoteCodeRefused(CheckpointRefused): ...


class UnsafeLink(CheckpointRefused): ...


class UnsupportedModel(CheckpointRefused): ...


class TokenizerRefused(CheckpointRefused): ...


def check_folder(directory: Path) -> None:
    """Check a model's folder in milliseconds, without loading weights or reading vocabularies. Raises
    CheckpointRefused, FileNotFoundError."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise UnsafeLink(entry.name, "not a regular file; a model's folder may not contain links or folders")
            if entry.name.endswith(PICKLES):
                raise PickleRefused(entry.name, "a pickle, which can run any code when it is loaded")
    for path in sorted(directory.glob("*.json")):
        if path.name in _NO_SETTINGS or path.name.endswith(".index.json"):
            continue
        if path.name not in _SETTINGS and path.stat().st_size <= MAX_CONFIG_BYTES:
            raw = path.read_bytes()
            if not any(key in raw for key in _CODE):
                continue
        is_settings = path.name in (CONFIG_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS)
        body = read_json(path, path.name, kind=dict if is_settings else object)
        if is_settings:
            family = body.get("model_type")
            if family is not None and not (isinstance(family, str) and _FAMILY.fullmatch(family)):
                raise NotACheckpoint(path.name, f"model_type {str(family)[:80]!r} is not a valid family name")
        if isinstance(body, dict) and (body.get("auto_map") or body.get("custom_generate")):
            raise RemoteCodeRefused(
                path.name,
                "has 'auto_map' or 'custom_generate', which make transformers run code of the checkpoint; the box "
                "never runs it. If transformers supports this architecture by now, remove the keys from the file and "
                "import again",
            )
        for key, value in _strings("", body):
            if "/" in value and key not in _SAVED_FROM and _is_elsewhere(directory, value):
                raise UnsafeLink(path.name, f"has {key[:80]!r}, a path outside the checkpoint: {value[:80]!r}")
    path = directory / "tokenizer.json"
    if path.is_file() and not 2 <= path.stat().st_size <= MAX_TOKENIZER_BYTES:
        raise NotACheckpoint(path.name, f"{path.stat().st_size} bytes; expected 2 to {MAX_TOKENIZER_BYTES}")


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return `directory`'s tokenizer_config.json, {} if there is no such file. Raises NotACheckpoint."""
    path = directory / TOKENIZER_CONFIG
    return read_json(path, path.name) if path.exists() else {}


def read_json(path: Path, name: str, *, kind: type = dict) -> Any:
    """Return the JSON value in `path`, which must be of type `kind`. Raises NotACheckpoint for the file `name`."""
    raw = path.read_bytes() if (size := path.stat().st_size) <= MAX_CONFIG_BYTES else b""
    values = sum(map(raw.count, (b",", b"[", b"{")))
    if size > MAX_CONFIG_BYTES or values > MAX_VALUES:
        raise NotACheckpoint(name, f"{size} bytes, {values} values; expected at most {MAX_CONFIG_BYTES}, {MAX_VALUES}")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise NotACheckpoint(name, f"not JSON: {str(error)[:120]}") from error
    if is_exceeding(body, MAX_DEPTH):
        raise NotACheckpoint(name, f"nested too deeply; at most {MAX_DEPTH} levels are read")
    if not isinstance(body, kind):
        raise NotACheckpoint(name, f"holds a JSON {type(body).__name__}, expected an object")
    return body


def _strings(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each string in a JSON value with the nearest key above the string."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for inner, item in value.items():
            yield from _strings(inner, item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(key, item)


def _is_elsewhere(directory: Path, name: str) -> bool:
    """Return whether a setting's value is the path of an existing file or folder outside of `directory`."""
    path = os.path.join(directory, name)
    return os.path.exists(path) and not Path(path).resolve().is_relative_to(directory.resolve())


def tokens_of(directory: Path, wanted: Iterable[str]) -> frozenset[str]:
    """Return the `wanted` tokens that the tokenizer in `directory` has.

    Searches the files, since parsing would take seconds: a token is a quoted string in a JSON file, and unquoted bytes
    in `tokenizer.model`.
    """
    wanted, known = frozenset(wanted), set[str]()
    names = [name for name in (*_WITH_TOKENS, _PIECES) if (directory / name).is_file()]
    if not {"tokenizer.json", _PIECES} & set(names) and (directory / _TEKKEN).is_file():
        known.add(_OF_TEKKEN)
    for name in names:
        written = (directory / name).read_bytes()
        for token in wanted - known:
            forms = (token,) if name == _PIECES else (json.dumps(token, ensure_ascii=False), json.dumps(token))
            if any(form.encode() in written for form in forms):
                known.add(token)
    return wanted & known
