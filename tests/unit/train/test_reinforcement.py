"""Reinforcement: its schema and data, its loss against a plain computation, and runs that learn from rewards."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.train_support.specs import host_spec
from tests.train_support.tiny import VOCABULARY, make_model_dir, write_prompt_file
from tests.train_support.world import SAMPLES
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from train.control.progress import ControlSignals, Progress
from train.data.chat import ChatEncoder
from train.data.check import check_training_file
from train.data.formats import BadRecord
from train.data.packing import RolloutRow, build_row
from train.graders.calls import calls_in
from train.methods.methods import convert, method_of
from train.methods.packed_objective import PackedObjective
from train.methods.reinforcement import GROUP
from train.methods.reinforcement import METHOD as REINFORCEMENT
from train.methods.reinforcement_objective import CLIP_HIGH, CLIP_LOW, TRUNCATED_AT, ReinforcementObjective, to_batch
from train.model.model import load_model, load_tokenizer
from train.plan import auto, estimate
from train.plan.errors import InvalidHyperparameter, InvalidSpec, InvalidTrainingData, NothingGraded
from train.plan.spec import TrainSpec
from train.rollouts import sampler
from train.rollouts.form import Form
from train.rollouts.grader import advantages, standard_error
from train.rollouts.rollouts import FILE, Rollouts
from train.rollouts.sampler import Answers, sample
from train.trainer.prepare import prepare
from weights.memory.store import WeightStore

DATASET, MODEL = auto.DatasetStats(64, 64 * 20, 30), auto.ModelStats(10_000_000, 512, device_kind="cpu")


# --- the schema


def test_its_hyperparameters_are_openais():
    given = {"compute_multiplier": 2, "eval_interval": 5, "eval_samples": 3, "reasoning_effort": "default"}
    fields = REINFORCEMENT.resolve(
        {**given, "n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 3}, DATASET, MODEL, 2
    )
    made = REINFORCEMENT.samples(fields["options"])
    assert (made.group, made.valid, fields["eval_interval"], made.room) == (2 * GROUP, 3, 5, 256)
    assert (fields["batch_size"], fields["micro_batch"], fields["packing"], fields["n_epochs"]) == (4, 1, False, 2)
    # The longest prompt, which may be an estimate, and the answer.
    assert fields["max_length"] == 64 + 256 and REINFORCEMENT.data_length(320, fields["options"]) == 64
    assert made.group / made.rows * fields["max_length"] <= 1024
    plain = auto.resolve({"batch_size": 4, "n_epochs": 2, "packing": False, "max_length": 320}, DATASET, MODEL, 2)
    assert fields["learning_rate"] == pytest.approx(3 * REINFORCEMENT.rate_share * plain["learning_rate"], rel=0.2)
    assert json.loads(json.dumps(fields["options"])) == fields["options"]


@pytest.mark.parametrize(
    "given, rank_limit, expected",
    [
        ({"lora_rank": 8}, 32, "ranks"),
        ({"lora_rank": 8, "rollouts": "engine"}, 32, "engine"),
        ({"lora_rank": 8, "rollouts": "engine", "lora_publish": "merged"}, 32, "engine"),
        ({"lora_rank": 8, "rollouts": "ranks"}, 32, "ranks"),
    ],
)
def test_an_engine_samples_where_it_is_asked_to(given, rank_limit, expected):
    model = replace(MODEL, adapter_max_rank=rank_limit)
    assert REINFORCEMENT.resolve(given, DATASET, model, 1)["options"]["rollouts"] == expected


@pytest.mark.parametrize(
    "given, rank_limit, why",
    [
        ({}, 32, "full is true"),
        ({"lora_rank": 8}, 0, "engines of this base take no adapters"),
        ({"lora_rank": 64, "lora_publish": "merged"}, 32, "engines take adapters of rank 32 at most"),
    ],
)
def test_an_engine_that_cannot_is_refused_in_words(given, rank_limit, why):
    model = replace(MODEL, adapter_max_rank=rank_limit)
    with pytest.raises(InvalidHyperparameter, match=f"'rollouts' is 'engine'; expected 'ranks' or 'auto': {why}"):
        REINFORCEMENT.resolve({**given, "rollouts": "engine"}, DATASET, model, 1)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"rollouts": "both"}, "one of auto, engine, ranks"),
        ({"reasoning_effort": "much"}, "'reasoning_effort' is 'much'; expected one of default, low"),
        ({"compute_multiplier": 11}, "'compute_multiplier' is 11; expected 'auto' or a number"),
        ({"compute_multiplier": 0}, "'compute_multiplier'"),
        ({"eval_samples": 0}, "'eval_samples'"),
        ({"max_completion_tokens": 512}, "less than the 512 tokens"),
        ({"max_completion_tokens": 64, "max_length": 64}, "less than max_length 64"),
        ({"packing": True}, "the answers to one prompt are learnt together"),
        ({"micro_batch": 2}, "the answers to one prompt are learnt together"),
        ({"beta": 0.1}, "'beta'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, expected):
    with pytest.raises(InvalidHyperparameter, match=expected):
        REINFORCEMENT.resolve(given, DATASET, MODEL, 1)


def test_a_given_length_leaves_the_answer_half_of_it():
    fields = REINFORCEMENT.resolve({"max_length": 64}, DATASET, MODEL, 1)
    assert fields["options"]["max_completion_tokens"] == 32


def test_memory_counts_the_answers_of_a_row_and_what_sampling_takes():
    shape = estimate.ModelShape(10**7, 256, 4, 4, 64, 1024, 1000)
    few, many = (REINFORCEMENT.resolve({"compute_multiplier": n}, DATASET, MODEL, 1) for n in (1, 4))
    assert REINFORCEMENT.rank_memory(shape, few, 1).activations_bytes >= estimate.SAMPLING_BYTES
    big = replace(shape, hidden=4096, layers=32, ffn=11008)
    one = REINFORCEMENT.rank_memory(big, few, 1).activations_bytes
    # More answers are more rows, not larger ones.
    assert REINFORCEMENT.rank_memory(big, many, 1).activations_bytes == one


def test_memory_counts_the_head_in_float32_which_it_is_learnt_in():
    """Its logits' gradients are held for as many rows as take its own size, and its own is made in parts and summed."""
    shape = estimate.ModelShape(10**9, 1024, 16, 8, 128, 8192, 128_000)
    fields = REINFORCEMENT.resolve({}, DATASET, MODEL, 1) | {"max_length": 4096, "precision": "bf16"}
    full, adapter = (
        REINFORCEMENT.rank_memory(shape, {**fields, "full": full}, 1).activations_bytes for full in (True, False)
    )
    rows = shape.hidden  # of 4 bytes for each element of the vocabulary
    assert full - adapter == shape.vocab * (4 * rows + (4 + 4) * shape.hidden)


