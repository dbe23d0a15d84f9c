"""Checks a checkpoint by its trials' results, repairs faults in the copy, and records every change.

An engine dies at each start if a checkpoint has an unknown tensor or lacks one, so such a checkpoint is refused here,
with the name of the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from appliance.models.checkpoint import Facts, examine
from appliance.models.template_trial import Tried
from serve.core.sizing import QUANTISED
from weights.checkpoint import generation
from weights.checkpoint.folder import (
    CONFIG_FILE,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    NotACheckpoint,
    TokenizerRefused,
    read_json,
    read_tokenizer_config,
)
from weights.checkpoint.turns import new_end, warnings_of
from weights.format.layout import Layout, Placed, rename_tensors

PLAIN_CLASS = "PreTrainedTokenizerFast"
# Architectures whose vLLM 0.32 classes use the embedding as the head, whatever tie_word_embeddings says.
_ALWAYS_TIED = ("Cohere", "Gemma2", "Gemma3n", "TeleFLM", "DeepseekOCR")
_CHUNK = 4 << 20  # numbers
_INFINITY = {"BF16": ("u2", 0x7F80), "F16": ("u2", 0x7C00), "F32": ("u4", 0x7F800000)}
"""By dtype: integer type of its bits, and the bits of infinity; without the sign bit, NaNs are larger."""
_NAMED = 3


def put_right(directory: Path, facts: Facts, tried: Tried, findings: Mapping[str, Any]) -> Facts:
    """Check the copy in `directory` and repair it; return `facts` with all warnings.

    tried: result of its chat template's trial. findings: the output of `checkpoint_trial`. Raises CheckpointRefused.
    """
    tensors, tokenizer, layout = findings["tensors"], findings["tokenizer"], Layout.read(directory)
    check_tensors(tensors)
    if tensors.get("plain"):
        _change_config(directory, lambda part: [part.pop(key, None) for key in QUANTISED])
        facts = examine(directory, layout)
    notes = [*facts.warnings, *([tried.warning] if tried.warning else [])]
    if tensors.get("plain"):
        notes.append("config.json has a quantization_config, but no tensor is quantised: removed it")
    check_numbers(directory, layout)
    notes += put_tensors_right(directory, tensors, facts.arch)
    if facts.task != "generate":
        return replace(facts, warnings=tuple(notes))
    notes += put_tokenizer_right(directory, tokenizer, tried.rendered)
    config = read_json(directory / CONFIG_FILE, CONFIG_FILE)
    file = directory / generation.FILE
    stored = read_json(file, generation.FILE) if file.is_file() else None
    end, ends = "", list[int]()
    if tried.rendered:
        added, known = _tokens(tokenizer, generation.eos_ids(stored, config))
        if end := new_end(tried.rendered, added, known):
            ends = [added[end]]
        notes += warnings_of(tried.rendered, added)
    settled, more = generation.settle(
        stored, config, rows=tensors["rows"], ends=ends, unreadable=tokenizer["generation"]
    )
    if settled is not None:
        file.write_text(json.dumps(settled, indent=2))
    if end:
        more.append(f"its chat template ends the model's turns with {end}, so engines end answers there too")
    return replace(facts, warnings=(*notes, *more))


def _tokens(tokenizer: Mapping[str, Any], eos: Sequence[Any]) -> tuple[dict[str, int], set[str]]:
    """Return the tokenizer's added tokens with their ids, and the tokens that by the files end an answer."""
    added = dict(tokenizer["added"])
    special = {role: token for role, (token, _) in tokenizer["special"].items()}
    if special.get("bos_token") != special.get("eos_token"):
        added.pop(special.get("bos_token", ""), None)
    known = {token for token, number in added.items() if number in eos}
    return added, known | {special.get("eos_token", "")} - {""}


