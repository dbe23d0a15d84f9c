"""Publishes the weights: every rank writes what it owns, cast to the serving dtype, into a version in shared memory.

No gather and no process with a full copy. A LoRA run publishes its factors alone, as peft stores them, or merged on
the way: the rank that owns a range of a base weight adds the same range of scaling * B @ A to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm, zero
from peft.tuners.lora import LoraLayer

from train.control.rank import Rank
from train.model.model import ADAPTER, CONFIG_FILE, DTYPES, STEM, checkpoint_name, config_json, is_factor, stored_name
from train.plan.spec import TrainSpec
from train.state import fragments
from train.state.copies import Piece, Written, is_full, write_together
from train.state.fragments import Fragment
from train.state.stored_names import StoredNames, cut, stored_names
from weights.format.errors import StoreFull
from weights.format.layout import Layout, TensorSpec
from weights.format.manifest import AUX_SUFFIXES
from weights.format.names import INDEX_SUFFIX, MANIFEST_FILE, version_name
from weights.format.torch_views import Strided, dtype_code

FINGERPRINT_PROMPT = (3, 7, 11, 13)


def publish_step(rank: Rank, step: int, epoch: float) -> None:
    """Collective: a version of the model as it is after this step. Raises StoreFull, on every rank."""
    spec, adapter_of = rank.spec, None
    rank.progress.enter("publishing")
    version = f"{spec.version_prefix}{version_name(step)}"
    if spec.published_kind == "adapter":
        adapter_of = {"base": spec.base_model, "base_version": spec.base_version, "rank": spec.lora_rank}
    written = publish(rank, version, {"step": step, "epoch": epoch, "method": spec.method})
    rank.emit("published", version=version, adapter=adapter_of, step=step, epoch=epoch, **asdict(written))


def publish_if_room(rank: Rank, step: int, epoch: float) -> bool:
    """As `publish_step`, and whether it did; where memory is full, training goes on without: the last step has a
    version of its own."""
    try:
        publish_step(rank, step, epoch)
    except (StoreFull, OSError) as error:
        if not is_full(error):
            raise
        text = f"the version of step {step}, epoch {epoch:.3g}, is not published: {error}"
        rank.emit("message", level="warn", text=text)
        return False
    return True


def publish(rank: Rank, version: str, meta: dict[str, Any]) -> Written:
    """Collective: write and commit `version` of `spec.output_model`: a complete Hugging Face directory, or for kind
    "adapter" (`spec.published_kind`) a peft one. Raises as `write_together`."""
    engine, spec, store = rank.engine, rank.spec, rank.store
    kind = spec.published_kind
    existing = store.find(kind, spec.output_model, version)
    if existing is not None:
        # An earlier world of this job committed it at the same step and died before it reported its end.
        return Written(str(existing.path), existing.nbytes, 0.0)
    meta = {"job": spec.job_id, "base": spec.base_model, "base_version": spec.base_version, **meta}
    if kind == "version":
        meta["fingerprint"] = fingerprint(engine)
    layout = Layout.plan(published_tensors(engine, spec), stem=STEM if kind == "adapter" else "model")

    def reserve() -> Any:
        files = aux_files(engine, spec)
        return store.reserve(layout, kind=kind, model=spec.output_model, version=version, aux_files=files)

    return write_together(store, layout, reserve, _pieces(engine, spec), meta)


@torch.no_grad()
def fingerprint(engine: Any) -> dict[str, Any] | None:
    """Collective: the likeliest token after a fixed prompt and its log-probability in nats, for the version's `meta`.
    An engine that has loaded the version compares it (serve.load.version_check). None of a model without numbers."""
    ids = torch.tensor([FINGERPRINT_PROMPT], device=engine.device)
    positions = torch.arange(ids.shape[1], device=engine.device)[None]
    trains = engine.module.training
    engine.eval()
    model = engine.module.model
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, segments=((0, ids.shape[1]),)).logits
    engine.train(trains)
    logprob, token = logits[0, -1].float().log_softmax(-1).max(-1)
    if not logprob.isfinite():
        return None
    return {"prompt": list(FINGERPRINT_PROMPT), "token": int(token), "logprob": float(logprob)}


def published_tensors(engine: Any, spec: TrainSpec) -> list[TensorSpec]:
    """What a published version holds, in the serving dtype: the base checkpoint's tensors under their stored names, or
    LoRA's factors.

    In the order of the model's parameters, fused ones in their order in memory: what an engine fuses lies adjacent.
    """
    code = dtype_code(DTYPES[spec.serve_dtype])
    if spec.published_kind == "adapter":
        return [TensorSpec(stored_name(p.name), code, p.shape) for p in fragments.parameters(engine) if p.trained]
    names = base_names(engine, spec.base_path)
    dtypes = {p.name: code for p in fragments.parameters(engine) if not is_factor(p.name)}
    dtypes |= {name: dtype_code(buffer.dtype) for name, buffer in _buffers(engine)}
    return [TensorSpec(t.name, dtype, t.shape) for name, dtype in dtypes.items() for t in names.get(name, ())]


@lru_cache(maxsize=1)  # a rank has one engine
def base_names(engine: Any, base_path: str) -> StoredNames:
    """Raises UnsupportedModel if the result could not be written under the base's own names."""
    shapes = {p.name: p.shape for p in fragments.parameters(engine) if not is_factor(p.name)}
    shapes |= {name: tuple(buffer.shape) for name, buffer in _buffers(engine)}
    return stored_names(engine.module.model, shapes, base_path)


