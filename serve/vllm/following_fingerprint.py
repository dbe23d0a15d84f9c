"""The fingerprint of a version that is loaded in place, computed while the layers behind it are still being converted.

Nothing may be served before the new weights answered, so the pass is part of the pause. It repeats the engine's own
fingerprint (`FingerprintTrace`) over the model itself. At a layer that is not loaded yet it helps with the loading:
what was just converted is still in the processor's cache. The output head is read once instead of twice, as the model
runner asks it for the prompt's positions and for the next token.

Only for a paused engine with its caches cleared: like the engine's own, the pass writes into a KV block that then
belongs to nobody.
"""

from __future__ import annotations

import torch
from vllm.forward_context import override_forward_context

from serve.cpu.staged_fingerprint import FingerprintTrace, read_answer
from serve.load.converting import Converting


def follow(model: torch.nn.Module, trace: FingerprintTrace, converting: Converting) -> dict[str, list]:
    """The answer of the new weights (`tokens`, `logprobs` in nats, per position).

    Every converted layer has to be among `trace.called`: only there can the pass wait for it. Raises what a conversion
    or the pass itself raised.
    """
    hooks = [module.register_forward_pre_hook(lambda m, _: converting.wait_for(m)) for module in converting.items]
    try:
        with torch.inference_mode(), override_forward_context(trace.context):
            return read_answer(model, model(**trace.inputs), converting.wait_for_all)
    finally:
        for hook in hooks:
            hook.remove()
