"""Each family of models that engines and trainers share, as a tiny random model: imported, asked, fine-tuned, asked
again, and both times compared with transformers.

A family that is refused is refused by name: what its row in docs/first-model.md says is what this asserts.
"""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
import torch
import transformers

from tests.e2e.box_support import gsm8k, wait_for, whole_box
from weights.format.names import encode_name

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # so that the next token is no matter of rounding
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "phi3": {"sliding_window": None, "pad_token_id": 0},
    "granite": {},
    "olmo2": {},
    "glm4": {"pad_token_id": 0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}
# What does not work, and the words in which the box says so: an engine's refusal, or a job's.
NOT_SERVED = {
    "gpt_oss": "tokenizer",  # its parsers want its own tokenizer
    "deepseek_v2": "Head dimension 48 is not supported",  # vLLM's latent attention on the CPU
    "deepseek_v3": "e_score_correction_bias",
}
NOT_TUNED = {"gemma2": "caps its attention logits"}
# Which experts answer turns on the last digit of bfloat16.
TOLERANCE_NATS = {"mixtral": 0.3}
PROMPT = [5, 17, 40, 71, 9, 33, 28, 64, 12, 90]


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box")) as one:
        one.make_starter()
        yield one


def expected(directory: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Log-probabilities of the token after PROMPT, computed in `dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)


def answered(client: openai.OpenAI, name: str, tokenizer) -> dict[int, float]:
    """The same from an engine, for its five likeliest tokens."""
    told = client.completions.create(
        model=name,
        prompt=PROMPT,
        max_tokens=1,
        temperature=0,
        logprobs=5,
        extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
    )
    top = told.choices[0].logprobs.top_logprobs[0]
    return {int(token.removeprefix("token_id:")): value for token, value in top.items()}


def ended(client: openai.OpenAI, job_id: str):
    job = client.fine_tuning.jobs.retrieve(job_id)
    return job if job.status in ("succeeded", "failed", "cancelled") else None


def compare(client: openai.OpenAI, name: str, directory: Path, tokenizer) -> tuple[float, float]:
    """The largest differences from float32, in nats: of the engine, and of transformers in bfloat16, which the engine
    computes in too. Rounding moves one draw of weights three times as far as another."""
    right, found = expected(directory), answered(client, name, tokenizer)
    rounded = expected(directory, torch.bfloat16)
    return tuple(
        round(max(abs(right[token].item() - value) for token, value in answer.items()), 4)
        for answer in (found, {token: rounded[token].item() for token in found})
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_imported_served_tuned_and_computes_what_transformers_does(box, family, tmp_path, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(next((box.data_dir / "models" / "starter").iterdir()))
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SHAPE | FAMILIES[family]
    )
    torch.manual_seed(1)
    directory = tmp_path / family
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    client, row = box.client(), {"family": family}
    try:
        box.run("model", "import", str(directory), "--name", family)
        if family in NOT_SERVED:
            with pytest.raises(openai.APIStatusError, match=NOT_SERVED[family]):
                compare(client, family, directory, tokenizer)
            row["served"] = f"no: {NOT_SERVED[family]}"
            return
        row["served"] = compare(client, family, directory, tokenizer)
        how = {"n_epochs": 1, "batch_size": 4, "max_length": 256, "full": True}
        job_id = box.tune(family, gsm8k("train", 24), **how)
        done = wait_for(lambda: ended(client, job_id), "the end of the job", 300)
        row["job"] = done.status if done.error is None else f"{done.status}: {done.error.message[:160]}"
        if done.status == "succeeded":
            (version,) = [v["version"] for v in box.ask("model", "show", done.fine_tuned_model)["versions"]]
            disk = box.data_dir / "models" / encode_name(done.fine_tuned_model) / encode_name(version)
            wait_for((disk / "manifest.json").is_file, "the version on disk", 60)
            row["tuned"] = compare(client, done.fine_tuned_model, disk, tokenizer)
            box.run("model", "rm", done.fine_tuned_model)
        box.run("model", "rm", family)
    finally:
        with capsys.disabled():
            print("\n" + json.dumps(row), flush=True)
    most = TOLERANCE_NATS.get(family, 0.1)
    engine, rounding = row["served"]
    assert engine < most + rounding, row
    if family in NOT_TUNED:
        assert NOT_TUNED[family] in row["job"], row
    else:
        assert row["job"] == "succeeded", row
        engine, rounding = row["tuned"]
        assert engine < most + rounding, row
