"""Simulates engines with continuous batching, in closed form between events.

Model of one step of one replica (tensor-parallel 1), after Vidur and vLLM's chunked prefill:

    step_s = base_s + per_token_s x (decoding sequences + prefill tokens of this step) + per_context_s x context tokens

Every decoding sequence gets one token per step. A step takes up to `chunk_tokens` of the queued prompts, first come
first served, and several prompts if they are short. A sequence is admitted when its prompt and output fit the KV cache.
Between two events (arrival, end of a prefill, end of a sequence) the rates are constant, so an engine costs a few
operations per request, not per token. The model leaves out quadratic prefill attention (below 5 % up to 8k tokens),
growth of the context between two events, and CPU time.

`base_s` and `per_token_s` are least-squares fits of the H100 profile of Llama-2-7B (32 layers, medians of all linear,
norm and rotary kernels) in microsoft/vidur's data (MIT).
`per_context_s` is the model's 512 KiB of KV per token over 70 % of an H100's 3.35 TB/s.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from benchmarks.simulator.trace import Requests


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Parameters of the formula above. `kv_tokens`: capacity of the KV cache, in tokens."""

    base_s: float = 3.68e-3
    per_token_s: float = 2.01e-5
    per_context_s: float = 2.2e-7
    chunk_tokens: int = 2048
    kv_tokens: int = 120_000
    max_num_seqs: int = 256

    def step_s(self, decoding: int, context_tokens: float, prefill_tokens: float) -> float:
        return self.base_s + self.per_token_s * (decoding + prefill_tokens) + self.per_context_s * context_tokens

    def target_inflight(self, *, tpot_s: float, prompt: float, output: float) -> int:
        """Return how many requests one replica carries: all fit its cache and, if their prompts arrive evenly, further
        tokens take two thirds of the target time. The time to the first token depends on waiting prompts instead.
        """
        n = 1
        while n < self.max_num_seqs and (n + 1) * (prompt + output) <= self.kv_tokens:
            prefill_per_step = min((n + 1) * prompt / max(output, 1.0), self.chunk_tokens)
            if self.step_s(n + 1, (n + 1) * (prompt + output / 2), prefill_per_step) > tpot_s * 2 / 3:
                break
            n += 1
        return n


@dataclass(slots=True)
class Served:
    """Times of the first token and the end of each request; -1 if not reached."""

    first_token_s: list[float]
    end_s: list[float]

    @classmethod
    def of(cls, count: int) -> Served:
        return cls([-1.0] * count, [-1.0] * count)


