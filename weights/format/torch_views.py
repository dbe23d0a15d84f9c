"""Describes a shard's elements of a stored tensor as runs of equal length, and views stored bytes as torch tensors.

Runs are pure integers, in the row-major order of a tensor's elements; ranges are half-open [start, stop). Only this
file of the package imports torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import safetensors.torch
import torch

from weights.format.errors import InvalidLayout
from weights.format.layout import DTYPE_BITS

# safetensors code -> torch dtype; sub-byte codes have no torch dtype.
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: dtype for code, dtype in safetensors.torch._TYPES.items() if isinstance(dtype, torch.dtype)
} | {"F8_E8M0": torch.float8_e8m0fnu}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Strided:
    """`count` runs of `run` elements: the first starts at `start`, each next run `stride` elements after the last."""

    start: int
    run: int
    stride: int
    count: int

    @property
    def size(self) -> int:
        """The number of elements in all runs."""
        return self.run * self.count


def narrow(shape: Sequence[int], dim: int, start: int, length: int) -> Strided:
    """Element runs of `tensor.narrow(dim, start, length)` for a contiguous tensor of `shape`.

    One run if the slice is contiguous (cut along the first dimension, or all of `dim`).
    """
    if not 0 <= dim < len(shape):
        raise InvalidLayout(f"shape {tuple(shape)} has no dimension {dim}")
    if start < 0 or length < 0 or start + length > shape[dim]:
        raise InvalidLayout(f"[{start}, {start + length}) is outside dimension {dim} of shape {tuple(shape)}")
    outer = prod(shape[:dim])
    inner = prod(shape[dim + 1 :])
    run, stride = length * inner, shape[dim] * inner
    if run == 0 or outer == 0:
        return Strided(0, 0, 0, 0)
    if outer == 1 or run == stride:
        return Strided(start * inner, run * outer, run * outer, 1)
    return Strided(start * inner, run, stride, outer)


def part(runs: Strided, start: int, size: int) -> Iterator[Strided]:
    """Elements [start, start + size) of the concatenated `runs`, in order: part of a run, whole runs, part of a run.

    Raises InvalidLayout beyond the end of `runs`.
    """
    if start < 0 or size < 0 or start + size > runs.size:
        raise InvalidLayout(f"[{start}, {start + size}) is outside the {runs.size} elements of {runs}")
    while size:
        index, inside = divmod(start, runs.run)
        at = runs.start + index * runs.stride + inside
        if inside or size < runs.run:
            taken = Strided(at, run := min(size, runs.run - inside), run, 1)
        else:
            taken = Strided(at, runs.run, runs.stride, size // runs.run)
        yield taken
        start, size = start + taken.size, size - taken.size


def dtype_code(dtype: torch.dtype) -> str:
    """Return the safetensors code of `dtype`. Raises InvalidLayout for a dtype that the format lacks."""
    try:
        return CODES[dtype]
    except KeyError:
        raise InvalidLayout(f"safetensors has no code for {dtype}; cast the tensor first") from None


def torch_dtype(code: str) -> torch.dtype:
    """Return the torch dtype of a safetensors code. Raises InvalidLayout if torch has no such dtype."""
    try:
        return TORCH_DTYPES[code]
    except KeyError:
        raise InvalidLayout(f"torch has no dtype for the safetensors code {code!r}") from None


def as_tensor(view: memoryview, code: str, shape: Sequence[int]) -> torch.Tensor:
    """Tensor of `shape` and dtype `code` over `view` (uint8 bytes), sharing its memory.

    The tensor keeps the view, and with it the mapping and its lease, alive. Writing to a tensor over a read-only view
    kills the process with SIGSEGV. Raises InvalidLayout if the sizes differ.
    """
    dtype = torch_dtype(code)
    expected = prod(shape) * DTYPE_BITS[code] // 8
    if view.nbytes != expected:
        raise InvalidLayout(f"{code} of shape {tuple(shape)} takes {expected} bytes, the view has {view.nbytes}")
    if expected == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    if not view.readonly:
        return torch.frombuffer(view, dtype=dtype).reshape(tuple(shape))
    with warnings.catch_warnings():
        # Leased bytes are read-only, as the docstring warns; silence torch's warning per tensor.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=dtype).reshape(tuple(shape))


def runs_view(flat: torch.Tensor, runs: Strided) -> torch.Tensor:
    """Return a view of the elements `runs` of `flat` (n,), with shape (runs.count, runs.run)."""
    return flat.as_strided((runs.count, runs.run), (runs.stride, 1), flat.storage_offset() + runs.start)