def test_memory_counts_every_answer_of_a_step():
    shape = estimate.ModelShape(10**7, 256, 4, 4, 64, 1024, 1000)
    model = replace(MODEL, max_position_embeddings=1 << 17)
    asked = {"batch_size": 4096, "compute_multiplier": 10, "max_completion_tokens": 100_000}
    fields = REINFORCEMENT.resolve(asked, DATASET, model, 1)
    needs = REINFORCEMENT.rank_memory(shape, fields, 1)
    assert needs.buffers_bytes > 12 * 4096 * 80 * 100_000, "0.4 TB, which a rank would have found out"


def test_memory_counts_the_answers_of_one_validation_prompt_where_a_step_has_fewer():
    shape = estimate.ModelShape(10**7, 256, 4, 4, 64, 1024, 1000)
    model = replace(MODEL, max_position_embeddings=1 << 17)
    asked = {"batch_size": 1, "compute_multiplier": 0.1, "max_completion_tokens": 100_000}
    one, many = (
        REINFORCEMENT.rank_memory(shape, REINFORCEMENT.resolve({**asked, "eval_samples": n}, DATASET, model, 1), 1)
        for n in (1, 64)
    )
    assert many.buffers_bytes - one.buffers_bytes > 12 * 50 * 100_000


# --- the data


def asked(**more):
    return {"messages": [{"role": "user", "content": "2 and 2?"}], "answer": "4", **more}


def test_a_file_of_prompts_is_checked_by_line(tmp_path):
    source, written = tmp_path / "p.jsonl", tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps(asked(n=n)) + "\n" for n in range(12)))
    report = check_training_file(source, chat_path=written, convert=REINFORCEMENT.convert)
    assert report.ok and report.shape == "prompt" and not report.warnings
    record = json.loads(written.read_bytes().splitlines()[3])
    assert record == {"messages": [{"role": "user", "content": "2 and 2?"}], "item": {"answer": "4", "n": 3}}
    assert check_training_file(source, convert=convert).ok, "at the upload no job says which method"
    said = asked()
    said["messages"] = [*said["messages"], {"role": "assistant", "content": "4"}]
    source.write_text("".join(json.dumps(one) + "\n" for one in (asked(), said)))
    (line, reason), *_ = check_training_file(source, convert=REINFORCEMENT.convert).errors
    assert (line, reason) == (2, "has the shape 'chat'; most of the file's first examples are 'prompt'")
    assert "ends with a message from the user" in method_of("supervised").refuses("prompt")
    assert "wants pairs" in method_of("dpo").refuses("prompt")
    assert "conversations that end with the user" in REINFORCEMENT.refuses("chat")
    with pytest.raises(BadRecord, match="expected an object|is a string"):
        REINFORCEMENT.convert({"messages": ["x"]}, "prompt")


def test_a_supervised_file_with_one_question_names_its_line(tmp_path):
    source = tmp_path / "t.jsonl"
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    source.write_text(f"{json.dumps(chat)}\n{json.dumps({'messages': chat['messages'][:1]})}\n")
    (line, reason), *_ = check_training_file(source, convert=convert).errors
    assert line == 2 and "has no assistant message" in reason


