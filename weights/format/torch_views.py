"""Wraps bytes of the store as torch tensors that share its memory. The only file here that imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

import safetensors.torch
import torch

from weights.format.errors import InvalidLayout
from weights.format.layout import DTYPE_BITS
from weights.format.slices import Strided

# By the codes of safetensors that have a torch dtype; sub-byte codes have none.
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: dtype for code, dtype in safetensors.torch._TYPES.items() if isinstance(dtype, torch.dtype)
} | {"F8_E8M0": torch.float8_e8m0fnu}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors code of `dtype`. Raises InvalidLayout for dtypes the format does not have."""
    try:
        return CODES[dtype]
    except KeyError:
        raise InvalidLayout(f"safetensors has no code for {dtype}; cast the tensor first") from None


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code. Raises InvalidLayout where torch has none."""
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
        # Leased bytes are read-only; the docstring says so instead of a warning per tensor.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=dtype).reshape(tuple(shape))


def runs_view(flat: torch.Tensor, runs: Strided) -> torch.Tensor:
    """The elements `runs` of `flat` (n,), shape (runs.count, runs.run), sharing its memory."""
    return flat.as_strided((runs.count, runs.run), (runs.stride, 1), flat.storage_offset() + runs.start)
