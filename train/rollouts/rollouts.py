"""A rank's part in sampling: it publishes the weights to sample from, waits for the file of samples (samples.py), and
makes training rows of the samples.

    weights after step s -> engines -> judge -> RUN_DIR/rollouts/train-s.json -> advantages -> rows

Every rank reads the whole file, so a step is the same on any number of ranks; a step that was interrupted before its
update uses the same samples again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from train.control.rank import DevicesWanted, Rank, any_rank
from train.data.packing import Row, StepData, StepPlan, build_row
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.model.model import load_tokenizer
from train.plan.errors import InvalidSpec, NothingGraded
from train.rollouts.samples import Samples, SamplesFile, SamplesPlan, Verdict
from train.state.publish import publish
from weights.format.errors import VersionLeased, VersionNotFound
from weights.format.names import policy_name, step_of, version_name

_POLL_S = 0.01
_SAME = 1e-8
"""Rewards that differ by no more are the same."""


class Rollouts:
    """One rank's part, with the interface of train.trainer.train.DataFeed. Methods are collective where marked."""

    def __init__(self, rank: Rank, method: Method, plan: StepPlan, train: TokenSet):
        spec, self._grid = rank.spec, rank.grid
        self._rank, self._spec, self._plan, self._train = rank, spec, plan, train
        self._lesson = taught if method.judged_by == "teacher" else graded
        self._form: Form | None = None
        if form := spec.options.get("response_format"):
            vocabulary = rank.engine.module.model.config.get_text_config().vocab_size
            self._form = Form(form, load_tokenizer(spec.base_path), vocabulary, train.ends)
        self._files = SamplesPlan(spec)
        # Published under a private name: an adapter if the base's engines support it, else whole weights.
        kind: Any = "adapter" if spec.options["policy"] == "adapter" else "merged"
        self._policy = replace(rank, spec=replace(spec, lora_publish=kind, output_model=policy_name(spec.job_id)))

    # --- a step

    def step(self, step: int) -> StepData:
        """Collective: publish weights if needed, wait for this step's samples, and build this rank's rows from these.
        Raises DevicesWanted, NothingGraded and StoreFull on every rank."""
        began_s = time.perf_counter()
        published_s = self._publish(step)
        samples, options = self._received(SamplesFile("train", step)), self._spec.options
        lesson = self._lesson(samples.verdict, samples.log_probs, options["group"])
        seconds = {"publishing": published_s, "sampling": time.perf_counter() - began_s - published_s}
        rows: list[tuple[int, Row]] = []
        packs = self._plan.packs_of_step(step)
        for prompt in range(self._grid.data_rank, len(packs), self._grid.data_size):
            (index,) = self._train.packs[packs[prompt]]
            tokens = self._train.tokens_of(int(index))
            group = np.arange(prompt * options["group"], (prompt + 1) * options["group"])
            for number, members in enumerate(np.array_split(group, options["rows"])):
                rows.append((prompt * options["rows"] + number, self._row(tokens, members.tolist(), samples, lesson)))
        sizes, last = np.array([len(ids) for ids in samples.ids]), [ids[-1] for ids in samples.ids]
        # OpenAI's names where they exist.
        figures = {
            **lesson.of_step,
            "completion_tokens_mean": float(sizes.mean()),
            "cut_answers": float((~np.isin(last, self._train.ends)).mean()),
            "staleness": step - samples.weights_step,
        }
        n_tokens = int(sizes.sum()) + options["group"] * self._train.tokens_in(packs)
        return StepData(rows, max(1, int(sizes[lesson.counted].sum())), n_tokens, figures, seconds)

    def _row(self, prompt: np.ndarray, members: Sequence[int], samples: Samples, lesson: Lesson) -> Row:
        # Answers without an advantage change nothing. A row of only such answers keeps one token of the first, because
        # all ranks need equally many rows.
        ids, log_probs, advantages = samples.ids, samples.log_probs, lesson.advantages
        trained = [(ids[n], log_probs[n], advantages[n]) for n in members if advantages[n] is not None]
        trained = trained or [(ids[members[0]][:1], log_probs[members[0]][:1], np.zeros(1, np.float32))]
        answers, sampled, gains = zip(*trained, strict=True)
        whole = [np.concatenate([prompt, answer]) for answer in answers]
        sequences = [(tokens, np.arange(len(tokens)) >= len(prompt)) for tokens in whole]
        row, form = build_row([sequences], 0, 0, packing=False), self._form
        return replace(
            row,
            advantages=np.concatenate([np.broadcast_to(g, len(ids)) for g, ids in zip(gains, answers, strict=True)]),
            sampled=np.concatenate(sampled),
            allowed=None if form is None else lambda: np.concatenate([form.allowed(answer) for answer in answers]),
        )

    # --- validation

    def validate(self, step: int) -> dict[str, float]:
        """Collective: the verdicts on the answers to the validation prompts. Raises as `step`."""
        self._publish(step)
        samples = self._received(SamplesFile("valid", step))
        lesson = self._lesson(samples.verdict, samples.log_probs, self._spec.options["eval_samples"])
        return {**lesson.of_validation, "completion_tokens_mean": sum(map(len, samples.ids)) / len(samples.ids)}

    # --- weights and samples

    def _publish(self, step: int) -> float:
        """Collective: publish the weights of this step if a missing file needs them. An earlier world may have
        published the same weights. Returns the seconds. Raises StoreFull on every rank."""
        if not any_rank(bool(self._files.missing(step)))[0]:
            return 0.0
        self._rank.progress.enter("publishing")
        began_s, store, spec = time.perf_counter(), self._policy.store, self._policy.spec
        old = store.list(spec.published_kind, spec.output_model) if self._grid.rank == 0 else []
        for stored in old:
            if step_of(stored.version) < step - self._files.staleness:  # no later step samples from these weights
                with suppress(VersionLeased, VersionNotFound):  # the controller removes it later
                    store.remove(stored)
        publish(self._policy, version_name(step), {"step": step})
        self._rank.emit("policy", step=step)
        return time.perf_counter() - began_s

    def _received(self, file: SamplesFile) -> Samples:
        """Collective: wait for the samples of a file. Raises DevicesWanted and NothingGraded on every rank."""
        progress = self._rank.progress
        while True:
            progress.enter("sampling")
            samples = Samples.read(file.path(self._spec.run_dir))
            wanted, missing = any_rank(progress.suspend, samples is None)
            if samples is not None and not missing:
                break
            if wanted:
                raise DevicesWanted
            time.sleep(_POLL_S)
        if samples.failed:
            raise NothingGraded(samples.failed)
        return samples


