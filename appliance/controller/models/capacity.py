"""Checks whether a model to be served or a job to be trained fits the box, before anything starts. Pure.

Each answer states what is taken, where there is too little, and what would fit instead. Sizes are bytes; sentences
show them in decimal units (1 GB is 10^9 bytes), like all user-visible texts of the box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from runtime.devices.kinds import kind_of
from scheduler.core.config import SchedulerConfig
from serve.core.sizing import EngineSize
from train.methods.method import Method
from train.methods.methods import DEFAULT
from train.plan import estimate
from train.plan.estimate import ModelShape

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)
CPU_RANK_BYTES, GPU_RANK_BYTES = 200_000_000, 2 * 2**30
"""Host memory of a rank besides its tensors: Python and torch, forked from the warm parent; on a GPU also the CUDA
context and pinned buffers."""
_LEAST_TOKENS = 512  # of a row; a shorter one saves little, and cuts examples


@dataclass(frozen=True, slots=True)
class BoxFacts:
    """devices: how many, all alike. device_memory_bytes: of one; logical CPU devices share the host's, so each of a
    few may use more. store_budget_bytes: of shared memory for weights, None without a limit. store_room_bytes: how much
    of it a new reservation could get now. node_devices: of the largest node, the limit for a job or one engine; 0: no
    such limit. host_memory_bytes: of one node, None if unknown. asleep_per_device: sleeping engines that may keep
    memory of one."""

    devices: int
    device_kind: str
    device_memory_bytes: int
    store_budget_bytes: int | None
    store_room_bytes: int
    node_devices: int = 0
    host_memory_bytes: int | None = None
    asleep_per_device: int = SchedulerConfig().max_asleep_per_device

    @property
    def on_host(self) -> bool:
        """Its devices are parts of the host: they share the host's memory, and one may use what another leaves."""
        return kind_of(self.device_kind).on_host

    def room_per_device(self, used_devices: int) -> int:
        if self.on_host:
            return self.devices * self.device_memory_bytes // max(1, used_devices)
        return self.device_memory_bytes

    def room_per_rank(self, ranks: int) -> int:
        """Bytes that weights, states and activations of a job may take on each of its devices."""
        residual = estimate.residual_bytes(self.device_kind, self.device_memory_bytes, self.asleep_per_device)
        return self.room_per_device(ranks) - residual

    def takes(self, memory: estimate.RankMemory) -> int:
        """Bytes that a rank takes of its device: a logical CPU device has the host's memory, so offloading saves
        nothing there."""
        return memory.device_bytes + (memory.host_bytes if self.on_host else 0)

    def ranks_bytes(self, memory: estimate.RankMemory, ranks: int) -> int:
        """Host memory of all ranks: on logical CPU devices all that they hold, on GPUs the processes and what they
        offload."""
        return ranks * (CPU_RANK_BYTES + self.takes(memory) if self.on_host else GPU_RANK_BYTES + memory.host_bytes)

    def holds(self, memory: estimate.RankMemory, ranks: int) -> bool:
        return self.takes(memory) <= self.room_per_rank(ranks)

    def room_per_worker(self, size: EngineSize, workers: int) -> int:
        """What such an engine may take of each device when this many workers of its kind share the box."""
        return self.room_per_device(workers) if self.on_host else size.room_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """fits: now or later. waits: fits, but only after shared memory is freed; the sentence why. problems: why not, one
    sentence each. instead: what would fit. numbers: memory taken, by part."""

    fits: bool
    problems: tuple[str, ...]
    instead: tuple[str, ...]
    numbers: dict[str, Any]
    waits: str = ""
    warnings: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def gb(count_bytes: int) -> str:
    """1,234,567,890 bytes are "1.23 GB"; small ones in MB."""
    return f"{count_bytes / 1e9:.2f} GB" if abs(count_bytes) >= 1e9 else f"{count_bytes / 1e6:.1f} MB"


