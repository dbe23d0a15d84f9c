"""What a box does for runs that learn from their model's own answers: it writes their files of samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from train.plan.spec import TrainSpec
from train.rollouts.samples import Facts, Prompt, Samples, SamplesFile, SamplesPlan, Verdict
from weights.format.names import policy_name, version_name
from weights.memory.store import WeightStore

Answer = tuple[list[int], list[float]]
"""Tokens of an answer and their log-probabilities."""
Sample = Callable[[SamplesPlan, int, Prompt, int], list[Answer]]
"""n answers to a prompt from the weights after a step."""
Judge = Callable[[Prompt, list[Answer]], Verdict]
LETTER_A = 67


def letters(plan: SamplesPlan, step: int, prompt: Prompt, n: int) -> list[Answer]:
    """The letter a, or b at every second place, as many times as the sample's own number says."""
    sizes = [1 + (prompt.seed + i) % 5 for i in range(n)]
    return [
        ([LETTER_A + (prompt.seed + i) % 2] * size, [-6.0 - (prompt.seed + i) % 32 / 100] * size)
        for i, size in enumerate(sizes)
    ]


def counts_a(prompt: Prompt, answers: list[Answer]) -> Verdict:
    """A grader: the more of the letter a, the better."""
    return {"rewards": [ids.count(LETTER_A) / len(ids) for ids, _ in answers], "errors": [""] * len(answers)}


def teaches(prompt: Prompt, answers: list[Answer]) -> Verdict:
    """A teacher, which likes some tokens better than others."""
    return {"log_probs": [[-5.0 - one % 3 for one in ids] for ids, _ in answers], "errors": [""] * len(answers)}


class Model:
    """Samples from the weights that the ranks have published."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(1)
        self.known: tuple[int, Any] = (-1, None)
        torch.set_num_threads(1)  # of a model so small more of them wait for each other

    @torch.no_grad()
    def __call__(self, plan: SamplesPlan, step: int, prompt: Prompt, n: int) -> list[Answer]:
        model, ids = self._loaded(plan, step), torch.tensor([prompt.tokens] * n)
        made: list[Answer] = [([], []) for _ in range(n)]
        cache = DynamicCache(config=model.config)
        for _ in range(plan.counts.room):
            log_probs = model(input_ids=ids, past_key_values=cache).logits[:, -1].float().log_softmax(-1)
            chosen = torch.tensor([self.draw.choice(len(row), p=row) for row in log_probs.double().softmax(-1).numpy()])
            for (tokens, numbers), token, row in zip(made, chosen.tolist(), log_probs, strict=True):
                if not tokens or tokens[-1] not in plan.facts.ends:
                    tokens.append(token)
                    numbers.append(float(row[token]))
            ids = chosen[:, None]
        return made

    def _loaded(self, plan: SamplesPlan, step: int) -> Any:
        if self.known[0] != step:
            spec = plan.spec
            store = WeightStore(Path(spec.shm_root), budget_bytes=None)
            stored = store.find(plan.policy_kind, policy_name(spec.job_id), version_name(step))
            assert stored is not None
            if plan.policy_kind == "adapter":
                base = AutoModelForCausalLM.from_pretrained(spec.base_path, dtype=torch.float32)
                model = PeftModel.from_pretrained(base, str(stored.path)).merge_and_unload()
            else:
                model = AutoModelForCausalLM.from_pretrained(str(stored.path), dtype=torch.float32)
            self.known = step, model
        return self.known[1]


class Sampler:
    """Writes what is missing once weights are published. drawn: (file, step of the weights, prompts) of each file that
    it has written."""

    def __init__(self, sample: Sample = letters, judge: Judge = counts_a):
        self.sample, self.judge = sample, judge
        self.drawn: list[tuple[SamplesFile, int, list[Prompt]]] = []

    def policy(self, spec: TrainSpec, step: int) -> None:
        plan = SamplesPlan(spec, Facts.read(spec.run_dir))
        for file in plan.missing(step):
            prompts = plan.prompts(file)
            self.drawn.append((file, step, prompts))
            self.write(plan, file, step, prompts)

    def write(self, plan: SamplesPlan, file: SamplesFile, step: int, prompts: list[Prompt]) -> None:
        answers, verdicts = [], []
        for prompt in prompts:
            made = self.sample(plan, step, prompt, plan.group(file))
            answers += made
            verdicts.append(self.judge(prompt, made))
        ids, log_probs = zip(*answers, strict=True)
        Samples(
            [np.array(one, np.int32) for one in ids],
            [np.array(one, np.float32) for one in log_probs],
            {name: [value for verdict in verdicts for value in verdict[name]] for name in verdicts[0]},
            step,
        ).write(file.path(plan.spec.run_dir))
