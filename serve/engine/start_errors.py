"""Translates vLLM's start errors into messages that name a setting of the box, never a vLLM option.

vLLM's messages name its own command-line options, which users of the box never see. Unknown messages stay unchanged.
"""

from __future__ import annotations

import re

from runtime.devices import kinds
from serve.core.sizing import INSTEAD_OF_QUANTISED

_MEMORY = (
    r"Free memory on device \S+ .* on startup|out of memory|[Cc]an(?:'|no)t allocate memory|MemoryError|std::bad_alloc"
)
_NO_FORMAT = "{model} is quantised by {format}, which engines do not serve on this kind of device; {instead}"
_KNOWN = (
    (
        r"max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed.*?available KV cache memory "
        r"\((?P<had>[\d.]+) GiB\)",
        "the KV cache is too small for one request of {length} tokens: {needed} GiB are needed, {had} GiB are set "
        "aside for it; raise [serve] kv_cache_bytes, or set [serve] max_model_len to {shorter}",
    ),
    (
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup",
        "the device has {free} of {total} GiB free, less than the share that an engine may use; stop what else uses "
        "it, or lower [serve] gpu_memory_fraction",
    ),
    (
        r"Model architectures? \[?'?(?P<arch>[\w', ]+?)'?\]? (?:are|is|was) (?:not )?supported",
        "engines of this box cannot serve the architecture {arch}; `appliance model rm {model}` removes it",
    ),
    (
        r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<held>\d+)\)",
        "{model} keeps a state per request, and memory holds {held} states, not {asked}: `appliance model deploy "
        "{model} --max-num-seqs {held}`, or spread it over more devices (`--tensor-parallel N`)",
    ),
    (
        r"FP8 KV cache is not supported by the Triton .*? on (?P<device>.+?) "
        r"\(compute capability (?P<capability>[\d.]+)",
        "keys and values in FP8 need compute capability 8.9 or higher, and {device} has {capability}: `appliance model "
        "deploy {model} --kv-cache-dtype bfloat16` (float16 for a model set to that) keeps them in 16 bits, "
        "regardless of the checkpoint's setting",
    ),
    (
        r"Failed to find a kernel that can implement the (?P<format>\w+) linear layer",
        "{model} has quantised layers ({format}) that engines do not compute on this kind of device; {instead}",
    ),
    (r"Unknown quantization method: (?P<format>[\w.-]+)", _NO_FORMAT),
    (r"(?P<format>[\w.-]+) quantization is currently not supported in \w+", _NO_FORMAT),
    (r"is not supported for quantization method (?P<format>[\w-]+)", _NO_FORMAT),
    # Reports an operator that the CPU build declares but does not implement.
    (r"_C::\w*(?P<format>fp8|int8)\w*\(\) expected at most 0 argument", _NO_FORMAT),
    (
        _MEMORY,
        "memory ran out while the engine of {model} started; lower [serve] kv_cache_bytes or max_num_seqs, or free "
        "memory",
    ),
)
"""Patterns of vLLM's messages; our text, with the pattern's groups and `shorter`, the length that vLLM proposes."""
_PROPOSED = re.compile(r"estimated maximum model length is (\d+)")


def out_of_memory(message: str) -> bool:
    """Return whether this message from vLLM or torch reports a lack of memory; a later retry may then succeed."""
    return re.search(_MEMORY, message) is not None


def in_our_words(message: str, model: str) -> str | None:
    """Return the box's message for this vLLM message; None if the vLLM message is unknown."""
    proposed = _PROPOSED.search(message)
    more = {
        "model": model,
        "instead": INSTEAD_OF_QUANTISED,
        "shorter": f"at most {proposed[1]}" if proposed else "lower",
    }
    for pattern, text in _KNOWN:
        if match := re.search(pattern, message, re.S):
            return text.format(**match.groupdict(), **more)
    return kinds.not_ready(message) or None