def test_a_prompt_is_encoded_up_to_where_the_assistant_answers(tmp_path):
    tokenizer = load_tokenizer(str(make_model_dir(tmp_path / "base")))
    (((ids, learnt),),) = REINFORCEMENT.encode(ChatEncoder(tokenizer), asked())
    assert tokenizer.decode(ids).endswith("2 and 2?<|im_end|>\n<|im_start|>assistant\n") and not learnt.any()
    with pytest.raises(BadRecord, match=f"has {len(ids)} tokens, and 5 are left"):
        REINFORCEMENT.cut([(ids, learnt)], 5)


# --- the loss


def test_advantages_are_rewards_less_the_mean_of_their_group():
    found = advantages([1.0, 0.0, 0.5, 0.5, None, 3.0, 1.0, 2.0, None, 1.0, None, None], 4)
    assert found.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert advantages([0.3] * 8, 8).tolist() == [0.0] * 8, "equal rewards teach nothing"


@pytest.mark.parametrize(
    "text, said, called",
    [
        ('I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "I look.", [("f", {"a": 1})]),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"b": "é"}}',
            "",
            [("f", {}), ("g", {"b": "é"})],
        ),
        ('{"name": "f", "parameters": {"a": [2]}}', "", [("f", {"a": [2]})]),
        ("It is <b>cold</b>.", None, []),
        ('{"name": "f"}', None, []),
        ("<tool_call>{no json}</tool_call>", None, []),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>[1]</tool_call>', None, []),
        ("[" * 100_000, None, []),
    ],
)
def test_calls_of_tools_in_an_answer_are_what_a_grader_reads(text, said, called):
    found = calls_in(text)
    assert found["text"] == (text if said is None else said)
    calls = [call["function"] for call in found.get("tools", [])]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == called


def test_the_error_of_a_mean_reward_is_over_prompts():
    """Answers to one prompt are alike: four of each say no more of other prompts than one does."""
    means = [1.0, 0.0, 0.5, 0.5]
    expected = np.std(means, ddof=1) / 2
    for each in (1, 4):
        found = standard_error([mean for mean in means for _ in range(each)], each)
        assert found == {"mean_reward_error": pytest.approx(expected)}
    assert standard_error([1.0, None, None, None, 0.0, 0.0], 2)["mean_reward_error"] == pytest.approx(0.5)
    assert standard_error([1.0, 0.0, None, None], 2) == {}, "of one prompt nothing is known of others"


def rollout_row(vocabulary=384, sequences=5, seed=0):
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(sequences):
        prompt, answer = draw.integers(4, 9), draw.integers(1, 9)
        ids = draw.integers(3, vocabulary, prompt + answer)
        made.append((ids, np.arange(len(ids)) >= prompt))
    row = build_row([made], 0, 0, packing=False)
    advantages = draw.normal(size=sequences).astype(np.float32)
    return zip(made, advantages, strict=True), RolloutRow(
        **{name: getattr(row, name) for name in row.__dataclass_fields__},
        advantages=advantages.repeat(row.sequence_sizes),
        sampled=draw.uniform(-7, -5, sum(row.sequence_sizes)).astype(np.float32),
    )


