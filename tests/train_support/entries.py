"""Entries for forked ranks of tests, where what is to be checked exists only inside the ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from deepspeed import comm, zero
from peft.tuners.lora import LoraLayer
from torch.distributed import distributed_c10d
from transformers.core_model_loading import revert_weight_conversion

from runtime.leash import Leash
from train import adapter, fragments
from train import publish as publishing
from train.engine import init_world
from train.loop import Progress, Wishes, prepare
from train.publish import publish
from train.spec import TrainSpec
from weights.torch_views import as_tensor


def compare_publish(leash: Leash, args: dict[str, Any]) -> int:
    """Train two steps, publish, gather the whole model the slow way, and report what differs."""
    spec = TrainSpec.from_dict(args["spec"])
    leash.serve({})
    init_world("cpu", 60.0)
    run = prepare(spec, lambda event, **data: None, Wishes(), Progress())
    for _ in range(2):
        run._one_step(run.plan.total_steps)
    sent, written = _count_collective_bytes(), _count_written_elements()
    publish(run.engine, spec, run.store, version="v1", meta={})
    collective_bytes, written_elements = sum(sent), sum(written)
    params = list(run.engine.module.parameters())
    gathered = zero.GatheredParameters(params) if fragments.is_zero3(run.engine) else nullcontext()
    with gathered, torch.no_grad():
        factors = {
            adapter.stored_name(p.name): p.tensor.detach().to(torch.bfloat16).clone()
            for p in fragments.parameters(run.engine) if p.trained
        }  # fmt: skip
        for layer in run.engine.module.modules():
            if isinstance(layer, LoraLayer):
                delta = layer.get_delta_weight("default").float()
                layer.base_layer.weight.data = (layer.base_layer.weight.float() + delta).to(torch.bfloat16)
        loaded = {
            p.name: p.tensor.detach().to(torch.bfloat16).clone()
            for p in fragments.parameters(run.engine) if "lora_" not in p.name
        }  # fmt: skip
        whole = revert_weight_conversion(run.engine.module.model, loaded)
    if spec.published_kind == "adapter":
        whole = factors
    stored = run.store.find(spec.published_kind, spec.output_model, "v1")
    worst: dict[str, float] = {}
    with run.store.lease(stored) as lease:
        for placed in lease.layout:
            ours = as_tensor(lease.view(placed.spec.name), placed.spec.dtype, placed.spec.shape)
            difference = (ours.float() - whole[placed.spec.name].float()).abs().max().item()
            if difference:
                worst[placed.spec.name] = difference
        names = sorted(placed.spec.name for placed in lease.layout)
    leash.emit("compared", names=names, expected=sorted(whole), worst=worst, rank=comm.get_rank(),
               collective_bytes=collective_bytes, written_elements=written_elements,
               elements=sum(tensor.numel() for tensor in whole.values()))  # fmt: skip
    comm.barrier()
    return 0


def _count_collective_bytes() -> list[int]:
    """From now on, the bytes of every tensor this rank hands to a collective."""
    sent: list[int] = []
    for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "gather", "reduce", "scatter",
                 "reduce_scatter_tensor", "all_to_all_single", "send", "recv"):  # fmt: skip
        original = getattr(distributed_c10d, name)

        def counting(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            for tensor in (*args, *kwargs.values()):
                tensors = tensor if isinstance(tensor, list) else [tensor]
                sent.extend(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
            return _original(*args, **kwargs)

        setattr(distributed_c10d, name, counting)
        setattr(torch.distributed, name, counting)
    return sent


def _count_written_elements() -> list[int]:
    """From now on, the elements this rank writes into versions."""
    written: list[int] = []
    original = publishing.write_range

    def counting(draft: Any, name: str, start: int, source: torch.Tensor) -> None:
        written.append(source.numel())
        original(draft, name, start, source)

    publishing.write_range = counting
    return written
