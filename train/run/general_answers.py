"""Asks the general questions (train.data.general_questions) of the model as it stands in the ranks, before the first
step and after the last.

In the ranks, not on an engine: the weights are here, whatever the job trains, and its devices are its own. Each group
of ranks takes its share of the questions; what all prompts begin with is computed once. The number of forward passes is
the same on every rank whatever the answers are, because under ZeRO-3 and tensor parallelism each is a collective. A
short job is asked fewer questions (train.data.general_questions.how_many), and a starting model that an earlier job has
asked is not asked again.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import comm
from transformers import DynamicCache

from train.control.progress import Events, Progress
from train.control.rank_messages import broadcast_json
from train.data.general_questions import (
    LEAST_KNOWN,
    NEW_TOKENS,
    QUESTIONS,
    Answers,
    Question,
    begin_otherwise,
    how_many,
    is_right,
)
from train.model.model import keeps_state, load_tokenizer
from train.plan.spec import TrainSpec
from train.rollouts.sampler import answering, last, next_logits, padded
from train.state.fragments import Grid

_BEFORE = "general_before.json"  # beside the run: what was heard before the first step
_ROWS = 8  # that go through the model together; bounds the memory of their logits
Wanted = Callable[[], bool]


class Prompt(NamedTuple):
    """Tokens: `asked` of a question, `begun` of the beginning of its answer, `right` and `wrong` for the next one."""

    asked: list[int]
    begun: list[int]
    right: int
    wrong: list[int]


class GeneralQuestions:
    """One rank's part. Emits "general" on rank 0: when ("before" or "after"), of (which model, `TrainSpec.general_of`),
    known, begun, spoken and said (train.data.general_questions.Answers), answers (texts of the spoken ones), seconds.
    trained_tokens: of the whole job, each epoch again."""

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

    def ask(self, when: str, wanted: Wanted = lambda: False) -> bool:
        """Collective. wanted: whether the devices are wanted, the same on every rank; if so, returns False and leaves
        the remaining questions."""
        before = self._heard_before() if when == "after" else None
        if not broadcast_json(self._spec.general_questions and (when == "before" or before is not None)):
            return True
        self._progress.enter("asking")
        began_s = time.perf_counter()
        tokenizer = load_tokenizer(self._spec.base_path) if self._grid.rank == 0 else None
        encoded = broadcast_json(None if tokenizer is None else self._prompts(tokenizer))
        prompts = [Prompt(*prompt) for prompt in encoded]
        if when == "before" and self._known(len(prompts)):
            return True
        with answering(self._model):
            # The lengths of all prompts, not of this rank's: the passes of all ranks are the same.
            prefix = Prefix(self._model, [prompt.asked for prompt in prompts], self._device)
            share = self._share(len(prompts))
            scored = score(self._model, [prompts[number] for number in share], prefix, self._moving(wanted))
            if scored is None:
                return False
            known, begun = self._together(scored, len(prompts)).T.tolist()
            found = Answers(tuple(round(p, 4) for p in known), tuple(round(nats, 4) for nats in begun))
            texts: list[str] = []
            spoken = broadcast_json(begin_otherwise(before, found) if before is not None else [])
            if spoken:
                rows = [prompts[spoken[turn]].asked for turn in self._share(len(spoken))]
                spoken_tokens = self._together(speak(self._model, rows, prefix), len(spoken))
                if tokenizer is not None:
                    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in spoken_tokens.tolist()]
                    right = tuple(n for n, text in zip(spoken, texts, strict=True) if is_right(n, text))
                    found = found._replace(spoken=tuple(spoken), said=right)
        if tokenizer is not None:
            self._tell(when, found, texts, time.perf_counter() - began_s)
        return True

    def _moving(self, wanted: Wanted) -> Wanted:
        """Return `wanted` with a heartbeat: each call shows that the questions move on."""

        def looked() -> bool:
            self._progress.enter("asking")
            return wanted()

        return looked

    def _share(self, count: int) -> list[int]:
        """This rank's share of `count` questions. All shares have one size, so that all ranks compute the same shapes;
        `_together` counts a question that two ranks asked once."""
        size, at = self._grid.data_size, self._grid.data_rank
        return [(at + turn * size) % count for turn in range(-(-count // size))]

    def _together(self, found: torch.Tensor, count: int) -> torch.Tensor:
        """Collective: join the rows that each rank found for its share into those of all `count` questions."""
        size, at = self._grid.data_size, self._grid.data_rank
        rows = found.new_zeros(count, *found.shape[1:])
        if self._grid.tensor_rank == 0:  # the others of its group have the same
            for turn, number in enumerate(self._share(count)):
                if at + turn * size < count:
                    rows[number] = found[turn]
        comm.all_reduce(rows)
        return rows

    def _heard_before(self) -> Answers | None:
        """On rank 0, the answers before the first step; None without any, or if the model knew too little to forget."""
        spec, path = self._spec, Path(self._spec.run_dir) / _BEFORE
        if self._grid.rank != 0:
            return None
        before = Answers(spec.general_known, spec.general_begun)  # the file may lie on the node of the first step
        if path.exists():
            saved = json.loads(path.read_text())
            before = Answers(tuple(saved["known"]), tuple(saved["begun"]))
        return before if before.known and before.mean >= LEAST_KNOWN else None

    def _known(self, count: int) -> bool:
        """Whether an earlier job asked this model as many questions, the same on every rank; rank 0 then reports its
        answers."""
        spec = self._spec
        if not spec.general_of or len(spec.general_known) < count:
            return False
        if self._grid.rank == 0:
            self._tell("before", Answers(spec.general_known[:count], spec.general_begun[:count]), [], 0.0)
        return True

    def _tell(self, when: str, found: Answers, texts: list[str], seconds: float) -> None:
        if when == "before":
            path = Path(self._spec.run_dir) / _BEFORE
            path.write_text(json.dumps({"known": found.known, "begun": found.begun}))
        of = self._spec.general_of
        self._emit("general", when=when, of=of, **found._asdict(), answers=texts, seconds=seconds)

    def _prompts(self, tokenizer: Any) -> list[Prompt]:
        prompts = [prompt_of(tokenizer, question) for question in QUESTIONS]
        common = _common([prompt.asked for prompt in prompts])
        own = [len(prompt.asked) - common + len(prompt.begun) for prompt in prompts]
        return prompts[: how_many(own, self._trained_tokens, self._spec.full)]


def prompt_of(tokenizer: Any, question: Question) -> Prompt:
    question_ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question.text}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    answers = [
        tokenizer(f"{question.begun} {word}", add_special_tokens=False)["input_ids"]
        for word in (question.right, *question.wrong)
    ]
    # Where the answers diverge: the token of the space before a word may belong to either side.
    same = 0
    while all(len(answer) > same + 1 and answer[same] == answers[0][same] for answer in answers):
        same += 1
    right = answers[0][same]
    wrong = [answer[same] for answer in answers[1:] if answer[same] != right]
    return Prompt(list(question_ids), list(answers[0][:same]), right, wrong)


def _common(rows: list[list[int]]) -> int:
    """How many tokens all rows begin with; each keeps one of its own."""
    first, last = min(rows), max(rows)
    same = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    return min(same, min(map(len, rows)) - 1)


class Prefix:
    """What all rows begin with, computed once. `rows`: of all prompts."""

    def __init__(self, model: Any, rows: list[list[int]], device: torch.device):
        config = model.config.get_text_config()
        self.device, self.common, self._cache = device, _common(rows), DynamicCache(config=config)
        window = getattr(config, "sliding_window", None)
        if keeps_state(model):
            self.common = 0  # transformers repeats no state (DynamicCache.batch_repeat_interleave)
        elif window and window < max(map(len, rows)) + 4 * NEW_TOKENS:
            self.common = 0  # otherwise padding would be inside the window, behind the common tokens
        if self.common:
            begun = torch.tensor([rows[0][: self.common]], device=device)
            model(input_ids=begun, past_key_values=self._cache, use_cache=True, logits_to_keep=last(begun, 1))

    def begin(self, rows: list[list[int]]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cache, tokens behind it, mask of all and positions of these tokens, for rows that begin so."""
        cache = copy.deepcopy(self._cache)
        if self.common:
            cache.batch_repeat_interleave(len(rows))
        ids, mask = padded([row[self.common :] for row in rows], self.device)
        mask = torch.cat([mask.new_ones(len(rows), self.common), mask], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, self.common :]
        return cache, ids, mask, positions