@pytest.mark.parametrize("fused", [True, False])
def test_loss_and_gradients_are_those_of_a_plain_computation(tmp_path, monkeypatch, fused):
    spec = host_spec(make_model_dir(tmp_path / "b", dtype=torch.float32), precision="fp32")
    made, row = rollout_row()
    objective = ReinforcementObjective(load_model(spec))
    objective._fused = fused
    loss = objective(to_batch(row, 0.25, "cpu"))
    loss.backward()

    plain = load_model(spec)
    plain.set_attn_implementation("eager")
    total, place = torch.zeros(()), 0
    for (ids, learnt), advantage in made:
        log_probs = plain(input_ids=torch.tensor(ids)[None]).logits[0].float().log_softmax(-1)
        at = np.flatnonzero(learnt)
        now = log_probs[at - 1, torch.tensor(ids[at])]
        ratio = (now - torch.tensor(row.sampled[place : place + len(at)])).exp()
        place += len(at)
        for one in ratio:
            # TRL 1.16's GRPOTrainer with epsilon 0.2, epsilon_high 0.28, delta 3.0 and loss_type "dapo".
            capped = torch.clamp(one, max=TRUNCATED_AT) if advantage < 0 else one
            total = total - torch.min(capped * advantage, torch.clamp(one, 1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    (total * 0.25).backward()
    assert loss.item() == pytest.approx(total.item() * 0.25, rel=1e-5)
    for (name, ours), theirs in zip(objective.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4), name
    # What the code of its `_compute_loss` gives for these numbers, over 21 tokens.
    assert loss.item() / 0.25 / 21 == pytest.approx(-0.0407224, abs=1e-6)
    norm = torch.sqrt(sum(one.grad.square().sum() for one in objective.model.parameters())).item()
    assert norm / 0.25 / 21 == pytest.approx(1.8867627, rel=1e-5)
    (*_, mismatch, moved, clipped), _ = objective.take_metrics()
    assert 0 < mismatch and 0 < moved and 0 < clipped < len(row.labels)
    assert objective.take_metrics() == ([0, 0], [])


def test_tokens_of_an_engine_are_weighed_by_how_likely_they_are_to_the_trainer(tmp_path):
    spec = host_spec(make_model_dir(tmp_path / "b", dtype=torch.float32), precision="fp32")
    made, row = rollout_row()
    objective = REINFORCEMENT.objective(load_model(spec), {"rollouts": "engine"})
    objective(to_batch(row, 0.25, "cpu")).backward()

    plain = load_model(spec)
    plain.set_attn_implementation("eager")
    total, place, ratios = torch.zeros(()), 0, []
    for (ids, learnt), advantage in made:
        log_probs = plain(input_ids=torch.tensor(ids)[None]).logits[0].float().log_softmax(-1)
        at = np.flatnonzero(learnt)
        now = log_probs[at - 1, torch.tensor(ids[at])]
        ratio = (now.detach() - torch.tensor(row.sampled[place : place + len(at)])).exp()
        place += len(at)
        # Yao et al., 2025: min(p(trainer) / p(sampler), C) x advantage x the gradient of log p(trainer).
        total = total - (ratio.clamp(max=2.0) * advantage * now).sum()
        ratios.append(ratio)
    (total * 0.25).backward()
    for (name, ours), theirs in zip(objective.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4), name
    ratios = torch.cat(ratios)
    assert (ratios > 2).any() and (ratios < 0.8).any(), "the cap is met, and what a clip would stop"
    moved = ratios.log().abs()
    (*_, kl, mean, cut), peaks = objective.take_metrics()
    assert kl == pytest.approx(0.25 * (ratios - 1 - ratios.log()).sum().item(), rel=1e-3)
    assert mean == pytest.approx(0.25 * moved.sum().item(), rel=1e-4) and cut == 0.25 * (ratios > 2).sum().item()
    assert peaks == [pytest.approx(moved.max().item(), rel=1e-4)]


def test_the_head_computes_in_float32_whatever_the_weights_are(tmp_path):
    spec = host_spec(make_model_dir(tmp_path / "b"), precision="bf16")
    _, row = rollout_row()
    objective = ReinforcementObjective(load_model(spec))
    batch = to_batch(row, 1.0, "cpu")
    log_probs = objective.log_probs(batch)[0]
    hidden = objective.model.get_decoder()(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], segments=batch["segments"], use_cache=False
    ).last_hidden_state[0, batch["predict_at"]]
    weight = objective.model.get_output_embeddings().weight
    expected = (hidden.float() @ weight.float().t()).log_softmax(-1).gather(1, batch["labels"][:, None])[:, 0]
    assert hidden.dtype == torch.bfloat16 and torch.allclose(log_probs, expected, atol=1e-6)
    objective(batch).backward()
    assert weight.grad.dtype == torch.bfloat16
    assert isinstance(objective, PackedObjective)


# --- the sampler


def sampled(model, prompts, chances, **more):
    return sample(model, prompts, chances, [2], 64, torch.device("cpu"), lambda going: (False, going), **more)


def test_sampled_log_probabilities_are_those_that_the_loss_computes(tmp_path, monkeypatch):
    spec = host_spec(make_model_dir(tmp_path / "b", dtype=torch.float32), precision="fp32")
    objective = ReinforcementObjective(load_model(spec))
    draw = np.random.default_rng(1)
    prompts = [draw.integers(3, 384, 5)] * 3 + [draw.integers(3, 384, 9)] * 3
    chances = draw.random((6, 12))
    made = sampled(objective.model, prompts, chances)
    assert made.sizes.min() >= 1 and made.sizes.max() == 12
    pairs = [(p, made.ids[n, : made.sizes[n]].numpy()) for n, p in enumerate(prompts)]
    whole = [(np.concatenate([p, ids]), np.arange(len(p) + len(ids)) >= len(p)) for p, ids in pairs]
    row = build_row([whole], 0, 0, packing=False)
    log_probs = np.concatenate([made.log_probs[n, : made.sizes[n]].numpy() for n in range(6)])
    found = RolloutRow(
        **{name: getattr(row, name) for name in row.__dataclass_fields__},
        advantages=np.ones(len(log_probs), np.float32),
        sampled=log_probs,
    )
    assert objective.log_probs(to_batch(found, 1.0, "cpu"))[0].detach().numpy() == pytest.approx(log_probs, abs=1e-4)
    # An answer depends on its own numbers alone: not on who is sampled beside it, nor on how many fit the memory.
    alone = sampled(objective.model, prompts[4:5], chances[4:5])
    assert torch.equal(alone.ids[0], made.ids[4])
    monkeypatch.setattr(sampler, "SAMPLING_BYTES", 1)
    assert torch.equal(sampled(objective.model, prompts, chances).ids, made.ids)
    objective(to_batch(found, 1.0, "cpu"))
    (*_, mismatch, moved, clipped), _ = objective.take_metrics()
    assert abs(mismatch) < 1e-6 and abs(moved) < 1e-3 and clipped == 0


@pytest.mark.parametrize("tokens", [64, 4096])
def test_what_is_sampled_at_once_fits_the_plan_with_the_choice_of_tokens(tokens):
    """Qwen2.5-0.5B, of whose short answers the choice takes more than keys and values."""
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    )
    rows = sampler._together(SimpleNamespace(config=config, dtype=torch.bfloat16), tokens)
    kept = rows * 2 * 2 * 24 * 2 * 64 * tokens
    logits = torch.zeros(1, 1000)
    made = [logits, logits.log_softmax(-1), *[logits.double()] * 2]  # see sampler._choose
    choice = rows * 151_936 * sum(one.nbytes for one in made) // 1000
    assert 0.9 * estimate.SAMPLING_BYTES < kept + choice <= estimate.SAMPLING_BYTES


