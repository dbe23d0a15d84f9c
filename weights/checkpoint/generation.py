"""Computes a version's generation_config.json: default sampling of engines, and tokens that end an answer.

Pure. vLLM takes the file's numbers without a check, refuses every request if a number is out of range, ignores
do_sample, and limits every answer to max_new_tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from weights.format.foreign_json import text_part

FILE = "generation_config.json"
SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OTHERS = ("presence_penalty", "frequency_penalty", "max_new_tokens")
_NOT_APPLIED = (
    "stop_strings suppress_tokens begin_suppress_tokens bad_words_ids sequence_bias forced_bos_token_id "
    "forced_eos_token_id no_repeat_ngram_size min_length min_new_tokens"
).split()
"""Settings that transformers applies to answers and no engine reads."""
_ROLES = ("eos_token_id", "bos_token_id", "pad_token_id")
# (lowest, highest) value by vllm.sampling_params.SamplingParams._verify_args; top_p and repetition_penalty exclude 0.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 30),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def settle(
    own: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    *,
    rows: int,
    ends: Collection[int] = (),
    unreadable: str = "",
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the stored version's file (None: the checkpoint's file stays unchanged or absent) and notes.

    Args:
        own: The checkpoint's file; if None, settings come from config.json.
        rows: Rows of the embedding; 0 if unknown.
        ends: Tokens that end a turn of the model but are not listed in any file.
        unreadable: Why transformers cannot read the file, "" if it can.
    """
    read, parts = (*_ROLES, *SAMPLING, *_OTHERS), {**text_part(config), **config}
    settings = dict(own) if own is not None else {key: parts[key] for key in read if parts.get(key) is not None}
    notes: list[str] = []
    if unreadable:
        settings = {key: value for key, value in settings.items() if key in read}
        notes.append(f"{FILE} cannot be read ({unreadable}): only its sampling and end tokens are used")
    before = dict(settings)
    notes += _sampling(settings)
    if settings.pop("max_new_tokens", None) is not None:
        notes.append(f"max_new_tokens of {FILE} is not applied: it would truncate answers; requests set max_tokens")
    unread = [key for key in _NOT_APPLIED if settings.get(key)]
    if unread or (settings.get("num_beams") or 1) != 1:
        unread = unread or ["num_beams"]
        notes.append(f"{', '.join(unread)} of {FILE} is not applied: no engine reads it; a request may set `stop`")
    known = eos_ids(own, config)
    valid = [token for token in known if type(token) is int and token >= 0 and (not rows or token < rows)]
    if odd := [token for token in known if token not in valid]:
        notes.append(f"eos_token_id {odd[0]!r} is not a token of this model and is left out")
    if ends or odd:
        tokens = list(dict.fromkeys([*valid, *ends]))
        settings["eos_token_id"] = tokens[0] if len(tokens) == 1 else tokens or None
    if own is None:
        own = before
        settings = {key: value for key, value in settings.items() if value is not None}
    return (None if settings == own else settings), notes


def eos_ids(own: Mapping[str, Any] | None, config: Mapping[str, Any]) -> list[Any]:
    """Return the tokens that end an answer according to the file, or to config.json if there is no file."""
    source = own if own is not None else {**text_part(config), **config}
    tokens = source.get("eos_token_id")
    return list(tokens) if isinstance(tokens, list) else [] if tokens is None else [tokens]


def _sampling(settings: dict[str, Any]) -> list[str]:
    """Correct the numbers in `settings` in place; return notes on the corrections."""
    notes = []
    for key, (least, most) in _BOUNDS.items():
        value = settings.get(key)
        if value is None:
            continue
        number = type(value) in (int, float) and math.isfinite(value)
        if number and key == "top_k" and value == int(value):
            settings[key] = value = int(value)
        if not number or not least <= value <= most or (key == "top_k" and type(value) is not int):
            del settings[key]
            notes.append(f"{key} {str(value)[:40]} of {FILE} is not applied: engines accept {least:g} to {most:g}")
    greedy = [key for key in ("do_sample", "temperature", "top_p") if settings.get(key) == 0]  # False == 0
    if greedy:
        for key in ("top_p", "top_k", "min_p"):
            settings.pop(key, None)
        settings |= {"do_sample": False, "temperature": 0.0}
        notes.append(f"{greedy[0]} of {FILE} makes answers greedy unless a request sets a temperature")
    return notes
