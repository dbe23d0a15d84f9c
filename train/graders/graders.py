"""Defines the graders of OpenAI's API, one class each, and `parse`, which reads a grader from a request."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from itertools import pairwise
from types import CodeType
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from train.graders import similarity, templates
from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader, MissingField

RunPython = Callable[[str, dict[str, Any], Any], float]
"""`(source, sample, item) -> reward`; raises GradingFailed."""
Reward = tuple[float, GradingErrors]
Template = Annotated[str, AfterValidator(templates.check)]

MAX_BYTES = 2 << 20
MAX_FORMULA = 4096  # characters
MAX_VARIABLES = 1000
ROLES = ("system", "developer", "user", "assistant")
DEFAULT_ANSWER_TOKENS = 1024
REASON_CHARACTERS = 160
REASON_TOKENS = 512
"""With at least this token limit, a judge gives a reason before its result. REASON_CHARACTERS need fewer tokens, unless
nearly all are rare characters that a tokenizer splits into bytes, so the result still fits."""

_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    # On floats: with Python's unbounded integers a power can take minutes and gigabytes.
    "floor": lambda number: float(math.floor(number)),
    "ceil": lambda number: float(math.ceil(number)),
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_ARITHMETIC = (ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Load)


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's answer to a grader's request. error: why there is no text. cached_tokens: number of prompt tokens that
    came from the engine's cache. tools: tool calls, as in a chat's `tool_calls`."""

    text: str = ""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    refused: bool = False
    tools: list[Any] = default(default_factory=list)
    finish_reason: str = ""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Grader(_Strict):
    """Base of all graders. Each except `multi` has a method `reward`, which raises GradingFailed."""

    name: str = Field(min_length=1, max_length=256)
    pass_threshold: float | None = Field(None, allow_inf_nan=False)
    """A sample passes with at least this reward; without it, above half of the grader's range."""
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    def as_given(self) -> dict[str, Any]:
        """Return the grader as the client wrote it, for storage and API responses; `parse` accepts it again."""
        return dict(self._given)

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.pass_threshold is not None and self.bounds and self.pass_threshold > self.bounds[1]:
            why = f"is {self.pass_threshold:g}, and the grader gives {self.bounds[1]:g} at most"
            raise InvalidGrader("pass_threshold", why)
        return self

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lowest and highest possible reward; None if the bounds depend on code or a formula."""
        return 0.0, 1.0

    @property
    def default_threshold(self) -> float:
        return sum(self.bounds or (0.0, 1.0)) / 2

    def passes(self, reward: float) -> bool:
        return reward >= (self.default_threshold if self.pass_threshold is None else self.pass_threshold)


class _Compared(_Grader):
    input: Template
    reference: Template

    def compared(self, sample: templates.Sample, item: Any) -> tuple[str, str]:
        """Return input and reference, filled from the data. Raises GradingFailed."""
        return templates.fill(self.input, sample, item), templates.fill(self.reference, sample, item)


class StringCheck(_Compared):
    """1 if the input equals the reference (`eq`), differs from it (`ne`), contains it (`like`) or contains it without
    regard to case (`ilike`), else 0."""

    type: Literal["string_check"]
    operation: Literal["eq", "ne", "like", "ilike"]

    def reward(self, sample: templates.Sample, item: Any, answer: ModelAnswer | None, run: RunPython) -> Reward:
        text, reference = self.compared(sample, item)
        holds = {
            "eq": text == reference,
            "ne": text != reference,
            "like": reference in text,
            "ilike": reference.casefold() in text.casefold(),
        }
        return float(holds[self.operation]), GradingErrors()


class TextSimilarity(_Compared):
    """The similarity of input and reference, from 0 to 1, by a metric of similarity.py."""

    type: Literal["text_similarity"]
    evaluation_metric: Literal[tuple(similarity.METRICS)]  # type: ignore[valid-type]
    """OpenAI's `cosine` compares embeddings of a hosted model, which a box does not have."""

    def reward(self, sample: templates.Sample, item: Any, answer: ModelAnswer | None, run: RunPython) -> Reward:
        reward, cut = similarity.similarity(self.evaluation_metric, *self.compared(sample, item))
        return reward, GradingErrors(truncated_observation_error=cut)