def job(
    shape: ModelShape, fields: Mapping[str, Any], sizes: Sequence[int], box: BoxFacts, method: Method = DEFAULT
) -> Verdict:
    """A fine-tuning job whose TrainSpec has `fields`, at any of the world sizes `sizes`.

    It needs memory on the devices for its ranks, host memory for what it offloads, and room in the store for its
    result. A snapshot that does not fit the store goes to disk, which only costs time.
    """
    fields = {**fields, "device_kind": box.device_kind}
    memory = {size: method.rank_memory(shape, fields, size) for size in sizes}
    fitting = tuple(size for size in sizes if box.holds(memory[size], size))
    shown = fitting[-1] if fitting else sizes[-1]
    version, snapshot = estimate.version_bytes(shape, fields), estimate.snapshot_bytes(shape, fields)
    budget = box.store_budget_bytes
    snapshot_on_disk = budget is not None and version + snapshot > budget >= version
    needed = version if snapshot_on_disk else version + snapshot
    offloaded = shown * memory[shown].host_bytes
    problems = [] if fitting else [_too_large(memory, box)]
    problems += _over_budget("The result takes", version, box)
    beyond_host = _offload_problem(offloaded, needed, box)
    problems += beyond_host
    instead = _milder(shape, fields, sizes, box, method) if not fitting or beyond_host else []
    if not fitting and not instead:
        problems.append("No milder setting fits either: it needs more devices, larger ones, or a smaller model.")
    waits, warnings = "", []
    if not problems and needed > box.store_room_bytes:
        waits = (
            f"Shared memory is full: the result ({gb(version)}) and a snapshot ({gb(needed - version)}) need "
            f"{gb(needed)}, {gb(max(0, box.store_room_bytes))} can be allocated now. It starts when models or other "
            "jobs have freed some."
        )
    if snapshot_on_disk:
        warnings.append(
            f"A snapshot takes {gb(snapshot)} of shared memory and does not fit next to the result in the store's "
            f"{gb(budget or 0)}: snapshots go to disk, and moving the job between devices takes longer."
        )
    numbers = {
        "trained_parameters": estimate.trained_parameters(shape, fields),
        "devices": shown,
        "device": memory[shown].as_dict()
        | {"device_bytes": box.takes(memory[shown]), "room_bytes": box.room_per_rank(shown)},
        "offload": {"host_bytes": offloaded, "host_memory_bytes": box.host_memory_bytes},
        "host_memory": {"job_bytes": box.ranks_bytes(memory[shown], shown) + needed},
        "host": {
            "version_bytes": version,
            "snapshot_bytes": snapshot,
            "needed_bytes": needed,
            "room_bytes": box.store_room_bytes,
            "budget_bytes": budget,
        },
    }
    return Verdict(not problems, tuple(problems), tuple(instead), numbers, waits, tuple(warnings), fitting)


def _too_large(memory: Mapping[int, estimate.RankMemory], box: BoxFacts) -> str:
    """memory: of a rank, by the number of ranks."""
    best = min(memory, key=lambda size: box.takes(memory[size]) - box.room_per_rank(size))
    rank = memory[best]
    parts = ", ".join(
        f"{part} {gb(getattr(rank, f'{part}_bytes'))}"
        for part in ("weights", "gradients", "optimizer", "buffers", "activations")
    )
    if rank.offloaded_bytes:
        parts += f", less {gb(rank.offloaded_bytes)} in host memory"
    return (
        f"Training needs {gb(box.takes(rank))} on each of {_devices(best)} ({parts}); there are "
        f"{gb(box.room_per_rank(best))}."
    )


def _offload_problem(host_bytes: int, stored_bytes: int, box: BoxFacts) -> list[str]:
    """host_bytes: that all ranks of a job offload to, besides the job's `stored_bytes` in the store, which is also host
    memory. On logical CPU devices, device memory is host memory and counts there."""
    host = box.host_memory_bytes
    if not host_bytes or host is None or box.on_host or host_bytes <= host - stored_bytes:
        return []
    return [
        f"Offloading takes {gb(host_bytes)} of host memory; the host has {gb(host)}, of which the job's own result and "
        f"snapshot take {gb(stored_bytes)}."
    ]


def _milder(
    shape: ModelShape, fields: Mapping[str, Any], sizes: Sequence[int], box: BoxFacts, method: Method
) -> list[str]:
    """The three mildest changes that make a job fit: of its memory, LoRA instead of full training, shorter rows."""
    cut = fields.get("tensor_parallel", 1) > 1  # not with ZeRO-3, offloading or LoRA
    less = {"activation_checkpointing": True}
    saving: dict[str, Any] = less if cut else {**less, "zero_stage": 3}
    changes = [less, {"zero_stage": 2}, {"zero_stage": 3}, saving]
    if fields["offload"] != "none":
        changes += [{"offload": "optimizer"}, {"offload": "none"}]
    elif not box.on_host:
        changes.append({**saving, "offload": "optimizer"})
    if fields["full"]:
        changes += [{**less, "full": False}, {**less, "full": False, "zero_stage": 3}]
    lengths = (fields["max_length"] >> halvings for halvings in range(1, 32))
    changes += [{**saving, "max_length": tokens} for tokens in lengths if tokens >= _LEAST_TOKENS]

    def fits(change: Mapping[str, Any]) -> str:
        changed = {**fields, **change}
        if changed == fields or changed["zero_stage"] < fields["zero_stage"]:
            return ""
        if cut and (change.keys() & {"full", "offload"} or change.get("zero_stage") == 3):
            return ""
        stored = estimate.version_bytes(shape, changed)
        for size in reversed(sizes):
            needs = method.rank_memory(shape, changed, size)
            if box.holds(needs, size) and not _offload_problem(size * needs.host_bytes, stored, box):
                what = [f"{name} {str(value).lower()}" for name, value in change.items() if name != "full"]
                if "full" in change:
                    what.insert(0, f"LoRA (full false, lora_rank {fields['lora_rank']})")
                return f"{' with '.join(what)} on {_devices(size)}: {gb(box.takes(needs))} each"
        return ""

    return list(islice(filter(None, map(fits, changes)), 3))


