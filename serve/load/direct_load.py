"""Loads a version straight into the form that the kernels read.

vLLM loads a checkpoint into plain parameters and then converts each layer (on the CPU: packs it for the matrix
kernels and drops the plain form). Its own reload repeats all of it through deferred weight loaders. This module takes
each layer's plain form from the mapped bytes, as a view where the layout allows, and converts it with the same
`process_weights_after_loading` that the first load used. That is about twice as fast.

Known about vLLM 0.32, each reproduced:
- tied embeddings: `lm_head` packs its own copy of the embedding, which a reload of the embedding leaves stale;
- MoE experts are packed by the kernel object, not by the quant method, on every load after the first;
- `bias` is converted to float32 in place by the small-matrix kernel, so it has to start from the stored dtype;
- vLLM also packs an embedding that no head uses, which wastes memory and time; this module skips it.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from runtime.devices.kinds import of_torch
from serve.load.converting import Converting
from serve.load.host_ring import HostRing
from serve.load.load_plan import LoadPlan, Target
from serve.load.shm_source import VersionSource


class Scratch(threading.local):
    """Buffers that a thread gathers into, by slot."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}


class DirectLoader:
    """Replays a plan into one model. `refusal` says why this way cannot load the model (None: it can).

    threads: how many convert layers at once in `load`, with the caller. Each converts whole layers, so a thread without
    a core delays no other.
    """

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, device: torch.device, threads: int = 1):
        self.model, self.plan, self.device, self.threads = model, plan, device, threads
        self._scratch = Scratch()
        self._heads = _head_ids(model)
        first_owner: dict[int, tuple[int, str]] = {}
        for key, target in plan.targets.items():
            first_owner.setdefault(id(target), key)
        self._first_owners = set(first_owner.values())
        self.refusal = self._why_not()

    @torch.no_grad()
    def load(self, source: VersionSource) -> None:
        """Load module by module, freeing each one's old weights first so that malloc reuses their memory.

        Re-raises errors of a conversion.
        """
        if not of_torch(self.device).on_host:
            self._copy_to_device(source)
            return
        inference = torch.is_inference_mode_enabled()

        def replace(module: torch.nn.Module) -> None:
            with torch.inference_mode(inference), torch.no_grad():
                self._replace(module, source)

        modules = [*self._modules()]
        with Converting(filter(self._packs, modules), replace, self.threads) as converting:
            for module in modules:
                if not self._packs(module):
                    replace(module)
            converting.wait_for_all()
        self._scratch.buffers.clear()

    def make_room(self) -> None:
        """Allocate memory for the layers that a load converts at once. New weights may not fit where the old ones were,
        and fresh pages cost more than the conversion."""
        largest = sorted(map(self._nbytes, filter(self._packs, self._modules())), reverse=True)[: self.threads]
        torch.empty(sum(largest), dtype=torch.uint8).fill_(0)

    def _nbytes(self, module: torch.nn.Module) -> int:
        targets = (self.plan.targets.get((id(module), name)) for name in module._parameters)
        return sum(math.prod(target.shape) * target.dtype.itemsize for target in targets if target is not None)

    def _modules(self) -> Iterator[torch.nn.Module]:
        owners = {module_id for module_id, _ in self.plan.targets}
        for module in self.model.modules():
            if id(module) in owners:
                yield module

    def _why_not(self) -> str | None:
        if not self.plan.complete:
            return f"not all parameters are filled by plain copies: {', '.join(self.plan.unplanned[:4])}"
        if hasattr(self.model, "process_weights_after_loading"):
            return f"{type(self.model).__name__} has a post-load step of its own"
        for name, module in self.model.named_modules():
            if is_deferred_attention_layer(module) and isinstance(module, MLAAttention):
                return f"{name} absorbs projections into its attention"
            method = getattr(module, "quant_method", None)
            if not isinstance(method, QuantizeMethodBase) or is_deferred_attention_layer(module):
                continue
            plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
            experts = isinstance(method, UnquantizedFusedMoEMethod)
            if experts and (not of_torch(self.device).on_host or hasattr(module, "w13_bias")):
                return f"{name}: experts are re-laid out for the device's kernel"
            if not plain and not experts:
                return f"{name} is quantised ({type(method).__name__})"
        return None

    def _packs(self, module: torch.nn.Module) -> bool:
        """Whether loading the module converts it; a load copies a plain module."""
        method = getattr(module, "quant_method", None)
        return isinstance(method, UnquantizedLinearMethod | UnquantizedFusedMoEMethod) or id(module) in self._heads

    def _replace(self, module: torch.nn.Module, source: VersionSource) -> None:
        """Load one module. Parameters that others hold references to (tied heads) stay the same objects."""
        names = [name for name in (*module._parameters, *module._buffers) if (id(module), name) in self.plan.targets]
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod | UnquantizedFusedMoEMethod):
            self._replace_packed(module, method, names, source)
            return
        for name in names:
            plain = self._plain(self.plan.targets[id(module), name], source, name)
            if isinstance(method, UnquantizedEmbeddingMethod) and name == "weight" and id(module) in self._heads:
                drop_packed(module)
                shadow = _shadow_of(module)
                shadow.weight = torch.nn.Parameter(plain, requires_grad=False)
                method.process_weights_after_loading(shadow)
                module.cpu_linear = shadow.cpu_linear
            if (id(module), name) in self._first_owners:  # a tied head sees its embedding's new weight
                _tensor(module, name).data.copy_(plain)

    def _replace_packed(self, module, method, names: list[str], source: VersionSource) -> None:
        shadow = _shadow_of(module)
        for name in names:
            plain = self._plain(self.plan.targets[id(module), name], source, name)
            if plain.ndim < 2:
                plain = plain.clone()
            shadow._parameters[name] = _parameter(plain, like=module._parameters[name])
        # Free them only now: otherwise the gathered tensors would take the memory that the new form fits into.
        shadow.__dict__.pop("cpu_linear", None)
        drop_weights(module)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel.fused_experts.process_weights_after_loading(shadow)
        else:
            method.process_weights_after_loading(shadow)
        for name in names:
            parameter = shadow._parameters[name]
            module._parameters[name] = _parameter(self._kept(parameter.data, source), like=parameter)
        if "cpu_linear" in shadow.__dict__:
            module.cpu_linear = shadow.cpu_linear

    def _plain(self, target: Target, source: VersionSource, slot: str) -> torch.Tensor:
        """Return the checkpoint form of a target: a view of the mapping if its bytes lie there as needed, else a
        gathered copy.

        A gathered copy stays valid until this thread gathers into the same `slot` again.
        """
        view = _adjacent(target, source)
        if view is not None:
            return view
        need_bytes = math.prod(target.shape) * target.dtype.itemsize
        scratch = self._scratch.buffers.get(slot)
        if scratch is None or scratch.nbytes < need_bytes:
            scratch = self._scratch.buffers[slot] = torch.empty(need_bytes, dtype=torch.uint8)
        flat = scratch[:need_bytes].view(target.dtype)
        target.fill(flat, source)
        return flat.view(target.shape)

    def _kept(self, tensor: torch.Tensor, source: VersionSource) -> torch.Tensor:
        """A packed module must own its memory and reference neither the mapping nor the scratch buffer."""
        borrowed = source.holds(tensor) or any(_shares(tensor, scratch) for scratch in self._scratch.buffers.values())
        return tensor.clone() if borrowed else tensor

    def _copy_to_device(self, source: VersionSource) -> None:
        seen: set[int] = set()
        with HostRing(self.device, self.threads) as ring:
            for module in self._modules():
                for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                    target = self.plan.targets.get((id(module), name))
                    if target is None or tensor.data_ptr() in seen:
                        continue
                    seen.add(tensor.data_ptr())
                    target.fill(tensor.data.view(-1), source, ring)
        of_torch(self.device).synchronize(self.device)


