"""Translates vLLM's start errors into the box's terms: which of its settings to change, never a vLLM option.

vLLM's messages name its own command-line options, which users of the box never see. Unknown messages stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from runtime.devices import kinds
from serve.core.sizing import INSTEAD_OF_QUANTISED


@dataclass(frozen=True, slots=True)
class Words:
    """memory: the start failed for lack of memory, so a retry may succeed when some is free."""

    text: str
    memory: bool = False


def _kv_too_small(found: re.Match[str], model: str) -> Words:
    length, needed, had = found["length"], found["needed"], found["had"]
    most = re.search(r"estimated maximum model length is (\d+)", found.string)
    shorter = f"at most {most[1]}" if most else "lower"
    return Words(
        f"the KV cache is too small for one request of {length} tokens: {needed} GiB are needed, {had} GiB are set "
        f"aside for it; raise [serve] kv_cache_bytes, or set [serve] max_model_len to {shorter}"
    )


def _no_room_for_kv(found: re.Match[str], model: str) -> Words:
    return Words(
        f"no memory is left for the KV cache of {model} besides its weights; raise [serve] kv_cache_bytes, spread it "
        f"over more devices (`appliance model deploy {model} --tensor-parallel N`), or stop what else uses the device",
        memory=True,
    )


def _device_too_full(found: re.Match[str], model: str) -> Words:
    return Words(
        f"the device has {found['free']} of {found['total']} GiB free, less than the share that an engine may use; "
        "stop what else uses it, or lower [serve] gpu_memory_fraction",
        memory=True,
    )


def _out_of_memory(found: re.Match[str], model: str) -> Words:
    return Words(
        f"memory ran out while the engine of {model} started; lower [serve] kv_cache_bytes or max_num_seqs, or free "
        "memory",
        memory=True,
    )


def _too_long(found: re.Match[str], model: str) -> Words:
    return Words(
        f"[serve] max_model_len is {found['asked']}, and {model} was made for at most {found['most']} tokens; set it "
        "no higher than that"
    )


def _unsupported(found: re.Match[str], model: str) -> Words:
    return Words(
        f"engines of this box cannot serve the architecture {found['arch']}; `appliance model rm {model}` removes it"
    )


def _heads(found: re.Match[str], model: str) -> Words:
    return Words(
        f"{model} has {found['heads']} attention heads, which {found['devices']} devices cannot share evenly; choose "
        f"another number with `appliance model deploy {model} --tensor-parallel N`"
    )


def _no_kernel(found: re.Match[str], model: str) -> Words:
    return Words(
        f"{model} has quantised layers ({found['format']}) that engines do not compute on this kind of device; "
        f"{INSTEAD_OF_QUANTISED}"
    )


def _no_format(found: re.Match[str], model: str) -> Words:
    return Words(
        f"{model} is quantised by {found['format']}, which engines do not serve on this kind of device; "
        f"{INSTEAD_OF_QUANTISED}"
    )


def _no_fp8_cache(found: re.Match[str], model: str) -> Words:
    return Words(
        "keys and values in FP8 need compute capability 8.9 or higher, or a compiler for other kernels (docs/gpu.md), "
        f"and {found['device']} has {found['capability']}: `appliance model deploy {model} --kv-cache-dtype bfloat16` "
        "(float16 for a model set to that) keeps them in full, whatever the checkpoint asks for"
    )


def _too_many_at_once(found: re.Match[str], model: str) -> Words:
    return Words(
        f"{model} keeps a state of each request, and memory holds {found['held']} of them, not {found['asked']}: "
        f"`appliance model deploy {model} --max-num-seqs {found['held']}`, or spread it over more devices "
        "(`--tensor-parallel N`)"
    )


def _head_size(found: re.Match[str], model: str) -> Words:
    return Words(
        f"{model} has attention heads of {found['size']} elements, which engines do not compute on this kind of "
        f"device; `appliance model rm {model}` removes it"
    )


_MEMORY = r"out of memory|[Cc]an(?:'|no)t allocate memory|MemoryError|std::bad_alloc"
_KNOWN: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], Words]], ...] = tuple(
    (re.compile(pattern, re.S), words)
    for pattern, words in (
        (
            r"max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed.*?available KV cache memory "
            r"\((?P<had>[\d.]+) GiB\)",
            _kv_too_small,
        ),
        (r"No available memory for the cache blocks", _no_room_for_kv),
        (r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup", _device_too_full),
        (
            r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \(\S+?=(?P<most>[\d.]+)",
            _too_long,
        ),
        (r"Model architectures? \[?'?(?P<arch>[\w', ]+?)'?\]? (?:are|is|was) (?:not )?supported", _unsupported),
        (r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<devices>\d+)\)", _heads),
        (r"Unsupported CPU attention configuration: head_dim=(?P<size>\d+)", _head_size),
        (r"Head size (?P<size>\d+) is not supported", _head_size),
        (
            r"max_num_seqs \((?P<asked>\d+)\) exceeds available Mamba cache blocks \((?P<held>\d+)\)",
            _too_many_at_once,
        ),
        (
            r"FP8 KV cache is not supported by the Triton .*? on (?P<device>.+?) "
            r"\(compute capability (?P<capability>[\d.]+)",
            _no_fp8_cache,
        ),
        (r"Failed to find a kernel that can implement the (?P<format>\w+) linear layer", _no_kernel),
        (r"Unknown quantization method: (?P<format>[\w.-]+)", _no_format),
        (r"(?P<format>[\w.-]+) quantization is currently not supported in \w+", _no_format),
        (r"is not supported for quantization method (?P<format>[\w-]+)", _no_format),
        # An operator that the CPU's build declares and does not have.
        (r"_C::\w*(?P<format>fp8|int8)\w*\(\) expected at most 0 argument", _no_format),
        (_MEMORY, _out_of_memory),
    )
)


def out_of_memory(message: str) -> bool:
    """Whether this message of vLLM's or torch's says that memory ran out."""
    return re.search(_MEMORY, message) is not None


def in_our_words(message: str, model: str) -> Words | None:
    """Return the box's text for this vLLM message; None if the message is unknown."""
    for pattern, words in _KNOWN:
        found = pattern.search(message)
        if found is not None:
            return words(found, model)
    not_ready = kinds.not_ready(message)
    return Words(not_ready) if not_ready else None
