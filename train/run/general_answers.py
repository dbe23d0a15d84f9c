"""Asks the general questions (train.data.general_questions) of the model as it stands in the ranks, before the first
step and after the last.

In the ranks, not on an engine: the weights are here, whatever the job trains, and its devices are its own. Greedy, with
a cache of keys and values, each group of ranks its share of the questions; what all prompts begin with is computed
once. The number of forward passes is the same on every rank whatever the answers are, because under ZeRO-3 and tensor
parallelism each is a collective. A short job is asked fewer questions (train.data.general_questions.how_many), and a
starting model that an earlier job has asked is not asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from transformers import DynamicCache

from train.control.progress import Events, Progress
from train.control.rank_messages import told_by_first
from train.data.general_questions import LEAST_KNOWN, NEW_TOKENS, QUESTIONS, how_many, is_right
from train.model.model import load_tokenizer
from train.plan.spec import TrainSpec
from train.run.sampler import answering, next_logits, padded
from train.state.fragments import Grid

_TOO_FEW = "general_questions_too_few"  # beside the run: those who cannot answer are asked once


class GeneralQuestions:
    """One rank's part. Emits "general" on rank 0: when ("before" or "after"), of (which model, `TrainSpec.general_of`),
    right (numbers of questions), answers (of the first questions, as many as were asked; empty texts for answers that
    an earlier job got), seconds. trained_tokens: of the whole job, each epoch anew."""

    def __init__(
        self,
        spec: TrainSpec,
        model: Any,
        grid: Grid,
        device: torch.device,
        trained_tokens: int,
        emit: Events,
        progress: Progress,
    ):
        self._spec, self._model, self._grid, self._device = spec, model, grid, device
        self._trained_tokens, self._emit, self._progress = trained_tokens, emit, progress

    def ask(self, when: str, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Collective. wanted: whether the devices are, the same on every rank; then the rest is left, and False
        returned."""
        too_few = Path(self._spec.run_dir) / _TOO_FEW
        if not told_by_first(self._spec.general_questions and not (when == "after" and too_few.exists())):
            return True
        self._progress.enter("asking")
        began_s = time.perf_counter()
        tokenizer = load_tokenizer(self._spec.base_path) if self._grid.rank == 0 else None
        prompts = told_by_first(None if tokenizer is None else self._prompts(tokenizer))
        count = len(prompts)
        if when == "before" and self._known(count):
            return True
        said = torch.zeros(count, NEW_TOKENS, dtype=torch.int64, device=self._device)
        # Equal shares, so that the shapes of all ranks are the same; what is asked twice is counted once.
        size, at = self._grid.data_size, self._grid.data_rank
        asked = [(at + turn * size) % count for turn in range(-(-count // size))]
        # Of all prompts, not of this rank's: the passes of all ranks are the same.
        found = _greedy(self._model, [prompts[number] for number in asked], _common(prompts), self._device, wanted)
        if found is None:
            return False
        if self._grid.tensor_rank == 0:
            for turn, number in enumerate(asked):
                if at + turn * size < count:
                    said[number] = found[turn]
        comm.all_reduce(said)
        if tokenizer is None:
            return True
        answers = [tokenizer.decode(row, skip_special_tokens=True) for row in said.tolist()]
        right = [number for number, answer in enumerate(answers) if is_right(number, answer)]
        self._tell(when, right, answers, time.perf_counter() - began_s)
        return True

    def _known(self, count: int) -> bool:
        """Whether an earlier job has asked this model as much, the same on every rank; rank 0 says what it heard."""
        spec = self._spec
        if not spec.general_of or spec.general_asked < count:
            return False
        if self._grid.rank == 0:
            self._tell("before", [number for number in spec.general_right if number < count], [""] * count, 0.0)
        return True

    def _tell(self, when: str, right: list[int], answers: list[str], seconds: float) -> None:
        if when == "before" and len(right) < LEAST_KNOWN:
            (Path(self._spec.run_dir) / _TOO_FEW).touch()
        of = self._spec.general_of
        self._emit("general", when=when, of=of, right=right, answers=answers, seconds=seconds)

    def _prompts(self, tokenizer: Any) -> list[list[int]]:
        prompts = [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
                )["input_ids"]
            )
            for question, _ in QUESTIONS
        ]
        common = _common(prompts)
        own = [len(prompt) - common for prompt in prompts]
        return prompts[: how_many(own, self._trained_tokens, self._spec.full)]


def _common(rows: list[list[int]]) -> int:
    """How many tokens all rows begin with; each keeps one of its own."""
    first, last = min(rows), max(rows)
    same = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    return min(same, min(map(len, rows)) - 1)


def _greedy(
    model: Any, rows: list[list[int]], common: int, device: torch.device, wanted: Callable[[], bool]
) -> torch.Tensor | None:
    """The likeliest next tokens of each row, (rows, NEW_TOKENS) int64; after an end of text it is repeated. None if the
    devices were wanted meanwhile. common: so many tokens are the same in all rows, and go through the model once."""
    end = getattr(model.generation_config, "eos_token_id", None)
    ends = torch.tensor(end if isinstance(end, list) else [-1 if end is None else end], device=device)
    with answering(model):
        config = model.config.get_text_config()
        cache, said = DynamicCache(config=config), []
        window = getattr(config, "sliding_window", None)
        if window and window < max(map(len, rows)) + NEW_TOKENS:
            common = 0  # what rows are filled up with would stand inside the window, behind the common tokens
        if common:
            model(
                input_ids=torch.tensor([rows[0][:common]], device=device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache.batch_repeat_interleave(len(rows))
        ids, mask = padded([row[common:] for row in rows], device)
        mask = torch.cat([mask.new_ones(len(rows), common), mask], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, common:]
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(NEW_TOKENS):
            if wanted():
                return None
            logits = next_logits(model, cache, ids, mask, positions)
            best = torch.where(ended, ends[0], logits.argmax(-1))
            ended |= torch.isin(best, ends)
            said.append(best)
            ids, positions = best[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return torch.stack(said, dim=1)
