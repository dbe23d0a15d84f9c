"""Prints the error of Liger's kernels per model family as JSON; run with TRITON_INTERPRET=1.

In float32, because Triton's interpreter does not support bfloat16.
"""

import json
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from triton.runtime import interpreter

from benchmarks.gpu import training
from train.model.model import LIGER_FAMILIES

_convert = interpreter._implicit_cvt


def _as_tensor(value):
    """Convert a kernel's floats to tensors, as Triton's compiler does and its interpreter does not."""
    if not isinstance(value, float):
        return _convert(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


if __name__ == "__main__":
    with (
        mock.patch.object(interpreter, "_implicit_cvt", _as_tensor),
        mock.patch.object(rms_norm, "rsqrt", lambda value: tl.math.rsqrt(value)),  # instead of CUDA's function
        mock.patch.object(training, "best_s", lambda ready, step: 1.0),
    ):
        checks = {name: training.kernels(torch.device("cpu"), 6, 16, 1, name, torch.float32) for name in LIGER_FAMILIES}
    print(json.dumps({name: found[-1].found for name, found in checks.items()}))
