"""Implements vLLM's load format `shm`: loads an engine's first weights straight from a version's mapped files.

serve.vllm.plugin registers it, `--load-format shm` selects it; the model path is the version directory itself.
serve.load.load_plan records the load, so that later versions can replay it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Generator
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from runtime.devices.kinds import of_torch
from serve.core.errors import VersionMismatch
from serve.load.direct_load import skip_unused_packing
from serve.load.load_plan import LoadPlan, LoadRecorder
from serve.load.shm_source import VersionSource

PLAN_ATTRIBUTE = "_shm_load_plan"


class ShmModelLoader(BaseModelLoader):
    """Loads a model from a version directory in shared memory."""

    def download_model(self, model_config: ModelConfig) -> None:
        VersionSource(model_config.model).close()

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        kind = of_torch(vllm_config.device_config.device)
        kind.in_worker()
        if model_config.quantization is not None and not kind.on_host:
            prefer_experts_in_parameters()
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

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield all tensors of the version, as vLLM's own `reload_weights` requires of a loader."""
        source = VersionSource(model_config.model).map()
        yield from source.tensors()


def prefer_experts_in_parameters() -> None:
    """Experts in MXFP4 (gpt-oss) go to Triton's kernels only where no other computes them.

    Those keep their weights in objects of triton_kernels, which vLLM's reload makes anew elsewhere: captured graphs
    would go on reading the first ones, which a sleep has discarded. It writes parameters where they were.
    """
    # In the worker alone: the import may bring FlashInfer along, which asks CUDA for the first GPU.
    oracle: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.mxfp4")
    if hasattr(every := oracle._get_priority_backends_for_gpt_oss, "__wrapped__"):
        return

    @functools.wraps(every)
    def ordered() -> list:
        return sorted(every(), key=lambda backend: backend in oracle.TRITON_BACKENDS)

    oracle._get_priority_backends_for_gpt_oss = ordered


def _refuse_holes(plan: LoadPlan, path: str) -> None:
    """vLLM starts with random values if a checkpoint lacks a parameter's tensor; this check prevents serving them."""
    if plan.unwritten:
        shown = ", ".join(plan.unwritten[:8])
        raise VersionMismatch(
            f"version {path} has no tensors for {len(plan.unwritten)} parameters of its own architecture: {shown}"
        )
