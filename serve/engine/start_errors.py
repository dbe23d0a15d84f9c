"""Translates vLLM's start errors into the box's terms: which of its settings to change, never a vLLM option.

vLLM's messages name its own command-line options, which users of the box never see. Unknown messages stay unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from runtime.devices import kinds
from serve.core.sizing import INSTEAD_OF_QUANTISED


@dataclass(frozen=True, slots=True)
class Words:
    """memory: the start failed for lack of memory, so a retry may succeed when some is free."""

    text: str
    memory: bool = False


class _Known(NamedTuple):
    """pattern: of vLLM's message. text, memory: the Words for it, with the groups of the pattern, and `shorter`: the
    length that vLLM proposes."""

    pattern: str
    text: str
    memory: bool = False


_MEMORY = r"out of memory|[Cc]an(?:'|no)t allocate memory|MemoryError|std::bad_alloc"
_NO_FORMAT = "{model} is quantised by {format}, which engines do not serve on this kind of device; {instead}"
_KNOWN = (
    _Known(
        r"max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed.*?available KV cache memory "
        r"\((?P<had>[\d.]+) GiB\)",
        "the KV cache is too small for one request of {length} tokens: {needed} GiB are needed, {had} GiB are set "
        "aside for it; raise [serve] kv_cache_bytes, or set [serve] max_model_len to {shorter}",
    ),
    _Known(
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup",
        "the device has {free} of {total} GiB free, less than the share that an engine may use; stop what else uses "
        "it, or lower [serve] gpu_memory_fraction",
        memory=True,
    ),
    _Known(
        r"Model architectures? \[?'?(?P<arch>[\w', ]+?)'?\]? (?:are|is|was) (?:not )?supported",
        "engines of this box cannot serve the architecture {arch}; `appliance model rm {model}` removes it",
    ),
    _Known(
        r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<devices>\d+)\)",
        "{model} has {heads} attention heads, which {devices} devices cannot share evenly; choose another number with "
        "`appliance model deploy {model} --tensor-parallel N`",
    ),
    _Known(
        r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<held>\d+)\)",
        "{model} keeps a state of each request, and memory holds {held} of them, not {asked}: `appliance model deploy "
        "{model} --max-num-seqs {held}`, or spread it over more devices (`--tensor-parallel N`)",
    ),
    _Known(
        r"FP8 KV cache is not supported by the Triton .*? on (?P<device>.+?) "
        r"\(compute capability (?P<capability>[\d.]+)",
        "keys and values in FP8 need compute capability 8.9 or higher, and {device} has {capability}: `appliance model "
        "deploy {model} --kv-cache-dtype bfloat16` (float16 for a model set to that) keeps them in full, whatever the "
        "checkpoint asks for",
    ),
    _Known(
        r"Failed to find a kernel that can implement the (?P<format>\w+) linear layer",
        "{model} has quantised layers ({format}) that engines do not compute on this kind of device; {instead}",
    ),
    _Known(r"Unknown quantization method: (?P<format>[\w.-]+)", _NO_FORMAT),
    _Known(r"(?P<format>[\w.-]+) quantization is currently not supported in \w+", _NO_FORMAT),
    _Known(r"is not supported for quantization method (?P<format>[\w-]+)", _NO_FORMAT),
    # An operator that the CPU's build declares and does not have.
    _Known(r"_C::\w*(?P<format>fp8|int8)\w*\(\) expected at most 0 argument", _NO_FORMAT),
    _Known(
        _MEMORY,
        "memory ran out while the engine of {model} started; lower [serve] kv_cache_bytes or max_num_seqs, or free "
        "memory",
        memory=True,
    ),
)
_PROPOSED = re.compile(r"estimated maximum model length is (\d+)")


def out_of_memory(message: str) -> bool:
    """Whether this message of vLLM's or torch's says that memory ran out."""
    return re.search(_MEMORY, message) is not None


def in_our_words(message: str, model: str) -> Words | None:
    """Return the box's text for this vLLM message; None if the message is unknown."""
    proposed = _PROPOSED.search(message)
    more = {
        "model": model,
        "instead": INSTEAD_OF_QUANTISED,
        "shorter": f"at most {proposed[1]}" if proposed else "lower",
    }
    for known in _KNOWN:
        if found := re.search(known.pattern, message, re.S):
            return Words(known.text.format(**found.groupdict(), **more), known.memory)
    not_ready = kinds.not_ready(message)
    return Words(not_ready) if not_ready else None
