"""vLLM as it comes: its own loader and worker on a model directory on disk, without anything of this project."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

from runtime.processes.child import Child
from runtime.processes.lifeline import Lifeline
from serve.core.spec import ReplicaSpec
from serve.vllm.arguments import engine_environment


async def answer_of_plain_engine(
    warm_socket: str, spec: ReplicaSpec, prompt: list[int], tokens: int, log_path: str, timeout_s: float = 400.0
) -> tuple[list[int], list[float]]:
    """(token ids, log-probabilities) of a greedy completion of `prompt` by the model in `spec.version_path`."""
    child = await Child.spawn(
        warm_socket,
        "tests.e2e.plain_engine:main",
        {"spec": spec.to_json(), "prompt": prompt, "tokens": tokens},
        log_path=log_path,
        name="plain engine",
    )
    try:
        event = await asyncio.wait_for(child.next_event(), timeout_s)
        with open(log_path) as log:
            assert event and event["event"] == "answered", f"{event}\n{log.read()[-3000:]}"
    finally:
        await child.kill_and_wait()
    return event["ids"], event["logprobs"]


def main(lifeline: Lifeline, args: dict[str, Any]) -> int:
    spec = ReplicaSpec(**args["spec"])
    os.environ.update(engine_environment(spec, 1))
    os.makedirs(spec.scratch_path, mode=0o700, exist_ok=True)
    tempfile.tempdir = spec.scratch_path  # the warm parent has looked up and kept its own
    from vllm import LLM, SamplingParams

    lifeline.serve({})
    engine = LLM(
        model=spec.version_path,
        load_format="safetensors",
        dtype=spec.dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=spec.kv_cache_bytes,
        max_num_seqs=spec.max_num_seqs,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=args["tokens"], logprobs=0, ignore_eos=True)
    (answer,) = engine.generate({"prompt_token_ids": args["prompt"]}, sampling, use_tqdm=False)[0].outputs
    chosen = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
    lifeline.emit("answered", ids=list(answer.token_ids), logprobs=chosen)
    return 0