def _pieces(engine: Any, spec: TrainSpec) -> Iterator[Piece]:
    """What this rank writes; the first rank also writes buffers."""
    if spec.published_kind == "adapter":
        for fragment in fragments.written(engine, fragments.trained_fragments(engine)):
            for runs, ours in fragment.pieces():
                yield stored_name(fragment.name), runs, fragment.weights[ours]
        return
    names = base_names(engine, spec.base_path)
    for fragment in fragments.written(engine, served_fragments(engine)):
        for runs, ours in fragment.pieces():
            yield from _stored(names, fragment.name, runs, fragment.weights[ours])
    if comm.get_rank() == 0:
        for name, buffer in _buffers(engine):
            yield from _stored(names, name, Strided(0, buffer.numel(), buffer.numel(), 1), buffer.reshape(-1))


def _stored(names: StoredNames, parameter: str, runs: Strided, weights: torch.Tensor) -> Iterator[Piece]:
    if runs.count > 1:
        # Columns of a matrix, and train.model.tensor_parallel cuts only what is stored as it is.
        (stored,) = names[parameter]
        yield stored.name, runs, weights
        return
    for name, at, ours in cut(names[parameter], runs.start, runs.run):
        piece = weights[ours]
        yield name, Strided(at, piece.numel(), piece.numel(), 1), piece


def served_fragments(engine: Any) -> Iterator[Fragment]:
    """This rank's fragments of what is served, LoRA merged; collective under ZeRO-3 with LoRA."""
    layers = {
        checkpoint_name(f"{name}.base_layer.weight").removeprefix("model."): layer
        for name, layer in engine.module.named_modules()
        if isinstance(layer, LoraLayer)
    }
    owned = {one.name: one for of in (fragments.trained_fragments, fragments.frozen_fragments) for one in of(engine)}
    for parameter in fragments.parameters(engine):
        fragment = owned.get(parameter.name)
        if parameter.name in layers:  # on every rank in the same order: gathering is collective
            layer = layers[parameter.name]
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            gathered = zero.GatheredParameters([down, up]) if fragments.is_zero3(engine) else nullcontext()
            with gathered:
                if fragment is not None:
                    fragment = _merged(fragment, down, up, layer.scaling[ADAPTER])
        if fragment is not None and not is_factor(parameter.name):
            yield fragment


def _merged(fragment: Fragment, down: torch.Tensor, up: torch.Tensor, scaling: float) -> Fragment:
    """`fragment` of W (out, in) plus its range of scaling * up (out, r) @ down (r, in), in float32. ZeRO-3 gathers the
    factors on the device, and keeps W in host memory where the parameters are offloaded."""
    width = down.shape[1]
    first, last = fragment.start // width, -(-(fragment.start + fragment.numel) // width)
    delta = (up[first:last].float() @ down.float()).view(-1)
    offset = fragment.start - first * width
    ours = delta[offset : offset + fragment.numel].to(fragment.weights.device)
    merged = fragment.weights.float() + scaling * ours
    return replace(fragment, weights=merged)


def aux_files(engine: Any, spec: TrainSpec) -> dict[str, bytes]:
    """adapter_config.json for an adapter; for whole weights config.json with the serving dtype, tokenizer and the
    like, from the base directory."""
    if spec.published_kind == "adapter":
        return {CONFIG_FILE: config_json(engine.module.model.peft_config[ADAPTER], spec.base_model)}
    files = {}
    for path in sorted(Path(spec.base_path).iterdir()):
        written_anew = path.name == MANIFEST_FILE or path.name.endswith(INDEX_SUFFIX)
        if path.suffix in AUX_SUFFIXES and not written_anew and path.is_file():
            files[path.name] = path.read_bytes()
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = {"bf16": "bfloat16", "fp32": "float32"}[spec.serve_dtype]
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def _buffers(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """Persistent buffers (those in the checkpoint), the same on every rank."""
    return [
        (f"{prefix}.{name}".removeprefix("model."), buffer)
        for prefix, module in engine.module.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
