"""The parts of `make gpu-smoke` that measure a training rank, with the ranks' own code. Each part works on any kind of
device, including the CPU, and for any size, so that tests run it without a GPU. An error is the distance from the
float32 result divided by that result's norm."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.checks import ROUNDS, Check, best_s
from runtime.devices import kinds
from runtime.devices.kinds import of_torch

GIB = 2**30
PIECE_ELEMENTS = 2**22
"""Size of the page-locked buffer that measures the link; pieces of a snapshot are smaller."""


def snapshots(device: torch.device, state_bytes: int = 2 * GIB, folder: str = "/dev/shm") -> list[Check]:
    """Write a rank's state into a snapshot file and back; compare with page-locked copies of the same size."""
    from train.state import copies
    from weights.format.layout import Layout, TensorSpec
    from weights.format.torch_views import Strided
    from weights.memory.store import WeightStore

    kind, elements = of_torch(device), state_bytes // 4
    state = torch.arange(elements, dtype=torch.float32, device=device)
    into = torch.zeros_like(state)
    buffer = torch.empty(PIECE_ELEMENTS, pin_memory=kind.locks_pages)
    with kind.copy_stream(), tempfile.TemporaryDirectory(dir=folder, prefix="appliance-smoke-") as place:
        link_out = best_s(partial(kind.synchronize, device), lambda: _pieces(state, buffer, out=True))
        link_in = best_s(partial(kind.synchronize, device), lambda: _pieces(into, buffer, out=False))
        host_s = state_bytes / host_copy(min(state_bytes, GIB))
        layout = Layout.plan([TensorSpec("snapshot", "F32", (elements,))])
        store = WeightStore(Path(place), budget_bytes=None)
        draft = store.reserve(layout, kind="snapshot", model="smoke", version="1")
        whole = Strided(0, elements, elements, 1)
        # The first round also includes page faults.
        out = best_s(partial(kind.synchronize, device), lambda: copies.write(draft, [("snapshot", whole, state)]))
        back = best_s(partial(kind.synchronize, device), lambda: copies.read(draft, [("snapshot", whole, into)]))
        draft.abort()
    remedy = "raise THREADS of train.state.copies, check numa_bind"
    return [
        Check("snapshot out over limit", max(link_out, host_s) / out, "x", least=0.6, remedy=remedy),
        Check("snapshot in over limit", max(link_in, host_s) / back, "x", least=0.6, remedy=remedy),
        Check("snapshot is right", torch.equal(state, into), least=1, remedy="train.state.copies; do not train"),
    ]


