"""Distillation: its schema, its loss against the divergence itself, and runs whose teacher is silent."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from tests.train_support.sampled import Sampler
from tests.train_support.specs import host_spec
from tests.train_support.tiny import make_model_dir
from tests.train_support.world import METHODS
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from tests.unit.train.test_reinforcement import Box, learnt_row, run_spec
from train.methods.methods import method_of
from train.methods.packed_objective import PackedObjective, to_batch
from train.model.model import load_model
from train.plan import auto
from train.plan.errors import InvalidHyperparameter, NothingGraded
from train.rollouts.rollouts import taught

DISTILLATION = method_of("distillation")
DATASET, MODEL = auto.DatasetStats(64, 64 * 20, 30), auto.ModelStats(10_000_000, 512, device_kind="cpu")


def test_it_has_the_hyperparameters_of_answers_and_how_many_there_are():
    given = {"samples": 3, "eval_samples": 2, "max_completion_tokens": 40, "batch_size": 4, "n_epochs": 2}
    fields = DISTILLATION.resolve(given, DATASET, MODEL, 2)
    made = DISTILLATION.samples(fields["options"])
    assert (made.group, made.valid, made.room, fields["packing"]) == (3, 2, 40, False)
    assert DISTILLATION.samples(DISTILLATION.resolve({"samples": 1}, DATASET, MODEL, 2)["options"]).group == 1
    for name, value in (("compute_multiplier", 1), ("reasoning_effort", "default"), ("samples", 0), ("packing", True)):
        with pytest.raises(InvalidHyperparameter, match=name):
            DISTILLATION.resolve({name: value}, DATASET, MODEL, 2)


def plain_model(tmp_path):
    folder = tmp_path / "b"
    base = str(folder if folder.exists() else make_model_dir(folder, dtype=torch.float32))
    return load_model(host_spec(base, precision="fp32"))


def next_token(model, prompt):
    model.set_attn_implementation("eager")
    return model(input_ids=torch.tensor(prompt)[None]).logits[0, -1].float().log_softmax(-1)


def test_over_all_answers_the_gradient_is_that_of_the_reverse_divergence(tmp_path):
    """Every token of the vocabulary as an answer of one token, weighed by how likely the model is to write it: what is
    left of the estimate is the divergence itself, as plain torch computes it from all logits."""
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


def test_teacher_metrics_are_of_the_tokens_that_were_sampled():
    sampled = [np.float32([-1, -2]), np.float32([-3])]
    verdict = {"log_probs": [[-2.0, -2.0], [-6.0]], "errors": [""] * 2}
    assert taught(verdict, sampled, 2).of_step == {
        "reverse_kl": pytest.approx(4 / 3),
        "answer_reverse_kl": pytest.approx(2),
        "entropy": pytest.approx(2),
        "teacher_errors": 0,
    }


def teaching(fails):
    """A teacher that likes letters alike. `fails`: from the number of an answer to why it says nothing of it."""
    numbers = count()

    def teach(prompt, answers):
        errors = [fails(next(numbers)) for _ in answers]
        log_probs = [None if error else [-5.0] * len(ids) for error, (ids, _) in zip(errors, answers, strict=True)]
        return {"log_probs": log_probs, "errors": errors}

    return Box(Sampler(judge=teach))


def test_what_a_teacher_says_nothing_of_is_left_out_and_nothing_at_all_ends_the_job(tmp_path):
    half = teaching(lambda number: "the teacher gave nan" if number % 2 else "")
    spec = run_spec(tmp_path, method="distillation", options=METHODS["distillation"][1])
    assert half.run(spec)["outcome"] == "succeeded"
    assert all(step["teacher_errors"] == 0.5 and np.isfinite(step["loss"]) for step in half.of("metrics"))
    silent = teaching(lambda number: "no answer within 3600 s: no engine of the model is awake")
    with pytest.raises(NothingGraded, match="no log-probabilities of any of 32 answers: no answer within 3600 s"):
        silent.run(replace(spec, run_dir=str(tmp_path / "silent")))
