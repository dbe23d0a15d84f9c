"""Publishes the weights: every rank writes its fragments, cast to the serving dtype, into a version in shared memory.

Nothing is gathered, and no process has a full copy. A LoRA run publishes its factors as peft stores them, or merges
them on the way: the rank that owns a range of a base weight adds the same range of scaling * B @ A to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm, zero
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from train.control.rank import Rank
from train.model.model import ADAPTER, CONFIG_FILE, DTYPES, STEM, checkpoint_name, config_json, is_factor, stored_name
from train.plan.errors import UnsupportedModel
from train.plan.spec import TrainSpec
from train.state import fragments
from train.state.copies import Piece, Written, write_together
from train.state.fragments import Fragment
from weights.format.layout import Layout, TensorSpec
from weights.format.manifest import AUX_SUFFIXES
from weights.format.names import INDEX_SUFFIX, MANIFEST_FILE, version_name
from weights.format.torch_views import Strided, dtype_code

FINGERPRINT_PROMPT = (3, 7, 11, 13)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Tensor `name` of the checkpoint: elements [start, start + numel) of a flattened parameter."""

    name: str
    shape: Shape
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


StoredNames = dict[str, list[StoredTensor]]
"""By parameter, the stored tensors that it consists of, in order."""


def publish_step(rank: Rank, step: int, epoch: float) -> None:
    """Collective: publish the model after this step as a version. Raises StoreFull, on every rank."""
    spec, adapter_of = rank.spec, None
    rank.progress.enter("publishing")
    version = f"{spec.version_prefix}{version_name(step)}"
    if spec.published_kind == "adapter":
        adapter_of = {"base": spec.base_model, "base_version": spec.base_version, "rank": spec.lora_rank}
    written = publish(rank, version, {"step": step, "epoch": epoch, "method": spec.method})
    rank.emit("published", version=version, adapter=adapter_of, step=step, epoch=epoch, **asdict(written))


def publish(rank: Rank, version: str, meta: dict[str, Any]) -> Written:
    """Collective: write and commit `version` of `spec.output_model`: a complete Hugging Face directory, or for kind
    "adapter" (`spec.published_kind`) a peft one. Raises as `write_together`."""
    engine, spec, store = rank.engine, rank.spec, rank.store
    kind = spec.published_kind
    existing = store.find(kind, spec.output_model, version)
    if existing is not None:
        # An earlier world of this job committed it at the same step and died before it reported the version.
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
    """Collective: the likeliest token after a fixed prompt and its log-probability in nats, for the version's `meta`;
    an engine that loads the version computes it too and compares (serve.load.version_check). None if it is not finite.
    """
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
    """The tensors of a published version, in the serving dtype: those of the base checkpoint under their stored names,
    or LoRA's factors.

    They are in the order of the model's parameters, parts of fused ones in their order in memory, so that tensors which
    an engine fuses are adjacent.
    """
    code = dtype_code(DTYPES[spec.serve_dtype])
    if spec.published_kind == "adapter":
        return [TensorSpec(stored_name(p.name), code, p.shape) for p in fragments.parameters(engine) if p.trained]
    names = base_names(engine, spec.base_path)
    dtypes = {p.name: code for p in fragments.parameters(engine) if not is_factor(p.name)}
    dtypes |= {name: dtype_code(buffer.dtype) for name, buffer in _buffers(engine)}
    return [TensorSpec(t.name, dtype, t.shape) for name, dtype in dtypes.items() for t in names.get(name, ())]


@lru_cache(maxsize=1)  # cached for the only engine of a rank
def base_names(engine: Any, base_path: str) -> StoredNames:
    """The stored names of all parameters and buffers. Raises UnsupportedModel if the result could not be written under
    the names of the base."""
    shapes = {p.name: p.shape for p in fragments.parameters(engine) if not is_factor(p.name)}
    shapes |= {name: tuple(buffer.shape) for name, buffer in _buffers(engine)}
    return stored_names(engine.module.model, shapes, base_path)


