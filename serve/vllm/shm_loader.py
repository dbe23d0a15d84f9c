"""Implements vLLM's load format `shm`: loads an engine's first weights straight from a version's mapped files.

serve.vllm.plugin registers it, `--load-format shm` selects it; the model path is the version directory itself.
serve.load.load_plan records the load, so that later versions can replay it.
"""

from __future__ import annotations

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from runtime.devices.kinds import of_torch
from serve.core.errors import VersionMismatch
from serve.load.load_plan import LoadPlan, LoadRecorder
from serve.load.loader import skip_unused_packing
from serve.load.shm_source import VersionSource

PLAN_ATTRIBUTE = "_shm_load_plan"


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
        """Raises VersionMismatch if the version has no tensor for a parameter of an unquantised model."""
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
    """vLLM starts with random values if a checkpoint lacks a parameter's tensor; this check prevents serving them."""
    if plan.unwritten:
        shown = ", ".join(plan.unwritten[:8])
        raise VersionMismatch(
            f"version {path} has no tensors for {len(plan.unwritten)} parameters of its own architecture: {shown}"
        )
