"""Reinforcement and distillation: hyperparameters, data, losses compared with plain torch, and runs on sample files."""

import json
from dataclasses import replace
from itertools import count, cycle

import numpy as np
import pytest
import torch

from tests.integration.train.test_deepspeed_contract import world_of_one  # noqa: F401
from tests.train_support.sampled import Sampler, letters
from tests.train_support.specs import host_spec, tokenised
from tests.train_support.tiny import VOCABULARY, make_model_dir, write_prompt_file
from tests.train_support.world import METHODS, SAMPLES
from train.control.rank import Progress
from train.data.chat import ChatEncoder
from train.data.formats import BadRecord
from train.data.packing import build_row
from train.data_checks.check import check_training_file
from train.methods.methods import method_of
from train.methods.own_answers import GROUP
from train.methods.packed_objective import PackedObjective, to_batch
from train.model.model import load_model, load_tokenizer
from train.plan import auto
from train.plan.errors import InvalidHyperparameter, InvalidSpec, NothingGraded
from train.plan.estimate import ModelShape
from train.rollouts.rollouts import Form, advantages, graded, taught
from train.rollouts.samples import SamplesFile
from train.trainer.worker import prepare
from weights.format.names import policy_name
from weights.memory.store import WeightStore

REINFORCEMENT, DISTILLATION = method_of("reinforcement"), method_of("distillation")
DATASET, MODEL = auto.DatasetStats(64, 64 * 20, 30), auto.ModelStats(ModelShape(10_000_000), 512, device_kind="cpu")


def test_reinforcement_resolves_openai_hyperparameters():
    given = {"compute_multiplier": 2, "eval_interval": 5, "eval_samples": 3, "reasoning_effort": "default"}
    fields = REINFORCEMENT.resolve({**given, "n_epochs": 2, "batch_size": 4}, DATASET, MODEL, 2)
    made = fields["options"]
    assert (made["group"], made["eval_samples"], made["max_completion_tokens"]) == (2 * GROUP, 3, 256)
    assert fields["eval_interval"] == 5
    assert (fields["batch_size"], fields["micro_batch"], fields["packing"], fields["n_epochs"]) == (4, 1, False, 2)
    # max_length covers the longest prompt (perhaps an estimate) plus the answer.
    assert fields["max_length"] == 64 + 256 and REINFORCEMENT.data_length(320, fields["options"]) == 64
    assert made["group"] / made["rows"] * fields["max_length"] <= 1024


def test_reinforcement_policy_is_adapter_if_engines_support_it():
    for given, rank_limit, expected in (
        ({"lora_rank": 8}, 32, "adapter"),
        ({"lora_rank": 8, "lora_publish": "merged"}, 32, "adapter"),
        ({"lora_rank": 8}, 0, "version"),
        ({"lora_rank": 64, "lora_publish": "merged"}, 32, "version"),
        ({}, 32, "version"),
    ):
        options = REINFORCEMENT.resolve(given, DATASET, replace(MODEL, adapter_max_rank=rank_limit), 1)["options"]
        assert (options["policy"], options["staleness"]) == (expected, 0)


@pytest.mark.parametrize(
    "given, param",
    [
        ({"rollouts": "engine"}, "rollouts"),
        ({"staleness": 5}, "staleness"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"compute_multiplier": 11}, "compute_multiplier"),
        ({"eval_samples": 0}, "eval_samples"),
        ({"max_completion_tokens": 512}, "max_completion_tokens"),
        ({"max_completion_tokens": 64, "max_length": 64}, "max_completion_tokens"),
        ({"packing": True}, "packing"),
        ({"micro_batch": 2}, "micro_batch"),
        ({"sequence_parallel": 2}, "sequence_parallel"),
        ({"beta": 0.1}, "beta"),
    ],
)
def test_reinforcement_invalid_hyperparameter_names_param(given, param):
    with pytest.raises(InvalidHyperparameter) as refused:
        REINFORCEMENT.resolve(given, DATASET, MODEL, 1)
    assert refused.value.param == param


def asked(**more):
    return {"messages": [{"role": "user", "content": "2 and 2?"}], "answer": "4", **more}