def _pieces(engine: Any, spec: TrainSpec) -> Iterator[Piece]:
    """The pieces that this rank writes; the first rank also writes buffers."""
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
        # Columns of a matrix: train.model.tensor_parallel cuts only parameters that are one stored tensor.
        (stored,) = names[parameter]
        yield stored.name, runs, weights
        return
    for name, at, ours in cut(names[parameter], runs.start, runs.run):
        piece = weights[ours]
        yield name, Strided(at, piece.numel(), piece.numel(), 1), piece


def served_fragments(engine: Any) -> Iterator[Fragment]:
    """This rank's fragments of the served weights, with LoRA merged; collective under ZeRO-3 with LoRA."""
    layers = {
        checkpoint_name(f"{name}.base_layer.weight").removeprefix("model."): layer
        for name, layer in engine.module.named_modules()
        if isinstance(layer, LoraLayer)
    }
    owned = {f.name: f for f in chain(fragments.trained_fragments(engine), fragments.frozen_fragments(engine))}
    for parameter in fragments.parameters(engine):
        fragment = owned.get(parameter.name)
        if parameter.name in layers:  # in the same order on every rank, because gathering is collective
            layer = layers[parameter.name]
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            gathered = zero.GatheredParameters([down, up]) if fragments.is_zero3(engine) else nullcontext()
            with gathered:
                if fragment is not None:
                    fragment = _merged(fragment, down, up, layer.scaling[ADAPTER])
        if fragment is not None and not is_factor(parameter.name):
            yield fragment


def _merged(fragment: Fragment, down: torch.Tensor, up: torch.Tensor, scaling: float) -> Fragment:
    """`fragment` of W (out, in) plus its range of scaling * up (out, r) @ down (r, in), in float32, on the device of W:
    with offloaded parameters ZeRO-3 has W in host memory, but gathers the factors on the device."""
    width = down.shape[1]
    first, last = fragment.start // width, -(-(fragment.start + fragment.numel) // width)
    delta = (up[first:last].float() @ down.float()).view(-1)
    offset = fragment.start - first * width
    ours = delta[offset : offset + fragment.numel].to(fragment.weights.device)
    merged = fragment.weights.float() + scaling * ours
    return replace(fragment, weights=merged)


