"""Registers the load format `shm`, which loads weights directly from a version's mapped files, and reasoning parsers.
vLLM calls `register` in each of its processes, by the `vllm.general_plugins` entry point `serve.vllm.plugin:register`.
With `shm` the model path is the version's directory."""

from __future__ import annotations

import sys

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _RegisteredModel
from vllm.platforms import current_platform

from runtime.devices.kinds import of_torch
from serve.core.errors import VersionMismatch
from serve.load.load_plan import LoadPlan, LoadRecorder
from serve.load.loader import skip_unused_packing
from serve.load.shm_source import VersionSource
from serve.vllm import thoughts
from serve.vllm.arguments import LOAD_FORMAT

PLAN_ATTRIBUTE = "_shm_load_plan"
"""Attribute of the model with its LoadPlan, by which later versions replay the load."""


def register() -> None:
    """Register load format `shm` and our parsers. vLLM may call this function several times in one process."""
    thoughts.register()
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not ShmModelLoader:
        register_model_loader(LOAD_FORMAT)(ShmModelLoader)
    if current_platform.is_cpu():
        _register_imported()


def _register_imported() -> None:
    """Register the model classes that the warm parent has imported. vLLM would inspect an unregistered class in a
    separate process, to avoid initialising CUDA: 10 s of imports for the first engine of an architecture."""
    for architecture, model in ModelRegistry.models.items():
        if isinstance(model, _LazyRegisteredModel) and model.module_name in sys.modules:
            ModelRegistry.models[architecture] = _RegisteredModel.from_model_cls(model.load_model_cls())


class ShmModelLoader(BaseModelLoader):
    """Loads a model from a version directory in shared memory."""

    def download_model(self, model_config: ModelConfig) -> None:
        VersionSource(model_config.model).close()

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        kind = of_torch(vllm_config.device_config.device)
        kind.in_worker()
        model = super().load_model(vllm_config, model_config, prefix)
        if kind.on_host:
            skip_unused_packing(model)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load all weights. Raises VersionMismatch if an unquantised model's tensors are missing."""
        source = VersionSource(model_config.model).map()
        try:
            with LoadRecorder(model, source) as recorder:
                model.load_weights(source.tensors())
            plan = recorder.plan()
        finally:
            source.close()
        if model_config.quantization is None:
            _refuse_holes(plan, model_config.model)
        setattr(model, PLAN_ATTRIBUTE, plan)


def _refuse_holes(plan: LoadPlan, path: str) -> None:
    """Refuse to serve a checkpoint that lacks a parameter's tensor; vLLM would use random values for the parameter."""
    if plan.unwritten:
        shown = ", ".join(plan.unwritten[:8])
        raise VersionMismatch(
            f"version {path} has no tensors for {len(plan.unwritten)} parameters of its own architecture: {shown}"
        )