class Python(_Grader):
    """The number that the source's `grade(sample, item)` returns; the code runs in a confined process (sandbox.py)."""

    type: Literal["python"]
    source: str
    image_tag: str | None = None
    """A field of OpenAI's API. A box has one set of packages, so every tag means the same."""

    @property
    def bounds(self) -> None:
        return None

    def reward(self, sample: templates.Sample, item: Any, answer: ModelAnswer | None, run: RunPython) -> Reward:
        if not math.isfinite(reward := run(self.source, sample.for_code(), item)):
            flags = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=f"{reward}")
            raise GradingFailed(f"grade() returned {reward}, which is not a reward", flags)
        return reward, GradingErrors()


class _Part(_Strict):
    type: Literal["input_text", "output_text", "text"]
    text: Template


class Message(_Strict):
    # OpenAI's simple messages may have any text as role: a role that chat templates do not support becomes "user".
    role: Annotated[str, AfterValidator(lambda role: role if role in ROLES else "user")]
    content: Template | _Part | Annotated[list[Template | _Part], Field(max_length=64)]
    type: Literal["message"] | None = None

    def parts(self) -> list[str]:
        """Return the text templates of the message."""
        parts = self.content if isinstance(self.content, list) else [self.content]
        return [part if isinstance(part, str) else part.text for part in parts]


class Sampling(_Strict):
    # The first name is that of OpenAI's API; the other two are in OpenAI's documentation.
    max_completions_tokens: int | None = Field(None, ge=1, le=1 << 17)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 17)
    max_tokens: int | None = Field(None, ge=1, le=1 << 17)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)

    @property
    def most_tokens(self) -> int:
        """Token limit of an answer."""
        return self.max_completions_tokens or self.max_completion_tokens or self.max_tokens or DEFAULT_ANSWER_TOKENS

    def fields(self) -> dict[str, Any]:
        """Return the other sampling fields that the client set, for a chat completion."""
        values = {name: getattr(self, name) for name in ("reasoning_effort", "seed", "temperature", "top_p")}
        return {name: value for name, value in values.items() if value is not None}