def test_prompt_file_check_names_bad_lines(tmp_path):
    source, written = tmp_path / "p.jsonl", tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps(asked(n=n)) + "\n" for n in range(12)))
    report = check_training_file(source, chat_path=written, refuses=REINFORCEMENT.refuses)
    assert report.ok and report.shape == "prompt" and not report.warnings
    record = json.loads(written.read_bytes().splitlines()[3])
    assert record == {"messages": [{"role": "user", "content": "2 and 2?"}], "item": {"answer": "4", "n": 3}}
    said = asked()
    said["messages"] = [*said["messages"], {"role": "assistant", "content": "4"}]
    source.write_text("".join(json.dumps(one) + "\n" for one in (asked(), said)))
    ((line, _), *_) = check_training_file(source, refuses=REINFORCEMENT.refuses).errors
    assert line == 2 and REINFORCEMENT.refuses("chat")
    assert method_of("supervised").refuses("prompt") and method_of("dpo").refuses("prompt")


def test_reinforcement_encode_ends_with_generation_prompt(tmp_path):
    tokenizer = load_tokenizer(str(make_model_dir(tmp_path / "base")))
    (((ids, learnt),),) = REINFORCEMENT.encode(ChatEncoder(tokenizer), asked())
    assert tokenizer.decode(ids).endswith("2 and 2?<|im_end|>\n<|im_start|>assistant\n") and not learnt.any()
    with pytest.raises(BadRecord, match=f"has {len(ids)} tokens; at most 5 are"):
        REINFORCEMENT.check_cut([(ids, learnt)], 5)