def test_tokens_come_by_their_probability(tmp_path):
    spec = host_spec(make_model_dir(tmp_path / "b", dtype=torch.float32), precision="fp32")
    model = load_model(spec)
    prompt = np.arange(3, 9)
    whole = load_model(spec)
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor(prompt)[None]).logits[0, -1].softmax(-1).numpy()
    n = 4000
    made = sampled(model, [prompt] * n, (np.arange(n)[:, None] + 0.5) / n)
    assert np.bincount(made.ids[:, 0].numpy(), minlength=384) / n == pytest.approx(expected, abs=1.5 / n)


ANSWER = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_learnt_under_a_form_is_its_own_distribution(tmp_path, monkeypatch, fused):
    """Against the logits of the whole vocabulary the ratio of a brace, which the form alone leaves, was its probability
    to a model that writes none: e**-6, with nothing learnt yet."""
    spec = host_spec(make_model_dir(tmp_path / "b", dtype=torch.float32), precision="fp32")
    objective, tokens = ReinforcementObjective(load_model(spec)), load_tokenizer(spec.base_path)
    monkeypatch.setattr(objective, "_fused", fused and objective._fused)
    form = Form(FORM, tokens, VOCABULARY, [2])
    draw = np.random.default_rng(1)
    prompt = draw.integers(3, 384, 5)
    made = sampled(objective.model, [prompt] * 8, draw.random((8, 32)), form=form)
    answers = [made.ids[n, : made.sizes[n]].numpy() for n in range(8)]
    said = [json.loads(tokens.decode(ids[:-1])) for ids in answers if ids[-1] == 2]
    assert said and all(one in ({"a": "x"}, {"a": "yy"}) for one in said)

    log_probs = np.concatenate([made.log_probs[n, : made.sizes[n]].numpy() for n in range(8)])
    whole = [(np.concatenate([prompt, ids]), np.arange(5 + len(ids)) >= 5) for ids in answers]
    row, allowed = build_row([whole], 0, 0, packing=False), np.concatenate([form.allowed(ids) for ids in answers])
    advantages = draw.standard_normal(len(log_probs)).astype(np.float32)
    found = RolloutRow(
        **{name: getattr(row, name) for name in row.__dataclass_fields__},
        advantages=advantages,
        sampled=log_probs,
        allowed=lambda: allowed,
    )
    batch = to_batch(found, 1.0, "cpu")
    computed = objective.log_probs(batch)[0]
    assert computed.detach().numpy() == pytest.approx(log_probs, abs=1e-4)
    one_left = np.array([np.unpackbits(one.view(np.uint8)).sum() == 1 for one in allowed])
    assert 0 < one_left.sum() < len(one_left) and not log_probs[one_left].any()

    weight = objective.model.get_output_embeddings().weight
    (gradient,) = torch.autograd.grad((computed * batch["advantages"]).sum(), weight, retain_graph=True)
    logits = objective.logits(batch)
    forbidden = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :VOCABULARY] == 0
    plain = logits.masked_fill(torch.from_numpy(forbidden), -torch.inf).log_softmax(-1)
    taken = plain.gather(1, batch["labels"][:, None])[:, 0]
    (expected,) = torch.autograd.grad((taken * batch["advantages"]).sum(), weight)
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_what_a_form_left_is_found_for_the_row_that_is_learnt_from() -> None:
    """Of all rows of a step at once it was tens of GB of the host's memory, and took minutes in which no rank left."""
    asked = list[int]()

    def allowed(ids: np.ndarray) -> np.ndarray:
        asked.append(len(ids))
        return np.full((len(ids), 12), -1, np.int32)

    step = SimpleNamespace(
        _advantages=[0.5, -0.5, 1.0],
        _sizes=np.array([4, 2, 3]),
        _ids=np.ones((3, 4), np.int64),
        _log_probs=np.zeros((3, 4)),
        _form=SimpleNamespace(allowed=allowed),
    )
    row = Rollouts._row(step, np.array([5, 6]), np.array([0, 1]))
    assert not asked
    assert to_batch(row, 1.0, "cpu")["allowed"].shape == (6, 12) and asked == [4, 2]


