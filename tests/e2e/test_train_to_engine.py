"""An engine serves the weights that ranks publish by fragments: compares a swap with unmodified vLLM from disk."""

import asyncio
import os
import shutil
import tempfile
from typing import Any

import pytest

from runtime.processes.child import Child
from runtime.processes.lifeline import Lifeline
from serve.core.spec import ReplicaSpec
from serve.vllm.arguments import engine_environment

# Widths of heads and experts that vLLM's CPU kernels need; at this range greedy decoding of random weights is stable.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.12,
}
PROMPT, TOKENS = [10, 20, 30, 40], 24
SAME_LOGPROB = 0.0
EXPERTS = {"moe_intermediate_size": 128}
LORA = {"full": False, "lora_rank": 4, "learning_rate": 0.02}

CASES = {"mixtral-full-3": ({"family": "mixtral"}, {"zero_stage": 3})}
SOAK = {
    f"{family}-{method}-{stage}": (
        {"family": family, "tied": tied} | (EXPERTS if family.endswith("moe") else {}),
        {"zero_stage": stage} | (LORA if method == "lora" else {}),
    )
    for family, tied in (
        ("llama", False),
        ("mistral", True),
        ("qwen2", True),
        ("qwen3", True),
        ("mixtral", False),
        ("qwen3_moe", False),
        ("qwen2_moe", False),
    )
    for method in ("full", "lora")
    for stage in (1, 2, 3)
}


@pytest.mark.parametrize(
    "model, fields",
    [pytest.param(*case, id=name) for name, case in CASES.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.soak) for name, case in SOAK.items()],
)
async def test_swap_of_published_fragments_equals_plain_engine(engine_box, start, shop, tmp_path, model, fields):
    job = shop.spec(model=model | SIZES, n_epochs=1, examples=32, **({"learning_rate": 5e-3} | fields))
    replica, sdk, *_ = await start("base", shop.base, version="base")
    before = await greedy(sdk, "starter")

    await shop.run(job, 2)
    (published,) = shop.store.list("version")
    swapped = await replica.swap("tuned", published.version, str(published.path))
    assert swapped["fingerprint"]["verdict"] == "verified"
    ids, logprobs = await greedy(sdk, "tuned")
    await replica.stop()
    assert (ids, logprobs) != before, "training must have changed the answer"

    disk = shutil.copytree(published.path, tmp_path / "disk")
    want, want_logprobs = await answer_of_plain_engine(
        str(engine_box.warm_socket), engine_box.spec("plain", disk), PROMPT, TOKENS, str(engine_box.logs / "plain.log")
    )
    worst = max(abs(ours - theirs) for ours, theirs in zip(logprobs, want_logprobs, strict=True))
    print(f"worst difference of a token's logprob: {worst:.1e}")
    assert ids == want and worst <= SAME_LOGPROB


async def greedy(sdk, model):
    """(token ids, log-probabilities) of a greedy completion."""
    answer = await sdk.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    return choice.model_extra["token_ids"], choice.logprobs.token_logprobs


# --- unmodified vLLM: its own loader and worker on a model directory on disk, without code of this project


async def answer_of_plain_engine(
    warm_socket: str, spec: ReplicaSpec, prompt: list[int], tokens: int, log_path: str, timeout_s: float = 400.0
) -> tuple[list[int], list[float]]:
    """(token ids, log-probabilities) of a greedy completion of `prompt` by the model in `spec.version_path`."""
    child = await Child.spawn(
        warm_socket,
        f"{__name__}:main",
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
    tempfile.tempdir = spec.scratch_path  # the warm parent has cached its own
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