def test_advantages_are_rewards_less_the_mean_of_their_group():
    nan = np.nan
    found = advantages(np.array([[1.0, 0.0, 0.5, 0.5], [nan, 3.0, 1.0, 2.0], [nan, 1.0, nan, nan]]))
    assert found.tolist() == [[0.5, -0.5, 0.0, 0.0], [0.0, 1.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert not advantages(np.full((1, 8), 0.3)).any(), "equal rewards teach nothing"


def test_graded_mean_reward_error_is_over_prompts():
    def error(rewards, group):
        lesson = graded({"rewards": rewards, "errors": [""] * len(rewards)}, [], group)
        return lesson.of_validation.get("mean_reward_error")

    means = [1.0, 0.0, 0.5, 0.5]
    for each in (1, 4):
        assert error([mean for mean in means for _ in range(each)], each) == pytest.approx(np.std(means, ddof=1) / 2)
    assert error([1.0, None, None, None, 0.0, 0.0], 2) == pytest.approx(0.5)
    assert error([1.0, 0.0, None, None], 2) is None, "of one prompt nothing is known of others"


def learnt_row(sequences, advantages, sampled, **more):
    """A row of (prompt, answer) pairs with an advantage and a log-probability per answer token."""
    whole = [(np.concatenate([p, ids]), np.arange(len(p) + len(ids)) >= len(p)) for p, ids in sequences]
    row = build_row([whole], 0, 0, packing=False)
    return replace(row, advantages=np.float32(advantages), sampled=np.float32(sampled), **more)


def rollout_row(vocabulary=384, sequences=5, seed=0):
    draw = np.random.default_rng(seed)
    made, pairs = [], []
    for _ in range(sequences):
        prompt, answer = draw.integers(4, 9), draw.integers(1, 9)
        ids = draw.integers(3, vocabulary, prompt + answer)
        pairs.append((ids[:prompt], ids[prompt:]))
        made.append((ids, np.arange(len(ids)) >= prompt))
    sizes = [len(answer) for _, answer in pairs]
    advantages = draw.normal(size=sequences).astype(np.float32)
    row = learnt_row(pairs, advantages.repeat(sizes), draw.uniform(-7, -5, sum(sizes)))
    return zip(made, advantages, strict=True), row


def plain_tokens(model, made, row):
    """For each answer: advantage, the model's log-probabilities of its tokens, and those in the row."""
    model.set_attn_implementation("eager")
    place = 0
    for (ids, learnt), advantage in made:
        log_probs = model(input_ids=torch.tensor(ids)[None]).logits[0].float().log_softmax(-1)
        at = np.flatnonzero(learnt)
        yield advantage, log_probs[at - 1, torch.tensor(ids[at])], torch.tensor(row.sampled[place : place + len(at)])
        place += len(at)


def test_reinforcement_loss_uses_truncated_importance_weights(tmp_path):
    spec = host_spec(make_model_dir(tmp_path / "b", dtype=torch.float32), precision="fp32")
    made, row = rollout_row()
    objective = PackedObjective(load_model(spec), REINFORCEMENT, {})
    objective(to_batch(row, 0.25, "cpu")).backward()

    plain, total, ratios = load_model(spec), torch.zeros(()), []
    for advantage, now, before in plain_tokens(plain, made, row):
        ratio = (now.detach() - before).exp()
        # Yao et al., 2025: min(p(trainer) / p(sampler), C) x advantage x the gradient of log p(trainer).
        total = total - (ratio.clamp(max=2.0) * advantage * now).sum()
        ratios.append(ratio)
    (total * 0.25).backward()
    for (name, ours), theirs in zip(objective.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4), name
    ratios = torch.cat(ratios)
    assert (ratios > 2).any() and (ratios < 0.8).any(), "the cap is met, and what a clip would stop"
    moved = ratios.log().abs()
    *_, kl, mean, cut = objective.take_metrics()
    assert kl == pytest.approx(0.25 * (ratios - 1 - ratios.log()).sum().item(), rel=1e-3)
    assert mean == pytest.approx(0.25 * moved.sum().item(), rel=1e-4) and cut == 0.25 * (ratios > 2).sum().item()


def test_log_probs_are_computed_in_float32(tmp_path):
    spec = host_spec(make_model_dir(tmp_path / "b"), precision="bf16")
    _, row = rollout_row()
    objective = PackedObjective(load_model(spec), REINFORCEMENT, {})
    batch = to_batch(row, 1.0, "cpu")
    log_probs = objective._log_probs(batch)[0]
    hidden = objective.model.get_decoder()(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], segments=batch["segments"], use_cache=False
    ).last_hidden_state[0, batch["predict_at"]]
    weight = objective.model.get_output_embeddings().weight
    expected = (hidden.float() @ weight.float().t()).log_softmax(-1).gather(1, batch["labels"][:, None])[:, 0]
    assert hidden.dtype == torch.bfloat16 and torch.allclose(log_probs, expected, atol=1e-6)
    objective(batch).backward()
    assert weight.grad.dtype == torch.bfloat16


ANSWER = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize("fused", [True, False])
def test_log_probs_under_schema_use_allowed_tokens_only(tmp_path, monkeypatch, fused):
    spec = host_spec(make_model_dir(tmp_path / "b", dtype=torch.float32), precision="fp32")
    objective, tokens = PackedObjective(load_model(spec), REINFORCEMENT, {}), load_tokenizer(spec.base_path)
    monkeypatch.setattr(objective, "_fused", fused and objective._fused)
    form = Form(FORM, tokens, VOCABULARY, [2])
    draw = np.random.default_rng(1)
    prompt = draw.integers(3, 384, 5)
    answers = [np.array([*tokens.encode(text), 2]) for text in ('{"a":"x"}', '{"a":"yy"}')]
    allowed = np.concatenate([form.allowed(ids) for ids in answers])
    advantages, pairs = draw.standard_normal(len(allowed)), [(prompt, ids) for ids in answers]
    row = learnt_row(pairs, advantages, np.zeros(len(allowed)), allowed=lambda: allowed)
    batch = to_batch(row, 1.0, "cpu")
    computed = objective._log_probs(batch)[0]
    one_left = np.array([np.unpackbits(one.view(np.uint8)).sum() == 1 for one in allowed])
    assert 0 < one_left.sum() < len(one_left) and not computed.detach().numpy()[one_left].any()

    weight = objective.model.get_output_embeddings().weight
    (gradient,) = torch.autograd.grad((computed * batch["advantages"]).sum(), weight, retain_graph=True)
    names = ("input_ids", "position_ids", "segments")
    kept = {"logits_to_keep": batch["predict_at"], "use_cache": False}
    logits = objective.model(**{name: batch[name] for name in names}, **kept).logits[0].float()
    forbidden = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :VOCABULARY] == 0
    plain = logits.masked_fill(torch.from_numpy(forbidden), -torch.inf).log_softmax(-1)
    taken = plain.gather(1, batch["labels"][:, None])[:, 0]
    assert torch.allclose(computed, taken, atol=1e-4)
    (expected,) = torch.autograd.grad((taken * batch["advantages"]).sum(), weight)
    assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize(
    "schema, why",
    [
        ({"$ref": "#"}, "no text fits"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}, "no text fits"),
        ({"type": "object", "properties": 1}, "does not follow its schema"),
    ],
)
def test_form_that_no_answer_can_have_is_refused(tmp_path, schema, why):
    tokens = load_tokenizer(str(make_model_dir(tmp_path / "b")))
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with pytest.raises(InvalidSpec, match=f"response_format: .*{why}"):
        Form(form, tokens, VOCABULARY, [2]).allowed(tokens.encode('{"a":' + " " * 40))


