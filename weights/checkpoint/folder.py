"""The owner of "may this model's folder be opened": at an import, and wherever engines, ranks or tokenizers open it.

A version may be older than a rule, so an import that was checked is not enough. All of it takes milliseconds: nothing
is loaded, and vocabularies are not read. What takes seconds (trials of templates and tokenizers) is done at an import
alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights.checkpoint import settings
from weights.checkpoint.errors import (
    CheckpointRefused,
    NotACheckpoint,
    OpeningRefused,
    PickleRefused,
    RemoteCodeRefused,
    UnsafeLink,
    UnsupportedModel,
)
from weights.format.errors import VersionNotFound
from weights.format.foreign_json import MOST_VALUES, loads

CONFIG_FILE, ADAPTER_CONFIG_FILE, PARAMS_FILE, MODULES_FILE = (
    "config.json",
    "adapter_config.json",
    "params.json",
    "modules.json",
)
MAX_CONFIG_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 256 << 20
# Formats that run code on load.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Vocabularies: large, and read by tokenizers alone.
_NO_SETTINGS = ("tokenizer.json", "vocab.json", "tekken.json", "manifest.json")
# For a part of the model, vLLM reads the config.json of whatever these name, even of a path.
_OTHER_MODELS = ("text_model_id", "audio_model_id")
_FOLDER = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,99})?")
_FAMILY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def may_open(directory: str | Path, model: str) -> None:
    """Returns if engines, ranks and tokenizers may open `directory`, a version or an adapter of `model`. Raises
    OpeningRefused, whose words name the file and what to do; VersionNotFound."""
    try:
        check_folder(Path(directory))
    except FileNotFoundError as error:
        raise VersionNotFound(f"{directory} is gone: {error}") from error
    except CheckpointRefused as error:
        raise OpeningRefused(model, error.file, error.reason) from error


def check_folder(directory: Path) -> None:
    """As `may_open`, in the words of an import. Raises CheckpointRefused, FileNotFoundError."""
    _check_entries(directory)
    check_settings(directory)


def _check_entries(directory: Path) -> None:
    """Allows only plain files, and none that a library would read in place of those that were checked. Raises
    PickleRefused, UnsafeLink, UnsupportedModel."""
    names = set()
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except FileNotFoundError:
                continue  # a mark of the store's, which it has just taken away
            names.add(entry.name)
            if not stat.S_ISREG(mode):
                raise UnsafeLink(entry.name, "not a regular file; a model's folder has no links and no folders within")
            if entry.name.endswith(PICKLES):
                raise PickleRefused(entry.name, "a pickle, which can run any code when it is loaded")
    if CONFIG_FILE not in names:
        return
    if ADAPTER_CONFIG_FILE in names:
        raise UnsupportedModel(ADAPTER_CONFIG_FILE, "an adapter would be added to the model wherever it is opened")
    if settings.NEVER_TAKEN in names:
        raise UnsupportedModel(settings.NEVER_TAKEN, "names another model, which a processor would load")
    if PARAMS_FILE in names and any(name.startswith("consolidated") for name in names):
        raise UnsupportedModel(PARAMS_FILE, "an engine would read it in place of the config.json that is checked")


def check_settings(directory: Path) -> None:
    """Checks the contents of the settings files in `directory`, whatever else is in it. Raises CheckpointRefused."""
    if (directory / CONFIG_FILE).exists():
        _check_config(read_json(directory / CONFIG_FILE, CONFIG_FILE))
    if (directory / settings.CONFIG_FILE).exists():
        settings.check_tokenizer(read_tokenizer_config(directory))
    if (directory / settings.MAP_FILE).exists():
        special = read_json(directory / settings.MAP_FILE, settings.MAP_FILE)
        settings.check_map(special)
    for name in settings.PROCESSOR_FILES:
        if (directory / name).is_file():
            settings.check_processor(read_json(directory / name, name), name)
    # It is not parsed: that would hold the interpreter for half a second per 30 MB, and the loaders check it anyway.
    path = directory / "tokenizer.json"
    if path.is_file() and not 2 <= path.stat().st_size <= MAX_TOKENIZER_BYTES:
        raise NotACheckpoint(path.name, f"{path.stat().st_size} bytes; expected 2 to {MAX_TOKENIZER_BYTES}")
    _refuse_code_elsewhere(directory)
    _refuse_other_folders(directory)


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """The settings of the tokenizer in `directory`, {} without any. Raises NotACheckpoint."""
    path = directory / settings.CONFIG_FILE
    return read_json(path, path.name) if path.exists() else {}


def read_json(
    path: Path, name: str, limit_bytes: int = MAX_CONFIG_BYTES, most_values: int = MOST_VALUES
) -> dict[str, Any]:
    """The JSON object in `path`. Raises NotACheckpoint naming `name`."""
    body = _read_any(path, name, limit_bytes, most_values)
    if not isinstance(body, dict):
        raise NotACheckpoint(name, f"holds a JSON {type(body).__name__}, expected an object")
    return body


def _read_any(path: Path, name: str, limit_bytes: int = MAX_CONFIG_BYTES, most_values: int = MOST_VALUES) -> Any:
    size = path.stat().st_size
    if size > limit_bytes:
        raise NotACheckpoint(name, f"{size} bytes; at most {limit_bytes} are read")
    try:
        return loads(path.read_bytes(), most_values=most_values)
    except ValueError as error:
        raise NotACheckpoint(name, f"not JSON: {str(error)[:120]}") from error


def _check_config(config: Mapping[str, Any]) -> None:
    _refuse_code(config, CONFIG_FILE)
    if config.get("configuration_files"):
        # transformers and vLLM read the one of these that fits their version, and then ignore this file.
        raise UnsupportedModel(
            CONFIG_FILE,
            "has 'configuration_files', which name another file to be read in its place; give the checkpoint that one "
            "as its config.json, without the list",
        )
    if config.get("speculators_config") is not None:
        # vLLM loads the model that it names, from any path of this machine, in place of this one.
        raise UnsupportedModel(
            CONFIG_FILE, "has 'speculators_config': a draft for another model is not a model by itself"
        )
    if (named := next((key for key in _OTHER_MODELS if config.get(key)), None)) is not None:
        raise UnsupportedModel(CONFIG_FILE, f"has {named!r}, another model that this one would be put together with")
    family = config.get("model_type")
    if family is not None and not (isinstance(family, str) and _FAMILY.fullmatch(family)):
        raise NotACheckpoint(CONFIG_FILE, f"model_type {str(family)[:80]!r} is not a name of a family of models")


def _refuse_code(body: Mapping[str, Any], name: str) -> None:
    if body.get("auto_map"):
        raise RemoteCodeRefused(
            name,
            "has 'auto_map', that is, it wants Python code of the checkpoint to be run, which never happens here. If "
            "transformers knows this architecture by now, remove 'auto_map' from the file and import again",
        )


def _refuse_code_elsewhere(directory: Path) -> None:
    """generation_config.json and those of tokenizers and processors may ask for code too. They are read only if they
    name the key."""
    for path in sorted(directory.glob("*.json")):
        if path.name in _NO_SETTINGS or path.name.endswith(".index.json"):
            continue
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise NotACheckpoint(path.name, f"{path.stat().st_size} bytes; at most {MAX_CONFIG_BYTES} are read")
        if any(key in path.read_bytes() for key in (b"auto_map", b"custom_generate", b"\\u")):
            body = read_json(path, path.name)
            _refuse_code({"auto_map": body.get("auto_map") or body.get("custom_generate")}, path.name)


def _refuse_other_folders(directory: Path) -> None:
    """modules.json of sentence-transformers names folders of layers, from which vLLM takes weights, pickles too. Those
    of the checkpoint are never taken in, so a plain name leads nowhere; every other one leads out of it. Raises
    NotACheckpoint, UnsafeLink."""
    path = directory / MODULES_FILE
    if not path.exists():
        return
    found = _read_any(path, path.name)
    listed = found.get("modules", []) if isinstance(found, dict) else found
    for module in listed if isinstance(listed, list) else ():
        folder = module.get("path", "") if isinstance(module, dict) else None
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            raise UnsafeLink(
                path.name, f"names {str(folder)[:80]!r}; expected folders of the checkpoint, such as '1_Pooling'"
            )
