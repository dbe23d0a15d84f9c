"""The files of a job's samples. Numpy alone: the controller writes them, every rank reads them.

    RUN_DIR/rollouts/train-3.json    samples of the step after three steps, with their verdict
    RUN_DIR/rollouts/valid-3.json    samples of the validation after three steps, with their verdict

Prompts and random numbers of a file follow from its name. It appears by rename and is not written again, so that it
fixes what its step learns: whatever dies, no sample is lost or counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from train.data.packing import StepPlan
from train.data.token_set import TokenSet
from train.methods.methods import method_of
from train.plan.spec import TrainSpec
from weights.format.names import replace_file

Verdict = dict[str, list[Any]]
"""One value for each answer, by name; "errors" are texts, empty where there was none."""
FOLDER = "rollouts"
_NEWLINE = ord("\n")


@dataclass(frozen=True)
class SamplesFile:
    """One file by its purpose. step: the number of steps done before the file is read."""

    purpose: Literal["train", "valid"]
    step: int

    def path(self, run_dir: str | Path) -> Path:
        return Path(run_dir) / FOLDER / f"{self.purpose}-{self.step}.json"


@dataclass(frozen=True)
class Samples:
    """Answers in the order of their prompts; the answers to one prompt follow each other.

    ids: (n,) int32 tokens of each answer, with its end token. log_probs: (n,) float32, each token's log-probability
    when it was sampled. weights_step: the number of steps done when the sampling weights were published. failed: why
    the job cannot continue.
    """

    ids: list[np.ndarray]
    log_probs: list[np.ndarray]
    verdict: Verdict
    weights_step: int
    failed: str = ""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, orjson.dumps(self, option=orjson.OPT_SERIALIZE_NUMPY), durable=True)

    @classmethod
    def read(cls, path: Path) -> Samples | None:
        """Read a file of samples; None if it does not exist."""
        try:
            fields = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        ids = [np.array(tokens, np.int32) for tokens in fields.pop("ids")]
        return cls(ids, [np.array(answer, np.float32) for answer in fields.pop("log_probs")], **fields)


@dataclass(frozen=True)
class Prompt:
    """record: the prompt's line of the job's data. seed: answer i is sampled with the seed `seed + i`."""

    tokens: list[int]
    record: dict[str, Any]
    seed: int


class _Prompts:
    """The prompts of one of the job's data files, as records and as tokens."""

    def __init__(self, path: str, spec: TrainSpec):
        method = method_of(spec.method)
        most = method.data_length(spec.max_length, spec.options)
        self.tokens = TokenSet(path, method, max_length=most, packing=False)
        self._lines = np.memmap(path, np.uint8, "r")

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.flatnonzero(self._lines == _NEWLINE) + 1])

    def record(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = orjson.loads(self._lines[self._starts[index] : self._starts[index + 1]].tobytes())
        return record


class SamplesPlan:
    """The files that a run needs, and the prompts of each. Reads the files of the job; may be used on any thread. ends:
    tokens that end an answer. Raises FileNotFoundError, UnsupportedModel."""

    def __init__(self, spec: TrainSpec):
        self.spec = spec
        self.staleness: int = spec.options["staleness"]
        self._train = _Prompts(spec.train_path, spec)
        self._valid = _Prompts(spec.valid_path, spec) if spec.valid_path else None
        tokens = self._train.tokens
        self.ends = tokens.ends
        self._steps = StepPlan(tokens.n_examples, spec.batch_size, spec.micro_batch, spec.n_epochs, spec.seed)

    @property
    def policy_kind(self) -> Literal["adapter", "version"]:
        """The kind under which the weight store has the weights to sample from."""
        return "adapter" if self.spec.options["policy"] == "adapter" else "version"

    def due(self, step: int) -> list[SamplesFile]:
        """The files that may be sampled from the weights after this many steps, in the order that ranks need them."""
        spec, total = self.spec, self._steps.total_steps
        validates = step == 0 or self._steps.validates(step, spec.eval_interval)
        files = [SamplesFile("train", later) for later in range(step, min(step + self.staleness + 1, total))]
        return [SamplesFile("valid", step), *files] if validates and self._valid is not None else files

    def missing(self, step: int) -> list[SamplesFile]:
        return [file for file in self.due(step) if not file.path(self.spec.run_dir).exists()]

    def group(self, file: SamplesFile) -> int:
        """Return the number of answers to each prompt."""
        return self.spec.options["eval_samples" if file.purpose == "valid" else "group"]

    def prompts(self, file: SamplesFile) -> list[Prompt]:
        source = self._train
        order: Sequence[int] = self._steps.packs_of_step(file.step).tolist()
        if file.purpose == "valid":
            assert self._valid is not None
            source, order = self._valid, range(self._valid.tokens.n_examples)
        # Validations use the same seeds after every step.
        purpose, step = (1, 0) if file.purpose == "valid" else (0, file.step)
        group, prompts = self.group(file), []
        for nth, index in enumerate(order):
            key = np.array([self.spec.seed, purpose << 63 | step << 32 | nth * group], np.uint64)
            seed = int(np.random.Generator(np.random.Philox(key=key)).integers(1 << 62))
            prompts.append(Prompt(source.tokens.tokens_of(index).tolist(), source.record(index), seed))
        return prompts
