"""How a model's parameters lie in its checkpoint: which stored tensor is which range of which parameter.

transformers 5 loads some architectures into other tensors than they are stored in: the experts of Mixtral or
Qwen3-MoE are stored one by one and fused on loading into `experts.gate_up_proj` (experts, 2 * width, hidden) and
`experts.down_proj`. What is trained must go back under the stored names, because those are what engines load.

The map is found in transformers' own terms: every stored name goes through the renamings and converters that loading
the model used (`model._weight_conversions`), so a name is never guessed. Only those of the converters' operations are
taken on that leave each stored tensor one contiguous range of the parameter, stacking and joining behind the stack:
then a ZeRO fragment is cut at the edges of stored tensors, and publishing stays a copy of ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from train.plan.errors import UnsupportedModel
from weights.format.layout import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Tensor `name` of the checkpoint: elements [start, start + numel) of the flattened parameter `parameter`."""

    name: str
    shape: Shape
    parameter: str
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


StoredNames = dict[str, list[StoredTensor]]
"""Of each parameter the stored tensors that make it up, by where they start."""


def cut(tensors: Iterable[StoredTensor], start: int, numel: int) -> Iterator[tuple[str, int, slice]]:
    """Where elements [start, start + numel) of a parameter go: stored name, first element there, slice of ours."""
    for tensor in tensors:
        first, last = max(start, tensor.start), min(start + numel, tensor.start + tensor.numel)
        if first < last:
            yield tensor.name, first - tensor.start, slice(first - start, last - start)


def stored_names(model: PreTrainedModel, shapes: Mapping[str, Shape], path: str | Path) -> StoredNames:
    """The map between the checkpoint in `path` and `model`, which was loaded from it.

    shapes: of every parameter (and persistent buffer), whole, tied ones once, under the model's own names. Stored
    tensors that are not among them (a tied head that is stored all the same, heads for speculation) are left out.

    Raises UnsupportedModel if a parameter is not made of whole stored tensors, each one contiguous range of it.
    """
    conversions = getattr(model, "_weight_conversions", None) or []
    stored = {placed.spec.name: placed.spec.shape for placed in Layout.read(Path(path))}
    return match(conversions, model.base_model_prefix, shapes, stored)


def match(conversions: list[Any], prefix: str, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> StoredNames:
    """`stored_names` on plain values: conversions as transformers lists them, `prefix` of the base model."""
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
            names.setdefault(target, []).append(StoredTensor(name, stored[name], target, 0))
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
                f"{parameter} {shape} is not filled by what the base checkpoint stores for it: {held}; so the result "
                "could not be written under names that an engine loads"
            )
    return names


def _ranges(
    target: str, lists: list[list[str]], operations: list[Any], stored: Mapping[str, Shape]
) -> Iterator[StoredTensor]:
    """Where the stored tensors lie in `target`: lists[i] are the names of the i-th source pattern, in order."""
    kinds = [type(operation) for operation in operations]
    dims = [getattr(operation, "dim", None) for operation in operations]
    merged = bool(kinds) and kinds[0] is MergeModulelist and dims[0] == 0
    joined = kinds[merged:] == [Concatenate] and dims[-1] == int(merged)
    if not (joined or (merged and len(kinds) == 1)):
        raise UnsupportedModel(
            f"{target} is made of {lists[0][0]} and others by {' and '.join(map(repr, operations))}; results can be "
            "written back only where stored tensors are stacked along dimension 0 and joined along the next"
        )
    # Along the stack, then along the join: the order in which the elements lie in memory. Stacks of different heights
    # are cut, and then do not fill the parameter.
    rows = zip(*lists, strict=False) if merged else lists
    ordered = [name for row in rows for name in row]
    starts = accumulate((prod(stored[name]) for name in ordered), initial=0)
    for name, start in zip(ordered, starts, strict=False):
        yield StoredTensor(name, stored[name], target, start)
