"""What a version's generation_config.json may say to engines: how to sample by default, and which tokens end an answer.

Pure. vLLM takes numbers of it as they are, refuses every request where one is out of range, does not heed do_sample,
and takes max_new_tokens for a limit of each answer.
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
"""What changes an answer of transformers and no engine reads."""
_ROLES = ("eos_token_id", "bos_token_id", "pad_token_id")
# vllm.sampling_params.SamplingParams._verify_args: least and most; 0 is no top_p and no repetition_penalty.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 30),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def settled(
    given: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    *,
    rows: int,
    ends: Collection[int] = (),
    unreadable: str = "",
) -> tuple[dict[str, Any] | None, list[str]]:
    """The file of the stored version, None where it stays as it is (or stays away), and notes.

    Args:
        given: The checkpoint's own file, None without one: then config.json says it.
        rows: Of the embedding; 0 where they are not known.
        ends: Tokens that end a turn of the model and that nobody else names.
        unreadable: Why transformers cannot read the file, "" where it can.
    """
    read, parts = (*_ROLES, *SAMPLING, *_OTHERS), {**text_part(config), **config}
    made = dict(given) if given is not None else {key: parts[key] for key in read if parts.get(key) is not None}
    notes: list[str] = []
    if unreadable:
        made = {key: value for key, value in made.items() if key in read}
        notes.append(f"{FILE} cannot be read ({unreadable}): only its sampling and its ends of an answer are used")
    before = dict(made)
    notes += _sampling(made)
    if (limit := made.pop("max_new_tokens", None)) is not None:
        notes.append(
            f"max_new_tokens {limit} of {FILE} is not applied: it would cut answers; max_tokens is a request's"
        )
    if unread := [key for key in _NOT_APPLIED if made.get(key)] + (
        ["num_beams"] if (made.get("num_beams") or 1) != 1 else []
    ):
        notes.append(f"{', '.join(unread)} of {FILE} is not applied: no engine reads it; a request may set `stop`")
    known = eos_ids(given, config)
    valid = [one for one in known if type(one) is int and one >= 0 and (not rows or one < rows)]
    if odd := [one for one in known if one not in valid]:
        notes.append(f"eos_token_id {odd[0]!r} is not a token of this model and is left out")
    if ends or odd:
        found = list(dict.fromkeys([*valid, *ends]))
        made["eos_token_id"] = found[0] if len(found) == 1 else found or None
    if given is None:
        given = before
        made = {key: value for key, value in made.items() if value is not None}
    return (None if made == given else made), notes


def eos_ids(given: Mapping[str, Any] | None, config: Mapping[str, Any]) -> list[Any]:
    """What the file, or config.json without one, has as ends of an answer."""
    where = given if given is not None else {**text_part(config), **config}
    found = where.get("eos_token_id")
    return list(found) if isinstance(found, list) else [] if found is None else [found]


def _sampling(made: dict[str, Any]) -> list[str]:
    """Puts the numbers right in `made`."""
    notes = []
    for key, (least, most) in _BOUNDS.items():
        value = made.get(key)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if number and key == "top_k" and value == int(value):
            made[key] = value = int(value)
            number = True
        if not number or not least <= value <= most or (key == "top_k" and type(value) is not int):
            del made[key]
            notes.append(f"{key} {str(value)[:40]} of {FILE} is not applied: engines take {least:g} to {most:g}")
    why = next((f"{key} {made[key]}" for key in ("temperature", "top_p") if made.get(key) == 0), "")
    if made.get("do_sample") is False:
        why = "do_sample false"
    if why:
        for key in ("top_p", "top_k", "min_p"):
            made.pop(key, None)
        made |= {"do_sample": False, "temperature": 0.0}
        notes.append(f"answers are greedy unless a request sets a temperature, as {FILE} has {why}")
    return notes
