"""Entry functions of forked test ranks, for checks that are possible only inside a rank."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed import comm, zero
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from peft.tuners.lora import LoraLayer
from transformers.core_model_loading import revert_weight_conversion

from runtime.processes.lifeline import Lifeline
from train.control.rank import Progress
from train.model.model import stored_name
from train.plan.spec import TrainSpec
from train.state import copies, fragments
from train.state.copies import Piece
from train.state.publish import publish
from train.trainer.engine import init_world
from train.trainer.worker import prepare
from weights.format.torch_views import as_tensor


def compare_publish(lifeline: Lifeline, args: dict[str, Any]) -> int:
    """Train two steps, publish, gather the whole model with DeepSpeed, and report the differences."""
    spec = TrainSpec.from_dict(args["spec"])
    lifeline.serve({})
    init_world("cpu", args["meeting"], 60.0)
    run = prepare(spec, lambda event, **data: None, Progress())
    for _ in range(2):
        run.train_step()
    written = _count_written_elements()
    publish(run.rank, "v1", {})
    written_elements = sum(written)
    params = list(run.engine.module.parameters())
    gathered = zero.GatheredParameters(params) if fragments.is_zero3(run.engine) else nullcontext()
    with gathered, torch.no_grad():
        for module in run.engine.module.modules():
            if own := list(module.parameters(recurse=False)):
                GatherReplacedLayerParams(own, module).__enter__()  # this has no effect without tensor parallelism
        factors = {
            stored_name(p.name): p.tensor.detach().to(torch.bfloat16).clone()
            for p in fragments.parameters(run.engine)
            if p.trained
        }
        for layer in run.engine.module.modules():
            if isinstance(layer, LoraLayer):
                delta = layer.get_delta_weight("default").float()
                layer.base_layer.weight.data = (layer.base_layer.weight.float() + delta).to(torch.bfloat16)
        loaded = {
            p.name: p.tensor.detach().to(torch.bfloat16).clone()
            for p in fragments.parameters(run.engine)
            if "lora_" not in p.name
        }
        whole = revert_weight_conversion(run.engine.module.model, loaded)
    if spec.published_kind == "adapter":
        whole = factors
    elements = sum(tensor.numel() for tensor in whole.values())
    comm.barrier()  # until the first rank has committed the version
    stored = run.rank.store.find(spec.published_kind, spec.output_model, "v1")
    worst: dict[str, float] = {}
    with run.rank.store.lease(stored) as lease:
        for placed in lease.layout:
            ours = as_tensor(lease.view(placed.spec.name), placed.spec.dtype, placed.spec.shape)
            difference = (ours.float() - whole[placed.spec.name].float()).abs().max().item()
            if difference:
                worst[placed.spec.name] = difference
        names = sorted(placed.spec.name for placed in lease.layout)
    lifeline.emit(
        "compared",
        names=names,
        expected=sorted(whole),
        worst=worst,
        rank=comm.get_rank(),
        written_elements=written_elements,
        elements=elements,
    )
    comm.barrier()
    return 0


def _count_written_elements() -> list[int]:
    """Count the elements that this rank writes into versions from now on."""
    written: list[int] = []
    original = copies.write

    def counting(draft: Any, pieces: Iterable[Piece]) -> None:
        original(draft, (written.append(piece[2].numel()) or piece for piece in pieces))

    copies.write = counting
    return written