class Engine:
    """Simulates one replica's queue and batch. Call `advance(t)` before any other method at time t."""

    __slots__ = (
        *("model", "requests", "served", "now_s", "version", "waiting", "tokens", "prompt_tokens", "_prefill", "_left"),
        *("_emitted", "_batch", "_context", "_reserved", "_queued", "_chunk", "_step_s"),
    )

    def __init__(self, model: EngineModel, requests: Requests, served: Served, now_s: float):
        self.model, self.requests, self.served, self.now_s = model, requests, served, now_s
        self.waiting: deque[int] = deque()
        self.version = 0
        self._prefill: int | None = None
        self._left = 0.0
        self._emitted = 0.0  # tokens that a sequence in the batch from the beginning would have
        self._batch: list[tuple[float, int]] = []  # (value of _emitted at which the request ends, request)
        self._context = 0.0
        self._reserved = 0
        self._queued = 0  # prompt tokens of `waiting`
        self.tokens = 0  # prompt and output tokens of all requests that have not ended
        self.prompt_tokens = 0  # prompt tokens of all requests that have not ended
        self._chunk, self._step_s = 0.0, 1.0  # rates, constant between two events, set by `next_event_s`

    @property
    def inflight(self) -> int:
        return len(self.waiting) + len(self._batch) + (self._prefill is not None)

    @property
    def waiting_tokens(self) -> int:
        return int(self._left) + self._queued

    @property
    def pending_tokens(self) -> int:
        """Number of prompt tokens of requests without a first token. Like a gateway, counts full prompts."""
        return self._queued + (0 if self._prefill is None else self.requests.prompt[self._prefill])

    @property
    def stuck(self) -> bool:
        """Whether requests wait while no prompt is computed, because the cache or the batch is full."""
        return bool(self.waiting) and self._prefill is None

    def take_back(self) -> int:
        """Remove and return the longest waiting request whose prompt is not being computed."""
        request = self.waiting.popleft()
        self._queued -= self.requests.prompt[request]
        self.tokens -= self.requests.prompt[request] + self.requests.output[request]
        self.prompt_tokens -= self.requests.prompt[request]
        self._admit()
        self.version += 1
        return request

    def add(self, request: int) -> None:
        self.waiting.append(request)
        prompt = self.requests.prompt[request]
        self._queued += prompt
        self.tokens += prompt + self.requests.output[request]
        self.prompt_tokens += prompt
        self._admit()
        self.version += 1

    def _admit(self) -> None:
        if self._prefill is not None or not self.waiting or len(self._batch) >= self.model.max_num_seqs:
            return
        request = self.waiting[0]
        need = self.requests.prompt[request] + self.requests.output[request]
        if self._reserved and self._reserved + need > self.model.kv_tokens:
            return
        self.waiting.popleft()
        self._queued -= self.requests.prompt[request]
        self._reserved += need
        self._prefill, self._left = request, float(self.requests.prompt[request])

    def next_event_s(self) -> float | None:
        """Return when the next event comes (None: idle). Call it after each change: it sets the rates of `advance`."""
        prefilling, batch, model = self._prefill is not None, self._batch, self.model
        if not prefilling and not batch:
            return None
        chunk = 0.0
        if prefilling:
            # Prompt tokens per step: of the first queued request and, if they fit the cache, of the next requests.
            chunk = self._left + self._queued if self._reserved + self._queued <= model.kv_tokens else self._left
            chunk = min(chunk, model.chunk_tokens)
        self._chunk = chunk
        self._step_s = step_s = (
            model.base_s + model.per_token_s * (len(batch) + chunk) + model.per_context_s * self._context
        )
        steps = self._left / chunk if prefilling else math.inf
        if batch:
            steps = min(steps, max(batch[0][0] - self._emitted, 0.0))
        return self.now_s + steps * step_s

    def advance(self, to_s: float) -> None:
        """Advance time; `to_s` must not be beyond the next event."""
        steps = (to_s - self.now_s) / self._step_s
        self.now_s = to_s
        if self._batch:
            self._emitted += steps
            self._context += steps * len(self._batch)
        if self._prefill is not None:
            self._left -= steps * self._chunk

    def finish_events(self) -> None:
        """Process the events due now: end sequences, complete a prefill."""
        requests, served = self.requests, self.served
        self.version += 1
        while self._batch and self._batch[0][0] - self._emitted < 1e-6:
            _, request = heapq.heappop(self._batch)
            served.end_s[request] = self.now_s
            whole = requests.prompt[request] + requests.output[request]
            self._reserved -= whole
            self.tokens -= whole
            self.prompt_tokens -= requests.prompt[request]
            self._context -= whole
        if not self._batch:
            self._context = 0.0
        if self._prefill is not None and self._left < 1e-3:
            request, self._prefill, self._left = self._prefill, None, 0.0
            served.first_token_s[request] = self.now_s
            if requests.output[request] <= 1:
                served.end_s[request] = self.now_s
                self._reserved -= requests.prompt[request] + requests.output[request]
                self.tokens -= requests.prompt[request] + requests.output[request]
                self.prompt_tokens -= requests.prompt[request]
            else:
                self._context += requests.prompt[request] + 1
                heapq.heappush(self._batch, (self._emitted + requests.output[request] - 1, request))
        self._admit()