def host_copy(nbytes: int = GIB, threads: int = 8) -> float:
    """Return bytes/s of host memory copies, with as many threads as an engine uses for loading."""
    there, here = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    parts = list(zip(there.chunk(threads), here.chunk(threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        took = []
        for _ in range(1 + ROUNDS):
            began_s = time.perf_counter()
            deque(pool.map(lambda pair: pair[0].copy_(pair[1]), parts), maxlen=0)
            took.append(time.perf_counter() - began_s)
    return nbytes / min(took[1:])


def _pieces(state: torch.Tensor, buffer: torch.Tensor, *, out: bool) -> None:
    for part in state.split(len(buffer)):
        here = buffer[: len(part)]
        target, source = (here, part) if out else (part, here)
        target.copy_(source, non_blocking=True)


def attention(
    device: torch.device, tokens: int = 16_384, heads: int = 32, kv_heads: int = 8, dim: int = 128
) -> list[Check]:
    """Measure a layer's attention over a packed row of examples of many lengths, forward and backward. The error covers
    heads of `dim`, full and with a window, and narrower heads (values narrowest), which need padding."""
    from train.model import attention as packed

    kind, segments = of_torch(device), _segments(tokens)
    kind.unplanned_attention()  # as in ranks, where lengths rarely repeat
    shapes = ((1, heads, tokens, dim), (1, kv_heads, tokens, dim), (1, kv_heads, tokens, dim))
    torch.manual_seed(7)
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    upstream = torch.randn((1, tokens, heads, dim), device=device, dtype=torch.bfloat16)

    def step(given: Iterable[torch.Tensor] = inputs, window: int | None = None) -> list[torch.Tensor]:
        given = list(given)
        out, _ = packed.packed_attention(
            torch.nn.Module(), *given, None, segments=segments, scaling=dim**-0.5, sliding_window=window
        )
        return [out, *torch.autograd.grad(out, given, upstream[..., : out.shape[-1]].to(out.dtype))]

    seconds = best_s(partial(kind.synchronize, device), step)
    with mock.patch.object(packed, "_VARLEN_DTYPES", ()):
        split_s = best_s(partial(kind.synchronize, device), step)
    widths = (dim - 4, dim - 4, dim - 4 - dim // 8)
    narrow = [one.detach()[..., :width].requires_grad_() for one, width in zip(inputs, widths, strict=True)]
    errors = [
        _error(ours, exact)
        for given, window in ((inputs, None), (inputs, tokens // 64), (narrow, None))
        for ours, exact in zip(
            step(given, window), step([one.detach().float().requires_grad_() for one in given], window), strict=True
        )
    ]
    remedy = "a wrong or slow kernel for a row: take its dtype from _VARLEN_DTYPES of train.model.attention"
    return [
        Check("attention over split", split_s / seconds, "x", least=1, remedy=remedy),
        Check("attention's error", _worst(errors), most=0.02, remedy=remedy),
    ]


def _segments(tokens: int) -> tuple[tuple[int, int], ...]:
    """Return bounds of examples that take an eighth, a sixteenth, ... of a row, repeatedly; the last takes the rest."""
    bounds, end, length = [0], 0, max(1, tokens // 8)
    while end < tokens:
        end = min(tokens, end + length)
        bounds.append(end)
        length = length // 2 if length > max(1, tokens // 64) else max(1, tokens // 8)
    return tuple(zip(bounds, bounds[1:], strict=False))


def head(
    device: torch.device, tokens: int = 4096, width: int = 4096, vocabulary: int = 128_256, checked_width: int = 256
) -> list[Check]:
    """Measure the loss of `tokens` trained positions and the gradients of the output head."""
    from train.methods.packed_objective import LogProbHead
    from train.plan import estimate

    kind = of_torch(device)

    def made(width: int) -> tuple[LogProbHead, torch.Tensor, torch.Tensor]:
        torch.manual_seed(7)
        layer = LogProbHead(width, vocabulary, bias=False, device=device, dtype=torch.bfloat16)
        hidden = torch.randn((tokens, width), device=device, dtype=torch.bfloat16).requires_grad_()
        return layer, hidden, torch.randint(vocabulary, (tokens,), device=device)

    def step(layer: LogProbHead, hidden: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        loss = -layer(hidden, labels).sum() / tokens
        return [loss, *torch.autograd.grad(loss, [hidden, layer.weight])]

    whole = made(width)
    held = 0 if kind.on_host else torch.accelerator.memory_allocated()
    seconds = best_s(partial(kind.synchronize, device), partial(step, *whole))
    peak = 0 if kind.on_host else torch.accelerator.max_memory_allocated() - held
    layer, hidden, labels = made(checked_width)  # a narrow layer: its gradient is the sum of several parts
    ours = step(layer, hidden, labels)
    weight, exact = layer.weight.detach().float().requires_grad_(), hidden.detach().float().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact @ weight.t(), labels)
    errors = map(_error, ours, [loss, *torch.autograd.grad(loss, [exact, weight])])

    shape = estimate.ModelShape(vocabulary * width, width, vocab=vocabulary)
    fields = {"micro_batch": 1, "max_length": tokens, "full": True, "device_kind": kind.name}
    planned = estimate.head_bytes(shape, fields, 2) + 2 * 2 * tokens * width
    rate = 6 * tokens * vocabulary * width / seconds
    counted, wrong = "head_bytes of train.plan.estimate", "train.methods.packed_objective"
    return [
        Check("loss head", rate / 1e12, "TFLOP/s"),
        Check("loss head's memory", peak / planned, "x planned", most=1.1, remedy=f"plans assume less: {counted}"),
        Check("loss head's error", _worst(errors), most=0.02, remedy=f"wrong gradients: {wrong}; do not train with it"),
    ]


def kernels(
    device: torch.device,
    tokens: int = 8192,
    hidden: int = 4096,
    layers: int = 2,
    family: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
) -> list[Check]:
    """Compare layers, forward and backward, with Liger's kernels and with torch's, the default (`kernels`)."""
    from transformers import AutoConfig, AutoModel

    from train.model import attention as packed
    from train.model.model import use_liger

    kind = of_torch(device)
    packed.register()
    config = AutoConfig.for_model(
        family,
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 128),
        num_key_value_heads=max(1, hidden // 512),
        head_dim=min(128, hidden // 2),
        pad_token_id=0,
    )
    torch.manual_seed(7)
    exact = AutoModel.from_config(config, attn_implementation=packed.NAME).to(device)
    model = AutoModel.from_config(config, attn_implementation=packed.NAME, dtype=dtype).to(device)
    model.load_state_dict(exact.state_dict())
    given, upstream = (torch.randn((1, tokens, hidden), device=device) for _ in range(2))
    row = {"position_ids": torch.arange(tokens, device=device)[None], "segments": ((0, tokens),), "use_cache": False}

    def step(model: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        out = model(inputs_embeds=given.to(dtype), **row).last_hidden_state
        learnt = [p for name, p in model.named_parameters() if "embed" not in name]
        return [out, *torch.autograd.grad(out, learnt, upstream.to(dtype))]

    def measured() -> tuple[float, int]:
        if kind.on_host:
            return best_s(partial(kind.synchronize, device), partial(step, model, dtype)), 1
        torch.accelerator.reset_peak_memory_stats()
        held, seconds = (
            torch.accelerator.memory_allocated(),
            best_s(partial(kind.synchronize, device), partial(step, model, dtype)),
        )
        return seconds, torch.accelerator.max_memory_allocated() - held

    right = step(exact, torch.float32)
    torch_s, torch_bytes = measured()
    use_liger(model)  # this also changes the rotary embedding of `exact`
    liger_s, liger_bytes = measured()
    remedy = "leave `kernels` of jobs at 'torch'"
    return [
        Check("liger over torch", torch_s / liger_s, "x", least=1, remedy=remedy),
        Check("liger's memory over torch's", liger_bytes / torch_bytes, "x", most=1, remedy=remedy),
        Check("liger's error", _worst(map(_error, step(model, dtype), right)), most=0.02, remedy=remedy),
    ]


def ranks(
    rank: int, of: int, meet: str, device_kind: str, *, steps: int = 20, width: int = 512, tokens: int = 1024
) -> list[Check]:
    """Train a small model with ZeRO 2, on `of` ranks with one device each, repeatedly on the same examples. The loss
    must fall, and all ranks must end with the same weights."""
    kind = kinds.kind_of(device_kind)
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(of), "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    )
    os.environ.update({"DS_ACCELERATOR": kind.name, "NCCL_SOCKET_IFNAME": "lo"})
    from deepspeed import comm
    from transformers import LlamaConfig, LlamaForCausalLM

    from train.methods.methods import DEFAULT
    from train.methods.packed_objective import PackedObjective
    from train.model import attention as packed
    from train.plan.spec import TrainSpec
    from train.trainer.engine import build_engine, init_world, meeting_url

    began_s = time.perf_counter()
    device = torch.device(kind.name) if kind.on_host else torch.device(kind.name, 0)
    kind.use(device)
    init_world(device_kind, meeting_url(meet, rank, of), timeout_s=100.0)
    packed.register()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        attn_implementation=packed.NAME,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    spec = TrainSpec(
        "smoke", "/b", "/t", "/r", "/shm", "ft:x",
        batch_size=of, learning_rate=1e-3, zero_stage=2, device_kind=device_kind,
    )  # fmt: skip
    engine = build_engine(PackedObjective(model, DEFAULT, {}), spec)
    batch, losses = _batch(rank, of, tokens, 2048, engine.device), []
    for _ in range(steps):
        loss = engine(batch)
        engine.backward(loss * 1, scale_wrt_gas=False)
        engine.step()
        comm.all_reduce(total := loss.detach().clone())
        losses.append(float(total))
        if len(losses) == 1:
            to_first_step_s = time.perf_counter() - began_s
    sums = torch.stack([p.detach().double().abs().sum() for p in engine.module.parameters()])
    least, most = sums.clone(), sums.clone()
    comm.all_reduce(least, op=comm.ReduceOp.MIN)
    comm.all_reduce(most, op=comm.ReduceOp.MAX)
    residual = 0
    if not kind.on_host:
        free, whole = torch.accelerator.get_memory_info()
        residual = whole - free - torch.accelerator.memory_reserved()
    comm.destroy_process_group()
    same = bool(torch.equal(least, most))
    return [
        Check("ranks learn", losses[-1] / losses[0], "x first loss", most=0.9, remedy="compare with one GPU"),
        Check("ranks agree", same, least=1, remedy="their weights differ: NCCL, `nvidia-smi -q -d ECC`, `dcgmi diag`"),
        Check("rank's residual", residual / GIB, "GiB", most=2, remedy="context_bytes of runtime/devices/cuda.py"),
        Check("ranks' first step", to_first_step_s, "s", most=60, remedy="slow imports or NCCL: NCCL_DEBUG=INFO"),
    ]


def _batch(rank: int, of: int, tokens: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Return this rank's row of two fully trained examples, formatted like packed_objective.to_batch."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    half = tokens // 2
    learnt = torch.cat([torch.arange(half - 1), torch.arange(half, tokens - 1)])
    positions = torch.cat([torch.arange(half), torch.arange(tokens - half)])
    tensors = {"input_ids": ids[None], "position_ids": positions[None], "predict_at": learnt, "labels": ids[learnt + 1]}
    return {
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        "segments": ((0, half), (half, tokens)),
        "sequence_sizes": (half - 1, tokens - half - 1),
        "scale": 1.0 / (of * len(learnt)),
    }


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.detach().float() - exact.detach()).norm() / exact.detach().norm())


def _worst(errors: Iterable[float]) -> float:
    """Return the largest error; NaN counts as the largest."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)
