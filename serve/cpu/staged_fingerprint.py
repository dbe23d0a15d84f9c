"""Computes the fingerprint of a staged version beside the serving weights, in slices between the engine's steps.

After a swap, new weights take traffic only once they have answered the fingerprint prompt. Computed after the exchange,
that is a forward pass inside the pause. This module computes it before: a twin of the model's module tree, holding the
staged tensors, repeats the forward pass that the engine's own fingerprint once made (`FingerprintTrace`: inputs and
attention metadata as the model runner built them), with its own KV memory. The pass stops at every layer with weights,
so that a step of the engine waits for at most one layer. The swap then exchanges exactly the tensors that answered.

Rules
- The twin's thread runs only while the worker's main thread waits in `advance`. vLLM's forward context is one global,
  and its CPU kernels share one scratch buffer: two concurrent passes would corrupt each other.
- A twin that could still reach a tensor or module it replaces is refused (`TwinRefused`), because its answer could come
  from other weights. The engine then computes the fingerprint in the pause.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from serve.cpu.lora import GroupedLoRA, NoLoRA
from serve.load.direct_load import Ready, twin_of
from serve.load.kernel_threads import set_kernel_threads

# Block 0 is vLLM's null block; the fingerprint's KV lies in block 1 (serve.vllm.patches).
TWIN_KV_BLOCKS = 2
HEAD_ROWS = 4
LEAKS_SLICE_S = 0.004
DONE = object()


class TwinRefused(Exception):
    """The model cannot run as a twin beside itself; the text says why."""


@dataclass(frozen=True)
class FingerprintTrace:
    """One fingerprint pass as the model runner called it: keyword arguments of the model, its forward context, and the
    ids of the called modules (without those whose weights another module's kernel used)."""

    inputs: dict[str, Any]
    context: ForwardContext
    called: frozenset[int] = frozenset()

    @classmethod
    def take(cls, inputs: dict[str, Any]) -> FingerprintTrace:
        """Copy what the runner passes to the model, because the next batch overwrites its buffers."""
        copies: dict[int, Any] = {}
        context = get_forward_context()
        attention = {name: _copied(metadata, copies) for name, metadata in context.attn_metadata.items()}
        slots = {name: _copied(mapping, copies) for name, mapping in context.slot_mapping.items()}
        return cls(
            {name: _copied(value, copies) for name, value in inputs.items()},
            replace(context, attn_metadata=attention, slot_mapping=slots),
        )


def watch_next_pass(runner: Any, keep: Callable[[FingerprintTrace], None]) -> None:
    """Pass the FingerprintTrace of the model runner's next forward pass to `keep`."""
    plain = runner._model_forward

    def forward(**inputs: Any) -> Any:
        del runner._model_forward
        trace, called = FingerprintTrace.take(inputs), set()
        hooks = [
            module.register_forward_pre_hook(lambda module, _: called.add(id(module)))
            for module in runner.model.modules()
        ]
        try:
            return plain(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
            keep(replace(trace, called=frozenset(called)))

    runner._model_forward = forward


class StagedFingerprint:
    """One fingerprint pass over staged tensors. Between engine steps, call `make_ready` until it is True on every
    worker, then `advance` until it returns an answer."""

    def __init__(self, model: torch.nn.Module, staged: Iterable[Ready], trace: FingerprintTrace):
        """Touches nothing of `model`."""
        twins, replaced = _twin(model, staged)
        self._twins, self._model = [*twins.values()], twins[id(model)]
        layers = {name: twins.get(id(layer), layer) for name, layer in trace.context.no_compile_layers.items()}
        self._inputs, self._context = trace.inputs, replace(trace.context, no_compile_layers=layers)
        self._making_ready = self._make_ready(replaced)
        self._threads = torch.get_num_threads()
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._answer: dict[str, list] | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="staged-fingerprint", daemon=True)
        self._thread.start()

    def make_ready(self) -> bool:
        """Search for references to replaced tensors for a few milliseconds; True when the search is complete.

        Workers need different numbers of calls. Layers of tensor parallel workers wait for each other, so no worker may
        `advance` before all are ready: one that did waited for ever. Raises TwinRefused.
        """
        return next(self._making_ready, DONE) is DONE

    def advance(self) -> dict[str, list] | None:
        """Compute up to the next layer. The last call returns the answer (`tokens`, `logprobs` in nats, per position).

        Re-raises errors of the forward pass.
        """
        with override_forward_context(self._context):
            self._go.release()
            self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._answer

    def close(self) -> None:
        """Stop the thread at any point and release all tensors: the twins form reference cycles, which the garbage
        collector would find only several swaps later."""
        self._cancelled = True
        self._go.release()
        self._thread.join()
        for twin in self._twins:
            twin.__dict__.clear()
        self._twins, self._model, self._inputs, self._context, self._making_ready = [], None, {}, None, iter(())

    def _make_ready(self, replaced: dict[int, str]) -> Iterator[None]:
        yield from _refuse_leaks(self._twins, replaced)
        for layer in self._context.no_compile_layers.values():
            if isinstance(getattr(layer, "kv_cache", None), torch.Tensor) and layer.kv_cache.numel():
                layer.kv_cache = layer.kv_cache.new_zeros((TWIN_KV_BLOCKS, *layer.kv_cache.shape[1:]))
        for twin in self._twins:
            if isinstance(twin.__dict__.get("punica_wrapper"), GroupedLoRA):
                twin.punica_wrapper = NoLoRA.beside(twin.punica_wrapper)
            if getattr(twin, "quant_method", None) is not None:
                twin.register_forward_pre_hook(self._stop)

    def _stop(self, *_: Any) -> None:
        self._stopped.release()
        self._go.acquire()
        if self._cancelled:
            raise SystemExit

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                set_kernel_threads(self._threads)  # a new thread has OpenMP's default
                with torch.inference_mode():
                    self._answer = self._forward()
        except BaseException as error:  # noqa: BLE001 - carried to `advance`, which raises it
            self._error = error
        finally:
            self._stopped.release()

    def _forward(self) -> dict[str, list]:
        return read_answer(self._model, self._model(**self._inputs), self._stop)


def read_answer(model: torch.nn.Module, hidden: torch.Tensor, before_rows: Callable[[], Any]) -> dict[str, list]:
    """Return the answer for these hidden states (positions, width): at each position the top token and its
    log-probability in nats. It calls `before_rows` before each pass of the output head.
    """
    tokens, logprobs = [], []
    for rows in hidden.split(HEAD_ROWS):
        before_rows()
        logits = model.compute_logits(rows)
        if logits is None:  # a tensor-parallel worker on which the logits are not gathered
            continue
        best = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
        tokens += best.indices.tolist()
        logprobs += best.values.tolist()
    return {"tokens": tokens, "logprobs": logprobs}


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Clone each tensor once, also inside dataclasses; keep everything else as it is.

    `scheduler_metadata` is kept, not copied: it is created for each batch and holds addresses into itself.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = (value.clone(), value)
        return copies[id(value)][0]
    if is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: _copied(getattr(value, field.name), copies)
            for field in fields(value)
            if field.init and field.name != "scheduler_metadata"
        }
        return replace(value, **changed)
    return value


