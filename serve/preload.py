"""What the serving warm parent imports, so that a forked engine is healthy in about a second and a half.

`python -m runtime.warm_parent --preload serve.preload`. vLLM imports much of itself lazily; each module named here
was found by listing what a served first request still imported. Rules: no OpenMP work, no CUDA initialisation, no
thread left running: none of them survives a fork.
"""

from __future__ import annotations

import importlib
import os

# Read by OpenMP and by tokenizers when they are loaded; both must not start threads in this process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

LAZY_MODULES = (
    "vllm.v1.worker.cpu.shm",
    "serve.engine",
)


def _import_all() -> list[str]:
    return [importlib.import_module(name).__name__ for name in LAZY_MODULES]


IMPORTED = tuple(_import_all())
