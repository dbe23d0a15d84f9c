"""Computes what an engine takes of its devices and how long its context is, from the sizes of the model and the device.

One estimate for everybody who asks: the engine's command line, plans, device assignment and what guards the host's
memory. vLLM gets explicit numbers, because by default it takes a fraction of the device (or of NUMA node 0 on a CPU),
whose meaning differs between its versions and which ignores other engines and training on the same device.

On the CPU, with b bytes per element of the dtype that computes, V tokens in the vocabulary, h hidden and f of the MLP
that one token passes:

    weights      b P (as stored if quantised), and b V h more where the head is tied to the embedding, because the head
                 is packed for the matrix kernels and the embedding stays plain
    adapters     slots x rank x sum of the in and out of all linear layers x b, allocated at the start; each
                 tensor-parallel worker has the sides of the hidden state whole
    KV cache     2 x layers x heads x head size x b per token, for one whole context at least
    activations  a batch of BATCHED_TOKENS tokens, and the sampling of max_num_seqs rows of V numbers
    process      PROCESS_BYTES for the frontend and its core, WORKER_BYTES for each further worker, TOKENIZER_BYTES per
                 token of the vocabulary; this much stays while the engine sleeps

The constants are measured by benchmarks/engine_memory.py, whose table stands in benchmarks/results.md.

A GPU's memory is divided as follows; no constant of it is measured yet:

    others       max_asleep_per_device engines asleep, each asleep_bytes of the kind
    process      context_bytes of the kind, and GRAPH_BYTES for captured graphs
    weights      b P (as stored if quantised), adapters as above
    activations  a batch of vLLM's size, of which tensor parallelism divides only the MLP, and sampling;
                 LEAST_ACTIVATIONS_BYTES at least; with guessed tokens the logits that check them, and all texts
    KV cache     the rest of `gpu_memory_fraction`, or of what the engines asleep leave
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from runtime.devices.kind import DeviceKind
from runtime.devices.kinds import kind_of
from serve.core.config import EngineConfig
from serve.core.shape import ServedShape

CPU_KV_BYTES = 256 * 2**20
LEAST_KV_BYTES = 64 * 2**20
LEAST_FRACTION = 0.01
LORA_RANK_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Dense architectures for which vLLM takes adapters on every linear layer. On a CPU it takes none for experts.
ADAPTER_ARCHITECTURES = frozenset(
    f"{family}ForCausalLM"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Granite", "Olmo2", "Olmo3", "Phi3")
)
# Their linear layers, by the last part of their names.
ADAPTER_MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)
GRAPH_BYTES = 2**30  # vLLM reports 0.5 to 1 GiB for models of 1 to 8 B parameters and its default sizes of batches
LEAST_ACTIVATIONS_BYTES = 2**30

PROCESS_BYTES = 285_000_000
WORKER_BYTES = 190_000_000
TOKENIZER_BYTES = 1_600
BATCHED_TOKENS = 2048  # vLLM 0.32's default on a CPU (EngineArgs.get_batch_defaults)
BATCH_ELEMENTS_H, BATCH_ELEMENTS_F = 16, 4  # per token of a batch, times hidden and MLP width
SAMPLING_BYTES = 40  # per row and token of the vocabulary: logits, sorted values and indexes, their sums
# The same on a GPU: logits, their float32, what is drawn, and the counts of penalties (vllm/v1/worker/gpu/sample).
GPU_SAMPLING_BYTES = 16
CPU_MAX_NUM_SEQS = 64
# vLLM 0.32's defaults for its server by bytes of the device (EngineArgs.get_batch_defaults): from so many bytes on, so
# many requests at once and tokens in a batch. It takes the last row for an A100 of any size.
GPU_BATCHES = ((160 * 2**30, 1024, 16384), (70 * 2**30, 1024, 8192), (0, 256, 2048))
BLOCK_TOKENS = 128  # on a CPU; on GPUs 16, 64 or 128, as the kernel of the attention wants (latent, FP8, heads of 256)
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def lora_rank_bound(rank: int) -> int:
    """Return the smallest `--max-lora-rank` that vLLM 0.32 accepts (vllm/config/lora.py) and that covers `rank`."""
    return next(bound for bound in LORA_RANK_BOUNDS if bound >= rank)


def adapter_rank_limit(config: EngineConfig, *, task: str, arch: str) -> int:
    """Return the largest adapter rank that engines of this model accept; 0: they accept no adapters."""
    taken = config.adapter_slots and task == "generate" and arch in ADAPTER_ARCHITECTURES
    return config.adapter_max_rank if taken else 0


INSTEAD_OF_QUANTISED = (
    "import the model as its publisher trained it (bf16 or fp16), or a GGUF file, which is dequantised"
)


class ModelTooLarge(ValueError):
    """The weights leave no room for a KV cache on this device."""


class NotComputed(ValueError):
    """Devices of this kind do not compute the model's layers, whatever memory they have."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that an engine takes of each of its devices under full load."""

    weights_bytes: int
    adapters_bytes: int
    kv_cache_bytes: int
    activations_bytes: int
    engine_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class EngineSize:
    """An engine as it would be started. max_model_len: its context in tokens, None where the model does not say.
    max_num_seqs: requests at once. gpu_memory_fraction: of a GPU that must be free after the engine's own context.
    room_bytes: what it may take of each device, by the settings that hold for it.
    shortened: why the context is shorter than asked for or the model's own, "" if it is not. problem: why it cannot be
    started, "" if it can. not_computed: the same where the reason is not a lack of memory."""

    memory: EngineMemory
    dtype: str
    max_model_len: int | None
    kv_tokens: int | None
    max_num_seqs: int
    gpu_memory_fraction: float
    room_bytes: int
    shortened: str = ""
    problem: str = ""
    not_computed: str = ""


