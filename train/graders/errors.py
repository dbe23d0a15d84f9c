"""Errors in definitions of graders, and errors of grading."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

_LONGEST = 500


class InvalidGrader(ValueError):
    """A grader is refused. param: the path within the grader (`graders.0.input`). message: the problem and the expected
    value. Both texts are cut, since they may quote a value of megabytes."""

    def __init__(self, param: str, message: str):
        param, message = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…" for text in (param, message))
        super().__init__(f"{param}: {message}" if param else message)
        self.param, self.message = param, message


class MissingField(InvalidGrader):
    """The definition of a grader lacks the field `param`."""

    def __init__(self, param: str):
        super().__init__(param, "is missing")


@dataclass(frozen=True, slots=True)
class GradingErrors:
    """Error flags of a graded sample, with the names of OpenAI's API (`MetadataErrors` in openai 3.52)."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    invalid_variable_error: bool = False
    other_error: bool = False
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    model_grader_server_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_server_error_details: str | None = None

    def __or__(self, other: GradingErrors) -> GradingErrors:
        return replace(self, **{name: value for name, value in asdict(other).items() if value})

    def __bool__(self) -> bool:
        """Whether the sample has no valid reward. A cut text alone does not make the reward invalid."""
        return any(value for name, value in asdict(self).items() if name != "truncated_observation_error")

    @property
    def of_the_answer(self) -> bool:
        """Whether the answer lacks a part that the grader reads: it calls no tool, or is not JSON. Then the missing
        reward is the answer's fault, not the grader's or the box's."""
        cut = self.truncated_observation_error
        return self == GradingErrors(sample_parse_error=True, truncated_observation_error=cut)


class GradingFailed(Exception):
    """A sample has no reward. errors: the flags of the sample; the message says why."""

    def __init__(self, message: str, errors: GradingErrors):
        super().__init__(message)
        self.errors = errors
