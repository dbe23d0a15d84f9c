"""Errors of training.

TrainError
├── InvalidHyperparameter   a hyperparameter is unknown or out of range (param, given, expected)
├── InvalidTrainingData     a data file has nothing to train on
├── InvalidSpec             a TrainSpec describes a run that cannot start
├── UnsupportedModel        the base model, its tokenizer or its chat template cannot be trained here
├── SnapshotMismatch        a snapshot belongs to another run
├── NothingGraded           a grader gave no reward for any answer of a step
├── TrainingDiverged        the loss or the gradient norm is not finite
└── RankFailed              a rank died, hung or raised; the run can resume from its newest snapshot
"""

from __future__ import annotations

from typing import Any, Literal

Blame = Literal["own", "outside", "memory"]


class TrainError(Exception):
    """Base of all errors that `train` raises because of a job's input."""


class InvalidHyperparameter(TrainError):
    """A hyperparameter is unknown or out of range."""

    def __init__(self, param: str, given: Any, expected: str):
        super().__init__(f"hyperparameter {param!r} is {given!r}; expected {expected}")
        self.param, self.given, self.expected = param, given, expected


class InvalidTrainingData(TrainError):
    """A data file has nothing to train on; the message says why."""


class InvalidSpec(TrainError):
    """A TrainSpec describes a run that cannot start; the message names the field."""


class UnsupportedModel(TrainError):
    """The base model, its tokenizer or its chat template cannot be trained here; the message says why."""


class SnapshotMismatch(TrainError):
    """A snapshot does not fit the run that should resume from it."""


class TrainingDiverged(TrainError):
    """Loss or gradient norm is not finite; further steps would only write broken weights."""

    def __init__(self, step: int, loss: float, grad_norm: float):
        super().__init__(
            f"training diverged at step {step} (loss {loss}, gradient norm {grad_norm}); lower "
            "learning_rate_multiplier or check the data for broken examples"
        )


class NothingGraded(TrainError):
    """A grader gave no reward for any answer of a step, or cannot run; the message says why."""


class RankFailed(TrainError):
    """A rank died, hung or raised. code: name of the exception that the rank raised, or how it failed. retryable:
    whether a restart from a snapshot can help. blame: "own" if the rank raised an error, "memory" if the OOM killer
    killed it, else "outside" (it was killed or stopped, or its supervisor died), which is not the job's fault."""

    def __init__(
        self, rank: int, reason: str, *, code: str = "rank_failed", retryable: bool = True, blame: Blame = "outside"
    ):
        # Errors of the input are the same on every rank.
        super().__init__(f"rank {rank} {reason}" if retryable else reason)
        self.rank, self.code, self.retryable, self.blame = rank, code, retryable, blame
