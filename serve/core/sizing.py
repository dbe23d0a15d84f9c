"""Estimates an engine's memory per device and its context length from the sizes of the model and the device. vLLM gets
explicit numbers, because its own memory fraction ignores other engines and training on the device.

With b bytes per element of the computing dtype, P parameters, V tokens in the vocabulary, h the hidden size and f the
MLP width that each token passes through:

    weights      b P (as stored if quantised); on a CPU another b V h for the packed copy of a tied head
    adapters     slots x rank x sum of inputs and outputs of all linear layers x b, allocated at the start
    KV cache     2 x layers x heads x head size x b per token. Capacity: on a CPU one full context; on a GPU the rest of
                 `gpu_memory_fraction`, or less if max_asleep_per_device sleeping engines leave less
    activations  for a batch of tokens, and for sampling max_num_seqs rows of V logits
    engine       on a CPU the engine's processes, also during sleep; on a GPU the CUDA context and captured graphs

The CPU constants were measured on two models (error under 6 %); the GPU constants were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from runtime.devices.kind import DeviceKind
from runtime.devices.kinds import kind_of
from serve.core.config import EngineConfig
from serve.core.model_settings import ModelSettings
from weights.format.foreign_json import size, text_part

CPU_KV_BYTES = 256 * 2**20
LEAST_KV_BYTES = 64 * 2**20
LEAST_FRACTION = 0.01
LORA_RANK_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Dense architectures for which vLLM supports adapters on every linear layer. On a CPU it excludes experts.
ADAPTER_ARCHITECTURES = frozenset(
    f"{family}ForCausalLM"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Granite", "Olmo2", "Olmo3", "Phi3")
)
# The linear layers of these architectures, by the last part of the layer's name.
ADAPTER_MODULES = tuple("q_proj k_proj v_proj qkv_proj o_proj gate_proj up_proj gate_up_proj down_proj".split())
GRAPH_BYTES = 2**30  # vLLM reports 0.5 to 1 GiB for models of 1 to 8 B parameters and its default batch sizes
LEAST_ACTIVATIONS_BYTES = 2**30

PROCESS_BYTES, WORKER_BYTES = 285_000_000, 190_000_000  # of front end and core; of each further worker
TOKENIZER_BYTES = 1_600  # bytes per token of the vocabulary
BATCH_ELEMENTS_H, BATCH_ELEMENTS_F = 16, 4  # elements per batch token: multiples of hidden size and MLP width
# Bytes per row and token of the vocabulary. On a CPU: logits, sorted values, indexes and cumulative sums. On a GPU:
# logits, float32 logits, sampling noise, and token counts for penalties (vllm/v1/worker/gpu/sample).
SAMPLING_BYTES, GPU_SAMPLING_BYTES = 40, 16
CPU_MAX_NUM_SEQS = 64
BLOCK_TOKENS = 128  # on a CPU; on GPUs 16, 64 or 128, by attention kernel (latent, FP8, heads of 256)
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
INSTEAD_OF_QUANTISED = (
    "import the model as its publisher trained it (bf16 or fp16), or a GGUF file, which is dequantised"
)
QUANTISED = ("quantization_config", "compression_config")  # vllm/model_executor/model_loader/weight_utils.py


class NotServable(ValueError):
    """No engine of the model can start on such devices; the message gives the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class ServedShape:
    """Sizes of a model from its config.json; 0 for a size that config.json lacks.

    stored_bytes: of the version's tensors as stored. quantized: tensors are served as stored, whatever the engine's
    dtype. layers: number of layers with keys and values. latent: numbers that each layer keeps per token as one latent
    vector (multi-head latent attention); 0: it keeps `kv_heads` of `head_dim`. tied: the head uses the embedding.
    lora_sides: sum of inputs + outputs of the linear layers that support adapters.
    """

    stored_bytes: int
    n_parameters: int = 0
    quantized: bool = False
    hidden: int = 0
    ffn: int = 0
    vocab: int = 0
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    tied: bool = False
    lora_sides: int = 0
    context: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], stored_bytes: int, n_parameters: int) -> ServedShape:
        """Return the shape that a Hugging Face config.json describes, for a multimodal model that of its text part."""
        text = text_part(config)
        number = partial(size, text)
        hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
        layers, width = number("num_hidden_layers", "n_layer"), number("intermediate_size", "n_inner")
        kv_heads = number("num_key_value_heads") or heads
        head_dim = number("head_dim") or (hidden // heads if heads else 0)
        kinds = text.get("layer_types")
        attending = layers
        if isinstance(kinds, list) and len(kinds) == layers:
            attending = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
        latent = number("kv_lora_rank")
        experts = number("num_local_experts", "num_experts", "n_routed_experts")
        active = number("num_experts_per_tok") * (number("moe_intermediate_size") or width) if experts else width
        sides = 2 * (hidden + heads * head_dim) + 2 * (hidden + kv_heads * head_dim) + 3 * (hidden + width)
        context = number("max_position_embeddings", "n_positions")
        return cls(
            stored_bytes,
            n_parameters,
            any(part.get(name) for part in (config, text) for name in QUANTISED),
            hidden,
            active,
            number("vocab_size"),
            attending,
            kv_heads,
            head_dim,
            latent + number("qk_rope_head_dim") if latent else 0,
            bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            layers * sides,
            context if 0 < context < 1 << 31 else None,
        )

    def kv_elements_per_token(self, tensor_parallel: int) -> int:
        """Return how many KV cache numbers one worker stores per token; 0 if unknown. If there are more workers than
        key-value heads, several workers store the same head."""
        if self.latent:
            return self.layers * self.latent
        return 2 * self.layers * max(1, self.kv_heads // tensor_parallel) * self.head_dim if self.kv_heads else 0


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that an engine uses on each of its devices under full load."""

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
    """The computed memory and start parameters of an engine.

    max_model_len: the engine's context in tokens, None if the model states no length. kv_tokens: tokens that the KV
    cache holds, None if unknown. max_num_seqs: number of requests that run at once. gpu_memory_fraction: share of a GPU
    that must be free after the engine has created its CUDA context. room_bytes: bytes that the engine may use on each
    device. adapter_slots, adapter_max_rank: as in ReplicaSpec, 0 without adapters. shortened: why the context is
    shorter than the setting or the model's length, "" if it is not. problem: why the engine cannot start, "" if it can.
    """

    memory: EngineMemory
    dtype: str
    max_model_len: int | None
    kv_tokens: int | None
    max_num_seqs: int
    gpu_memory_fraction: float
    room_bytes: int
    adapter_slots: int
    adapter_max_rank: int
    adapters_resident: int
    shortened: str
    problem: str

    def spec_fields(self) -> dict[str, Any]:
        """Return the size as fields of a ReplicaSpec. Raises NotServable."""
        if self.problem:
            raise NotServable(self.problem)
        names = (
            "dtype max_model_len max_num_seqs gpu_memory_fraction adapter_slots adapter_max_rank adapters_resident"
        ).split()
        return {name: getattr(self, name) for name in names} | {"kv_cache_bytes": self.memory.kv_cache_bytes}


def lora_rank_bound(rank: int) -> int:
    """Return the smallest `--max-lora-rank` that vLLM 0.32 accepts (vllm/config/lora.py) and that covers `rank`."""
    return next(bound for bound in LORA_RANK_BOUNDS if bound >= rank)


def adapter_rank_limit(config: EngineConfig, *, task: str, arch: str) -> int:
    """Return the largest adapter rank that engines of this model accept; 0: no adapters."""
    takes = config.adapter_slots and task == "generate" and arch in ADAPTER_ARCHITECTURES
    return config.adapter_max_rank if takes else 0


def default_batch(device_memory_bytes: int, device_name: str, *, on_host: bool) -> tuple[int, int]:
    """Return (concurrent requests, tokens per batch): vLLM 0.32's server defaults (EngineArgs.get_batch_defaults), with
    fewer requests on a CPU, where more requests gain nothing."""
    if on_host:
        return CPU_MAX_NUM_SEQS, 2048
    if device_memory_bytes >= 160 * 2**30:
        return 1024, 16384
    return (1024, 8192) if device_memory_bytes >= 70 * 2**30 and "a100" not in device_name.lower() else (256, 2048)


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
    device_name: str = "",
    settings: ModelSettings | None = None,
) -> EngineSize:
    """Size an engine over `tensor_parallel` devices. All bytes are per device.

    config: the box's. settings: the model's own. asleep_per_device: other engines that may sleep on a device.
    """
    settings = settings or ModelSettings()
    config, kv_dtype = settings.config(config), settings.kv_cache_dtype
    kind, shards = kind_of(device_kind), tensor_parallel
    dtype = settings.dtype or ("bfloat16" if kind.computes_bf16() else "float32")
    element = ELEMENT_BYTES[dtype]
    seqs, tokens = default_batch(device_memory_bytes, device_name, on_host=kind.on_host)
    seqs, tokens = config.max_num_seqs or seqs, settings.batched_tokens or tokens
    context = min(filter(None, (config.max_model_len, shape.context)), default=None)
    rank = adapter_rank_limit(config, task=task, arch=arch)

    weights, activations, engine = _parts(kind, shape, shards, element, tokens, seqs if task == "generate" else 0)
    if settings.draft_tokens and task == "generate" and not kind.on_host:
        # Memory for the logits of drafted tokens, and for every request's tokens, which are searched for n-grams
        # (vllm/v1/worker/gpu/spec_decode/rejection_sampler.py, states.py).
        activations += 4 * (min(seqs * settings.draft_tokens, tokens) * shape.vocab + seqs * (context or 0))
    # Without fully_sharded_loras a worker keeps each layer's hidden side unsharded, less than half of the adapter.
    sides = shape.lora_sides * (shards + 1) // (2 * shards)
    adapters = config.adapter_slots * lora_rank_bound(rank) * sides * element if rank else 0

    # vLLM refuses to start if a smaller share is free once its CUDA context exists
    # (vllm/v1/worker/utils.request_memory). Round down, so that the command line never requests a larger share.
    free = device_memory_bytes - asleep_per_device * kind.asleep_bytes
    share = (free - kind.context_bytes) * 10_000 // device_memory_bytes / 10_000
    fraction = min(config.gpu_memory_fraction, max(LEAST_FRACTION, share))
    room = device_memory_bytes if kind.on_host else min(int(device_memory_bytes * config.gpu_memory_fraction), free)

    block_bytes = BLOCK_TOKENS * shape.kv_elements_per_token(shards) * (1 if "fp8" in (kv_dtype or "") else element)
    # One block more than a sequence fills, because vLLM reserves one block for itself.
    whole = (-(-context // BLOCK_TOKENS) + 1) * block_bytes if context else 0
    problem = _not_computed(kind, shape, dtype, kv_dtype, rank)
    if config.kv_cache_bytes is not None:
        kv = config.kv_cache_bytes
    elif kind.on_host:
        kv = max(CPU_KV_BYTES, min(whole, device_memory_bytes))
    else:
        others = adapters + activations + engine
        left = room - weights - others
        kv = max(left, LEAST_KV_BYTES)
        if left < kv:
            problem = problem or (
                f"a device of {device_memory_bytes} bytes has {left} left for the KV cache, which needs at least "
                f"{LEAST_KV_BYTES}: weights take {weights}, adapters, activations and the engine {others}, engines "
                f"asleep there {device_memory_bytes - room}. Raise the deployment's tensor_parallel, or lower "
                "[scheduler] max_asleep_per_device"
            )
    kv_tokens = (kv // block_bytes - 1) * BLOCK_TOKENS if block_bytes else None
    length, shortened = context, ""
    if context and kv_tokens is not None and kv_tokens < context:
        length = kv_tokens
        shortened = (
            f"its KV cache of {kv / 1e6:,.0f} MB holds {max(0, kv_tokens):,} of {context:,} tokens, "
            f"{whole / 1e6:,.0f} MB would hold all"
        )
        if kv_tokens < BLOCK_TOKENS:
            length, problem = None, problem or f"{shortened}: raise kv_cache_bytes or the number of devices"
    return EngineSize(
        EngineMemory(weights, adapters, kv, activations, engine),
        dtype,
        length,
        kv_tokens,
        seqs,
        fraction,
        room,
        config.adapter_slots if rank else 0,
        rank,
        max(config.adapters_resident, config.adapter_slots),
        shortened,
        problem,
    )


def _not_computed(kind: DeviceKind, shape: ServedShape, dtype: str, kv_dtype: str | None, adapter_rank: int) -> str:
    """Return why engines on such devices cannot compute the model, whatever their memory; "" if they can."""
    where, on_gpu = f"engines on a {kind.title}", not kind.on_host
    if shape.quantized and (lacking := kind.lacks_for_quantised()):
        return (
            f"its layers are quantised, which engines compute only on a processor with {lacking}; this processor "
            f"lacks it: {INSTEAD_OF_QUANTISED}"
        )
    if on_gpu and adapter_rank and dtype == "float32":
        return (
            f"it is set to float32, in which {where} compute no adapters: set bfloat16 or float16, or [serve] "
            "adapter_slots to 0"
        )
    if on_gpu and kv_dtype in ELEMENT_BYTES and kv_dtype != dtype:
        return (
            f"its keys and values are set to {kv_dtype} and it is computed in {dtype}, which {where} do not mix: "
            "set both to the same dtype, or unset keys and values (--kv-cache-dtype none)"
        )
    sizes = kind.head_sizes
    if sizes and shape.head_dim and shape.head_dim not in sizes and not shape.latent:  # latent: other kernel
        known = ", ".join(map(str, sorted(sizes)))
        return f"its attention heads have {shape.head_dim} elements, and {where} compute heads of {known}"
    return ""


def _process_bytes(shape: ServedShape, tensor_parallel: int) -> int:
    further = WORKER_BYTES * tensor_parallel if tensor_parallel > 1 else 0
    return PROCESS_BYTES + further + TOKENIZER_BYTES * shape.vocab


def _parts(
    kind: DeviceKind, shape: ServedShape, shards: int, element: int, tokens: int, rows: int
) -> tuple[int, int, int]:
    """Return bytes per device as (weights, activations, engine itself). rows: number of sequences sampled at once."""
    hidden, ffn = BATCH_ELEMENTS_H * shape.hidden, BATCH_ELEMENTS_F * shape.ffn
    weights = shape.stored_bytes if shape.quantized or not shape.n_parameters else shape.n_parameters * element
    if kind.on_host:
        if shape.tied:
            weights += shape.vocab * shape.hidden * element
        activations = tokens * (hidden + ffn) * element + rows * shape.vocab * SAMPLING_BYTES
        return -(-weights // shards), activations // shards, -(-_process_bytes(shape, shards) // shards)
    if 2 * shape.stored_bytes < 3 * shape.n_parameters:
        weights = shape.stored_bytes  # under 1.5 bytes per parameter: quantised, as another file specifies (ModelOpt)
    # Tensor parallelism divides only the MLP's activations.
    activations = tokens * (hidden + ffn // shards) * element + rows * shape.vocab * GPU_SAMPLING_BYTES
    return -(-weights // shards), max(LEAST_ACTIVATIONS_BYTES, activations), kind.context_bytes + GRAPH_BYTES
