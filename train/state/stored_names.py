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


class StoredNames:
    """The map both ways. Every element of every parameter belongs to exactly one stored tensor."""

    def __init__(self, tensors: Iterable[StoredTensor]):
        self._of: dict[str, list[StoredTensor]] = {}
        for tensor in sorted(tensors, key=lambda t: t.start):
            self._of.setdefault(tensor.parameter, []).append(tensor)

    def of(self, parameter: str) -> list[StoredTensor]:
        """The stored tensors that make up `parameter`, by where they start; none if the checkpoint has none."""
        return self._of.get(parameter, [])

    def cut(self, parameter: str, start: int, numel: int) -> Iterator[tuple[str, int, slice]]:
        """Where elements [start, start + numel) of `parameter` go: stored name, first element there, slice of ours."""
        for tensor in self._of[parameter]:
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
    found: list[StoredTensor] = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in shapes and name in shapes:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in shapes:
            continue
        if pattern is None:
            found.append(StoredTensor(name, stored[name], target, 0))
        else:
            fused.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, parts in fused.items():
        converter = by_pattern[next(iter(parts))]
        lists = [parts[pattern] for pattern in converter.source_patterns if pattern in parts]
        found += _ranges(target, lists, converter.operations, stored)
    names = StoredNames(found)
    for parameter, shape in shapes.items():
        _check_covered(names, parameter, shape)
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
    if len({len(names) for names in lists}) > 1 and merged:
        counts = ", ".join(str(len(names)) for names in lists)
        raise UnsupportedModel(f"{target} is made of stacks of different heights ({counts}); the checkpoint is damaged")
    # Along the stack, then along the join: the order in which the elements lie in memory.
    rows = zip(*lists, strict=True) if merged else [[name for names in lists for name in names]]
    ordered = [name for row in rows for name in row]
    starts = accumulate((prod(stored[name]) for name in ordered), initial=0)
    for name, start in zip(ordered, starts, strict=False):
        yield StoredTensor(name, stored[name], target, start)


def _check_covered(names: StoredNames, parameter: str, shape: Shape) -> None:
    tensors, end = names.of(parameter), 0
    if not tensors:
        raise UnsupportedModel(
            f"{parameter} {shape} is in no tensor of the base checkpoint (transformers made it up on loading), so the "
            "result could not be written under names that an engine loads"
        )
    for tensor in tensors:
        if tensor.start != end:
            break
        end += tensor.numel
    if end != prod(shape):
        held = ", ".join(f"{t.name} {t.shape}" for t in tensors[:3])
        raise UnsupportedModel(f"{parameter} {shape} is not filled by what the base checkpoint stores for it: {held}")