@pytest.mark.parametrize(
    "schema, why",
    [
        ({"$ref": "#"}, "no text fits"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}, "no text fits"),
        ({"type": "object", "properties": 1}, "does not follow its schema"),
    ],
)
def test_a_form_that_no_answer_has_is_refused_in_words(tmp_path, schema, why):
    tokens = load_tokenizer(str(make_model_dir(tmp_path / "b")))
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with pytest.raises(InvalidSpec, match=f"response_format: .*{why}"):
        Form(form, tokens, VOCABULARY, [2]).allowed(tokens.encode('{"a":' + " " * 40))


# --- a run


def run_spec(tmp_path, **fields):
    base = tmp_path / "base"
    defaults = {
        "job_id": "j",
        "base_path": str(base if base.exists() else make_model_dir(base, dtype=torch.float32)),
        "train_path": str(write_prompt_file(tmp_path / "train.jsonl", 24)),
        "run_dir": str(tmp_path / "run"),
        "shm_root": str(tmp_path / "store"),
        "output_model": "m",
        "method": "reinforcement",
        "options": SAMPLES,
        "batch_size": 4,
        "max_length": 96,
        "packing": False,
        "learning_rate": 3e-3,
        "warmup_ratio": 0.0,
        "precision": "fp32",
    }
    return TrainSpec(**(defaults | fields), device_kind="cpu")


class Box:
    """Whoever runs the job: hears its events, and grades. `grade`: text and item to (reward, error). `sampled`: the
    answers' tokens, log-probabilities and texts to a question for samples; None: nothing yet."""

    def __init__(self, grade, sampled=None):
        self.told, self.questions, self.grade, self.sampled = [], [], grade, sampled
        self.asked = []
        self.signals = ControlSignals()

    def __call__(self, event, **data):
        if event != "ask":
            self.told.append({"event": event, **data})
            return
        if data["kind"] == "sample":
            self.asked.append(data)
            if (made := self.sampled(data)) is not None:
                self.give(data, made)
            return
        self.questions.append((data["question"], data["texts"]))
        self.answer(data)

    def answer(self, data):
        self.signals.answer(data["question"], {"verdict": self.verdict(data, data["texts"])})

    def verdict(self, data, texts):
        told = [self.grade(text, data["item"]) for text in texts]
        return {"rewards": [one[0] for one in told], "errors": [one[1] for one in told]}

    def give(self, data, made):
        ids, log_probs, texts = zip(*made, strict=True)
        verdict = self.verdict(data, texts)
        self.signals.answer(data["question"], {"ids": ids, "log_probs": log_probs, "verdict": verdict})

    def of(self, kind):
        return [event for event in self.told if event["event"] == kind]

    def run(self, spec, snapshot=None):
        run = prepare(spec, self, self.signals, Progress(), snapshot)
        outcome = run.run()
        run.close()
        return outcome


def letters(text, item):
    """More of the letter a."""
    return text.count("a") / max(1, len(text)), ""


def test_a_run_learns_what_is_rewarded(tmp_path):
    box = Box(letters)
    valid = str(write_prompt_file(tmp_path / "valid.jsonl", 6, seed=1))
    spec = run_spec(tmp_path, valid_path=valid, n_epochs=4, options={**SAMPLES, "reasoning_effort": "high"})
    assert box.run(spec)["outcome"] == "succeeded"
    assert any("'high' changes nothing" in event["text"] for event in box.of("message"))
    steps = box.of("metrics")
    assert [step["step"] for step in steps] == list(range(1, 25))
    rewards = [step["train_mean_reward"] for step in steps]
    assert np.mean(rewards[-4:]) > 3 * np.mean(rewards[:4]), rewards
    first, *_, last = [event["mean_reward"] for event in box.of("validation")]
    assert last > first
    assert all(0 < event["mean_reward_error"] < 0.5 for event in box.of("validation"))
    # Synchronous: what is learnt from is the policy's own.
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-5 and all(step["clipped"] == 0 for step in steps)
    assert {"sampling", "grading", "training", "full_iteration"} == steps[0]["timing"]["step"].keys()
    item = json.loads((tmp_path / "train.jsonl").read_bytes().splitlines()[0])["item"]
    assert item.keys() == {"answer"}
    train = [texts for name, texts in box.questions if name.startswith("train")]
    assert len(train) == 24 * 4 and all(len(texts) == 8 for texts in train), "a question is one prompt"
    assert [event["version"] for event in box.of("published")] == ["step-24"]


def test_a_run_learns_within_a_form(tmp_path):
    def longer(text, item):
        return (float(json.loads(text)["a"] == "yy") if text.endswith("}") else 0.0), ""

    box = Box(longer)
    options = {**SAMPLES, "max_completion_tokens": 32, "response_format": FORM}
    assert box.run(run_spec(tmp_path, options=options, learning_rate=1e-2))["outcome"] == "succeeded"
    steps = box.of("metrics")
    assert steps[-1]["train_mean_reward"] > steps[0]["train_mean_reward"] + 0.2, steps
    assert all(step["mismatch_max"] < 1e-3 for step in steps)
    said = [text for _, texts in box.questions for text in texts if "}" in text]
    assert said and all(json.loads(text) in ({"a": "x"}, {"a": "yy"}) for text in said)


