"""The `vllm.general_plugins` entry point `serve.vllm.plugin:register`: vLLM calls it in each of its processes."""

from __future__ import annotations

from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

from serve.vllm import thoughts
from serve.vllm.arguments import LOAD_FORMAT
from serve.vllm.shm_loader import ShmModelLoader


def register() -> None:
    """Register load format `shm` and our parsers. vLLM may call it several times in one process."""
    thoughts.register()
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not ShmModelLoader:
        register_model_loader(LOAD_FORMAT)(ShmModelLoader)
