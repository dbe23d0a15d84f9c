"""Grading by models and by code: rewards of samples, verdicts on the answers of models in training, checks of the
graders, teachers and response formats of requests, and /v1/fine_tuning/alpha/graders, which tries or checks a grader
(https://platform.openai.com/docs/api-reference/graders).

Models are asked through the gateway on behalf of the job's key, judges by chat, students and teachers in token ids,
which need no chat template; code runs in another process. Samples are drawn at temperature 1 from the whole vocabulary,
so that the log-probability that vLLM records (`logprobs_mode` raw_logprobs) is of the distribution that the token was
drawn from. The job's events say when judges fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, NamedTuple

import orjson
from fastapi import APIRouter
from pydantic import Field

from appliance.controller.access.model_access import Resolved, check_may_ask, unknown_model
from appliance.controller.access.model_access import resolve as resolve_model
from appliance.controller.bus.asking import Asking
from appliance.controller.context.context import ControllerContext
from appliance.controller.http.routers import StrictBody, make_router
from appliance.controller.interfaces.errors import ApiError, BadRequest, shown
from appliance.controller.interfaces.principal import FINE_TUNING, Caller, Principal
from appliance.controller.jobs.events import add_message
from appliance.gateway.core import errors as gateway_errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import ENGINES_DIED
from appliance.gateway.core.routes import resolve
from appliance.gateway.requests.request_check import check_body
from appliance.store import jobs, keys
from appliance.store.database import Database
from appliance.store.rows import JobRow
from serve.core.keywords import unenforced_in_tools
from train.graders import graders
from train.graders.errors import GradingErrors, InvalidGrader, MissingField
from train.graders.graders import Grader, ModelAnswer, judges, leaves, parse
from train.graders.grading import Graded, requests
from train.graders.sandbox import ForkBroke, GraderHosts, WorkerBroke, refusal
from train.graders.templates import MAX_TEXT, Sample
from train.rollouts.samples import Prompt, Verdict

_LIMITS, _CHAT = Limits(), resolve(b"POST", b"/v1/chat/completions")
URL = "/v1/completions"
MOST_ANSWERS = 8
"""Answers of one request at most: no engine has fewer slots by default."""
MOST_TOKENS = 8192
"""Tokens of all answers of one request together, which the controller reads at once."""
MOST_SCORED_TOKENS = 1 << 16
"""Tokens of a text at most, if a client asks for its log-probabilities."""
GENERATED_TOKENS = 1
"""Tokens that an engine generates behind a scored text, the fewest there are; they have to fit its context."""
_NONE = -9999.0
"""What vLLM writes for minus infinity, and where it knows no log-probability of the token."""


class Sampled(NamedTuple):
    """One answer. ids: tokens, ending with the end token unless the answer was cut off; log_probs: one for each token;
    text: the answer without special tokens."""

    ids: list[int]
    log_probs: list[float]
    text: str


def sampling_request(
    model: str, prompt: Sequence[int], *, n: int, seed: int, max_tokens: int, ends: Sequence[int], form: Any = None
) -> dict[str, Any]:
    """Return a request's body. n: number of answers, up to MOST_ANSWERS. seed: answer i uses the seed `seed` + i. ends:
    tokens that end an answer. form: `response_format` that constrains answers."""
    return {
        "model": model,
        "prompt": list(prompt),
        "n": n,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop_token_ids": list(ends),
        # All sampling fields: an engine takes missing ones from the model's generation_config.json.
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,  # only the sampled token's log-probability
        "return_token_ids": True,
        **({"response_format": form} if form else {}),
    }


def samples_of(body: Any, n: int) -> list[Sampled]:
    """Return the n answers of a response. Raises ValueError if an answer is missing or incomplete."""
    try:
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        samples = [Sampled(list(c["token_ids"]), c["logprobs"]["token_logprobs"], c["text"]) for c in choices]
        whole = (s.ids and len(s.ids) == len(s.log_probs) and min(s.log_probs) > _NONE for s in samples)
        if len(samples) == n and all(whole):
            return samples
    except (KeyError, TypeError) as error:
        raise ValueError(f"an engine's samples lack tokens or log-probabilities: {error}") from error
    raise ValueError(f"{len(samples)} of {n} samples, or one without tokens or log-probabilities")


def scores_of(body: Any, tokens: Sequence[int], last: int) -> list[float]:
    """Return the log-probability of each of the `last` tokens, given all tokens before it. Raises ValueError."""
    try:
        places = body["choices"][0]["prompt_logprobs"][-last:]
        scores = [place[str(token)]["logprob"] for token, place in zip(tokens[-last:], places, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"no log-probability of a token: {error}") from error
    if not all(value is not None and value > _NONE for value in scores):
        raise ValueError("no log-probability of a token")
    return scores


ANSWER_WITHIN_S = 3600.0
"""How long a model that samples, judges or teaches may take, while the job's devices wait."""
WARN_EVERY_S = 600.0
"""Between two warnings of a job."""
MOST_REWARD = 1e9
"""The largest reward: ranks learn in float32, where the squared gradients of larger rewards overflow and the loss
becomes NaN."""
Judged = dict[str, tuple[dict[str, Any], ModelAnswer]]
"""By the name of a judge, the body of the chat completion that it was sent, and its answer."""


