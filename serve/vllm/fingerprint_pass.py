"""Runs one forward pass over a fingerprint's tokens inside the engine core, bypassing the scheduler."""

from __future__ import annotations

from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine.core import EngineCore

FINGERPRINT_REQUEST = "appliance-fingerprint"


def run_fingerprint(core: EngineCore, token_ids: list[int], pooling_task: str | None) -> dict[str, Any]:
    """Run one forward pass over `token_ids` on the current model, bypassing the scheduler.

    Only for an engine that is paused with its caches cleared, or idle: the pass writes into the first KV blocks, which
    no request may own. Returns `{"tokens": [...], "logprobs": [...]}`: for each position the token the
    model ranks first and its log-probability in nats; or `{"embedding": [...]}` for a pooling model.
    """
    if core.scheduler.pause_state.name == "UNPAUSED" and core.scheduler.has_unfinished_requests():
        raise RuntimeError("the fingerprint needs a paused or idle engine")
    request = NewRequestData(
        req_id=FINGERPRINT_REQUEST,
        prompt_token_ids=list(token_ids),
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=tuple([1] for _ in core.scheduler.kv_cache_config.kv_cache_groups),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=list(token_ids),
    )
    if pooling_task is None:
        request.sampling_params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=1, logprobs=1, skip_reading_prefix_cache=True
        )
    else:
        request.pooling_params = PoolingParams(task=pooling_task)
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [request]
    step.num_scheduled_tokens = {FINGERPRINT_REQUEST: len(token_ids)}
    step.total_num_scheduled_tokens = len(token_ids)
    # A pause preempts all requests, but the worker frees their slots only when a step names them. vLLM's runner for
    # GPUs has max_num_seqs slots, and dies when a request finds none (vllm/v1/worker/gpu/states.py). The scheduler
    # names them again in its next step, which finds nothing left to free.
    step.finished_req_ids = set(core.scheduler.finished_req_ids)
    step.preempted_req_ids = set(core.scheduler.reset_preempted_req_ids)
    try:
        output = core.model_executor.execute_model(step)
        if output is None:
            output = core.model_executor.sample_tokens(None)
    finally:
        forget = SchedulerOutput.make_empty()
        forget.finished_req_ids = {FINGERPRINT_REQUEST}
        core.model_executor.execute_model(forget)
    if pooling_task is not None:
        return {"embedding": output.pooler_output[0].float().flatten().tolist()}
    # Column 0 of prompt_logprobs is the prompt's own next token, column 1 the top-ranked one.
    prompt = output.prompt_logprobs_dict[FINGERPRINT_REQUEST]
    return {
        "tokens": prompt.logprob_token_ids[:, 1].tolist() + [int(output.sampled_token_ids[0][0])],
        "logprobs": prompt.logprobs[:, 1].tolist() + [float(output.logprobs.logprobs[0][0])],
    }
