"""What ranks publish by fragments is what an engine serves: a swap against vLLM as it comes, loading from disk."""

import shutil

import pytest

from tests.e2e.plain_engine import answer_of_plain_engine

# As wide as vLLM's CPU kernels want heads and experts to be; greedy decoding of random weights is stable at this range.
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

CASES = {
    "mixtral-full-3": ({"family": "mixtral"}, {"zero_stage": 3}),
}
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
async def test_published_by_fragments_then_swapped_in_equals_a_plain_engine_from_disk(
    engine_box, start, shop, tmp_path, model, fields
):
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