def test_equal_rewards_change_nothing_and_a_silent_grader_ends_the_job(tmp_path):
    box = Box(lambda text, item: (0.5, ""))
    spec = run_spec(tmp_path)
    assert box.run(spec)["outcome"] == "succeeded"
    assert all(
        step["loss"] == 0 and step["grad_norm"] == 0 and step["equal_rewards"] == 1 for step in box.of("metrics")
    )
    broken = Box(lambda text, item: (0.0, "grade() raised NameError: x"))
    with pytest.raises(NothingGraded, match="any of 32 answers: grade.. raised NameError"):
        broken.run(replace(spec, run_dir=str(tmp_path / "broken")))
    # A judge that was not there is no verdict.
    absent = iter(range(10**6))
    half = Box(lambda text, item: (None, "the model did not answer") if next(absent) % 2 else letters(text, item))
    assert half.run(replace(spec, run_dir=str(tmp_path / "half"), job_id="h"))["outcome"] == "succeeded"
    assert all(step["mean_unresponsive_rewards"] == 0.5 for step in half.of("metrics"))


def test_a_prompt_too_long_for_its_answer_is_refused_by_line(tmp_path):
    with pytest.raises(InvalidTrainingData, match="line 1: the prompt has .* and 8 are left"):
        Box(letters).run(run_spec(tmp_path, max_length=24))


class Impatient(Box):
    """Wants the devices when it is asked for the third step's rewards, and answers nothing more."""

    def answer(self, data):
        if data["question"].startswith("train-2-"):
            self.signals.ask("suspend")
        else:
            super().answer(data)


def test_a_step_that_is_broken_off_goes_on_with_the_same_samples(tmp_path):
    spec = run_spec(tmp_path)
    whole = Box(letters)
    whole.run(spec)
    spec = replace(spec, run_dir=str(tmp_path / "other"), job_id="k")
    first, second = Impatient(letters), Box(letters)
    outcome = first.run(spec)
    assert outcome["outcome"] == "suspended" and outcome["step"] == 2
    assert (tmp_path / "other" / FILE).exists()
    assert second.run(spec, outcome["snapshot_path"])["outcome"] == "succeeded"
    assert [step["step"] for box in (first, second) for step in box.of("metrics")] == list(range(1, 7))
    assert first.questions[-4:] == second.questions[:4], "sampled once, graded when somebody answers"
    assert first.questions[:-4] + second.questions == whole.questions, "no sample is lost, none counts twice"
    losses = [step["loss"] for box in (first, second) for step in box.of("metrics")]
    assert losses == [step["loss"] for step in whole.of("metrics")]


# --- by an engine

LORA = {"full": False, "lora_rank": 4, "lora_publish": "adapter", "base_model": "base", "base_version": "v1"}
BY_ENGINE = {**SAMPLES, "rollouts": "engine"}
LETTER_A = 67


class Engines:
    """An engine that answers with the letter a, or b at every second place, as many times as the sample's own number
    says. It looks for the weights that the question names."""

    def __init__(self, store):
        self.store, self.seen = store, []

    def __call__(self, asked):
        policy = asked["policy"]
        stored = self.store.find("adapter", policy["name"], policy["version"])
        there = [one.version for one in self.store.list("adapter") if one.model.startswith(".policy/")]
        self.seen.append((policy["version"], stored.manifest.meta["step"], there))
        return [self.answer(asked["seed"] + number) for number in range(asked["n"])]

    def answer(self, seed):
        size = 1 + seed % 5
        return [LETTER_A + seed % 2] * size, [-6.0 - seed % 32 / 100] * size, "ab"[seed % 2] * size


def warned(box):
    return [event for event in box.of("message") if event["level"] == "warn"]


def lora_spec(tmp_path, **fields):
    return run_spec(tmp_path, **{**LORA, "options": BY_ENGINE, **fields})


def test_engine_samples_come_from_the_weights_of_the_very_step(tmp_path):
    spec = lora_spec(tmp_path, valid_path=str(write_prompt_file(tmp_path / "valid.jsonl", 6, seed=1)))
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))
    box = Box(letters, engines)
    assert box.run(spec)["outcome"] == "succeeded"
    steps = box.of("metrics")
    assert [step["staleness"] for step in steps] == [0] * 6 and not warned(box)
    # One state of the model, one version, whose predecessor is gone; a question is one prompt.
    of_steps = [asked for asked in box.asked if asked["question"].startswith("sample-train")]
    assert [(one["policy"]["version"].partition(".")[0], one["n"]) for one in of_steps] == [
        (f"step-{step}", 8) for step in range(6) for _ in range(4)
    ]
    assert all(there == [version] for version, _, there in engines.seen)
    assert [step for _, step, _ in engines.seen[-6:]] == [6] * 6, "the validation after the last step"
    assert len({asked["question"] for asked in box.asked}) == len(box.asked)
    assert len({asked["seed"] for asked in of_steps}) == 24
    assert box.asked[0]["base"] == {"model": "base", "version": "v1"} and not box.questions
    # It says other numbers than the trainer would: the event says how far they are apart.
    assert all(step["mismatch_max"] >= step["mismatch_mean"] > 0.01 for step in steps)
    assert [event["version"] for event in box.of("published")] == ["step-6"]


