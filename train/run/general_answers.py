"""Asks the general questions (train.data.general_questions) of the model as it stands in the ranks, before the first
step and after the last.

In the ranks, not on an engine: the weights are here, whatever the job trains, and its devices are its own. Greedy, with
a cache of keys and values, each group of ranks its share of the questions. The number of forward passes is the same on
every rank whatever the answers are, because under ZeRO-3 and tensor parallelism each is a collective. A short job is
asked fewer questions (train.data.general_questions.how_many).
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
from train.state.fragments import Grid

_ATTENTION = "sdpa"  # packed rows know no cache
_TOO_FEW = "general_questions_too_few"  # beside the run: those who cannot answer are asked once


class GeneralQuestions:
    """One rank's part. Emits "general" on rank 0: when ("before" or "after"), right (numbers of questions), answers (of
    the first questions, as many as were asked), seconds. trained_tokens: of the whole job, each epoch anew."""

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
        said = torch.zeros(count, NEW_TOKENS, dtype=torch.int64, device=self._device)
        # Equal shares, so that the shapes of all ranks are the same; what is asked twice is counted once.
        size, at = self._grid.data_size, self._grid.data_rank
        asked = [(at + turn * size) % count for turn in range(-(-count // size))]
        found = _greedy(self._model, *_padded([prompts[number] for number in asked], self._device), wanted)
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
        if when == "before" and len(right) < LEAST_KNOWN:
            too_few.touch()
        self._emit("general", when=when, right=right, answers=answers, seconds=time.perf_counter() - began_s)
        return True

    def _prompts(self, tokenizer: Any) -> list[list[int]]:
        prompts = [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
                )["input_ids"]
            )
            for question, _ in QUESTIONS
        ]
        return prompts[: how_many(list(map(len, prompts)), self._trained_tokens, self._spec.full)]


def _padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, (rows, longest) int64, filled up on the left."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor, wanted: Callable[[], bool]) -> torch.Tensor | None:
    """The likeliest next tokens of each row, (rows, NEW_TOKENS) int64; after an end of text it is repeated. None if the
    devices were wanted meanwhile."""
    training, attention = model.training, model.config._attn_implementation
    end = getattr(model.generation_config, "eos_token_id", None)
    ends = torch.tensor(end if isinstance(end, list) else [-1 if end is None else end], device=ids.device)
    model.eval()
    model.set_attn_implementation(_ATTENTION)
    try:
        with torch.no_grad():
            cache, said = DynamicCache(config=model.config.get_text_config()), []
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
            for _ in range(NEW_TOKENS):
                if wanted():
                    return None
                logits = model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                best = torch.where(ended, ends[0], logits.argmax(-1))
                ended |= torch.isin(best, ends)
                said.append(best)
                ids, positions = best[:, None], positions[:, -1:] + 1
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            return torch.stack(said, dim=1)
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