class CannotGoOn(Exception):
    """A job gets no more samples; the text says why."""


class Grading:
    def __init__(self, db: Database, hosts: GraderHosts, asking: Asking):
        self._db, self._hosts, self._asking = db, hosts, asking
        self._event_s: dict[str, float] = {}  # {job id: time of its newest warning}

    async def chat(self, key_id: str | None, body: dict[str, Any], within_s: float | None = None) -> ModelAnswer:
        """Request a chat completion on behalf of this key; return the answer, with `error` set if there is none."""
        model = str(body["model"])
        answer = await self._asking.ask(key_id, model, "/v1/chat/completions", body, within_s=within_s)
        if answer.error:
            return ModelAnswer(model=model, error=answer.error)
        choice, used = answer.body["choices"][0], answer.body.get("usage") or {}
        message = choice["message"]
        return ModelAnswer(
            message.get("content") or "",
            model,
            int(used.get("prompt_tokens") or 0),
            int(used.get("completion_tokens") or 0),
            int((used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            refused=bool(message.get("refusal")),
            tools=message.get("tool_calls") or [],
            finish_reason=str(choice.get("finish_reason") or ""),
        )

    async def ask_judges(
        self, key_id: str | None, grader: Grader, sample: Sample, item: Any, within_s: float | None = None
    ) -> Judged:
        """Ask the models of a grader about a sample on behalf of this key. within_s: seconds that each model has."""
        bodies = await asyncio.to_thread(requests, grader, sample, item) if judges(grader) else {}
        answers = await asyncio.gather(*(self.chat(key_id, body, within_s) for body in bodies.values()))
        return dict(zip(bodies, zip(bodies.values(), answers, strict=True), strict=True))

    async def grade(
        self,
        key_id: str | None,
        grader: Grader,
        samples: Sequence[tuple[Sample, Any]],
        judged: Sequence[Judged],
        waited_for: bool = False,
    ) -> list[Graded]:
        """Return the rewards of samples with their items; a sample without a reward has 0 and error flags.

        Args:
            judged: of each sample, from `ask_judges`.
            waited_for: as `GraderHosts.grade` has it.
        """
        owner = keys.owner_of(self._db, key_id or "")
        answers = [{name: answer for name, (_, answer) in of_sample.items()} for of_sample in judged]
        try:
            return await self._hosts.grade(owner, grader, samples, answers, waited_for)
        except WorkerBroke as error:
            broke = Graded(0.0, False, errors=GradingErrors(other_error=True), messages=[str(error)], was_run=False)
            return [broke] * len(samples)

    # --- answers of models in training

    async def verdict(self, row: JobRow, prompt: Prompt, answers: Sequence[Sampled]) -> Verdict:
        """Judge the answers to one prompt. Returns, in the answers' order, "errors" and a grader's "rewards" or a
        teacher's "log_probs". Raises CannotGoOn."""
        judge_row = jobs.find_judge(self._db, row.id)
        if judge_row is None:
            raise CannotGoOn("the judge of the job was deleted")
        if how := keys.how_ended(self._db, row.key_id):
            raise CannotGoOn(f"the API key of the job {how}, and its answers are judged on behalf of it")
        if teacher := judge_row.judge.get("teacher"):
            return await self._teach(row, teacher, prompt, answers)
        grader = await asyncio.to_thread(parse, judge_row.judge["grader"])  # 2 MB take seconds
        return await self._reward(row, grader, prompt, answers)

    async def _reward(self, row: JobRow, grader: Grader, prompt: Prompt, answers: Sequence[Sampled]) -> Verdict:
        """Return rewards: None for an answer that the box could not grade or with a reward beyond MOST_REWARD, 0 if the
        grader failed. An answer without the expected JSON or field is not an error: the model trains on that."""
        record = prompt.record
        item = {**record["item"], "messages": record["messages"]}
        sample_of = Sample.with_calls if record.get("tools") else Sample
        samples = [(sample_of(answer.text), item) for answer in answers]
        ask = partial(self.ask_judges, row.key_id, grader, within_s=ANSWER_WITHIN_S)
        judged = await asyncio.gather(*(ask(sample, item) for sample, item in samples))
        graded = await self.grade(row.key_id, grader, samples, judged, waited_for=True)
        rewards, errors = map(list, zip(*map(_rewarded, graded), strict=True))
        if (first := next((place for place, why in enumerate(errors) if why), None)) is not None:
            counts = "counts for nothing" if rewards[first] is None else "has the reward 0"
            failed = f"{sum(map(bool, errors))} of {len(errors)} answers to a prompt, of which the first {counts}"
            self._warn(row, f"the grader failed at {failed}: {errors[first]}")
        return {"rewards": rewards, "errors": errors}

    async def _teach(self, row: JobRow, teacher: str, prompt: Prompt, samples: Sequence[Sampled]) -> Verdict:
        """Return the teacher's log-probability of each token of each answer; None with a reason in "errors"."""
        texts = [[*prompt.tokens, *sample.ids] for sample in samples]
        # `prompt_logprobs` 0 requests only the log-probability of the token itself.
        fields = {"model": teacher, "max_tokens": GENERATED_TOKENS, "temperature": 0.0, "prompt_logprobs": 0}
        bodies = [{**fields, "prompt": tokens} for tokens in texts]
        ask = partial(self._asking.ask, row.key_id, teacher, URL, within_s=ANSWER_WITHIN_S)
        answers = await asyncio.gather(*map(ask, bodies))
        if fatal := next((answer for answer in answers if answer.code == ENGINES_DIED), None):
            # Not repeated, because the sample would crash engines that also serve others.
            raise CannotGoOn(f"an answer of the student cannot be shown to its teacher {teacher}: {fatal.error}")
        log_probs, errors = list[list[float] | None](), list[str]()
        for answer, tokens, sample in zip(answers, texts, samples, strict=True):
            why, scores = answer.error, None
            if not why:
                try:
                    scores = scores_of(answer.body, tokens, len(sample.ids))
                except ValueError as error:
                    why = f"the teacher gave {error}"
            log_probs.append(scores)
            errors.append(why)
        if why := next(filter(None, errors), ""):
            self._warn(row, f"some answers train nothing, because the teacher {teacher} did not score them: {why}")
        return {"log_probs": log_probs, "errors": errors}

    def _warn(self, row: JobRow, text: str) -> None:
        """Add an event, unless the job had one within WARN_EVERY_S."""
        now_s = time.monotonic()
        self._event_s = {job_id: at_s for job_id, at_s in self._event_s.items() if now_s - at_s < WARN_EVERY_S}
        if row.id not in self._event_s:
            self._event_s[row.id] = now_s
            add_message(self._db, row.id, text, level="warn")


def _rewarded(graded: Graded) -> tuple[float | None, str]:
    """Return an answer's reward (None without a valid one) and its error."""
    errors = graded.errors
    if abs(graded.reward) > MOST_REWARD:
        return None, f"the reward is {graded.reward:g}: a model can learn from rewards within ±{MOST_REWARD:,.0f}"
    judged = errors.model_grader_server_error or errors.model_grader_parse_error or errors.model_grader_refusal_error
    ours = judged or errors.python_grader_server_error or errors.other_error
    return None if ours else graded.reward, "" if errors.of_the_answer else "; ".join(graded.messages)


# --- checks of the graders, teachers and response formats of requests


def grader_of(context: ControllerContext, definition: Any, caller: Principal, param: str = "grader") -> Grader:
    """Parse a grader. Raises BadRequest if it is not a grader or this machine cannot run it, Forbidden and NotFound if
    it uses a model that the caller may not use."""
    try:
        grader = graders.parse(definition)
    except MissingField as error:
        raise _missing(f"{param}.{error.param}") from None
    except InvalidGrader as error:
        raise _invalid(f"{param}.{error.param}" if error.param else param, error.message, "invalid_grader") from None
    for name, leaf in leaves(grader).items():
        if isinstance(leaf, graders.Python) and (why := refusal()):
            raise BadRequest(f"{why[:1].upper()}{why[1:]}.", param=param, code="python_graders_unavailable")
        if isinstance(leaf, graders.ScoreModel | graders.LabelModel):
            check_may_ask(context.db, caller, leaf.model, param)
            field = "labels" if isinstance(leaf, graders.LabelModel) else "range"
            path = f"{param}.graders.{name}.{field}" if isinstance(grader, graders.Multi) else f"{param}.{field}"
            check_completion({"structured_outputs": leaf.answers_by}, path)
    return grader


async def check_code(hosts: GraderHosts, grader: Grader, caller: Principal, param: str) -> None:
    """Check python graders' code. Raises BadRequest if it cannot grade, ApiError if the box could not check it."""
    if not (code := graders.sources(grader)):
        return
    try:
        faults = await hosts.unusable(caller.owner, code)
    except WorkerBroke as error:
        raise _not_checked(f"The code of {param!r}", error) from error
    for path, why in faults:
        raise _invalid(f"{param}.{path}", why, "invalid_grader")


async def check_schema(hosts: GraderHosts, schema: Mapping[str, Any], caller: Principal, param: str) -> None:
    """Check a JSON schema. Raises BadRequest if it is invalid, ApiError if the box could not check it."""
    try:
        refused = await hosts.refused_schema(caller.owner, schema)
    except ForkBroke as error:
        refused = str(error)
    except WorkerBroke as error:
        raise _not_checked(f"The schema of {param!r}", error) from error
    if refused:
        raise _invalid(param, refused, "invalid_json_schema")


async def check_form(hosts: GraderHosts, form: Any, caller: Principal, param: str) -> None:
    """Check the schema of a `response_format` (its kind and shape are checked elsewhere): engines and ranks read the
    schema only when they write the first answer. Raises as `check_schema` does."""
    named = form.get("json_schema") if isinstance(form, Mapping) else None
    if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
        await check_schema(hosts, named["schema"], caller, f"{param}.json_schema.schema")


def form_of(form: Any, param: str) -> dict[str, Any] | None:
    """Return the form that constrains a job's answers (train.rollouts.rollouts); None for unconstrained text. Raises
    BadRequest."""
    if form is None or form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("json_object", "json_schema"):
        raise _invalid(param, "expected an object of the type text, json_object or json_schema", "invalid_value")
    named = form.get("json_schema")
    if kind == "json_schema" and not (isinstance(named, dict) and isinstance(named.get("schema"), dict)):
        raise _missing(f"{param}.json_schema.schema")
    check_completion({"response_format": form}, param)
    if kind == "json_schema" and (place := next(unenforced_in_tools(form["json_schema"]["schema"]), "")):
        why = f"ranks do not enforce `{place}` of its schema; use a simpler form, or let the grader reward it"
        raise _invalid(param, why, "unsupported_value")
    return dict(form)


def teacher_of(
    context: ControllerContext, name: Any, student: Resolved, longest: int, caller: Principal, param: str
) -> str:
    """Return the teacher's name after checks. longest: tokens of the longest prompt with its answer. Raises Forbidden
    and NotFound for a model that the caller may not ask, BadRequest for one that cannot teach this student; whether
    both have the same tokens takes a second, so the job's validation checks it."""
    if not isinstance(name, str) or not name:
        why = f"{shown(name)} was given, expected the name of a model (MODEL, MODEL@VERSION)"
        raise _invalid(param, why, "invalid_value")
    check_may_ask(context.db, caller, name, param)
    teacher = resolve_model(context.db, name)
    if teacher is None:
        raise unknown_model(name, param)
    context_tokens = context.sizes.size(teacher.model, teacher.version).max_model_len or MOST_SCORED_TOKENS
    capacity, why = min(MOST_SCORED_TOKENS, context_tokens) - GENERATED_TOKENS, ""
    if teacher.model.task != "generate":
        why = "it makes embeddings, and a teacher says how likely a text is"
    elif longest > capacity:
        why = (
            f"its engines say how likely texts of at most {capacity:,} tokens are, and max_length, a prompt with its "
            f"answer, is {longest:,}; choose a smaller one, or a teacher with a longer context"
        )
    if why:
        message = f"{shown(name)} cannot teach {shown(student.name)}: {why}."
        raise BadRequest(message, param=param, code="invalid_teacher")
    return name


def _missing(path: str) -> BadRequest:
    return BadRequest(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")


def _invalid(path: str, why: str, code: str) -> BadRequest:
    return BadRequest(f"Invalid '{path}': {why}.", param=path, code=code)


def _not_checked(noun: str, error: WorkerBroke) -> ApiError:
    """Return the error for a check whose worker failed through no fault of the request."""
    return ApiError(503, f"{noun} was not checked: {error}. Please retry.", kind="server_error", code="grader_not_run")


def check_completion(fields: dict[str, Any], param: str) -> None:
    """Check whether an engine takes a chat completion with these fields: once, and not for each of 10,000 items,
    because a check takes up to 50 ms. Raises BadRequest."""
    body = {"model": "m", "messages": [{"role": "user", "content": ""}], **fields}
    try:
        check_body(_CHAT, orjson.dumps(body), _LIMITS)
    except gateway_errors.HttpError as error:
        raise BadRequest(f"Invalid '{param}': {error.message}", param=param, code=error.code) from None


# --- routes that try a grader


TRIAL_WITHIN_S = 300.0


class Validate(StrictBody):
    grader: dict[str, Any]


class Run(Validate):
    model_sample: Annotated[str, Field(max_length=MAX_TEXT)]
    item: Any = None


def routes(context: ControllerContext, grading: Grading) -> APIRouter:
    router = make_router("/v1/fine_tuning/alpha/graders", FINE_TUNING)

    @router.post("/validate")
    async def validate(body: Validate, caller: Caller) -> dict[str, Any]:
        grader = grader_of(context, body.grader, caller)
        await check_code(context.graders, grader, caller, "grader")
        return {"grader": grader.as_given()}

    @router.post("/run")
    async def run(body: Run, caller: Caller) -> dict[str, Any]:
        grader = grader_of(context, body.grader, caller)
        sample, began_s = Sample(body.model_sample), time.perf_counter()
        judged = await grading.ask_judges(caller.key_id, grader, sample, body.item, TRIAL_WITHIN_S)
        (graded,) = await grading.grade(caller.key_id, grader, [(sample, body.item)], [judged])
        if not graded.was_run:
            message = f"The grader was not run: {'; '.join(graded.messages)}. Please retry."
            raise ApiError(503, message, kind="server_error", code="grader_not_run")
        return _result(grader, graded, time.perf_counter() - began_s)

    return router


def _result(grader: Grader, graded: Graded, took_s: float) -> dict[str, Any]:
    tokens = sum(graded.tokens_by_model.values())
    models = {judge.model for judge in judges(grader).values()}
    return {
        "reward": graded.reward,
        "sub_rewards": graded.sub_rewards,
        "metadata": {
            "name": grader.name,
            "type": grader.type,
            "errors": asdict(graded.errors),
            "execution_time": took_s,
            "scores": graded.sub_rewards or {grader.name: graded.reward},
            "token_usage": tokens if models else None,
            "sampled_model_name": ", ".join(sorted(models)) or None,
            # Beyond OpenAI's type: messages of the errors.
            "messages": graded.messages,
        },
        "model_grader_token_usage_per_model": {
            model: {"total_tokens": tokens} for model, tokens in graded.tokens_by_model.items()
        },
    }