def run_spec(tmp_path, **fields):
    base = tmp_path / "base"
    base = base if base.exists() else make_model_dir(base, dtype=torch.float32)
    defaults = {
        "train_path": str(tokenised(write_prompt_file(tmp_path / "train.jsonl", 24), base, "reinforcement")),
        "run_dir": str(tmp_path / "run"),
        "shm_root": str(tmp_path / "store"),
        "method": "reinforcement",
        "options": SAMPLES,
        "batch_size": 4,
        "max_length": 96,
        "packing": False,
        "learning_rate": 3e-3,
        "warmup_ratio": 0.0,
        "precision": "fp32",
    }
    return host_spec(base, **(defaults | fields))


class Box:
    """The owner of a job: records events, writes samples, and requests a suspend after the step `leaves_at`."""

    def __init__(self, sampler=None, leaves_at=None):
        self.told, self.sampler, self.leaves_at = [], sampler or Sampler(), leaves_at
        self.progress, self.spec = Progress(), None

    def __call__(self, event, **data):
        self.told.append({"event": event, **data})
        if event == "policy":
            self.sampler.policy(self.spec, data["step"])
            self.progress.suspend = data["step"] == self.leaves_at

    def of(self, kind):
        return [event for event in self.told if event["event"] == kind]

    def run(self, spec, snapshot=None):
        self.spec = spec
        run = prepare(spec, self, self.progress, snapshot)
        outcome = run.run()
        run.metrics.close()
        return outcome


def box_of(*verdicts):
    """A box whose grader returns these (reward, error) pairs in turn."""
    turn = cycle(verdicts)

    def judge(prompt, answers):
        rewards, errors = zip(*(next(turn) for _ in answers), strict=True)
        return {"rewards": list(rewards), "errors": list(errors)}

    return Box(Sampler(judge=judge))


def test_equal_rewards_change_nothing_and_a_silent_grader_ends_the_job(tmp_path):
    box, valid = box_of((0.5, "")), write_prompt_file(tmp_path / "valid.jsonl", 6, seed=1)
    spec = run_spec(tmp_path, valid_path=str(valid), options={**SAMPLES, "reasoning_effort": "high"})
    tokenised(valid, tmp_path / "base", "reinforcement")
    assert box.run(spec)["outcome"] == "succeeded"
    for step in box.of("metrics"):
        assert (step["loss"], step["grad_norm"], step["equal_rewards"]) == (0, 0, 1)
        assert step["timing"]["step"].keys() == {"publishing", "sampling", "training", "full_iteration"}
    assert [(one["mean_reward"], one["mean_reward_error"]) for one in box.of("validation")] == [(0.5, 0)] * 2
    assert [event["version"] for event in box.of("published")] == ["step-6"]
    assert any("'high' is ignored" in event["text"] for event in box.of("message"))
    spec = replace(spec, valid_path=None)
    with pytest.raises(NothingGraded, match="any of 32 answers: grade.. raised NameError"):
        box_of((0.0, "grade() raised NameError: x")).run(replace(spec, run_dir=str(tmp_path / "broken")))
    # An unavailable judge gives no verdict.
    half = box_of((None, "the model did not answer"), (0.5, ""))
    assert half.run(replace(spec, run_dir=str(tmp_path / "half"), job_id="h"))["outcome"] == "succeeded"
    assert all(step["mean_unresponsive_rewards"] == 0.5 for step in half.of("metrics"))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_suspended_run_uses_each_sample_once(tmp_path, staleness):
    spec = run_spec(tmp_path, options={**SAMPLES, "staleness": staleness})
    whole = Box()
    whole.run(spec)
    assert [step["staleness"] for step in whole.of("metrics")] == [min(step, staleness) for step in range(6)]
    spec = replace(spec, run_dir=str(tmp_path / "other"), job_id="k")
    first, second = Box(Sampler(silent=(SamplesFile("train", 2),)), leaves_at=2), Box()
    outcome = first.run(spec)
    assert outcome["outcome"] == "suspended" and outcome["step"] == 2
    assert second.run(spec, outcome["snapshot_path"])["outcome"] == "succeeded"
    assert [step["step"] for box in (first, second) for step in box.of("metrics")] == list(range(1, 7))
    drawn = sorted(file.step for box in (first, second) for file, _, _ in box.sampler.drawn)
    assert drawn == list(range(6)), "each file is drawn once"
    if not staleness:
        losses = [step["loss"] for box in (first, second) for step in box.of("metrics")]
        assert losses == [step["loss"] for step in whole.of("metrics")]