def check_tensors(trial: Mapping[str, Any]) -> None:
    """Raise NotACheckpoint with the first tensor that config.json or the files lack, or that does not fit."""
    if trial["unchecked"]:
        return
    if lora := [name for name in trial["unknown"] if ".lora_" in name]:
        raise NotACheckpoint(
            lora[0],
            "a factor of an adapter that was not merged into its layer; save the model again after peft's "
            "`merge_and_unload`, or import the adapter's own directory",
        )
    if trial["unknown"]:
        raise NotACheckpoint(
            trial["unknown"][0],
            f"is not in the architecture of config.json{_and_more(trial['unknown'])}, so no "
            "engine would start; use the config.json with which the checkpoint was trained, or save it again "
            "without wrappers around the model",
        )
    if trial["missing"] == [f"{trial['head']}.weight"]:
        raise NotACheckpoint(
            trial["missing"][0],
            "not among the tensors, and config.json does not tie the head to the embedding. If the model was "
            'trained with both tied, set "tie_word_embeddings": true in config.json; else save it again with its head',
        )
    if trial["missing"]:
        raise NotACheckpoint(
            trial["missing"][0],
            f"is not among the tensors{_and_more(trial['missing'])}, but the architecture in "
            "config.json needs it; the copy is incomplete, or config.json belongs to another model",
        )
    for name, stored, expected in trial["shapes"]:
        rows = stored[1:] == expected[1:] and name.rpartition(".")[0] in (trial["head"], trial["embedding"])
        raise NotACheckpoint(
            name,
            f"has shape {stored}, but config.json implies {expected}: "
            + (f"set vocab_size there to {stored[0]}, its rows" if rows else "use the config.json of these weights"),
        )
    for name in trial["unconvertible"]:
        raise NotACheckpoint(name, "cannot be built from the tensors in the files; a tensor may be missing")


def check_numbers(directory: Path, layout: Layout) -> None:
    """Raise NotACheckpoint with the first tensor that has NaN or infinity, because all answers would be NaN."""
    for placed in layout:
        if placed.spec.dtype not in _INFINITY or not placed.spec.name.endswith(("weight", "bias")):
            continue
        kind, infinity = _INFINITY[placed.spec.dtype]
        numbers = _mapped(directory, placed, kind)
        without_sign = numbers.dtype.type(np.iinfo(kind).max >> 1)
        for at in range(0, numbers.size, _CHUNK):
            if (numbers[at : at + _CHUNK] & without_sign).max() >= infinity:
                raise NotACheckpoint(
                    placed.spec.name,
                    "has NaN or infinite values, so every answer would be NaN; the training diverged, "
                    "or it was saved or merged in float16, whose range is too small: save it in bfloat16",
                )


def _mapped(directory: Path, placed: Placed, kind: str) -> np.ndarray:
    """Map a tensor's bytes from its file as an array of dtype `kind`."""
    if not placed.nbytes:
        return np.empty(0, kind)
    size = placed.nbytes // np.dtype(kind).itemsize
    return np.memmap(directory / placed.file, kind, "r", offset=placed.start, shape=(size,))


def _and_more(names: list[str]) -> str:
    return f" (nor are {len(names) - 1} more, such as {', '.join(names[1:_NAMED])})" if len(names) > 1 else ""


