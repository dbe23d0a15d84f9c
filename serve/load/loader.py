"""Loads a version into a running model, at a swap or a wake, from one mapping of the version's files.

Two ways (`how`), depending on the model's layers:

    in-place    repeats the recorded first load (serve.load.load_plan): on a GPU into the existing tensors, so that
                captured graphs stay valid; on the CPU layer by layer, packing each layer for its kernels
    layerwise   vLLM's own reload (vllm/model_executor/model_loader/reload), for unquantised experts and latent
                attention on GPUs, whose kernels use their own weight layout

After a failed load the weights are mixed, so the engine ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from runtime.devices.kinds import of_torch
from serve.core.errors import VersionMismatch, WrongState
from serve.load.host_ring import HostRing
from serve.load.load_plan import LoadPlan
from serve.load.shm_source import ToLock, VersionSource

NICENESS = 10  # added to the engine's niceness for the mapping thread
COPY_THREADS = 8  # threads share the memory bandwidth, so more would gain little
MADE_ONCE = ("_merged_conv_weight", "_wp_fp32", "_combined_gate_weight", "_fused_w13_fp8", "workspace")
"""Attributes that layers compute once, at the first load or pass, and vLLM never recomputes: convolutions and token
selection of GLM 5 Next, gates of shared experts on AMD's GPUs, dots3's image experts, the all-reduce workspace of
MiniMax-M2."""


class VersionLoader:
    """Loads versions into one worker's model. `reload`: vLLM's `reload_weights`. `workers`: sharers of the cores."""

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: ModelConfig,
        plan: LoadPlan,
        device: torch.device,
        reload: Callable[..., None],
        workers: int = 1,
    ) -> None:
        self.model, self.plan, self.device = model, plan, device
        self._model_config, self._reload, self._kind = model_config, reload, of_torch(device)
        self._threads = max(1, min(len(os.sched_getaffinity(0)) // workers, COPY_THREADS))
        self._heads = _head_ids(model)
        self._own_layout = self._kept_in_own_layout()
        self._beside = ThreadPoolExecutor(1, "versions", self._begin)  # maps and unmaps files while the engine steps
        self._mapped: Future[VersionSource] | None = None  # the version that is staged or loaded
        self._retied = plan.follow_first_load(model)

    @property
    def how(self) -> str:
        return "layerwise" if self._own_layout else "in-place"

    def refusal(self) -> str:
        """Return why this engine can load no other version, "" if it can; valid once the model has run."""
        if self._model_config.quantization is not None:
            return f"its weights are quantised ({self._model_config.quantization})"
        if hasattr(self.model, "process_weights_after_loading"):
            return f"{type(self.model).__name__} has its own post-load step"
        if self._retied:
            return f"{self._retied} equalled its embedding when it was loaded, and vLLM keeps both as one tensor"
        for name, module in self.model.named_modules():
            tensors = [key for key in MADE_ONCE if isinstance(getattr(module, key, None), torch.Tensor)]
            if tensors:
                return f"{name} computes {tensors[0]} only once"
        return self._own_layout if self._kind.on_host else ""

    # -- before a pause ------------------------------------------------------------------------------------

    def check(self, path: str) -> dict[str, Any]:
        """Compare a version with the model, which stays unchanged; return its bytes. Raises a VersionError."""
        if refusal := self.refusal():
            raise VersionMismatch(f"a running engine cannot load another version: {refusal}")
        source = VersionSource(path)
        try:
            self.plan.check(source)
            return {"bytes": source.nbytes}
        finally:
            source.close()

    def stage(self, path: str) -> None:
        """Start mapping `path` in the background (fault its pages in, on a GPU also lock them); then poll `staged`."""
        self.unmap()
        lock = self._kind.locks_pages and not self._own_layout
        self._mapped = self._beside.submit(self._open, path, lock=lock)

    def staged(self) -> bool:
        """Return whether the version is mapped. Raises the error of a failed mapping, WrongState if none was staged."""
        if self._mapped is None:
            raise WrongState("no version is being staged")
        return self._mapped.done() and self._mapped.result() is not None

    def unmap(self) -> None:
        """Unmap the staged or loaded version, in the background because unlocking takes time."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self._beside.submit(_close, mapped)

    def _begin(self) -> None:
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, min(os.getpriority(os.PRIO_PROCESS, me) + NICENESS, 19))
        # A new thread defaults to the first GPU: locking pages from such a thread would create a CUDA context of half a
        # gigabyte on that GPU for every tensor parallel worker.
        self._kind.use(self.device)

    def _open(self, path: str, *, lock: bool) -> VersionSource:
        source = VersionSource(path)
        try:
            self.plan.check(source)
            to_lock = ToLock(self.plan.spans(source, in_one_piece=True), self._kind.page_lock()) if lock else None
            return source.map(to_lock, self.plan.spans(source) if self.plan.complete else None)
        except BaseException:
            source.close()
            raise

    # -- in a pause ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, path: str) -> dict[str, Any]:
        """Load the version from its staged mapping, else map it now without locking pages, since locking would take
        longer than it saves. Returns the method, the bytes that this worker read, and the seconds without mapping."""
        if self._mapped is None or str(self._mapped.result().path) != path:
            self.unmap()
            self._mapped = Future()
            self._mapped.set_result(self._open(path, lock=False))
        source = self._mapped.result()
        began_s = time.perf_counter()
        if self._own_layout:
            before = [(tensor, tensor.data) for tensor in chain(self.model.parameters(), self.model.buffers())]
            with disable_mtp_completeness_check():
                self._reload(weights_iterator=source.tensors())
            for tensor, first in before:  # because captured graphs read the old address
                if tensor.data_ptr() != first.data_ptr() and tensor.shape == first.shape:
                    first.copy_(tensor.data)
                    tensor.data = first
        elif self._kind.on_host:
            self._pack(source)
        else:
            self._copy(source)
        return {
            "how": self.how,
            "bytes_read": self.plan.bytes_read(source) if self.plan.complete else source.nbytes,
            "load_s": time.perf_counter() - began_s,
        }

    def _copy(self, source: VersionSource) -> None:
        seen: set[int] = set()
        with HostRing(self.device, self._threads) as ring:
            for module in self.model.modules():
                for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                    target = self.plan.targets.get((id(module), name))
                    if target is None or tensor.data_ptr() in seen:
                        continue
                    seen.add(tensor.data_ptr())
                    target.fill(tensor.data.view(-1), source, ring)
        self._kind.synchronize(self.device)

    def _pack(self, source: VersionSource) -> None:
        """Load on the CPU. vLLM 0.32 packs linear layers, heads and experts and drops the unpacked weights, so these
        are restored before packing: for a linear layer as a view of the mapped file, if contiguous there. After the
        first load, the experts' kernel packs experts."""
        filled: set[int] = set()  # a tied head shares the embedding's target
        for module in self.model.modules():
            tensors = {**module._parameters, **module._buffers}
            names = [name for name in tensors if (id(module), name) in self.plan.targets]
            method = getattr(module, "quant_method", None)
            replaced = isinstance(method, UnquantizedLinearMethod | UnquantizedFusedMoEMethod)
            views: dict[str, torch.Tensor] = {}
            if names:
                drop_packed(module)
            for name in names:
                target, tensor = self.plan.targets[id(module), name], tensors[name]
                if isinstance(method, UnquantizedLinearMethod) and (mapped := target.mapped_view(source)) is not None:
                    views[name] = tensor = mapped
                elif replaced:
                    tensor = torch.empty(target.shape, dtype=target.dtype)
                if replaced:
                    module._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
                if name not in views and (replaced or id(target) not in filled):
                    target.fill(tensor.data.view(-1), source)
                    filled.add(id(target))
            if not names:
                continue
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel.fused_experts.process_weights_after_loading(module)
            elif replaced or id(module) in self._heads:
                method.process_weights_after_loading(module)
            for name, tensor in views.items():  # a bias or unpacked weight must not refer to the file
                if module._parameters[name].data_ptr() == tensor.data_ptr():
                    module._parameters[name].data = tensor.clone()

    # ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.unmap()
        self._beside.shutdown()

    def _kept_in_own_layout(self) -> str:
        """Return why parameters do not have the checkpoint's layout, "" if they have it."""
        if not self.plan.complete:
            return f"not all parameters are filled by plain copies: {', '.join(self.plan.unplanned[:4])}"
        for name, module in self.model.named_modules():
            if is_deferred_attention_layer(module) and isinstance(module, MLAAttention):
                return f"{name} absorbs projections into its attention"
            method = getattr(module, "quant_method", None)
            if not isinstance(method, QuantizeMethodBase) or is_deferred_attention_layer(module):
                continue
            experts = isinstance(method, UnquantizedFusedMoEMethod)
            if experts and (not self._kind.on_host or hasattr(module, "w13_bias")):
                return f"{name}: experts have the layout of the device's kernel"
            if not experts and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
                return f"{name} is quantised ({type(method).__name__})"
        return ""


def _close(mapped: Future[VersionSource]) -> None:
    if mapped.exception() is None:
        mapped.result().close()


def skip_unused_packing(model: torch.nn.Module) -> None:
    """Free the packed copies that vLLM makes on the CPU for embeddings that no head uses."""
    heads = _head_ids(model)
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod) and id(module) not in heads:
            drop_packed(module)


def drop_weights(module: torch.nn.Module) -> None:
    """Free a module's packed weights; until the next load a forward pass fails on the empty shapes."""
    drop_packed(module)
    if isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = torch.empty(0, dtype=parameter.dtype)


def drop_packed(module: torch.nn.Module) -> None:
    """Free the packed copy of a linear or embedding layer."""
    if "cpu_linear" in module.__dict__:
        module.cpu_linear = torch.nn.functional.linear


def _head_ids(model: torch.nn.Module) -> set[int]:
    heads = set()
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            heads.add(id(module))
        head = getattr(module, "lm_head", None)
        if isinstance(head, torch.nn.Module):
            heads.add(id(head))
    return heads
