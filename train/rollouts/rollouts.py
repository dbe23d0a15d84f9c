"""What a rank does with samples: it publishes the weights they are drawn from, waits for their file (samples.py), and
makes the rows that are learnt from.

    weights after step s -> engines -> judge -> RUN_DIR/rollouts/train-s.npz -> advantages -> rows

Every rank reads the whole file, so a step is the same on any number of ranks, and goes on with the same samples if it
was interrupted before its update.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from train.control.progress import ControlSignals, Events, Progress
from train.control.rank_messages import any_rank
from train.data.packing import Row, StepPlan, build_row
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.model.model import load_tokenizer
from train.plan.errors import NothingGraded
from train.plan.spec import TrainSpec
from train.rollouts.judges import Grader, Judge, Teacher
from train.rollouts.policy import Policy
from train.rollouts.samples import Facts, Samples, SamplesFile, SamplesPlan
from train.state.fragments import Grid
from weights.memory.store import WeightStore

if TYPE_CHECKING:
    from train.rollouts.form import Form

_POLL_S = 0.01


class Rollouts:
    """One rank's part, as a Feed (train.trainer.feed). Methods are collective where they say so."""

    def __init__(
        self,
        spec: TrainSpec,
        method: Method,
        engine: Any,
        store: WeightStore,
        grid: Grid,
        plan: StepPlan,
        sets: tuple[TokenSet, TokenSet | None],
        emit: Events,
        signals: ControlSignals,
        progress: Progress,
    ):
        self._spec, self._engine, self._grid, self._plan = spec, engine, grid, plan
        self._train, valid = sets
        self._emit, self._signals, self._progress = emit, signals, progress
        self._judge: Judge = Teacher() if method.judged_by == "teacher" else Grader()
        facts = Facts(str(self._train.directory), str(valid.directory) if valid else None, self._ends)
        if grid.rank == 0:
            facts.write(spec.run_dir)
        self._files = SamplesPlan(spec, facts)
        self._counts = self._files.counts
        self._policy = Policy(spec, engine, grid, store, self._files.staleness)
        self._step = -1  # the one that is ready
        self._samples = Samples([], [], {}, 0)
        self._advantages: list[np.ndarray | None] = []
        self._seconds: dict[str, float] = {}

    # --- a step

    def ready(self, step: int) -> bool:
        """Collective: the samples of this step are there; False if the devices were wanted before. Raises
        NothingGraded and StoreFull, on every rank."""
        if step == self._step:
            return True
        began_s = time.perf_counter()
        published_s = self._publish(step)
        samples = self._received(SamplesFile("train", step))
        if samples is None:
            return False
        self._step, self._samples = step, samples
        self._advantages = self._judge.advantages(samples.verdict, samples.log_probs, self._counts.group)
        self._seconds = {"publishing": published_s, "sampling": time.perf_counter() - began_s - published_s}
        return True

    def rows(self) -> list[tuple[int, Row]]:
        counts, packs = self._counts, self._plan.packs_of_step(self._step)
        rows: list[tuple[int, Row]] = []
        for prompt in range(self._grid.data_rank, len(packs), self._grid.data_size):
            (index,) = self._train.packs[packs[prompt]]
            tokens = self._train.tokens_of(int(index))
            group = np.arange(prompt * counts.group, (prompt + 1) * counts.group)
            for number, members in enumerate(np.array_split(group, counts.rows)):
                rows.append((prompt * counts.rows + number, self._row(tokens, members.tolist())))
        return rows

    def denominator(self) -> int:
        """The number of tokens in the step's answers that count."""
        return max(1, int(self._sizes[self._judge.counted(self._advantages, self._counts.group)].sum()))

    def tokens(self) -> int:
        """The tokens of the step's prompts and answers."""
        packs = self._plan.packs_of_step(self._step)
        return int(self._sizes.sum()) + self._counts.group * self._train.tokens_in(packs)

    def seconds(self) -> dict[str, float]:
        return self._seconds

    def step_metrics(self) -> dict[str, Any]:
        """The contents of the step's event, by OpenAI's names where those exist."""
        samples, last = self._samples, [ids[-1] for ids in self._samples.ids]
        return {
            **self._judge.step_metrics(samples.verdict, samples.log_probs, self._counts.group),
            "completion_tokens_mean": float(self._sizes.mean()),
            "cut_answers": float((~np.isin(last, self._ends)).mean()),
            "staleness": self._step - samples.weights_step,
        }

    @property
    def _sizes(self) -> np.ndarray:
        return np.array([len(ids) for ids in self._samples.ids])

    def _row(self, prompt: np.ndarray, members: Sequence[int]) -> Row:
        # Answers without an advantage change nothing, but every rank runs equally many forward passes.
        ids, log_probs, advantages = self._samples.ids, self._samples.log_probs, self._advantages
        learnt = [(ids[n], log_probs[n], advantages[n]) for n in members if advantages[n] is not None]
        learnt = learnt or [(ids[members[0]][:1], log_probs[members[0]][:1], np.zeros(1, np.float32))]
        answers, sampled, better = zip(*learnt, strict=True)
        whole = [np.concatenate([prompt, answer]) for answer in answers]
        sequences = [(tokens, np.arange(len(tokens)) >= len(prompt)) for tokens in whole]
        row, form = build_row([sequences], 0, 0, packing=False), self._form
        return replace(
            row,
            advantages=np.concatenate([np.broadcast_to(b, len(a)) for b, a in zip(better, answers, strict=True)]),
            sampled=np.concatenate(sampled),
            allowed=None if form is None else lambda: np.concatenate([form.allowed(answer) for answer in answers]),
        )

    # --- validation

    def validate(self, step: int) -> dict[str, float] | None:
        """Collective: the verdicts on the answers to the validation prompts; None if the devices were wanted."""
        self._publish(step)
        samples = self._received(SamplesFile("valid", step))
        if samples is None:
            return None
        metrics = self._judge.validated(samples.verdict, samples.log_probs, self._counts.valid)
        return {**metrics, "completion_tokens_mean": sum(map(len, samples.ids)) / len(samples.ids)}

    # --- how

    def _publish(self, step: int) -> float:
        """Collective: the weights of this step, if a file is to be sampled from them. Returns the seconds it took."""
        if not any_rank(bool(self._files.missing(step)))[0]:
            return 0.0
        self._progress.enter("publishing")
        seconds = self._policy.publish(step)
        if self._grid.rank == 0:
            self._emit("policy", step=step)
        return seconds

    def _received(self, file: SamplesFile) -> Samples | None:
        """Collective: the samples, once their file is there; None if the devices were wanted before. Raises
        NothingGraded, on every rank."""
        while True:
            self._progress.enter("sampling")
            samples = Samples.read(file.path(self._spec.run_dir))
            wanted, missing = any_rank(self._signals.suspend, samples is None)
            if not missing:
                break
            if wanted:
                return None
            time.sleep(_POLL_S)
        assert samples is not None
        if samples.failed:
            raise NothingGraded(samples.failed)
        self._judge.check(samples.verdict)
        return samples

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._spec.base_path)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        end = getattr(self._engine.module.model.generation_config, "eos_token_id", None)
        ends = [*(end if isinstance(end, list) else [end]), self._tokenizer.eos_token_id]
        return tuple(sorted({int(token) for token in ends if token is not None}))

    @cached_property
    def _form(self) -> Form | None:
        form = self._spec.options.get("response_format")
        if form is None:
            return None
        from train.rollouts.form import Form  # loads xgrammar, which few jobs need

        return Form(form, self._tokenizer, self._engine.module.model.config.get_text_config().vocab_size, self._ends)
