"""Computes the fingerprint of a version loaded in place, while later layers are still being converted.

The engine may serve nothing before the new weights have answered, so the pass is part of the pause. It repeats the
engine's own fingerprint (`FingerprintTrace`) over the model itself. At a layer that is not loaded yet it helps with the
loading: a layer just converted is still in the processor's cache. It reads the output head once; the model runner would
read it twice, for the prompt's positions and for the next token.

Only for a paused engine with its caches cleared: like the engine's own, the pass writes into a KV block that no request
may own.
"""

from __future__ import annotations

import torch
from vllm.forward_context import override_forward_context

from serve.cpu.staged_fingerprint import FingerprintTrace, read_answer
from serve.load.converting import Converting


def follow(model: torch.nn.Module, trace: FingerprintTrace, converting: Converting) -> dict[str, list]:
    """Return the answer of the new weights (`tokens`, `logprobs` in nats, per position).

    Every converted layer must be in `trace.called`, because only there can the pass wait for it. Re-raises errors of a
    conversion or of the pass.
    """
    hooks = [module.register_forward_pre_hook(lambda m, _: converting.wait_for(m)) for module in converting.items]
    try:
        with torch.inference_mode(), override_forward_context(trace.context):
            return read_answer(model, model(**trace.inputs), converting.wait_for_all)
    finally:
        for hook in hooks:
            hook.remove()