def engine_size(
    config: EngineConfig,
    shape: ServedShape,
    *,
    task: str,
    arch: str,
    tensor_parallel: int,
    device_kind: str,
    device_memory_bytes: int,
    asleep_per_device: int,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    batched_tokens: int | None = None,
    draft_tokens: int | None = None,
    throughput: bool = False,
    whole_prompts: bool = False,
) -> EngineSize:
    """Size an engine over `tensor_parallel` devices of `device_memory_bytes` each.

    asleep_per_device: engines that may sleep on a device beside this one. dtype: None takes the one that the device
    computes in. kv_cache_dtype: None keeps keys and values in `dtype`. batched_tokens: None takes vLLM's default, of
    which `throughput` makes twice as much, and `whole_prompts` as much as the context. draft_tokens: guessed from the
    text and checked together. All bytes of the result are per device.
    """
    kind = kind_of(device_kind)
    dtype = dtype or ("bfloat16" if kind.computes_bf16() else "float32")
    seqs, tokens = _batch(device_memory_bytes, on_host=kind.on_host)
    config = config.model_copy(update={"max_num_seqs": config.max_num_seqs or seqs})
    wanted = min(filter(None, (config.max_model_len, shape.context)), default=None)
    if batched_tokens is None:
        batched_tokens = max(tokens * (2 if throughput else 1), (wanted or 0) if whole_prompts else 0)
    memory = _without_kv(kind, config, shape, task, arch, tensor_parallel, dtype, batched_tokens)
    if draft_tokens and task == "generate" and not kind.on_host:
        guessed = _guessed(config.max_num_seqs or seqs, shape.vocab, draft_tokens, batched_tokens, wanted)
        memory = replace(memory, activations_bytes=memory.activations_bytes + guessed)
    room = room_bytes(config, device_kind, device_memory_bytes, asleep_per_device)
    kv_element = 1 if (kv_cache_dtype or "").startswith("fp8") else ELEMENT_BYTES[dtype]
    block_bytes = BLOCK_TOKENS * shape.kv_elements_per_token(tensor_parallel) * kv_element
    # One block more than a sequence fills: vLLM keeps one that no request gets.
    whole = (-(-wanted // BLOCK_TOKENS) + 1) * block_bytes if wanted else 0

    rank = adapter_rank_limit(config, task=task, arch=arch)
    not_computed = _not_computed(kind, shape, dtype, kv_cache_dtype, rank)
    if config.kv_cache_bytes is not None:
        kv, too_little = config.kv_cache_bytes, ""
    elif kind.on_host:
        # A share of the host for each device; a longer context does not get more, it is shortened.
        kv, too_little = max(CPU_KV_BYTES, min(whole, device_memory_bytes)), ""
    else:
        kv, too_little = _left_for_kv(memory, room, device_memory_bytes)
    kv_tokens = (kv // block_bytes - 1) * BLOCK_TOKENS if block_bytes else None
    length, shortened, too_short = _context(wanted, kv_tokens, kv, whole)
    # vLLM refuses to start if less is free, when its context is there already (vllm/v1/worker/utils.request_memory).
    # Rounded down, so that what the command line shows is never more.
    free = device_memory_bytes - asleep_per_device * kind.asleep_bytes - kind.context_bytes
    fraction = min(config.gpu_memory_fraction, max(LEAST_FRACTION, free * 10_000 // device_memory_bytes / 10_000))
    memory, problem = replace(memory, kv_cache_bytes=kv), not_computed or too_little or too_short
    return EngineSize(
        memory, dtype, length, kv_tokens, config.max_num_seqs, fraction, room, shortened, problem, not_computed
    )


def _left_for_kv(memory: EngineMemory, room: int, device_memory_bytes: int) -> tuple[int, str]:
    """(bytes of a GPU for keys and values, why that is too little or "")."""
    kv = room - memory.device_bytes
    if kv >= LEAST_KV_BYTES:
        return kv, ""
    return LEAST_KV_BYTES, (
        f"{memory.weights_bytes} bytes of weights per device, {memory.device_bytes - memory.weights_bytes} for "
        f"adapters, activations and the engine itself, and {device_memory_bytes - room} for other engines that "
        f"sleep there leave {kv} bytes of {device_memory_bytes} for the KV cache, at least {LEAST_KV_BYTES} "
        "are needed: raise the deployment's tensor_parallel, or lower [scheduler] max_asleep_per_device"
    )


def _context(wanted: int | None, kv_tokens: int | None, kv: int, whole: int) -> tuple[int | None, str, str]:
    """(tokens of the context, why these are fewer than wanted or "", why these are too few or ""). kv: bytes of the KV
    cache; whole: as many as would hold what is wanted."""
    if not wanted or kv_tokens is None or kv_tokens >= wanted:
        return wanted, "", ""
    shortened = (
        f"its KV cache of {kv / 1e6:,.0f} MB holds {max(0, kv_tokens):,} of {wanted:,} tokens, "
        f"{whole / 1e6:,.0f} MB would hold all"
    )
    if kv_tokens < BLOCK_TOKENS:
        return None, shortened, f"{shortened}: raise kv_cache_bytes or the number of devices"
    return kv_tokens, shortened, ""


def _not_computed(
    kind: DeviceKind, shape: ServedShape, dtype: str, kv_cache_dtype: str | None, adapter_rank: int
) -> str:
    lacking = kind.lacks_for_quantised() if shape.quantized else ""
    if lacking:
        return (
            f"its layers are quantised, and engines compute such layers only on a processor with {lacking}, which this "
            f"one does not have; {INSTEAD_OF_QUANTISED}"
        )
    if adapter_rank and dtype == "float32" and not kind.on_host:
        return (
            f"it is set to float32, in which engines on a {kind.title} compute no adapters: set bfloat16 or float16, "
            "or [serve] adapter_slots to 0"
        )
    if kv_cache_dtype in ELEMENT_BYTES and kv_cache_dtype != dtype and not kind.on_host:
        return (
            f"its keys and values are set to {kv_cache_dtype} and it is computed in {dtype}, which engines on a "
            f"{kind.title} do not mix: set both alike, or leave keys and values to follow (--kv-cache-dtype none)"
        )
    sizes = kind.head_sizes
    if shape.latent or not shape.head_dim or not sizes or shape.head_dim in sizes:
        return ""  # latent attention has a kernel of its own
    return (
        f"its attention heads have {shape.head_dim} elements, and engines on a {kind.title} compute heads of "
        f"{', '.join(map(str, sorted(sizes)))}"
    )


def room_bytes(config: EngineConfig, device_kind: str, device_memory_bytes: int, asleep_per_device: int) -> int:
    """What an engine may take of a device: on a GPU `gpu_memory_fraction` of it, if the engines that may sleep there
    leave that much."""
    kind = kind_of(device_kind)
    if kind.on_host:
        return device_memory_bytes
    left = device_memory_bytes - asleep_per_device * kind.asleep_bytes
    return min(int(device_memory_bytes * config.gpu_memory_fraction), left)


def engine_settings(
    config: EngineConfig,
    size: EngineSize,
    *,
    task: str,
    arch: str,
) -> dict[str, Any]:
    """Return the fields of a ReplicaSpec that follow from an engine's size. Raises ModelTooLarge, NotComputed."""
    if size.not_computed:
        raise NotComputed(size.not_computed)
    if size.problem:
        raise ModelTooLarge(size.problem)
    rank = adapter_rank_limit(config, task=task, arch=arch)
    adapters = {
        "adapter_slots": config.adapter_slots,
        "adapter_max_rank": rank,
        "adapters_resident": max(config.adapters_resident, config.adapter_slots),
    }
    return {
        "task": task,
        "dtype": size.dtype,
        "max_model_len": size.max_model_len,
        "max_num_seqs": size.max_num_seqs,
        "kv_cache_bytes": size.memory.kv_cache_bytes,
        "gpu_memory_fraction": size.gpu_memory_fraction,
        **(adapters if rank else {}),
    }


def asleep_bytes(shape: ServedShape, tensor_parallel: int = 1) -> int:
    """Host memory of an engine on the CPU that sleeps: its processes, and quantised weights, which it keeps."""
    return _process_bytes(shape, tensor_parallel) + (shape.stored_bytes if shape.quantized else 0)


def _process_bytes(shape: ServedShape, tensor_parallel: int) -> int:
    further = WORKER_BYTES * tensor_parallel if tensor_parallel > 1 else 0
    return PROCESS_BYTES + further + TOKENIZER_BYTES * shape.vocab


def _without_kv(
    kind: DeviceKind,
    config: EngineConfig,
    shape: ServedShape,
    task: str,
    arch: str,
    shards: int,
    dtype: str,
    tokens: int,
) -> EngineMemory:
    element = ELEMENT_BYTES[dtype]
    adapters = _adapters(config, shape, task, arch, shards) * element
    hidden, ffn = BATCH_ELEMENTS_H * shape.hidden, BATCH_ELEMENTS_F * shape.ffn
    weights = shape.stored_bytes if shape.quantized or not shape.n_parameters else shape.n_parameters * element
    if not kind.on_host:
        if 2 * shape.stored_bytes < 3 * shape.n_parameters:
            weights = shape.stored_bytes  # narrower than any dtype: quantised, and another file says how (ModelOpt)
        batch = tokens * (hidden + ffn // shards) * element
        activations = max(LEAST_ACTIVATIONS_BYTES, batch + _sampling(config, shape, task, GPU_SAMPLING_BYTES))
        return EngineMemory(-(-weights // shards), adapters, 0, activations, kind.context_bytes + GRAPH_BYTES)
    if shape.tied:
        weights += shape.vocab * shape.hidden * element
    batch = tokens * (hidden + ffn) * element
    rows = _sampling(config, shape, task, SAMPLING_BYTES)
    processes = -(-_process_bytes(shape, shards) // shards)
    return EngineMemory(-(-weights // shards), adapters, 0, batch // shards + rows // shards, processes)


def _adapters(config: EngineConfig, shape: ServedShape, task: str, arch: str, shards: int) -> int:
    """Numbers that a worker keeps (vllm/lora/layers, without fully_sharded_loras)."""
    rank = adapter_rank_limit(config, task=task, arch=arch)
    sides = shape.lora_whole + -(-(shape.lora_sides - shape.lora_whole) // shards)
    return config.adapter_slots * lora_rank_bound(rank) * sides if rank else 0


def _sampling(config: EngineConfig, shape: ServedShape, task: str, per_entry: int) -> int:
    return (config.max_num_seqs or 0) * shape.vocab * per_entry if task == "generate" else 0


def _guessed(seqs: int, vocab: int, draft_tokens: int, tokens: int, context: int | None) -> int:
    """On a GPU: logits of each guessed token, once more where they are joined from shards (what is computed in float32
    comes a part at a time: vllm/v1/worker/gpu/spec_decode/rejection_sampler.py), and the tokens of every request, in
    which guesses are looked up (states.py there)."""
    return min(seqs * draft_tokens, tokens) * vocab * 4 + seqs * (context or 0) * 4


def _batch(device_memory_bytes: int, *, on_host: bool) -> tuple[int, int]:
    """Requests at once and tokens in a batch, where nobody sets them."""
    if on_host:
        return CPU_MAX_NUM_SEQS, BATCHED_TOKENS
    return next((seqs, tokens) for least, seqs, tokens in GPU_BATCHES if device_memory_bytes >= least)