def aux_files(engine: Any, spec: TrainSpec) -> dict[str, bytes]:
    """The files besides weights: adapter_config.json for an adapter; else config.json with the serving dtype, the
    tokenizer and the other small files of the base."""
    if spec.published_kind == "adapter":
        return {CONFIG_FILE: config_json(engine.module.model.peft_config[ADAPTER], spec.base_model)}
    files = {}
    for path in sorted(Path(spec.base_path).iterdir()):
        is_replaced = path.name == MANIFEST_FILE or path.name.endswith(INDEX_SUFFIX)
        if path.suffix in AUX_SUFFIXES and not is_replaced and path.is_file():
            files[path.name] = path.read_bytes()
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = {"bf16": "bfloat16", "fp32": "float32"}[spec.serve_dtype]
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def _buffers(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """The persistent buffers (those in checkpoints), the same on every rank."""
    return [
        (f"{prefix}.{name}".removeprefix("model."), buffer)
        for prefix, module in engine.module.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


# --- from the parameters of a model to the tensors of its checkpoint
#
# transformers 5 fuses the stored tensors of some architectures when it loads them: the experts of Mixtral or Qwen3-MoE
# are stored one by one and become `experts.gate_up_proj` (experts, 2 * width, hidden) and `experts.down_proj`. Results
# must be written under the stored names again, because engines load those.
#
# The map follows transformers: every stored name goes through the renamings and converters that loading the model used
# (`model._weight_conversions`), so no name is guessed. Supported are the operations that leave each stored tensor one
# contiguous range of the parameter: stacking along dimension 0, and joining along the next. A ZeRO fragment is then cut
# at the edges of stored tensors, and publishing only copies ranges.


def cut(tensors: Iterable[StoredTensor], start: int, numel: int) -> Iterator[tuple[str, int, slice]]:
    """The places of elements [start, start + numel) of a parameter: (stored name, first element there, their slice)."""
    for tensor in tensors:
        first, last = max(start, tensor.start), min(start + numel, tensor.start + tensor.numel)
        if first < last:
            yield tensor.name, first - tensor.start, slice(first - start, last - start)


def stored_names(model: PreTrainedModel, shapes: Mapping[str, Shape], path: str | Path) -> StoredNames:
    """Map the parameters of `model` to the tensors of the checkpoint in `path`, from which it was loaded.

    shapes: of every whole parameter and persistent buffer, tied ones once, by the model's own names. Stored tensors of
    no parameter here (the head of a tied model, heads for speculation) are left out.

    Raises UnsupportedModel unless every parameter consists of whole stored tensors, each a contiguous range of it.
    """
    conversions = getattr(model, "_weight_conversions", None) or []
    stored = {placed.spec.name: placed.spec.shape for placed in Layout.read(Path(path))}
    return match(conversions, model.base_model_prefix, shapes, stored)


def match(conversions: list[Any], prefix: str, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> StoredNames:
    """As `stored_names`. conversions: as transformers lists them. prefix: of the base model. stored: shapes by name."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known = dict.fromkeys(shapes, True)  # `rename_source_key` asks for values that are not None
    fused: dict[str, dict[str, list[str]]] = {}
    names: StoredNames = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in shapes and name in shapes:
            target, pattern = name, None
        if target in shapes and pattern is None:
            names.setdefault(target, []).append(StoredTensor(name, stored[name], 0))
        elif target in shapes:
            fused.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, parts in fused.items():
        converter = by_pattern[next(iter(parts))]
        lists = [parts[pattern] for pattern in converter.source_patterns if pattern in parts]
        names[target] = list(_ranges(target, lists, converter.operations, stored))
    for parameter, shape in shapes.items():
        tensors = names.get(parameter, [])
        if [t.start for t in tensors] + [prod(shape)] != [*accumulate((t.numel for t in tensors), initial=0)]:
            held = ", ".join(f"{t.name} {t.shape}" for t in tensors[:3]) or "nothing"
            raise UnsupportedModel(
                f"the stored tensors of {parameter} {shape} do not fill it: the base checkpoint has {held}. The result "
                "could not be written under names that an engine loads"
            )
    return names


def _ranges(
    target: str, lists: list[list[str]], operations: list[Any], stored: Mapping[str, Shape]
) -> Iterator[StoredTensor]:
    """The stored tensors of `target` with their first elements; lists[i]: the names of the i-th source pattern."""
    kinds = [type(operation) for operation in operations]
    dims = [getattr(operation, "dim", None) for operation in operations]
    merged = bool(kinds) and kinds[0] is MergeModulelist and dims[0] == 0
    joined = kinds[merged:] == [Concatenate] and dims[-1] == int(merged)
    if not (joined or (merged and len(kinds) == 1)):
        raise UnsupportedModel(
            f"{target} is made of {lists[0][0]} and others by {' and '.join(map(repr, operations))}; a result can be "
            "published only if stored tensors are stacked along dimension 0 and joined along the next"
        )
    # The order of the elements in memory: along the stack, then along the join. Stacks of different heights are cut
    # here, and `match` refuses them because they do not fill the parameter.
    rows = zip(*lists, strict=False) if merged else lists
    ordered = [name for row in rows for name in row]
    starts = accumulate((prod(stored[name]) for name in ordered), initial=0)
    for name, start in zip(ordered, starts, strict=False):
        yield StoredTensor(name, stored[name], start)