def serve(
    sizes: Callable[[int], EngineSize], weight_bytes: int, replicas: int, tensor_parallel: int, box: BoxFacts
) -> Verdict:
    """`replicas` engines of a model of `weight_bytes`, each over `tensor_parallel` devices.

    sizes: an engine over this many devices, as it would be started.
    """
    used, size = replicas * tensor_parallel, sizes(tensor_parallel)
    room, needed = box.room_per_worker(size, used), size.memory.device_bytes
    problems, instead = _devices_short(replicas, tensor_parallel, box)
    warnings = []
    if needed > room:
        parts = ", ".join(
            f"{'KV cache' if name == 'kv_cache' else name} {gb(taken)}"
            for name in ("weights", "kv_cache", "adapters", "activations", "engine")
            if (taken := getattr(size.memory, f"{name}_bytes"))
        )
        problems.append(
            f"A replica needs {gb(needed)} on each of {_devices(tensor_parallel)} ({parts}); there are {gb(room)}."
        )
    elif size.problem:
        problems.append(f"An engine cannot be started: {size.problem}.")
    if needed > room or size.problem:
        instead += _other_serving(sizes, replicas, tensor_parallel, box)
    if size.shortened and not size.problem:
        warnings.append(f"The context is {size.max_model_len:,} tokens: {size.shortened}.")
    problems += _over_budget("The weights take", weight_bytes, box)
    budget = box.store_budget_bytes
    if budget is not None and 2 * weight_bytes > budget:
        warnings.append(
            f"A second version ({gb(weight_bytes)}) does not fit next to this one in the store's {gb(budget)}: the "
            "old one must be on disk before a new one is published."
        )
    numbers = {
        "devices": used,
        "device": {
            **asdict(size.memory),
            "device_bytes": needed,
            "room_bytes": room,
            "kv_cache_tokens": size.kv_tokens,
            "whole_sequences": size.kv_tokens // size.max_model_len if size.kv_tokens and size.max_model_len else None,
        },
        "host": {
            "version_bytes": weight_bytes,
            "room_bytes": box.store_room_bytes,
            "budget_bytes": budget,
        },
        "max_model_len": size.max_model_len,
        "dtype": size.dtype,
    }
    return Verdict(not problems, tuple(problems), tuple(instead), numbers, "", tuple(warnings))


def _over_budget(what: str, count_bytes: int, box: BoxFacts) -> list[str]:
    budget = box.store_budget_bytes
    if budget is None or count_bytes <= budget:
        return []
    return [f"{what} {gb(count_bytes)} of shared memory; the store's budget is {gb(budget)} (weights.budget_bytes)."]


def _devices_short(replicas: int, tensor_parallel: int, box: BoxFacts) -> tuple[list[str], list[str]]:
    """Why the box has too few devices for these replicas, and how many it has enough for."""
    widest, used = box.node_devices or box.devices, replicas * tensor_parallel
    if tensor_parallel > widest:
        return [f"A replica over {tensor_parallel} devices needs them side by side; the largest node has {widest}."], []
    if used <= box.devices:
        return [], []
    short = f"{replicas} replicas over {tensor_parallel} devices each need {used} devices; the box has {box.devices}."
    fitting = box.devices // tensor_parallel
    return [short], [f"{_replicas(fitting)} over {_devices(tensor_parallel)} each"] if fitting else []


def _other_serving(
    sizes: Callable[[int], EngineSize], replicas: int, tensor_parallel: int, box: BoxFacts
) -> Iterator[str]:
    def fits(count: int, devices: int) -> bool:
        size = sizes(devices)
        within = size.memory.device_bytes <= box.room_per_worker(size, count * devices)
        return count * devices <= box.devices and within and not size.problem

    fewer = next((n for n in range(replicas - 1, 0, -1) if fits(n, tensor_parallel)), None)
    if fewer is not None:
        yield f"{_replicas(fewer)} over {_devices(tensor_parallel)} each"
    if box.on_host:
        return  # tensor parallelism divides memory that logical devices share anyway
    for wider in TENSOR_PARALLEL_SIZES:
        if tensor_parallel < wider <= box.devices and fits(min(replicas, box.devices // wider), wider):
            yield f"{_replicas(min(replicas, box.devices // wider))} over {_devices(wider)} each"
            break


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _replicas(count: int) -> str:
    return f"{count} replica{'s' * (count != 1)}"
