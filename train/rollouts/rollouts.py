"""The samples of a step of a method that learns from the model's own answers: answers to the step's prompts, what a
judge says of them, and the rows that are learnt from.

    sampled by an engine of the box, or by all ranks, each its share -> judged by whoever runs the job -> advantages
    -> rows, the same on every rank

Where samples may be stale, engines are asked for the next steps' before this one's are waited for, judged and learnt
from, and so write them meanwhile.

A step's prompts, and the random numbers by which their answers are chosen, follow from its number, and every rank holds
all samples: so a step is the same on any number of ranks, and no sample is lost or counted twice, whatever ends the
run. What an engine was asked for and did not answer, the ranks sample. What has been sampled, and what has been judged,
is kept beside the run until the next step, so that one that is broken off before its update goes on with the same
samples.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm

from train.control.progress import ControlSignals, Events, Progress
from train.control.rank_messages import told_by_first
from train.data.packing import RolloutRow, Row, StepPlan, build_row
from train.data.token_set import TokenSet
from train.methods.method import Method
from train.model.model import load_tokenizer
from train.plan.errors import NothingGraded
from train.plan.spec import TrainSpec
from train.rollouts.asked import Policy, shared, to_ask, told
from train.rollouts.grader import Grader
from train.rollouts.judge import Judge, Verdict
from train.rollouts.sampler import Answers, sample
from train.rollouts.teacher import Teacher
from train.state.fragments import Grid
from weights.format.errors import StoreFull
from weights.memory.store import WeightStore

FILE = "rollouts.npz"
ASKED_AT_ONCE = 64
"""Samples in one question to whoever judges, if what is said of each leaves room for so many."""
ASKED_TOKENS = 1 << 19
"""Tokens of the prompts and the answers of one question to engines: whoever has it answered holds them all, for all
jobs, and a step may have thousands of answers of a hundred thousand tokens."""
_ASK_AGAIN_S = 10.0
_LOOK_EVERY_S = 0.01
_TRAINING, _VALIDATION = 0, 1


@dataclass(frozen=True)
class _Asked:
    """A question to engines, by its name: about this version, of the weights after so many steps; asked at_s
    (time.monotonic()), if it was."""

    version: str
    step: int
    name: str
    at_s: float = -_ASK_AGAIN_S


class Rollouts:
    """One rank's part, as a Feed (train.run.feed). All of its methods that say so are collective."""

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
        self._judge: Judge = (
            Teacher() if method.judged_by == "teacher" else Grader(lambda: self._tokenizer, lambda: self._ends)
        )
        self._file = Path(spec.run_dir) / FILE
        by_engine, self._staleness = spec.options.get("rollouts") == "engine", spec.options.get("staleness", 0)
        self._policy = Policy(spec, engine, grid, store, self._staleness) if by_engine else None
        self._asked: dict[int, _Asked] = {}  # by step, ahead of its turn
        self._why = ""  # an engine did not answer, as it was last reported
        # Of the step that is ready, as `Answers` has them, on the host: each look at a device waits for it.
        self._step = -1
        self._ids, self._log_probs, self._sizes = np.zeros((0, 0), np.int64), np.zeros((0, 0)), np.zeros(0, np.int64)
        self._verdict: Verdict = {}
        self._older = np.zeros((0, 0), np.int64)
        self._by_engine = 0  # of what was sampled last
        self._engine_share = 0.0  # of the step's samples
        self._advantages: list[np.ndarray | None] = []
        self._seconds: dict[str, float] = {}

    # --- a step

    def ready(self, step: int) -> bool:
        """Collective: the samples of this step are there and judged; False if the devices were wanted before."""
        if step == self._step:
            return True
        prompts = self._plan.packs_of_step(step).repeat(self._samples.group)
        began_s = time.perf_counter()
        if self._policy is not None:
            self._policy.take_seconds()  # of a validation
        made, verdict = self._taken_up(step, len(prompts))
        if self._policy is not None and self._staleness:
            self._ask_ahead(self._policy, step, taken_up=made is not None)
        if made is None:
            made = self._sampled(step, self._train, prompts, self._samples.group, (_TRAINING, step))
            if made is None:
                return False
            self._asked.pop(step, None)
            self._keep(step, made, None)
        sampled_s = time.perf_counter()
        if verdict is None:
            verdict = self._judged(f"train-{step}", (self._spec.train_path, self._train), prompts, made)
            if verdict is None:
                return False
            self._judge.check(verdict)
            self._keep(step, made, verdict)
        self._ids, self._log_probs, self._sizes, self._older = (
            part.cpu().numpy() for part in (made.ids, made.log_probs, made.sizes, made.older)
        )
        self._step, self._verdict, self._engine_share = step, verdict, self._by_engine / len(prompts)
        self._advantages = self._judge.advantages(verdict, self._sampled_of(range(len(prompts))), self._samples.group)
        judged_s = time.perf_counter()
        self._seconds = {"sampling": sampled_s - began_s, "grading": judged_s - sampled_s}
        if self._policy is not None:
            published_s = self._policy.take_seconds()
            self._seconds |= {"sampling": sampled_s - began_s - published_s, "publishing": published_s}
        return True

    def seconds(self) -> dict[str, float]:
        return self._seconds

    def denominator(self) -> int:
        """The tokens of those of the step's answers that count."""
        return max(1, int(self._sizes[self._judge.counted(self._advantages, self._samples.group)].sum()))

    def tokens(self) -> int:
        """Of the step's prompts and answers."""
        return int(self._sizes.sum()) + self._samples.group * self._train.tokens_in(
            self._plan.packs_of_step(self._step)
        )

    def rows(self) -> list[tuple[int, Row]]:
        """(number within the step, row) of the micro-batches of this rank."""
        samples, packs = self._samples, self._plan.packs_of_step(self._step)
        found: list[tuple[int, Row]] = []
        for prompt in range(self._grid.data_rank, len(packs), self._grid.data_size):
            tokens = self._prompt(self._train, packs[prompt])
            group = np.arange(prompt * samples.group, (prompt + 1) * samples.group)
            for number, members in enumerate(np.array_split(group, samples.rows)):
                found.append((prompt * samples.rows + number, self._row(tokens, members)))
        return found

    def told(self) -> dict[str, Any]:
        """For the step's event, by OpenAI's names where it has them."""
        last = self._ids[np.arange(len(self._sizes)), self._sizes - 1]
        return {
            **self._judge.told(self._verdict, self._sampled_of(range(len(self._sizes))), self._samples.group),
            "completion_tokens_mean": float(self._sizes.mean()),
            "cut_answers": float((~np.isin(last, self._ends)).mean()),
            **(self._told_of_engines() if self._policy is not None else {}),
        }

    def _told_of_engines(self) -> dict[str, float]:
        behind = 1 + np.arange(self._older.shape[1])
        return {
            "engine_samples": self._engine_share,
            "staleness_mean": float((self._older * behind).sum() / self._sizes.sum()),
            "staleness_max": int(behind[self._older.any(axis=0)].max(initial=0)),
        }

    def _sampled_of(self, members: Iterable[int]) -> list[np.ndarray]:
        """The log-probabilities of these answers' tokens."""
        return [self._log_probs[member, : self._sizes[member]] for member in members]

    def _row(self, prompt: np.ndarray, members: np.ndarray) -> RolloutRow:
        # Those without an advantage move nothing; but every rank runs equally many forwards.
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
        row = build_row([sequences], 0, 0, packing=False)
        return RolloutRow(
            **{name: getattr(row, name) for name in row.__dataclass_fields__},
            advantages=np.concatenate(parts),
            sampled=np.concatenate([self._log_probs[member, :size] for member, size in sizes.items()]),
        )

    # --- validation

    def validate(self, step: int) -> dict[str, float] | None:
        """Collective: what is said of the answers to the validation prompts; None if the devices were wanted."""
        assert self._valid is not None
        packs = np.arange(len(self._valid.packs))
        if self._spec.validation_batches:
            packs = packs[: self._spec.validation_batches]
        path, each, sampled = self._spec.valid_path, self._samples.valid, list[np.ndarray]()
        assert path is not None
        together, tokens = self._samples.validated_together(self._spec.batch_size), 0
        verdict = self._judge.empty()
        for first in range(0, len(packs), together):
            prompts = packs[first : first + together].repeat(each)
            # By the same numbers each time.
            made = self._sampled(step, self._valid, prompts, each, (_VALIDATION, 0), first * each)
            if made is None:
                return None
            judged = self._judged(f"valid-{step}", (path, self._valid), prompts, made, first * each)
            if judged is None:
                return None
            log_probs, sizes = made.log_probs.cpu().numpy(), made.sizes.cpu().numpy()
            sampled += [row[:size] for row, size in zip(log_probs, sizes, strict=True)]
            tokens += int(sizes.sum())
            verdict = {key: [*have, *judged[key]] for key, have in verdict.items()}
        self._judge.check(verdict)
        return {**self._judge.validated(verdict, sampled), "completion_tokens_mean": tokens / len(verdict["errors"])}

    # --- how

    def _sampled(
        self, step: int, tokens: TokenSet, prompts: np.ndarray, each: int, stream: tuple[int, int], before: int = 0
    ) -> Answers | None:
        """Collective: an answer to each of these prompts, on every rank; None if the devices were wanted. each: answers
        of a prompt, which follow each other. before: answers of the same stream that were made before."""
        self._progress.enter("sampling")
        made = Answers.empty(len(prompts), self._samples.room, self._engine.device, self._staleness)
        self._by_engine = 0
        if self._policy is not None:
            found = self._asked_for(step, tokens, prompts, each, stream, before)
            if found is None:
                return None
            made = found
            self._by_engine = int((made.sizes > 0).sum())
        missing = torch.nonzero(made.sizes == 0)[:, 0].cpu().numpy()
        if len(missing) and not self._sampled_here(tokens, prompts, missing, stream, made, before):
            return None
        return made

    def _asked_for(
        self, step: int, tokens: TokenSet, prompts: np.ndarray, each: int, stream: tuple[int, int], before: int
    ) -> Answers | None:
        """Collective: as `_sampled`, what an engine has answered; sizes 0 where it has not."""
        assert self._policy is not None
        made, why = Answers.empty(len(prompts), self._samples.room, staleness=self._staleness), ""
        vocabulary = self._engine.module.model.config.get_text_config().vocab_size
        early = self._asked.get(step) if stream[0] == _TRAINING else None
        for lines in self._questions(tokens, prompts, each):
            if early is None:
                try:
                    version = self._policy.version(step)
                except StoreFull as full:  # raised on every rank
                    why = f"no room for the model as it stands: {full}"
                    break
                early = _Asked(version, step, self._name(step, stream, version, before + lines[0][1]))
            asked = self._question(self._policy, early.version, tokens, prompts, lines, stream, before)
            answered, answer = self._heard(early.name, asked, early.at_s)
            if not answered:
                return None
            if self._grid.rank == 0:
                told(answer["samples"], made, vocabulary, step - early.step)
                why = answer["why"] or why
            early = None
        self._say(why)
        return shared(made, self._engine.device)

    def _ask_ahead(self, policy: Policy, step: int, taken_up: bool) -> None:
        """Collective: engines are asked for the samples of steps that may have this one's weights. Of each its first
        question alone, so that whoever answers holds few; what is left of it is asked for in its turn."""
        due = to_ask(step, self._staleness, self._plan.total_steps, {*self._asked, *([step] if taken_up else [])})
        try:
            version = policy.version(step)
        except StoreFull:  # raised on every rank; whose turn it is says so
            return
        for one in due:
            prompts, stream = self._plan.packs_of_step(one).repeat(self._samples.group), (_TRAINING, one)
            lines, *_ = self._questions(self._train, prompts, self._samples.group)
            asked = _Asked(version, step, self._name(one, stream, version, 0), time.monotonic())
            self._asked[one] = asked
            if self._grid.rank == 0:
                question = self._question(policy, version, self._train, prompts, lines, stream, 0)
                self._emit("ask", question=asked.name, **question)

    def _name(self, step: int, stream: tuple[int, int], version: str, place_of_first: int) -> str:
        """Of a question. No other world has the version, no other step of this one the rest."""
        purpose = "train" if stream[0] == _TRAINING else "valid"
        return f"sample-{purpose}-{step}-{version}-{place_of_first}"

    def _question(
        self,
        policy: Policy,
        version: str,
        tokens: TokenSet,
        prompts: np.ndarray,
        lines: list[tuple[int, int, int]],
        stream: tuple[int, int],
        before: int,
    ) -> dict[str, Any]:
        """On rank 0, which asks it."""
        if self._grid.rank != 0:
            return {}
        parts = [
            {
                "place": place,
                "n": n,
                "seed": int(_numbers(self._spec.seed, stream, before + first).integers(1 << 62)) + place - first,
                "tokens": self._prompt(tokens, prompts[place]).tolist(),
            }
            for first, place, n in lines
        ]
        return policy.question(version, parts, self._samples.room, self._ends)

    def _questions(self, tokens: TokenSet, prompts: np.ndarray, each: int) -> list[list[tuple[int, int, int]]]:
        """What to ask engines, ASKED_TOKENS at a time, the same on every rank: (place of the prompt's first answer,
        place of the first that is asked for, answers)."""
        room = self._samples.room
        most, left = max(1, ASKED_TOKENS // room), 0
        found: list[list[tuple[int, int, int]]] = []
        for first in range(0, len(prompts), each):
            size = len(self._prompt(tokens, prompts[first]))
            for place in range(first, first + each, most):
                n = min(most, first + each - place)
                if size + n * room > left or not found:
                    found.append([])
                    left = ASKED_TOKENS
                found[-1].append((first, place, n))
                left -= size + n * room
        return found

    def _say(self, why: str) -> None:
        """Why the ranks sample, when that has changed."""
        if why != self._why and self._grid.rank == 0:
            text = f"the ranks sample what no engine answers: {why}" if why else "an engine samples again"
            self._emit("message", level="warn" if why else "info", text=text)
        self._why = why

    def _sampled_here(
        self,
        tokens: TokenSet,
        prompts: np.ndarray,
        places: np.ndarray,
        stream: tuple[int, int],
        made: Answers,
        before: int,
    ) -> bool:
        """Collective: the answers of these places into `made`, on every rank; False if the devices were wanted."""
        grid, room, device = self._grid, self._samples.room, self._engine.device
        share = -(-len(places) // grid.data_size)
        first = min(grid.data_rank * share, len(places) - 1)
        mine = places[np.minimum(np.arange(first, first + share), len(places) - 1)]  # equally many everywhere
        chances = np.stack([_numbers(self._spec.seed, stream, before + int(place)).random(room) for place in mine])
        found = sample(
            self._engine.module.model,
            [self._prompt(tokens, prompts[place]) for place in mine],
            chances,
            self._ends,
            self._spec.max_length,
            device,
            self._agreed,
        )
        if found is None:
            return False
        own = max(0, min(share, len(places) - grid.data_rank * share))
        into = torch.from_numpy(mine[:own]).to(device)
        here = Answers.empty(len(prompts), room, device)
        if grid.tensor_rank == 0:
            for all_, part in ((here.ids, found.ids), (here.log_probs, found.log_probs), (here.sizes, found.sizes)):
                all_[into] = part[:own]
        for all_, part in ((made.ids, here.ids), (made.log_probs, here.log_probs), (made.sizes, here.sizes)):
            comm.all_reduce(part)
            all_ += part
        return True

    def _judged(
        self, name: str, prompts_of: tuple[str, TokenSet], prompts: np.ndarray, made: Answers, before: int = 0
    ) -> Verdict | None:
        """Collective: what is said of the answers, None if the devices were wanted. prompts_of: their file, and its
        tokens. before: answers that were judged before under this name. Raises NothingGraded, on every rank."""
        self._progress.enter("grading")
        verdict, asked = self._judge.empty(), dict[str, Any]()
        while (start := len(verdict["errors"])) < len(prompts):
            if self._grid.rank == 0:
                part = range(start, min(start + ASKED_AT_ONCE, len(prompts)))
                answers = (made.ids[place, : int(made.sizes[place])].tolist() for place in part)
                samples = self._judge.samples(*prompts_of, prompts[part.start : part.stop], answers)
                asked = {"kind": self._judge.kind, "samples": samples}
            answered, answer = self._heard(f"{name}-{before + start}", asked)
            if not answered:
                return None
            judged = told_by_first(answer)
            if judged.get("failed"):
                raise NothingGraded(judged["failed"])
            verdict = {key: [*have, *judged[key]] for key, have in verdict.items()}
        return verdict

    def _heard(self, question: str, asked: dict[str, Any], asked_s: float = -_ASK_AGAIN_S) -> tuple[bool, Any]:
        """Collective: whether rank 0 was answered before the devices were wanted, and the answer there. asked: by rank
        0; asked_s: when it has asked already."""
        answer = None
        while True:
            if self._grid.rank == 0:
                answer = self._signals.take_answer(question)
                if answer is None and time.monotonic() - asked_s > _ASK_AGAIN_S:
                    # Again: who was asked may have gone, and another come.
                    asked_s = time.monotonic()
                    self._emit("ask", question=question, **asked)
                    answer = self._signals.take_answer(question)
            wanted, waiting = self._agreed(self._grid.rank == 0 and answer is None)
            if wanted:
                return False, None
            if not waiting:
                return True, answer
            time.sleep(_LOOK_EVERY_S)

    def _agreed(self, going: bool) -> tuple[bool, bool]:
        """Collective: whether the devices are wanted, and whether any rank goes on."""
        self._progress.enter(self._progress.phase)
        signals = self._signals
        message = torch.tensor([float(signals.suspend or signals.cancel), float(going)], device=self._engine.device)
        comm.all_reduce(message)
        wanted, others = message.tolist()
        return wanted > 0, others > 0

    def _prompt(self, tokens: TokenSet, pack: int) -> np.ndarray:
        (index,) = tokens.packs[pack]
        return tokens.tokens_of(int(index))

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._spec.base_path)

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens that end an answer."""
        end = getattr(self._engine.module.model.generation_config, "eos_token_id", None)
        found = end if isinstance(end, list) else [end]
        return sorted({int(one) for one in [*found, self._tokenizer.eos_token_id] if one is not None})

    # --- what is kept of the step under way

    def _keep(self, step: int, made: Answers, verdict: Verdict | None) -> None:
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
                older=made.older.cpu().numpy(),
                engine=self._by_engine,
                verdict=np.frombuffer(json.dumps(verdict).encode(), np.uint8),
            )
        os.rename(partial, self._file)

    def _taken_up(self, step: int, n: int) -> tuple[Answers | None, Verdict | None]:
        """Collective: what an earlier world has sampled and had judged for this step."""
        shape = n, self._samples.room
        kept = _read(self._file, step, shape, self._staleness) if self._grid.rank == 0 else None
        there = told_by_first(kept is not None)
        if not there:
            return None, None
        made = Answers.empty(*shape, staleness=self._staleness)
        if kept is not None:
            made = Answers(*(torch.from_numpy(kept[name]) for name in ("ids", "log_probs", "sizes", "older")))
        self._by_engine, verdict = told_by_first(kept and [int(kept.get("engine", 0)), kept["verdict"]])
        return shared(made, self._engine.device), verdict


def _numbers(seed: int, stream: tuple[int, int], place: int) -> np.random.Generator:
    """The random numbers of one sample; `stream`: what it is for, and its step."""
    purpose, step = stream
    key = np.array([seed, (purpose << 63) | (step << 32) | place], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _read(path: Path, step: int, shape: tuple[int, int], staleness: int) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        with np.load(path) as file:
            kept = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile):
        return None  # a crash of the machine: it is sampled anew
    kept = {"older": np.zeros((shape[0], 0), np.int64), **kept}  # of a run that began before samples could be stale
    if int(kept["step"]) != step or kept["ids"].shape != shape or kept["older"].shape[1] != staleness:
        return None
    verdict = json.loads(kept["verdict"].tobytes())
    return {**kept, "ids": kept["ids"].astype(np.int64), "verdict": verdict}
