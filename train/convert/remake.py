"""Makes a new checkpoint from another one: merges an adapter into its base, or rounds linear layers to 8 or 4 bits.

    python -m train.convert.remake merged BASE ADAPTER OUT
    python -m train.convert.remake int8|fp8|int4 SOURCE OUT

The formats are those of compressed-tensors, which vLLM serves; they need no calibration data. The whole model is in
memory. Prints {"error": see `quantise`}, {} for a merge, or {"refused": why}.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStrategy,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from weights.checkpoint.folder import check_folder, read_json

FORMS: Final = {"int8": "W8A8", "fp8": "FP8_DYNAMIC", "int4": "W4A16"}
"""Presets of compressed-tensors. int8 and fp8: one scale per row, activations quantised dynamically. int4: one scale
per 128 weights of a row (64 or 32 if 128 does not divide the row), activations not quantised."""
_GROUPS: Final = (128, 64, 32)  # sizes for which vLLM has kernels


class CannotRemake(ValueError):
    """The checkpoint cannot be converted to this form; the text says why."""


@torch.no_grad()
def quantise(source: Path, target: Path, form: str) -> float:
    """Write the checkpoint `source` in another form into the new directory `target`. Returns the relative error: the
    norm of (rounded - original weights) over the norm of the original weights. Raises CannotRemake."""
    if _is_quantised(source):
        raise CannotRemake("it is quantised already")
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    scheme = preset_name_to_scheme(FORMS[form], ["Linear"])
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    head = model.get_output_embeddings()
    ignored = [name for name, module in layers.items() if module is head]
    if scheme.weights.group_size:
        widths = {name: layer.in_features for name, layer in layers.items() if name not in ignored}
        odd = next((name for name, width in widths.items() if width % _GROUPS[-1]), None)
        if odd is not None:
            raise CannotRemake(
                f"{form} needs rows of a multiple of {_GROUPS[-1]} weights, {odd} has {widths[odd]}; use int8 or fp8"
            )
        scheme.weights.group_size = next(size for size in _GROUPS if not any(w % size for w in widths.values()))
    if sum(one.weight.numel() for one in layers.values()) < sum(p.numel() for p in model.parameters() if p.dim() > 2):
        raise CannotRemake("most of its weights are fused experts, which cannot be quantised here")
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignored))
    moved = total = 0.0
    for module in layers.values():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight = module.weight
        scale, zero_point = calculate_qparams(*_bounds(weight, scheme.weights), scheme.weights)
        module.weight_scale.copy_(scale)
        means = fake_quantize(weight, scale, zero_point, scheme.weights)
        moved += float((means.float() - weight.float()).square().sum())
        total += float(weight.float().square().sum())
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)
    _copy_others(source, target)
    return (moved / total) ** 0.5 if total else 0.0


@torch.no_grad()
def merge(base: Path, adapter: Path, target: Path) -> None:
    """Write `base` with a LoRA adapter added to its weights, computed in float32, into the new directory `target`.
    Raises CannotRemake."""
    if _is_quantised(base):
        raise CannotRemake(
            "its base is quantised, so the merged weights would have to be rounded again. Export the adapter as it is, "
            "without --format merged"
        )
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    dtype = model.dtype
    PeftModel.from_pretrained(model.float(), str(adapter)).merge_and_unload().to(dtype).save_pretrained(target)
    _copy_others(base, target)


def _is_quantised(checkpoint: Path) -> bool:
    return bool(read_json(checkpoint / "config.json", "config.json").get("quantization_config"))


def _copy_others(source: Path, target: Path) -> None:
    """Copy all files that are not weights, such as the tokenizer's."""
    for path in source.iterdir():
        has_weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
        if not has_weights and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _bounds(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest weights, one pair per row (out, 1) or per group of a row (out, groups)."""
    if args.strategy == QuantizationStrategy.GROUP:
        groups = weight.unflatten(1, (-1, args.group_size))
        return groups.amin(-1), groups.amax(-1)
    return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)


def main(arguments: Sequence[str]) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print to stderr
    disable_progress_bar()
    work, *folders = arguments
    *sources, target = map(Path, folders)
    for source in sources:
        check_folder(source)
    try:
        if work == "merged":
            merge(sources[0], sources[1], target)
            print("{}", file=out)
        else:
            print(json.dumps({"error": quantise(sources[0], target, work)}), file=out)
    except CannotRemake as refused:
        print(json.dumps({"refused": str(refused)}), file=out)


if __name__ == "__main__":
    main(sys.argv[1:])