def skip_unused_packing(model: torch.nn.Module) -> None:
    """Free the packed copy of input embeddings that no output head uses."""
    heads = _head_ids(model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod) and id(module) not in heads:
            drop_packed(module)


def _head_ids(model: torch.nn.Module) -> set[int]:
    heads = set()
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            heads.add(id(module))
        head = getattr(module, "lm_head", None)
        if isinstance(head, torch.nn.Module):
            heads.add(id(head))
    return heads


def _parameter(data: torch.Tensor, *, like: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter with the class and weight loader of `like`, which a later layerwise reload needs."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    parameter.__class__ = type(like)
    parameter.__dict__.update(like.__dict__)
    return parameter


def drop_weights(module: torch.nn.Module) -> None:
    """Free a module's packed weights. A forward pass before the next load fails on the empty shapes."""
    drop_packed(module)
    if isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = torch.empty(0, dtype=parameter.dtype)


def drop_packed(module: torch.nn.Module) -> None:
    """Free the packed copy of a linear or embedding layer."""
    if "cpu_linear" in module.__dict__:
        module.cpu_linear = torch.nn.functional.linear


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _shadow_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with its own attribute and parameter tables, so that an error of a conversion leaves the serving
    module as it was."""
    shadow = copy.copy(module)
    shadow.__dict__ = dict(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        shadow.__dict__[table] = dict(module.__dict__[table])
    return shadow


def _adjacent(target: Target, source: VersionSource) -> torch.Tensor | None:
    """Return the target as one view of the mapping if its pieces are contiguous there, in order and in its dtype.

    A checkpoint that stores q, k, v and gate, up adjacently needs no gathering copy.
    """
    if target.zeroed:
        return None
    filled, expected_address, first = 0, None, None
    for piece in target.pieces:
        described = source.described[piece.name]
        if described.dtype != target.dtype or not source.aligned(piece.name):
            return None
        if not piece.target.dense or not piece.source.dense:
            return None
        tensor = source.tensor(piece.name)
        address = tensor.data_ptr() + piece.source.offset * described.dtype.itemsize
        if piece.target.offset != filled or (expected_address is not None and address != expected_address):
            return None
        if first is None:
            first = (tensor, piece.source.offset)
        filled += piece.target.numel
        expected_address = address + piece.source.numel * described.dtype.itemsize
    if first is None:
        return None
    tensor, offset = first
    strides, step = [], 1
    for extent in reversed(target.shape):
        strides.append(step)
        step *= extent
    if step != filled:
        return None
    return tensor.as_strided(target.shape, tuple(reversed(strides)), tensor.storage_offset() + offset)


def _shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
