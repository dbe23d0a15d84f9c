"""Computes where every tensor of a version lies: which file, which bytes.

`Layout.plan` is pure; `Layout.read` reads and validates the files' headers without mapping anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from weights.format import foreign_json
from weights.format.errors import IntegrityError, InvalidLayout
from weights.format.files import open_regular
from weights.format.header import ALIGN_BYTES, FileLayout, Placed, TensorSpec
from weights.format.names import INDEX_SUFFIX, TENSOR_SUFFIX, check_file_name

__all__ = ["FileLayout", "Layout", "Placed", "TensorSpec"]

DEFAULT_MAX_FILE_BYTES = 5_000_000_000  # transformers' own shard size
MAX_INDEX_BYTES, MAX_INDEX_VALUES = 64 << 20, 1 << 20


@dataclass(frozen=True)
class Layout:
    """The files of one version. Tensor names are unique over all files."""

    files: tuple[FileLayout, ...]

    @cached_property
    def _by_name(self) -> dict[str, Placed]:
        return {placed.spec.name: placed for file in self.files for placed in file.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files, headers included."""
        return sum(file.nbytes for file in self.files)

    def __iter__(self) -> Iterator[Placed]:
        return iter(self._by_name.values())

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Placed:
        """Where tensor `name` lies. Raises InvalidLayout."""
        try:
            return self._by_name[name]
        except KeyError:
            raise InvalidLayout(f"no tensor named {name!r} in the layout") from None

    def file(self, name: str) -> FileLayout:
        """The file called `name`. Raises InvalidLayout if there is none."""
        try:
            return next(file for file in self.files if file.name == name)
        except StopIteration:
            raise InvalidLayout(f"no file named {name!r} in the layout") from None

    def index_file(self) -> tuple[str, bytes] | None:
        """Name and bytes of the transformers index over several files; None where one file holds all."""
        if len(self.files) == 1:
            return None
        stem, numbered, _ = self.files[0].name.partition("-00001-of-")
        if not numbered:
            stem = "model"
        body = {
            "metadata": {"total_size": sum(placed.nbytes for placed in self)},
            "weight_map": {placed.spec.name: placed.file for placed in self},
        }
        return stem + INDEX_SUFFIX, json.dumps(body, indent=1).encode()

    @classmethod
    def plan(
        cls,
        specs: Iterable[TensorSpec],
        *,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        stem: str = "model",
    ) -> Layout:
        """Lays `specs` out in as few files as `max_file_bytes` of tensor data allows. Pure.

        The format forbids holes, so a tensor starts aligned only if all before it have aligned sizes: within
        a file tensors are ordered by how large a power of two divides their size, and otherwise as given.
        All tensors whose size is a multiple of ALIGN_BYTES (nearly all of a real model) start on such a
        boundary, every tensor at least on a boundary of its own element size.

        `stem` names the files ("model", or "adapter_model" for LoRA). Raises InvalidLayout.
        """
        specs = tuple(specs)
        if len({spec.name for spec in specs}) != len(specs) or not specs:
            raise InvalidLayout("a version needs at least one tensor, and each name once")
        groups: list[list[TensorSpec]] = [[]]
        filled = 0
        for spec in specs:
            if groups[-1] and filled + spec.nbytes > max_file_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(spec)
            filled += spec.nbytes
        names = [f"{stem}-{number:05d}-of-{len(groups):05d}" for number in range(1, len(groups) + 1)]
        if len(groups) == 1:
            names = [stem]
        return cls(
            tuple(
                FileLayout.of(name + TENSOR_SUFFIX, sorted(group, key=_alignment, reverse=True))
                for name, group in zip(names, groups, strict=True)
            )
        )

    @classmethod
    def read(cls, directory: Path | str) -> Layout:
        """The validated layout of a checkpoint directory.

        The files are those named by `*.safetensors.index.json`, else `model.safetensors`, else all
        `*.safetensors`. Raises IntegrityError (a bad header, a symlink, an index that disagrees with the files) or
        InvalidLayout (no safetensors file at all).
        """
        directory = Path(directory)
        names, weight_map = _files_of(directory)
        files = []
        owner: dict[str, str] = {}
        for file in names:
            with open_regular(directory, file) as opened:
                files.append(FileLayout.read(opened, path=directory, name=file))
            for placed in files[-1].tensors:
                if (other := owner.setdefault(placed.spec.name, file)) != file:
                    raise IntegrityError(
                        f"the tensor is in {other} too", path=directory, file=file, tensor=placed.spec.name
                    )
        if weight_map is not None and weight_map != owner:
            differing = min(set(weight_map.items()) ^ set(owner.items()))[0]
            raise IntegrityError("the index and the files disagree about a tensor", path=directory, tensor=differing)
        return cls(tuple(files))


def _alignment(spec: TensorSpec) -> int:
    return min(spec.nbytes & -spec.nbytes, ALIGN_BYTES) or ALIGN_BYTES


def _files_of(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    try:
        present = sorted(entry.name for entry in os.scandir(directory))
    except OSError as error:
        raise InvalidLayout(f"{directory} cannot be read as a checkpoint directory: {error.strerror}") from error
    indexes = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if "model" + INDEX_SUFFIX in indexes:
        indexes = ["model" + INDEX_SUFFIX]
    if len(indexes) > 1:
        raise InvalidLayout(f"{directory} has several indexes ({', '.join(indexes)}); keep the one that is meant")
    if indexes:
        weight_map = read_index(directory, indexes[0])
        return sorted(set(weight_map.values())), weight_map
    names = [name for name in present if name.endswith(TENSOR_SUFFIX)]
    if "model" + TENSOR_SUFFIX in names:
        names = ["model" + TENSOR_SUFFIX]
    if not names:
        raise InvalidLayout(
            f"{directory} has no *.safetensors file; other weight formats are not accepted, convert it first"
        )
    return names, None


def read_index(directory: Path, name: str) -> dict[str, str]:
    """The file of each tensor, by the index file `name`. Raises IntegrityError."""
    with open_regular(directory, name) as fd:
        if os.fstat(fd.fileno()).st_size > MAX_INDEX_BYTES:
            raise IntegrityError(f"larger than {MAX_INDEX_BYTES} bytes", path=directory, file=name)
        raw = fd.read(MAX_INDEX_BYTES)
    try:
        weight_map = foreign_json.loads(raw, most_values=MAX_INDEX_VALUES, most_depth=None)["weight_map"]
        pairs = {tensor: check_file_name(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"not a usable index: {error}", path=directory, file=name) from error
    if not pairs or not all(file.endswith(TENSOR_SUFFIX) for file in pairs.values()):
        raise IntegrityError("the index must name *.safetensors files only", path=directory, file=name)
    return pairs
