"""The samples of a step of a method that learns from the model's own answers: answers to the step's prompts, what a
judge says of them, and the rows that are learnt from.

    sampled by engines of the box, or by all ranks, each its share -> judged by whoever runs the job -> advantages
    -> rows, the same on every rank

Engines' answers come judged (engine_samples.py). Where they may be stale, the next steps' are asked for before this
step's are waited for and learnt from.

A step's prompts, and the random numbers by which their answers are chosen, follow from its number, and every rank holds
all samples: so a step is the same on any number of ranks, and no sample is lost or counted twice, whatever ends the
run. Samples and judgements are kept beside the run until the next step, so that a step that was interrupted before its
update continues with the same samples.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepspeed import comm

from train.control.progress import ControlSignals, Events, Progress
from train.control.rank_messages import broadcast_json
from train.data.packing import RolloutRow, Row, StepPlan, build_row
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.model.model import load_tokenizer
from train.plan.spec import TrainSpec
from train.rollouts.engine_samples import EngineSamples
from train.rollouts.grader import Grader
from train.rollouts.hearing import Hearing
from train.rollouts.judge import Judge, Verdict
from train.rollouts.policy import Policy, shared
from train.rollouts.sampler import Answers, sample
from train.rollouts.teacher import Teacher
from train.rollouts.wanted import TRAINING, VALIDATION, Wanted
from train.state.fragments import Grid
from weights.memory.store import WeightStore

if TYPE_CHECKING:
    from train.rollouts.form import Form

FILE = "rollouts.npz"


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
        self._train, self._valid = sets
        self._emit, self._signals, self._progress = emit, signals, progress
        self._samples = method.samples(spec.options)
        self._judge: Judge = Teacher() if method.judged_by == "teacher" else Grader()
        self._file = Path(spec.run_dir) / FILE
        self._hearing = Hearing(grid, engine.device, emit, signals, progress)
        self._engines: EngineSamples | None = None
        if spec.options.get("rollouts") == "engine":
            staleness = spec.options.get("staleness", 0)
            self._engines = EngineSamples(
                Policy(spec, engine, grid, store, staleness),
                self._hearing,
                self._judge,
                grid,
                room=self._samples.room,
                staleness=staleness,
                ends=lambda: self._ends,
                device=engine.device,
            )
        # Of the step that is ready, with the names of `Answers`, on the host: each read from a device waits for it.
        self._step = -1
        self._ids, self._log_probs, self._sizes = np.zeros((0, 0), np.int64), np.zeros((0, 0)), np.zeros(0, np.int64)
        self._verdict: Verdict = {}
        self._behind = 0  # updates between the weights that wrote the answers and those that learn from them
        self._advantages: list[np.ndarray | None] = []
        self._seconds: dict[str, float] = {}

    # --- a step

    def ready(self, step: int) -> bool:
        """Collective: the samples of this step are there and judged; False if the devices were wanted before."""
        if step == self._step:
            return True
        wanted, engines = self._wanted(step), self._engines
        began_s = time.perf_counter()
        if engines is not None:
            engines.policy.take_seconds()  # of a validation
        made, verdict, behind = self._taken_up(step, len(wanted))
        if engines is not None:
            engines.ask(step, self._plan.total_steps, self._wanted, taken_up=made is not None)
        if made is None:
            self._progress.enter("sampling")
            found = self._sampled(wanted) if engines is None else engines.answers(wanted, step)
            if found is None:
                return False
            made, verdict, behind = found
            self._keep(step, made, None, behind)
        sampled_s = time.perf_counter()
        if verdict is None:
            verdict = self._judged(f"train-{step}", wanted, made)
            if verdict is None:
                return False
        self._judge.check(verdict)
        self._keep(step, made, verdict, behind)
        self._ids, self._log_probs, self._sizes = (
            part.cpu().numpy() for part in (made.ids, made.log_probs, made.sizes)
        )
        self._step, self._verdict, self._behind = step, verdict, behind
        self._advantages = self._judge.advantages(verdict, self._sampled_of(range(len(wanted))), self._samples.group)
        judged_s = time.perf_counter()
        self._seconds = {"sampling": sampled_s - began_s, "grading": judged_s - sampled_s}
        if engines is not None:
            published_s = engines.policy.take_seconds()
            self._seconds |= {"sampling": sampled_s - began_s - published_s, "publishing": published_s}
        return True

    def _wanted(self, step: int) -> Wanted:
        group = self._samples.group
        packs = self._plan.packs_of_step(step).repeat(group)
        return Wanted(self._spec.train_path, self._train, packs, group, self._spec.seed, TRAINING, step)

    def seconds(self) -> dict[str, float]:
        return self._seconds

    def denominator(self) -> int:
        """The number of tokens in the step's answers that count."""
        return max(1, int(self._sizes[self._judge.counted(self._advantages, self._samples.group)].sum()))

    def tokens(self) -> int:
        """The tokens of the step's prompts and answers."""
        return int(self._sizes.sum()) + self._samples.group * self._train.tokens_in(
            self._plan.packs_of_step(self._step)
        )

    def rows(self) -> list[tuple[int, Row]]:
        samples, packs = self._samples, self._plan.packs_of_step(self._step)
        found: list[tuple[int, Row]] = []
        for prompt in range(self._grid.data_rank, len(packs), self._grid.data_size):
            (index,) = self._train.packs[packs[prompt]]
            tokens = self._train.tokens_of(int(index))
            group = np.arange(prompt * samples.group, (prompt + 1) * samples.group)
            for number, members in enumerate(np.array_split(group, samples.rows)):
                found.append((prompt * samples.rows + number, self._row(tokens, members)))
        return found

    def step_metrics(self) -> dict[str, Any]:
        """The contents of the step's event, by OpenAI's names where those exist."""
        last = self._ids[np.arange(len(self._sizes)), self._sizes - 1]
        return {
            **self._judge.step_metrics(self._verdict, self._sampled_of(range(len(self._sizes))), self._samples.group),
            "completion_tokens_mean": float(self._sizes.mean()),
            "cut_answers": float((~np.isin(last, self._ends)).mean()),
            **({"staleness": self._behind} if self._engines is not None else {}),
        }

    def _sampled_of(self, members: Iterable[int]) -> list[np.ndarray]:
        """The log-probabilities of these answers' tokens."""
        return [self._log_probs[member, : self._sizes[member]] for member in members]

    def _row(self, prompt: np.ndarray, members: np.ndarray) -> RolloutRow:
        # Answers without an advantage change nothing, but every rank runs equally many forward passes.
        sizes, parts, sequences = dict[int, int](), list[np.ndarray](), []
        for member in members:
            if (better := self._advantages[member]) is not None:
                sizes[member] = int(self._sizes[member])
                parts.append(np.broadcast_to(better, sizes[member]))
        if not sizes:
            sizes, parts = {members[0]: 1}, [np.zeros(1, np.float32)]
        for member, size in sizes.items():
            ids = np.concatenate([prompt, self._ids[member, :size]])
            sequences.append((ids, np.arange(len(ids)) >= len(prompt)))
        row, form = build_row([sequences], 0, 0, packing=False), self._form
        answers = [self._ids[member, :size] for member, size in sizes.items()]
        return RolloutRow(
            **{name: getattr(row, name) for name in row.__dataclass_fields__},
            advantages=np.concatenate(parts),
            sampled=np.concatenate([self._log_probs[member, :size] for member, size in sizes.items()]),
            allowed=None if form is None else lambda: np.concatenate([form.allowed(ids) for ids in answers]),
        )

    # --- validation

    def validate(self, step: int) -> dict[str, float] | None:
        """Collective: the verdicts on the answers to the validation prompts; None if the devices were wanted."""
        assert self._valid is not None
        packs = np.arange(len(self._valid.packs))
        path, each, sampled_of = self._spec.valid_path, self._samples.valid, list[np.ndarray]()
        assert path is not None
        together, tokens = self._samples.validated_together(self._spec.batch_size), 0
        verdict = self._judge.empty()
        for first in range(0, len(packs), together):
            prompts = packs[first : first + together].repeat(each)
            # The numbers are the same each time.
            wanted = Wanted(path, self._valid, prompts, each, self._spec.seed, VALIDATION, 0, first * each)
            self._progress.enter("sampling")
            found = self._sampled(wanted) if self._engines is None else self._engines.answers(wanted, step)
            if found is None:
                return None
            made, judged, _ = found
            judged = judged or self._judged(f"valid-{step}", wanted, made)
            if judged is None:
                return None
            log_probs, sizes = made.log_probs.cpu().numpy(), made.sizes.cpu().numpy()
            sampled_of += [row[:size] for row, size in zip(log_probs, sizes, strict=True)]
            tokens += int(sizes.sum())
            verdict = {key: [*have, *judged[key]] for key, have in verdict.items()}
        self._judge.check(verdict)
        metrics = self._judge.validated(verdict, sampled_of, each)
        return {**metrics, "completion_tokens_mean": tokens / len(verdict["errors"])}

    # --- how

    def _sampled(self, wanted: Wanted) -> tuple[Answers, Verdict | None, int] | None:
        """Collective: the ranks' own answers, on every rank, without a verdict, of weights that are 0 updates behind;
        None if the devices were wanted."""
        grid, room, device, n = self._grid, self._samples.room, self._engine.device, len(wanted)
        share = -(-n // grid.data_size)
        first = min(grid.data_rank * share, n - 1)
        mine = np.minimum(np.arange(first, first + share), n - 1)  # equally many everywhere
        chances = np.stack([wanted.numbers(int(place)).random(room) for place in mine])
        found = sample(
            self._engine.module.model,
            [wanted.prompt(place) for place in mine],
            chances,
            self._ends,
            self._spec.max_length,
            device,
            self._hearing.agreed,
            self._form,
        )
        if found is None:
            return None
        own = max(0, min(share, n - grid.data_rank * share))
        into = torch.from_numpy(mine[:own]).to(device)
        made = Answers.empty(n, room, device)
        for all_, part in ((made.ids, found.ids), (made.log_probs, found.log_probs), (made.sizes, found.sizes)):
            if grid.tensor_rank == 0:
                all_[into] = part[:own]
            comm.all_reduce(all_)
        return made, None, 0

    def _judged(self, name: str, wanted: Wanted, made: Answers) -> Verdict | None:
        """Collective: the verdicts on the answers, None if the devices were wanted. Raises NothingGraded, on every
        rank."""
        self._progress.enter("grading")
        heard = self._hearing.heard(self._to_judge(name, wanted, made))
        return None if heard is None else self._judge.verdict(heard)

    def _to_judge(self, name: str, wanted: Wanted, made: Answers) -> dict[str, dict[str, Any]]:
        """Questions about the answers to each prompt, by name; none but on rank 0."""
        if self._grid.rank != 0:
            return {}
        ids = [one[:size] for one, size in zip(made.ids.tolist(), made.sizes.tolist(), strict=True)]
        return {
            f"{name}-{wanted.before + place}": {
                "kind": "judge",
                "ids": ids[place : place + wanted.each],
                "texts": [self._text(one) for one in ids[place : place + wanted.each]],
                **self._judge.asked_about(wanted, place),
            }
            for place in range(0, len(wanted), wanted.each)
        }

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids[:-1] if ids[-1] in self._ends else ids, skip_special_tokens=True))

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._spec.base_path)

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens that end an answer."""
        end = getattr(self._engine.module.model.generation_config, "eos_token_id", None)
        found = end if isinstance(end, list) else [end]
        return sorted({int(one) for one in [*found, self._tokenizer.eos_token_id] if one is not None})

    @cached_property
    def _form(self) -> Form | None:
        form = self._spec.options.get("response_format")
        if form is None:
            return None
        from train.rollouts.form import Form  # loads xgrammar, which few jobs need

        return Form(form, self._tokenizer, self._engine.module.model.config.get_text_config().vocab_size, self._ends)

    # --- what is kept of the step under way

    def _keep(self, step: int, made: Answers, verdict: Verdict | None, behind: int) -> None:
        if self._grid.rank != 0:
            return
        partial = self._file.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(
                file,
                step=step,
                ids=made.ids.cpu().numpy().astype(np.int32),
                log_probs=made.log_probs.cpu().numpy(),
                sizes=made.sizes.cpu().numpy(),
                behind=behind,
                verdict=np.frombuffer(json.dumps(verdict).encode(), np.uint8),
            )
        os.rename(partial, self._file)

    def _taken_up(self, step: int, n: int) -> tuple[Answers | None, Verdict | None, int]:
        """Collective: what an earlier world has sampled and had judged for this step, and how stale that is."""
        shape = n, self._samples.room
        kept = _read(self._file, step, shape) if self._grid.rank == 0 else None
        told = broadcast_json(kept and [kept["verdict"], int(kept["behind"])])
        if told is None:
            return None, None, 0
        made = Answers.empty(*shape)
        if kept is not None:
            made = Answers(*(torch.from_numpy(kept[name]) for name in ("ids", "log_probs", "sizes")))
        verdict, behind = told
        return shared(made, self._engine.device), verdict, behind


def _read(path: Path, step: int, shape: tuple[int, int]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        with np.load(path) as file:
            kept = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile):
        return None  # a crash of the machine: it is sampled again
    if int(kept["step"]) != step or kept["ids"].shape != shape:
        return None
    verdict = json.loads(kept["verdict"].tobytes())
    return {**kept, "ids": kept["ids"].astype(np.int64), "verdict": verdict}