def filled(messages: Sequence[Message], sample: templates.Sample, item: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat completion. Raises GradingFailed if the data lacks a variable or is too long."""
    chat, size = list[dict[str, Any]](), 0
    for message in messages:
        text = "\n".join(templates.fill(part, sample, item) for part in message.parts())
        if (size := size + len(text)) > templates.MAX_TEXT:
            raise GradingFailed(f"a prompt has over {templates.MAX_TEXT} characters", GradingErrors(other_error=True))
        # JSON may contain a lone surrogate, which UTF-8 cannot encode.
        chat.append({"role": message.role, "content": text.encode(errors="replace").decode()})
    return chat


class _ModelGrader(_Grader):
    """Asks a model of the box for an answer that matches a regular expression or is one of several choices. A JSON
    schema would allow unlimited white space, on which small models waste all of their tokens."""

    model: str = Field(min_length=1, max_length=256)
    input: list[Message] = Field(min_length=1, max_length=64)
    sampling_params: Sampling | None = None

    def as_given(self) -> dict[str, Any]:
        """As `_Grader.as_given`, with roles that OpenAI's SDK accepts."""
        grader = super().as_given()
        roles = ({**raw, "role": message.role} for raw, message in zip(grader["input"], self.input, strict=True))
        return {**grader, "input": list(roles)}

    @property
    def answers_by(self) -> dict[str, Any]:
        """The `structured_outputs` field of the grader's chat completion."""
        raise NotImplementedError

    @property
    def answer_tokens(self) -> int:
        """The token limit of an answer."""
        return (self.sampling_params or Sampling()).most_tokens

    def request(self, sample: templates.Sample, item: Any) -> dict[str, Any]:
        """Return the body of a chat completion. Raises GradingFailed if the data lacks a variable or is too long."""
        return {
            "model": self.model,
            "messages": filled(self.input, sample, item),
            "max_completion_tokens": self.answer_tokens,
            "structured_outputs": self.answers_by,
            **(self.sampling_params or Sampling()).fields(),
        }

    def score(self, answer: Any) -> float:
        """Compute the score of an answer. Raises KeyError, TypeError, ValueError for an answer of another form."""
        raise NotImplementedError

    def reward(self, sample: templates.Sample, item: Any, answer: ModelAnswer | None, run: RunPython) -> Reward:
        if answer is None:
            self.request(sample, item)  # raises for a variable without a value
            answer = ModelAnswer(error="it was not asked")
        if answer.error:
            flags = GradingErrors(model_grader_server_error=True, model_grader_server_error_details=answer.error)
            raise GradingFailed(f"the model {self.model!r} did not answer: {answer.error}", flags)
        if answer.refused:
            raise GradingFailed(f"the model {self.model!r} refused", GradingErrors(model_grader_refusal_error=True))
        try:
            return self.score(json.loads(answer.text, strict=False)), GradingErrors()
        except (KeyError, TypeError, ValueError) as error:
            why = f"is not a grade ({error})"
            if answer.finish_reason == "length":
                why = f"was cut at its limit of {self.answer_tokens} tokens, before the grade"
            text = f"the answer of the model {self.model!r} {why}: {answer.text[:200]!r}"
            raise GradingFailed(text, GradingErrors(model_grader_parse_error=True)) from None


class ScoreModel(_ModelGrader):
    """A number within `range` that a model gives, after a short reason if the token limit allows one."""

    type: Literal["score_model"]
    range: list[float] = Field([0.0, 1.0], min_length=2, max_length=2)

    @field_validator("range")
    @classmethod
    def _rises(cls, bounds: list[float]) -> list[float]:
        if not -1e6 <= bounds[0] < bounds[1] <= 1e6:
            raise InvalidGrader("", f"is {bounds}; expected [low, high] within ±1,000,000")
        return bounds

    @property
    def bounds(self) -> tuple[float, float]:
        return self.range[0], self.range[1]

    @property
    def answers_by(self) -> dict[str, Any]:
        reason = rf'"reason": "[^"\\\n]{{0,{REASON_CHARACTERS}}}", ' if self.answer_tokens >= REASON_TOKENS else ""
        return {"regex": rf'\{{{reason}"result": ({_numbers(*self.range)})\}}'}

    def score(self, answer: Any) -> float:
        low, high = self.range
        if not math.isfinite(score := float(answer["result"])):
            raise ValueError(f"the result {score} is not a number")
        return min(high, max(low, score))


def _numbers(low: float, high: float) -> str:
    """Return a regular expression for numbers between the integers around a range; in a wide range, for numbers with no
    more digits than its ends. Scores are clipped to the range later."""
    least, most = math.floor(low), math.ceil(high)
    if most - least > 100:
        digits, sign = len(str(max(abs(least), abs(most)))), "-?" if low < 0 else ""
        # JSON does not allow 007: an answer with such a number would have no reward.
        return rf"{sign}(0|[1-9][0-9]{{0,{digits - 1}}})(\.[0-9]{{1,4}})?"
    # Cover the numbers between each two neighbouring integers: -0.5 is between -1 and 0.
    above = [str(whole) if whole >= 0 else f"-{-whole - 1}" for whole in range(least, most)]
    return rf"({'|'.join(above)})(\.[0-9]{{1,4}})?|({least}|{most})(\.0)?"


class LabelModel(_ModelGrader):
    """1 if the label that a model gives is one of `passing_labels`, else 0."""

    type: Literal["label_model"]
    labels: list[str] = Field(min_length=1, max_length=256)
    passing_labels: list[str] = Field(min_length=1, max_length=256)

    @model_validator(mode="after")
    def _known(self) -> Self:
        if strange := set(self.passing_labels) - set(self.labels):
            raise InvalidGrader("passing_labels", f"{', '.join(sorted(strange))}: not among `labels`")
        return self

    @property
    def answers_by(self) -> dict[str, Any]:
        return {"choice": [json.dumps({"label": label}, ensure_ascii=False) for label in self.labels]}

    def score(self, answer: Any) -> float:
        if answer["label"] not in self.labels:
            raise ValueError(f"the label {answer['label']!r} is not among the grader's")
        return float(answer["label"] in self.passing_labels)


Leaf = StringCheck | TextSimilarity | Python | ScoreModel | LabelModel


class Multi(_Grader):
    """The value of the formula `calculate_output`, whose variables are the rewards of several graders."""

    type: Literal["multi"]
    calculate_output: str
    graders: dict[str, Annotated[Leaf, Field(discriminator="type")]] = Field(min_length=1, max_length=32)
    """Graders by their name in the formula."""
    _code: CodeType

    @property
    def bounds(self) -> None:
        return None

    @model_validator(mode="after")
    def _computes(self) -> Self:
        if odd := next((name for name in self.graders if not name.isidentifier()), None):
            raise InvalidGrader("graders", f"the name {odd!r} cannot be used in a formula: use letters, digits and _")
        try:
            tree = _parsed(self.calculate_output)
            self._code = compile(tree, "formula", "eval")
        except (SyntaxError, RecursionError, MemoryError, OverflowError) as error:
            raise InvalidGrader("calculate_output", f"cannot be read as a formula: {error}") from None
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if unknown := named - set(self.graders) - set(_FUNCTIONS):
            names, called = (", ".join(sorted(some)) for some in (unknown, self.graders))
            raise InvalidGrader("calculate_output", f"names {names}, but the graders are called {called}")
        return self

    def value(self, rewards: Mapping[str, float]) -> float:
        """Compute the formula. Raises GradingFailed without a value (division by zero, root of a negative number)."""
        try:
            result = eval(
                self._code, {"__builtins__": {}} | _FUNCTIONS, {name: float(reward) for name, reward in rewards.items()}
            )
            if isinstance(result, complex) or not math.isfinite(result):
                raise ValueError(f"it is {result}")
            return float(result)
        except (ArithmeticError, TypeError, ValueError) as error:
            values = ", ".join(f"{name} = {reward:g}" for name, reward in rewards.items())
            text = f"calculate_output has no value for {values}: {error}"
            raise GradingFailed(text, GradingErrors(formula_parse_error=True)) from None


def _parsed(formula: str) -> ast.Expression:
    """Parse a formula to an arithmetic expression with floats as its numbers. Raises InvalidGrader, and any error of
    `ast.parse`."""
    if len(formula) > MAX_FORMULA:
        raise InvalidGrader("calculate_output", f"has {len(formula)} characters; at most {MAX_FORMULA} are accepted")
    # In formulas of OpenAI's API ^ is a power.
    tree = ast.parse(formula.strip().replace("^", "**"), mode="eval")
    for node in ast.walk(tree.body):
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                node.value = float(number)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
                pass
            case _ if not isinstance(node, (ast.Name, *_ARITHMETIC)):
                expected = f"numbers, names of graders, + - * / ^ and {', '.join(_FUNCTIONS)}"
                why = f"has {ast.unparse(node)!r}; a formula has {expected}"
                raise InvalidGrader("calculate_output", why)
    return tree


Grader = Leaf | Multi
_ANY: TypeAdapter[Grader] = TypeAdapter(Annotated[Grader, Field(discriminator="type")])
_ASKING = ("score_model", "label_model")
TYPES = ("string_check", "text_similarity", "python", "score_model", "label_model", "multi")


def parse(given: Any) -> Grader:
    """Read the grader of a request. The graders of a `multi` may be a dictionary by name, a list, or a single grader:
    OpenAI's documentation and SDK use all three forms. A dictionary's key is the default of a grader's name. Raises
    InvalidGrader."""
    if not isinstance(given, Mapping):
        raise InvalidGrader("", f"a grader is an object with a `type`, one of {', '.join(TYPES)}")
    named = {**given, "graders": _by_name(given.get("graders"))} if given.get("type") == "multi" else given
    try:
        written = json.dumps(named)
        if len(written) > MAX_BYTES:
            raise InvalidGrader("", f"the grader has {len(written)} bytes; at most {MAX_BYTES} are accepted")
        if written.count("{{") > MAX_VARIABLES:  # each variable is filled for each sample
            raise InvalidGrader("", f"the grader has more than {MAX_VARIABLES} variables in braces")
        # Read from JSON text, because there strict types accept 1 as a float.
        grader = _ANY.validate_json(written)
    except ValidationError as error:
        _refuse(error)
    except InvalidGrader:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidGrader("", f"cannot be read: {error}") from None
    grader._given = dict(given)
    return grader


def leaves(grader: Grader) -> dict[str, Leaf]:
    """Return the graders of a `multi` by name; for another grader, only itself by its name."""
    return dict(grader.graders) if isinstance(grader, Multi) else {grader.name: grader}


def sources(grader: Grader) -> dict[str, str]:
    """Return the source code of python graders by the path of its field."""
    within = "graders.{}.source" if isinstance(grader, Multi) else "source"
    return {within.format(name): leaf.source for name, leaf in leaves(grader).items() if isinstance(leaf, Python)}


def judge_models(kept: Mapping[str, Any]) -> set[str]:
    """Return the names of the models that a stored grader asks, without parsing the grader."""
    parts = _by_name(kept["graders"]).values() if kept["type"] == "multi" else [kept]
    return {part["model"] for part in parts if part["type"] in _ASKING}


def judges(grader: Grader) -> dict[str, ScoreModel | LabelModel]:
    """Return the graders that ask a model, by name."""
    return {name: leaf for name, leaf in leaves(grader).items() if isinstance(leaf, ScoreModel | LabelModel)}


def _by_name(graders: Any) -> Any:
    alone = isinstance(graders, Mapping) and isinstance(graders.get("type"), str)
    if alone:
        graders = [graders]
    if isinstance(graders, Mapping):
        return {name: {"name": name, **part} if isinstance(part, Mapping) else part for name, part in graders.items()}
    if not isinstance(graders, list):
        return graders
    for place, part in enumerate(graders):
        if isinstance(part, Mapping) and "name" not in part:
            raise MissingField("graders.name" if alone else f"graders.{place}.name")
    names = [part.get("name") if isinstance(part, Mapping) else None for part in graders]
    if len(set(map(str, names))) != len(names):
        raise InvalidGrader("graders", "two graders have the same name; the formula could not tell them apart")
    return {str(name): part for name, part in zip(names, graders, strict=True)}


def _refuse(error: ValidationError) -> NoReturn:
    faults = error.errors(include_url=False, include_input=False)
    # The errors of a union's other branches come first.
    first = next((fault for fault in faults if fault["type"] == "value_error"), faults[0])
    if first["type"] == "missing":  # a misspelt name is both missing and unknown: report the unknown name
        unknown = (
            fault for fault in faults if fault["type"] == "extra_forbidden" and fault["loc"][:-1] == first["loc"][:-1]
        )
        first = next(unknown, first)
    # Remove the branches that a union adds to the path, but no name in `graders` that equals a branch.
    steps = pairwise(("", *map(str, first["loc"])))
    path = [step for before, step in steps if before == "graders" or step not in (*TYPES, "_Part") and "[" not in step]
    message = first["msg"]
    if first["type"] == "value_error":
        own: InvalidGrader = first["ctx"]["error"]
        raise InvalidGrader(".".join(filter(None, [*path, own.param])), own.message)
    if first["type"] == "missing":
        raise MissingField(".".join(path))
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path, message = [*path, "type"], f"is not a kind of grader; expected one of {', '.join(TYPES)}"
    elif first["type"] == "extra_forbidden":
        message = "is not a field of this grader"
    if "content" in path:
        message += "; text is taken (`input_text`), images and audio are not"
    raise InvalidGrader(".".join(path), message[:1].lower() + message[1:])