def test_job_that_no_engine_answers_ends_in_words(tmp_path):
    refusal = {"failed": "no engine of base samples"}
    box = Box(letters, lambda asked: box.signals.answer(asked["question"], refusal))
    with pytest.raises(NothingGraded, match="no engine of base samples"):
        box.run(lora_spec(tmp_path))


def test_job_that_waits_for_an_engine_gives_its_devices_back(tmp_path):
    spec = lora_spec(tmp_path)
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))

    def silent_in_step_three(asked):
        if asked["policy"]["version"].startswith("step-3."):
            first.signals.ask("suspend")
            return None
        return engines(asked)

    first = Box(letters, silent_in_step_three)
    outcome = first.run(spec)
    assert outcome["outcome"] == "suspended" and outcome["step"] == 3
    second = Box(letters, engines)
    assert second.run(spec, outcome["snapshot_path"])["outcome"] == "succeeded"
    assert [step["step"] for box in (first, second) for step in box.of("metrics")] == list(range(1, 7))
    # Another world has names of its own: no late answer to the first one's question is taken for its own.
    assert len({version.partition(".")[2] for version, _, _ in engines.seen}) == 2


def test_a_validation_holds_no_more_answers_than_a_step_and_finds_the_same(tmp_path, monkeypatch):
    valid, made = str(write_prompt_file(tmp_path / "valid.jsonl", 30, seed=1)), []
    empty = Answers.empty.__func__
    count = classmethod(lambda cls, n, *more, **named: made.append(n) or empty(cls, n, *more, **named))
    monkeypatch.setattr(Answers, "empty", count)

    def validated(run, most):
        monkeypatch.setattr("train.methods.method.VALIDATED_TOKENS", most)
        made.clear()
        options = {**SAMPLES, "eval_samples": 3}
        of = {"valid_path": valid, "run_dir": str(tmp_path / run), "shm_root": str(tmp_path / run / "store")}
        spec = run_spec(tmp_path, **{**of, "options": options})
        box = Box(letters)
        assert box.run(spec)["outcome"] == "succeeded"
        names = [name for name, _ in box.questions if name.startswith("valid-0-")]
        texts = [text for name, parts in box.questions if name.startswith("valid-0-") for text in parts]
        assert len(set(names)) == len(names)
        return texts, box.of("validation")[0], max(made)

    whole, told, most = validated("whole", 1 << 19)
    assert (len(whole), most) == (90, 90)
    parts, told_of_parts, most = validated("parts", 1)
    assert most == 32, "as a step has"
    assert parts == whole and told_of_parts["mean_reward"] == pytest.approx(told["mean_reward"])
    assert told_of_parts["completion_tokens_mean"] == pytest.approx(told["completion_tokens_mean"])


class PlainEngine:
    """Samples from the base with the adapter that the question names, as it lies in shared memory."""

    def __init__(self, spec):
        self.base, self.store = spec.base_path, WeightStore(spec.shm_root, budget_bytes=None)
        self.draw, self.tokenizer = np.random.default_rng(1), load_tokenizer(spec.base_path)

    def __call__(self, asked):
        stored = self.store.find("adapter", asked["policy"]["name"], asked["policy"]["version"])
        base = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(stored.path)).merge_and_unload()
        prompts = [np.array(asked["tokens"])] * asked["n"]
        chances = self.draw.random((len(prompts), asked["room"]))
        made = sample(model, prompts, chances, asked["ends"], 96, torch.device("cpu"), lambda going: (False, going))
        found = []
        for ids, log_probs, size in zip(made.ids.tolist(), made.log_probs.tolist(), made.sizes.tolist(), strict=True):
            text = self.tokenizer.decode(ids[:size], skip_special_tokens=True)
            found.append((ids[:size], log_probs[:size], text))
        return found


def test_a_run_learns_from_what_is_sampled_from_its_adapter(tmp_path):
    spec = lora_spec(tmp_path, n_epochs=4, learning_rate=2e-2)
    box = Box(letters, PlainEngine(spec))
    assert box.run(spec)["outcome"] == "succeeded"
    steps = box.of("metrics")
    rewards = [step["train_mean_reward"] for step in steps]
    assert np.mean(rewards[-4:]) > 2 * np.mean(rewards[:4]), rewards
    # The weights of the very step: what lies in shared memory is rounded to bfloat16, and that is all.
    assert max(step["mismatch_mean"] for step in steps) < 0.01 and max(step["mismatch_max"] for step in steps) < 0.2
    assert all(step["clipped"] == 0 for step in steps)
