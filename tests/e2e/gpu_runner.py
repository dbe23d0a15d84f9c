"""Of vLLM's model runner for GPUs what takes in requests: it keeps what each asks for in rows of fixed types and
lengths and raises where something does not fit, which ends an engine. Here the rows lie in host memory and no kernel
reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

HOST = torch.device("cpu")


class GpuRunner:
    """One slot of `vllm.v1.worker.gpu.model_runner.GPUModelRunner`, as 0.32 takes in a request that generates."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.worker.gpu import buffer_utils
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        buffer_utils.is_uva_available = lambda: False  # no memory here is shared with a GPU
        self._vocab, self._length = config.model_config.get_vocab_size(), config.model_config.max_model_len
        self._states = RequestState(1, self._length, self._length, 0, self._vocab, HOST, 1)
        self._sampler = Sampler(config, 1, self._vocab, HOST, self._states)
        self._prompts = PromptLogprobsWorker(1, HOST)

    def take(self, request: Any) -> None:
        """request: vllm.v1.request.Request. Raises what ends an engine."""
        asked, prompt = request.sampling_params, request.prompt_token_ids
        self._states.add_request("r", len(prompt), list(prompt), 0, asked.max_tokens)
        self._sampler.add_request(0, asked)
        self._prompts.add_request("r", 0, asked)
        forbidden = self._sampler.logits_processors
        for place in (self._states, self._sampler.logprob_token_ids_state, *forbidden):
            for name, kept in vars(place).items():
                self._written(name, kept)
        self._prompts.remove_request("r")
        self._states.remove_request("r")
        assert 0 < len(prompt) <= self._length and max(prompt) < self._vocab and min(prompt) >= 0

    def _written(self, name: str, kept: Any) -> None:
        """A kernel writes what is staged, and does not ask whether it fits."""
        staged = getattr(kept, "_staged_write_contents", None)
        if not staged:
            return
        row = np.array(staged, dtype=kept.gpu.numpy().dtype)
        assert len(row) <= (kept.gpu.shape[1] if kept.gpu.dim() > 1 else 1), f"{name} has no room for {len(row)}"
        if name.endswith("token_ids"):
            assert row.min() >= 0 and row.max() < self._vocab, f"{name} has ids of no token"
        for list_name in ("indices", "starts", "contents", "cu_lens"):
            getattr(kept, f"_staged_write_{list_name}").clear()