def put_tensors_right(directory: Path, trial: Mapping[str, Any], arch: str) -> list[str]:
    """Rename tensors that wrappers renamed, and untie the head in config.json if the tensors include a head. Returns
    notes. Raises NotACheckpoint."""
    notes = []
    if trial["unchecked"]:
        notes.append(f"its tensors were not compared with an architecture: {trial['unchecked']}")
    if names := trial["renamed"]:
        rename_tensors(directory, names)
        old, new = next(iter(names.items()))
        notes.append(f"{len(names)} tensors were renamed to names that engines load, such as {old} to {new}")
    for head, embedding in trial.get("tied", ()):
        if head != f"{trial['head']}.weight":
            continue
        layout = Layout.read(directory)
        own, tied = layout.find(head), layout.find(embedding)
        is_alike = (own.spec.dtype, own.spec.shape) == (tied.spec.dtype, tied.spec.shape)
        if is_alike and np.array_equal(_mapped(directory, own, "u1"), _mapped(directory, tied, "u1")):
            continue
        if arch.startswith(_ALWAYS_TIED):
            raise NotACheckpoint(
                head,
                f"differs from {embedding}, but engines use the embedding as the head of {arch}: save the model "
                "again with both tied",
            )
        _change_config(directory, lambda part: part.update(tie_word_embeddings=False))
        notes.append(
            f"{head} differs from {embedding}, though config.json ties them: the head in the file is used "
            "(tie_word_embeddings is false in the stored config.json)"
        )
    return notes


def _change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change config.json, both its top level and its text_config."""
    config = read_json(directory / CONFIG_FILE, CONFIG_FILE)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            change(part)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))


def put_tokenizer_right(directory: Path, trial: Mapping[str, Any], rendered: Mapping[str, str | None]) -> list[str]:
    """Make transformers use tokenizer.json as it is, and remove roles of tokens without an embedding row. Returns
    notes. Raises TokenizerRefused."""
    notes = []
    if trial["differs"] and trial["mended"]:
        _set_in(directory, "tokenizer_class", PLAIN_CLASS)
        notes.append(
            f"its tokenizer_class would be read as {trial['class']}, which tokenizes {trial['differs']!r} otherwise "
            f"than tokenizer.json; the stored tokenizer_config.json has {PLAIN_CLASS}, which reads it unchanged"
        )
    elif trial["differs"]:
        notes.append(
            f"transformers reads this tokenizer by {trial['class']}, which tokenizes {trial['differs']!r} otherwise "
            "than tokenizer.json: answers may be worse than elsewhere"
        )
    return notes + (_without_a_row(directory, trial, rendered) if trial["beyond"] else [])


def _without_a_row(directory: Path, trial: Mapping[str, Any], rendered: Mapping[str, str | None]) -> list[str]:
    """Check tokens whose ids are beyond the embedding, on which an engine would die. Returns notes."""
    beyond = {token: number for token, number in trial["beyond"]}
    roles = {role: token for role, (token, _) in trial["special"].items() if token in beyond}
    needed = roles.get("eos_token") or (roles.get("bos_token") if trial["begins"] else None)
    written = next((token for token in beyond if any(token in (text or "") for text in rendered.values())), None)
    if needed or written:
        token = str(needed or written)
        raise TokenizerRefused(
            TOKENIZER_CONFIG if needed else "chat template",
            f"uses the token {token!r} ({beyond[token]}), which has no row in the embedding: the tokenizer is another "
            "model's, or the model was saved before its embedding was resized (`resize_token_embeddings`)",
        )
    notes = []
    if "pad_token" in roles and "eos_token" in trial["special"]:
        _set_in(directory, "pad_token", trial["special"]["eos_token"][0])
        notes.append(f"its pad_token {roles['pad_token']!r} has no row in the embedding; eos_token is used for padding")
    some = ", ".join(f"{token} ({number})" for token, number in list(beyond.items())[:_NAMED])
    return [
        *notes,
        f"{len(beyond)} tokens of the tokenizer have no row in the embedding: "
        f"{some}{', …' if len(beyond) > _NAMED else ''}; requests with one are refused",
    ]


def _set_in(directory: Path, key: str, value: str) -> None:
    settings = read_tokenizer_config(directory) | {key: value}
    (directory / TOKENIZER_CONFIG).write_text(json.dumps(settings, ensure_ascii=False, indent=2))
    roles = directory / SPECIAL_TOKENS
    if roles.is_file() and key in (tokens := read_json(roles, SPECIAL_TOKENS)):
        roles.write_text(json.dumps(tokens | {key: value}, ensure_ascii=False, indent=2))
