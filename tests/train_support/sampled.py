"""Stand-ins for the box in runs that train on samples of their own model: writers of sample files."""

from collections.abc import Callable

import numpy as np

from train.plan.spec import TrainSpec
from train.rollouts.samples import Prompt, Samples, SamplesFile, SamplesPlan, Verdict

Answer = tuple[list[int], list[float]]
"""Tokens of an answer and their log-probabilities."""
Sample = Callable[[SamplesPlan, int, Prompt, int], list[Answer]]
"""n answers to a prompt from the weights after a step."""
Judge = Callable[[Prompt, list[Answer]], Verdict]
LETTER_A = 67


def letters(plan: SamplesPlan, step: int, prompt: Prompt, n: int) -> list[Answer]:
    """Sample answers: 1 to 5 letters a or b, by the seed and the sample number."""
    sizes = [1 + (prompt.seed + i) % 5 for i in range(n)]
    return [
        ([LETTER_A + (prompt.seed + i) % 2] * size, [-6.0 - (prompt.seed + i) % 32 / 100] * size)
        for i, size in enumerate(sizes)
    ]


def counts_a(prompt: Prompt, answers: list[Answer]) -> Verdict:
    """A grader whose reward is the share of the letter a."""
    return {"rewards": [ids.count(LETTER_A) / len(ids) for ids, _ in answers], "errors": [""] * len(answers)}


def teaches(prompt: Prompt, answers: list[Answer]) -> Verdict:
    """A teacher whose log-probability depends on the token."""
    return {"log_probs": [[-5.0 - one % 3 for one in ids] for ids, _ in answers], "errors": [""] * len(answers)}


class Sampler:
    """Writer of missing sample files, except `silent` ones. drawn: (file, weights step, prompts) of each file."""

    def __init__(self, sample: Sample = letters, judge: Judge = counts_a, silent: tuple[SamplesFile, ...] = ()):
        self.sample, self.judge, self.silent = sample, judge, silent
        self.drawn: list[tuple[SamplesFile, int, list[Prompt]]] = []

    def policy(self, spec: TrainSpec, step: int) -> None:
        plan = SamplesPlan(spec)
        for file in plan.missing(step):
            if file not in self.silent:
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
