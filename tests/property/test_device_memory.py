"""Engines and jobs that are not refused fit next to all sleeping engines of their devices, on cards of any size."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from appliance.controller.models.capacity import BoxFacts
from runtime.devices.kinds import KINDS, kind_of
from scheduler.core.config import SchedulerConfig
from scheduler.core.workload import Demand, DeploymentView, Device, PlanInput, Policy, ReplicaView
from scheduler.plan.plan import plan
from serve.core.config import EngineConfig
from serve.core.sizing import EngineSize, ServedShape, engine_size
from train.plan.estimate import ModelShape, rank_memory

GIB = 2**30
GPUS = sorted(name for name, kind in KINDS.items() if not kind.on_host)


def llama(billions: int, hidden: int, layers: int, ffn: int, kv_heads: int, heads: int) -> ServedShape:
    about = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    }
    return ServedShape.from_config(about, 2 * billions * 10**9, billions * 10**9)


LLAMA_1B, LLAMA_8B = llama(1, 2048, 16, 8192, 8, 32), llama(8, 4096, 32, 14336, 8, 32)
LLAMA_70B = llama(70, 8192, 80, 28672, 8, 64)
MODEL = {"task": "generate", "arch": "LlamaForCausalLM"}


def sized(kind: str, memory: int, shape: ServedShape, asleep: int, shards: int, config: EngineConfig) -> EngineSize:
    return engine_size(
        config,
        shape,
        **MODEL,
        tensor_parallel=shards,
        device_kind=kind,
        device_memory_bytes=memory,
        asleep_per_device=asleep,
    )


def vllm_starts(size: EngineSize, kind: str, memory: int, asleep: int) -> bool:
    """Whether vLLM would start (vllm/v1/worker/utils.request_memory, with its context) and has enough memory."""
    free = memory - asleep * kind_of(kind).asleep_bytes
    asked = -(-memory * round(size.gpu_memory_fraction * 10_000) // 10_000)
    return free - kind_of(kind).context_bytes >= asked and size.memory.device_bytes <= free


@given(
    kind=st.sampled_from(GPUS),
    memory=st.integers(6 * GIB, 192 * GIB),
    shape=st.sampled_from([LLAMA_1B, LLAMA_8B, LLAMA_70B]),
    asleep=st.integers(0, 4),
    shards=st.sampled_from([1, 2, 4, 8]),
    fraction=st.floats(0.3, 1.0),
    seqs=st.sampled_from([None, 1, 64, 4096]),
)
def test_accepted_engine_starts_next_to_all_sleepers(kind, memory, shape, asleep, shards, fraction, seqs):
    config = EngineConfig(gpu_memory_fraction=fraction, max_num_seqs=seqs)
    size = sized(kind, memory, shape, asleep, shards, config)
    if size.problem:
        return
    assert vllm_starts(size, kind, memory, asleep)
    assert size.gpu_memory_fraction <= fraction and size.memory.device_bytes <= memory * fraction
    assert size.spec_fields()["gpu_memory_fraction"] == size.gpu_memory_fraction
    fewer = sized(kind, memory, shape, 0, shards, config)
    assert fewer.memory.kv_cache_bytes >= size.memory.kv_cache_bytes, "sleepers take from the KV cache"
    assert not fewer.problem


@given(kind=st.sampled_from(GPUS), memory=st.integers(24, 192), asleep=st.integers(0, 2))
def test_small_models_start_on_cards_from_24_gb(kind, memory, asleep):
    memory *= GIB
    for shape, least in ((LLAMA_1B, 32_768), (LLAMA_8B, 4_096)):
        size = sized(kind, memory, shape, asleep, 1, EngineConfig())
        assert not size.problem and (size.max_model_len or 0) >= least
        assert vllm_starts(size, kind, memory, asleep)


MODELS = st.sampled_from(
    [
        ModelShape(1_235_814_400, 2048, 16, 8, 64, 8192, 128256, 800_000, 128256 * 2048),
        ModelShape(8_030_261_248, 4096, 32, 8, 128, 14336, 128256, 2_600_000, 2 * 128256 * 4096),
        ModelShape(70_553_706_496, 8192, 80, 8, 128, 28672, 128256, 13_107_200),
    ]
)


@given(
    kind=st.sampled_from(["cpu", *GPUS]),
    bound=st.integers(0, 4),
    devices=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=12),
)
def test_sleepers_per_device_stay_within_limit(kind, bound, devices):
    config = SchedulerConfig(max_asleep_per_device=bound)
    replicas = tuple(
        ReplicaView(f"r{n}", f"m{n}", "v1", "asleep", tuple(f"n0/{d}" for d in sorted(held)))
        for n, held in enumerate(devices)
    )
    deployments = tuple(
        DeploymentView(r.model, "v1", demand=Demand(last_request_s=float(n)), tensor_parallel=len(r.devices))
        for n, r in enumerate(replicas)
    )
    box = tuple(Device(f"n0/{n}", "n0", n, kind, memory_bytes=80 * GIB) for n in range(4))
    made = plan(PlanInput(Policy("auto"), box, deployments=deployments, replicas=replicas), 1e6, config)
    asleep = [r for r in made.replicas if r.state == "asleep"]
    counts = Counter(device for replica in asleep for device in replica.devices)
    if kind_of(kind).asleep_bytes:
        assert max(counts.values(), default=0) <= bound
    else:
        assert len(asleep) == min(len(replicas), config.max_resident_asleep), "the host's memory has its own bound"


@given(
    kind=st.sampled_from(GPUS),
    memory=st.integers(16, 192).map(lambda n: n * GIB),
    shape=MODELS,
    ranks=st.sampled_from([1, 2, 4, 8]),
    full=st.booleans(),
    stage=st.sampled_from([1, 2, 3]),
    tokens=st.sampled_from([512, 4096, 32768]),
    asleep=st.integers(0, 4),
)
def test_job_that_fits_leaves_room_for_contexts_and_sleepers(kind, memory, shape, ranks, full, stage, tokens, asleep):
    fields = {
        "full": full,
        "lora_rank": 16,
        "precision": "bf16",
        "zero_stage": stage,
        "offload": "none",
        "micro_batch": 1,
        "max_length": tokens,
        "activation_checkpointing": True,
        "device_kind": kind,
    }
    box = BoxFacts(8, kind, memory, None, 0, asleep_per_device=asleep)
    needs = rank_memory(shape, fields, ranks)
    if box.holds(needs, ranks):
        beside = kind_of(kind).context_bytes + asleep * kind_of(kind).asleep_bytes
        assert needs.device_bytes + beside < memory
        fewer = BoxFacts(8, kind, memory, None, 0, asleep_per_device=0)
        assert fewer.holds(needs, ranks), "fewer sleepers never make it too large"
    # The gradient of the head counts: two to twelve bytes per element of the head.
    without = rank_memory(shape, {**fields, "full": False}, ranks)
    head = needs.activations_bytes - without.activations_bytes
    assert (2 * shape.vocab * shape.hidden <= head <= 12 * shape.vocab * shape.hidden) if full else head == 0