def score(model: Any, prompts: list[Prompt], prefix: Prefix, wanted: Wanted) -> torch.Tensor | None:
    """How likely each right token is among those of its question, and the mean log-probability of the tokens with which
    the answer is begun, (prompts, 2) float64. None if the devices were wanted meanwhile."""
    found = []
    for at in range(0, len(prompts), _ROWS):
        if wanted():
            return None
        some = prompts[at : at + _ROWS]
        cache, ids, mask, positions = prefix.begin([prompt.asked + prompt.begun for prompt in some])
        keep = 1 + max(len(prompt.begun) for prompt in some)
        logits = next_logits(model, cache, ids, mask, positions, keep)
        for row, one in zip(logits, some, strict=True):
            known = row[-1, [one.right, *one.wrong]].double().softmax(-1)[0]
            begun = row[-1 - len(one.begun) : -1].log_softmax(-1)
            each = begun[range(len(one.begun)), one.begun] if one.begun else begun.new_zeros(1)
            found.append(torch.stack([known, each.double().mean()]))
    return torch.stack(found)


def speak(model: Any, rows: list[list[int]], prefix: Prefix) -> torch.Tensor:
    """The likeliest next tokens of each row, (rows, NEW_TOKENS) int64; after an end of text it is repeated."""
    end = getattr(model.generation_config, "eos_token_id", None)
    ends = torch.tensor(end if isinstance(end, list) else [-1 if end is None else end], device=prefix.device)
    cache, ids, mask, positions = prefix.begin(rows)
    ended, tokens = torch.zeros(len(rows), dtype=torch.bool, device=prefix.device), []
    for _ in range(NEW_TOKENS):
        logits = next_logits(model, cache, ids, mask, positions)[:, -1]
        best = torch.where(ended, ends[0], logits.argmax(-1))
        ended |= torch.isin(best, ends)
        tokens.append(best)
        ids, positions = best[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return torch.stack(tokens, dim=1)