class Form:
    """The form of a job's answers (OpenAI's `response_format`): the tokens that it allows at each place of an answer.

    An engine samples from the model's distribution over the allowed tokens, and records the log-probability in that
    distribution. Training must use the same distribution: where the form allows only a brace, the brace has probability
    1 whatever the model predicts, and teaches nothing.

    form: a `response_format` of the type json_schema or json_object. vocabulary: the number of tokens in the model's
    head. ends: tokens that end an answer. Raises InvalidSpec for a form that xgrammar cannot enforce."""

    def __init__(self, form: dict[str, Any], tokenizer: Any, vocabulary: int, ends: Sequence[int]):
        import xgrammar  # few jobs need it

        self._vocabulary, self._ends, self._xgrammar = vocabulary, list(ends), xgrammar
        schema = form["json_schema"]["schema"] if form["type"] == "json_schema" else {"type": "object"}
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        try:
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            # With the settings of engines (serve.vllm.arguments: disable_any_whitespace).
            self._grammar = compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(",", ":")
            )
        except RuntimeError as error:
            raise InvalidSpec(f"response_format: xgrammar does not follow its schema: {error}") from None

    def allowed(self, ids: Iterable[int]) -> np.ndarray:
        """The allowed tokens at each place of an answer: (tokens, words) int32, a bit for each token, the lowest first.
        Raises InvalidSpec for a form that no answer can have."""
        matcher = self._xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=self._ends)
        masks = []
        for token in ids:
            mask = self._xgrammar.allocate_token_bitmask(1, self._vocabulary)
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(mask)
            if not mask.any():
                raise InvalidSpec("response_format: no text fits its schema")
            masks.append(mask[0].numpy())
            matcher.accept_token(int(token))
        return np.stack(masks)