def test_run_removes_policy_weights_no_longer_sampled(tmp_path):
    box, spec = Box(), run_spec(tmp_path, options={**SAMPLES, "staleness": 1})
    there, store = [], WeightStore(spec.shm_root, budget_bytes=None)

    def look(plan, step, prompt, n):
        there.append([one.version for one in store.list("version", policy_name("j"))])
        return letters(plan, step, prompt, n)

    box.sampler.sample = look
    assert box.run(spec)["outcome"] == "succeeded"
    assert sorted(there[-1]) == ["step-3", "step-4"] and len({file for file, _, _ in box.sampler.drawn}) == 6
    seeds = [prompt.seed for _, _, prompts in box.sampler.drawn for prompt in prompts]
    assert len(set(seeds)) == 24, "each prompt of each step has random numbers of its own"


# -- distillation ------------------------------------------------------------------------------------------------------


def test_distillation_resolves_its_hyperparameters():
    given = {"samples": 1, "eval_samples": 2, "max_completion_tokens": 40, "batch_size": 4, "n_epochs": 2}
    made = DISTILLATION.resolve(given, DATASET, MODEL, 2)["options"]
    assert (made["group"], made["eval_samples"], made["max_completion_tokens"]) == (1, 2, 40)
    for name, value in (("compute_multiplier", 1), ("reasoning_effort", "default"), ("samples", 0)):
        with pytest.raises(InvalidHyperparameter, match=name):
            DISTILLATION.resolve({name: value}, DATASET, MODEL, 2)


def plain_model(tmp_path):
    folder = tmp_path / "b"
    base = str(folder if folder.exists() else make_model_dir(folder, dtype=torch.float32))
    return load_model(host_spec(base, precision="fp32"))


def next_token(model, prompt):
    model.set_attn_implementation("eager")
    return model(input_ids=torch.tensor(prompt)[None]).logits[0, -1].float().log_softmax(-1)


def test_distillation_gradient_equals_reverse_kl_gradient(tmp_path):
    """Each vocabulary token is an answer, weighted by its probability, which makes the estimate exact."""
    prompt = np.array([5, 9, 200, 31])
    theirs = torch.randn(384, generator=torch.Generator().manual_seed(1)).mul(2).log_softmax(-1)
    plain = plain_model(tmp_path)
    ours = next_token(plain, prompt)
    divergence = (ours.exp() * (ours - theirs)).sum()
    divergence.backward()

    share, sampled = ours.detach().exp().numpy(), ours.detach().numpy()
    verdict = {"log_probs": [[one] for one in theirs.tolist()], "errors": [""] * 384}
    advantages = taught(verdict, [sampled[i : i + 1] for i in range(384)], 1).advantages
    answers = [(prompt, np.array([token])) for token in range(384)]
    row = learnt_row(answers, np.concatenate([one * share[token] for token, one in enumerate(advantages)]), sampled)
    objective = PackedObjective(plain_model(tmp_path), DISTILLATION, {})
    loss = objective(to_batch(row, 1.0, "cpu"))
    loss.backward()
    assert loss.item() == pytest.approx(divergence.item(), rel=1e-5)
    worst = max(
        (ours.grad - theirs.grad).abs().max().item()
        for ours, theirs in zip(objective.model.parameters(), plain.parameters(), strict=True)
    )
    assert worst < 1e-5


def test_taught_metrics_are_over_sampled_tokens():
    sampled = [np.float32([-1, -2]), np.float32([-3])]
    verdict = {"log_probs": [[-2.0, -2.0], [-6.0]], "errors": [""] * 2}
    assert taught(verdict, sampled, 2).of_step == {
        "reverse_kl": pytest.approx(4 / 3),
        "answer_reverse_kl": pytest.approx(2),
        "entropy": pytest.approx(2),
        "teacher_errors": 0,
    }


def teaching(fails):
    """A box whose teacher gives all letters one probability. `fails`: answer number -> error, or ""."""
    numbers = count()

    def teach(prompt, answers):
        errors = [fails(next(numbers)) for _ in answers]
        log_probs = [None if error else [-5.0] * len(ids) for error, (ids, _) in zip(errors, answers, strict=True)]
        return {"log_probs": log_probs, "errors": errors}

    return Box(Sampler(judge=teach))


def test_run_skips_answers_without_teacher_scores_and_fails_without_any(tmp_path):
    half = teaching(lambda number: "the teacher gave nan" if number % 2 else "")
    spec = run_spec(tmp_path, method="distillation", options=METHODS["distillation"][1])
    assert half.run(spec)["outcome"] == "succeeded"
    assert all(step["teacher_errors"] == 0.5 and np.isfinite(step["loss"]) for step in half.of("metrics"))
    silent = teaching(lambda number: "no answer within 3600 s: no engine of the model is awake")
    with pytest.raises(NothingGraded, match="no log-probabilities of any of 32 answers: no answer within 3600 s"):
        silent.run(replace(spec, run_dir=str(tmp_path / "silent")))
