"""The `vllm.general_plugins` entry point `serve.vllm.plugin:register`: vLLM calls it in each of its processes."""

from __future__ import annotations

import sys

from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _RegisteredModel
from vllm.platforms import current_platform

from serve.vllm import thoughts
from serve.vllm.arguments import LOAD_FORMAT
from serve.vllm.shm_loader import ShmModelLoader


def register() -> None:
    """Register load format `shm` and our parsers. vLLM may call it several times in one process."""
    thoughts.register()
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not ShmModelLoader:
        register_model_loader(LOAD_FORMAT)(ShmModelLoader)
    if current_platform.is_cpu():
        _register_imported()


def _register_imported() -> None:
    """Register models that the warm parent has imported by their classes. Others vLLM inspects in a process of its own,
    so as not to initialise CUDA: 10 s of imports for the first engine of an architecture."""
    for architecture, model in ModelRegistry.models.items():
        if isinstance(model, _LazyRegisteredModel) and model.module_name in sys.modules:
            ModelRegistry.models[architecture] = _RegisteredModel.from_model_cls(model.load_model_cls())