# --- lessons of verdicts


@dataclass(frozen=True)
class Lesson:
    """Advantages and figures of judged answers, in the order of the answers.

    advantages: float32, how much better than expected an answer is, (1,) for all its tokens or (tokens,); None for an
    answer that trains nothing. counted: (answers,) bool, answers whose tokens divide the loss of a step. of_step,
    of_validation: figures for the event.
    """

    advantages: list[np.ndarray | None]
    counted: np.ndarray
    of_step: dict[str, float]
    of_validation: dict[str, float]


def graded(verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> Lesson:
    """The lesson of rewards: each answer is compared with the other answers to its prompt. Raises NothingGraded.

    "mean_reward_error": the standard error of the mean reward over prompts, since answers to one prompt are alike;
    missing with fewer than two prompts that have a reward.
    """
    rewards, errors = verdict["rewards"], verdict["errors"]
    if all(errors) and not any(rewards):
        raise NothingGraded(f"the grader gave no reward for any of {len(errors)} answers: {errors[0]}")
    by_prompt = np.array(rewards, np.float64).reshape(-1, group)  # NaN for an answer without a reward
    gains = advantages(by_prompt)
    counted = gains.any(axis=1).repeat(group)  # all answers to prompts whose answers differ in reward
    mean_reward = float(np.mean([reward for reward in rewards if reward is not None] or [0.0]))
    means = [np.nanmean(answers) for answers in by_prompt if not np.isnan(answers).all()]
    error = {"mean_reward_error": float(np.std(means, ddof=1) / len(means) ** 0.5)} if len(means) > 1 else {}
    of_step = {
        "train_mean_reward": mean_reward,
        "mean_unresponsive_rewards": rewards.count(None) / len(rewards),
        "equal_rewards": 1.0 - float(counted.mean()),
        "grader_errors": _failed(verdict),
    }
    trained = [np.array([gain]) if gain else None for gain in gains.flat]
    return Lesson(trained, counted, of_step, {"mean_reward": mean_reward, **error})


def taught(verdict: Verdict, sampled: Sequence[np.ndarray], group: int) -> Lesson:
    """The lesson of a teacher's log-probabilities: the advantage of a token is how much likelier it is to the teacher
    than it was to the model that sampled it (`sampled`: log-probabilities). Raises NothingGraded.

    Figures, estimated from the sampled tokens: the reverse KL divergence per token and of a whole answer, and the
    entropy of the model per token.
    """
    answers = list(zip(verdict["log_probs"], sampled, strict=True))
    gains = [None if theirs is None else (np.array(theirs) - ours).astype(np.float32) for theirs, ours in answers]
    counted = np.array([gain is not None for gain in gains])
    if not counted.any():
        errors = verdict["errors"]
        raise NothingGraded(f"the teacher gave no log-probabilities of any of {len(errors)} answers: {errors[0]}")
    divergences = np.concatenate([-gain for gain in gains if gain is not None])
    figures = {
        "reverse_kl": float(divergences.mean()),
        "answer_reverse_kl": float(divergences.sum() / counted.sum()),
        "entropy": float(-np.concatenate([ours for theirs, ours in answers if theirs is not None]).mean()),
    }
    return Lesson(
        gains, counted, {**figures, "teacher_errors": _failed(verdict)}, {"loss": figures["reverse_kl"], **figures}
    )


def _failed(verdict: Verdict) -> float:
    """Return the share of answers that the judge could not judge."""
    return sum(map(bool, verdict["errors"])) / len(verdict["errors"])


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the mean of its row: (prompts, group) float64 to float32. 0 for NaN, which the mean leaves out,
    and in a row of equal rewards."""
    scored = ~np.isnan(rewards)
    totals = np.where(scored, rewards, 0.0).sum(axis=1, keepdims=True)
    gains = np.where(scored, rewards - totals / np.maximum(1, scored.sum(axis=1, keepdims=True)), 0.0)
    return np.where(np.ptp(gains, axis=1, keepdims=True) > _SAME, gains, 0.0).astype(np.float32)