def _twin(model: torch.nn.Module, staged: Iterable[Ready]) -> tuple[dict[int, torch.nn.Module], dict[int, str]]:
    """Return twins of all modules, by the original's id, that hold the staged tensors; and by id what they must not
    reach."""
    modules = [*model.modules()]
    twins = {id(module): twin_of(module) for module in modules}
    tensors: dict[int, torch.nn.Parameter | torch.Tensor] = {}
    replaced: dict[int, str] = {}
    for ready in staged:
        module, twin = ready.module, twins[id(ready.module)]
        for name, value in {**ready.parameters, **ready.exchanged, **ready.copied}.items():
            table = module._parameters if name in module._parameters else module._buffers
            old = table[name]
            is_new_parameter = isinstance(old, torch.nn.Parameter) and not isinstance(value, torch.nn.Parameter)
            tensors[id(old)] = torch.nn.Parameter(value, requires_grad=False) if is_new_parameter else value
            replaced[id(old)] = f"{type(module).__name__}.{name}"
        for name, value in ready.attributes.items():
            replaced[id(module.__dict__.get(name))] = f"{type(module).__name__}.{name}"
            twin.__dict__[name] = value
        replaced[id(module)] = type(module).__name__
    for module in modules:
        twin = twins[id(module)]
        for table in ("_parameters", "_buffers"):
            found = twin.__dict__[table]
            twin.__dict__[table] = {name: tensors.get(id(tensor), tensor) for name, tensor in found.items()}
        twin.__dict__["_modules"] = {name: twins.get(id(child), child) for name, child in twin._modules.items()}
        for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            twin.__dict__[hooks] = twin.__dict__[hooks].copy()
        twin.__dict__.pop("lora_manager", None)  # lists every wrapped layer, but no forward pass reads it
        for name, value in twin.__dict__.items():
            if isinstance(value, MethodType) and id(value.__self__) in twins:
                twin.__dict__[name] = MethodType(value.__func__, twins[id(value.__self__)])
            elif isinstance(value, torch.nn.Module) and id(value) in twins:
                twin.__dict__[name] = twins[id(value)]
    return twins, replaced


def _refuse_leaks(twins: list[torch.nn.Module], replaced: dict[int, str]) -> Iterator[None]:
    """Raise TwinRefused if the twins can reach a replaced tensor, closure or module. Yields every LEAKS_SLICE_S: when
    this search ran in a thread beside the steps, a step took three times as long, because it waited for the
    interpreter's lock after each of its kernels.

    The search skips vLLM's configuration: it lists the attention and expert layers, but vLLM looks those up through the
    forward context, which names the twins.
    """
    replaced = {key: name for key, name in replaced.items() if key != id(None)}
    replaced.pop(id(torch.nn.functional.linear), None)
    namespaces = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    seen, left = set(), [*twins]
    began_s = time.perf_counter()
    while left:
        if time.perf_counter() - began_s > LEAKS_SLICE_S:
            yield
            began_s = time.perf_counter()
        value = left.pop()
        if id(value) in seen or id(value) in namespaces:
            continue
        seen.add(id(value))
        if id(value) in replaced:
            raise TwinRefused(f"something in the model still refers to the serving {replaced[id(value)]}")
        # A parameter's weight loader is a method of its module; only a load calls it.
        if isinstance(value, torch.Tensor | type | ModuleType | BuiltinFunctionType | VllmConfig | CompilationConfig):
            continue
        left.extend(gc.get_referents(value))
