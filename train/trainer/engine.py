"""Creates the DeepSpeed engine of one rank and joins its distributed world."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.runtime import compiler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch.distributed import distributed_c10d

from runtime.devices.kind import HOST_MEMORY
from runtime.devices.kinds import kind_of
from train.model import attention
from train.model.tensor_parallel import partition_config, seen_through_adapters
from train.plan.auto import allowed_sizes, ranks_of_row
from train.plan.errors import InvalidSpec
from train.plan.spec import TrainSpec
from train.state import fragments

# DeepSpeed imports Muon with its first engine and compiles its functions at import: six seconds of processor time for
# an optimizer that the box does not use.
_compile, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
compiler.compile = _compile

COLLECTIVE_TIMEOUT_S = 600.0
MAX_BUCKET_ELEMENTS = 50_000_000
ADAM_BETAS = (0.9, 0.95)


def meeting_url(meeting: str | Path, rank: int = 0, world_size: int = 1) -> str:
    """torch's rendezvous URL for the file `meeting`, in a directory private to this user. The first rank creates the
    file; it must exist as long as the world, which creates groups later.

    torch's TCP store would listen on every interface and accept writes from anyone.
    """
    return f"file://{meeting}?rank={rank}&world_size={world_size}"


def init_world(device_kind: str, meeting: str, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
    """Join the world that meets at `meeting` (see `meeting_url`). Raises InvalidSpec if DeepSpeed computes on devices
    of another kind.

    `timeout_s` bounds every collective of every group. DeepSpeed passes it to the first group only; for the others
    torch's default of 30 minutes, in which a hung peer would go unnoticed, is replaced.
    """
    kind = kind_of(device_kind)
    if (accelerator := get_accelerator().device_name()) != kind.name:
        raise InvalidSpec(
            f"the job needs devices of kind {kind.name!r}, but DeepSpeed computes on {accelerator!r}, which it found "
            "on this machine"
        )
    # DeepSpeed would compile C++ on first use (shm_comm 30 s, CPUAdam 90 s); torch has the same operations.
    deepspeed.ops.__dict__["__compatible_ops__"] = dict.fromkeys(ALL_OPS, False)
    timeout = timedelta(seconds=timeout_s)
    distributed_c10d._get_default_timeout = lambda backend: timeout
    kind.after_fork()
    # load_model gives every rank the same bytes; a broadcast through gloo would cost more than loading them.
    DeepSpeedEngine._broadcast_model = lambda engine: None
    deepspeed.init_distributed(
        dist_backend=kind.collectives, timeout=timeout, auto_mpi_discovery=False, verbose=False, init_method=meeting
    )
    if not kind.on_host:
        # Work on the host (offloaded Adam, reading a snapshot) may use this rank's share of the processors.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.get_world_size()))


def build_engine(objective: torch.nn.Module, spec: TrainSpec) -> Any:
    """A DeepSpeedEngine around `objective`. Collective. Raises InvalidSpec if the world size does not fit."""
    world_size, together = comm.get_world_size(), ranks_of_row(vars(spec))
    if world_size not in allowed_sizes(spec.batch_size, world_size, spec.micro_batch, together):
        raise InvalidSpec(
            f"batch_size {spec.batch_size} in micro-batches of {spec.micro_batch} cannot be shared by {world_size} "
            f"ranks, {together} for each row; see train.plan.auto.allowed_sizes"
        )
    trained = [p for p in objective.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(_groups(trained, spec), lr=spec.learning_rate, betas=ADAM_BETAS, fused=True)
    config = _config(spec, world_size, trained)
    if spec.tensor_parallel > 1:
        plan = partition_config(objective.model.config, spec.tensor_parallel)
        config["tensor_parallel"] = {"autotp_size": spec.tensor_parallel, "partition_config": plan}
    if spec.zero_stage == 3:
        # ZeRO-3 moves parameters to the device one by one and keeps its part of each (zero.Init). Before that the
        # engine would move the whole module, which fails for a model larger than one device.
        objective.to = partial(place_buffers, objective)
    # Validations run on whole rows, because they keep no activations.
    groups = UlyssesSPAttentionHF.register_with_transformers(
        objective.model, attention.NAME, spec.sequence_parallel, micro_batch_size=1, disable_in_eval=True
    )
    with seen_through_adapters():
        engine, *_ = deepspeed.initialize(
            model=objective, optimizer=optimizer, config=config, mpu=groups, dist_init_required=False
        )
    if spec.tensor_parallel > 1:
        # The check compares the first batch over the group, and cannot compare a dict of tensors.
        engine.first_dataloader_check.remove()
    fragments.sum_gradients(engine)
    fragments.coarsen_clipping(engine)
    return engine


def place_buffers(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move the buffers of `module` to the device, and no parameters."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module


def _groups(trained: list[torch.nn.Parameter], spec: TrainSpec) -> list[dict[str, Any]]:
    # ZeRO 1 and 2, and ZeRO 3 on one device, lay parameters end to end. On GPUs torch's grouped product needs experts
    # aligned to 16 bytes (GroupedMMUtils.h). So parameters whose number of elements 8 does not divide come last.
    trained = sorted(trained, key=lambda p: prod(p.shape) % 8 != 0)
    # Norms and biases are not decayed (the convention since GPT-2). Without decay one group makes fewer partitions.
    if spec.weight_decay == 0:
        return [{"params": trained, "weight_decay": 0.0}]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _config(spec: TrainSpec, world_size: int, trained: list[torch.nn.Parameter]) -> dict[str, Any]:
    # Stage 0 runs as stage 1, which computes the same in less memory: in stage 0 every rank keeps all optimizer state,
    # and in bf16 DeepSpeed has no fp32 master weights there.
    stage, kind = max(1, spec.zero_stage), kind_of(spec.device_kind)
    elements = sum(p.numel() for p in trained)
    micro_batches = spec.options.get("rows", 1) * spec.batch_size // spec.micro_batch
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": not kind.on_host,
        # The default of 5e8 elements is allocated again in every backward pass.
        "reduce_bucket_size": max(max(p.numel() for p in trained), min(elements, MAX_BUCKET_ELEMENTS)) + 1,
        "allgather_bucket_size": 2 * MAX_BUCKET_ELEMENTS,
    }
    if spec.offload != "none":
        zero["offload_optimizer"] = {"device": HOST_MEMORY, "pin_memory": kind.locks_pages}
    if spec.offload == "parameters":
        zero["offload_param"] = {"device": HOST_MEMORY, "pin_memory": kind.locks_pages}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": micro_batches * ranks_of_row(vars(spec)) // world_size,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": spec.max_grad_norm,
        # Gradients are reduced and summed in fp32, so that the loss curve does not depend on the number of ranks.
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
        # These timers are on by default, and nothing reads them. They wait for the device at both ends of every
        # micro-batch, so the next micro-batch could not be launched meanwhile.
        "timers": {"throughput": {"enabled": False}},
        "wall_clock_breakdown": False,
    }
    if spec.precision == "bf16":
        # In stage 1, add each bf16 gradient to its fp32 sum and free it at once; by default all of them stay in memory
        # for the life of the rank, 2 bytes per trained parameter.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    return config
