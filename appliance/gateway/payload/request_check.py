"""Checks an inference body. Pure: takes bytes, returns the few facts the gateway needs or raises HttpError.

A body's size bounds what parsing costs: orjson reads it once and refuses NaN, infinities, lone surrogates and invalid
UTF-8. readings/ makes of it what the client means; where that is another body, the engine gets that one, and else the
client's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from appliance.gateway.answers.continuation import CHAT, Continuation, continuation_of
from appliance.gateway.answers.kept_completion import kept_completion
from appliance.gateway.answers.transcript import Transcript, transcript_of
from appliance.gateway.answers.usage import TokenRequest
from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import COUNT_TOKENS, INPUT_TOKENS, RESPONSES, Route
from appliance.gateway.payload.fields import check_fields, prompts_in
from appliance.gateway.payload.nesting import check_depth, check_media
from appliance.gateway.payload.structure import check_structure
from appliance.gateway.readings.media_tokens import media_in
from appliance.gateway.readings.request import as_meant

Pairs = Sequence[tuple[bytes, bytes]]

MODEL_NAME_CHARS: Final = 512
DEFAULT_COMPLETION_TOKENS: Final = 256
PREFIX_CHARS: Final = 512
_BRACKETS: Final = 1 << 20
_UNBOUNDED: Final = 1 << 20
# No tokenizer makes fewer tokens of a prompt worth reading; an engine would read all of it to say that it is too long.
# Of a prompt that it shortens it reads all too, at up to 460 bytes of memory for each character.
_BYTES_OF_A_TOKEN: Final = 16
_BYTES_OF_A_KEPT_TOKEN: Final = 256
# An engine makes an object of each log-probability, on the loop that sends all tokens, at some 10 µs.
_LOGPROBS: Final = 1 << 18
_OPEN_LENGTH: Final = 1024
"""Taken for the length of an answer that the request leaves open."""
# Answers, or inputs of embeddings, that count as one open request of their owner.
_SEQUENCES_OF_ONE, _INPUTS_OF_ONE = 16, 64


@dataclass
class Checked:
    """What a checked request asks for.

    prompt: its messages, items or prompts. prompt_tokens: estimated; tokens: with the completion; asked: the same for
    quotas. weight: as how many open requests it counts for its owner. asks_usage: the client wants its stream's usage
    as an event. rewritten: the body as an engine reads it, if that is another one; ignored: headers that name what is
    left out of it. body_bytes, media_chars: of the body as sent, and of media in its prompt. cut: an engine shortens a
    prompt that is too long. named: what the client calls the person or conversation that it serves.
    """

    model: str
    stream: bool
    prompt: Any
    prompt_tokens: int
    tokens: int
    asked: TokenRequest
    weight: int
    asks_usage: bool
    body_bytes: int
    media_chars: int
    cut: bool
    cache_salt: str
    named: str
    ignored: Pairs
    continuation: Continuation | None
    transcript: Transcript | None
    rewritten: bytes = b""

    def forget_prompt(self) -> None:
        """Drop the parsed prompt: it may be large, and the request may wait for long."""
        self.prompt = ""

    def prefix(self) -> bytes:
        """Equal for requests with the same beginning: system prompt and first question, whatever their JSON form."""
        texts = "\n".join(_text(message.get("content")) for message in self._opening())[:PREFIX_CHARS]
        return texts.encode("utf-8", "replace")

    def conversation(self) -> bytes:
        """Equal for all turns of a conversation, and for no two that differ in their first question."""
        return f"{self.named}\n{_text(self._opening()[-1].get('content'))}".encode("utf-8", "replace")

    def _opening(self) -> list[dict[str, Any]]:
        """The messages up to the first question, which is the last of them."""
        messages = self.prompt if isinstance(self.prompt, list) and self.prompt else [self.prompt]
        if not isinstance(messages[0], dict):
            return [{"content": self.prompt if isinstance(self.prompt, str) else self.prompt[:PREFIX_CHARS]}]
        first = next((place for place, message in enumerate(messages) if message.get("role") == "user"), 0)
        return list(messages[: first + 1])


def _text(content: Any) -> str:
    """All of a content, whether it is a text or parts, without the marks that clients move from turn to turn."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(t if isinstance(t, str) else orjson.dumps(p).decode() for t, p in zip(texts, parts, strict=True))


def check_body(route: Route, body: bytes, limits: Limits) -> Checked:
    """Check one inference request body (JSON text in bytes).

    Raises HttpError 400 naming the parameter, what was given and what is expected.
    """
    return check_object(route, parsed_body(body, limits), len(body), limits)


def parsed_body(body: bytes, limits: Limits) -> dict[str, Any]:
    """Parse a body that must be an object with a `model` name. Raises HttpError 400, and 404 for an invalid name."""
    if body.count(b"[") + body.count(b"{") > _BRACKETS:  # parsed, eight megabytes of them take a second
        raise errors.bad_request("The request body has too many arrays and objects.", code="too_many_values")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.bad_request(
            f"We could not parse the JSON body of your request: {error}", code="invalid_json"
        ) from None
    if not isinstance(data, dict):
        raise errors.bad_request("The request body is not a JSON object.", code="invalid_json")
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise errors.bad_request("You must provide a model parameter: a non-empty string.", param="model")
    if len(model) > MODEL_NAME_CHARS:
        raise errors.model_not_found(model)
    return data


def check_object(route: Route, data: dict[str, Any], body_bytes: int, limits: Limits) -> Checked:
    """Check a body of this many bytes, as returned by `parsed_body`. Raises HttpError 400 like `check_body`."""
    check_depth(data, limits.json_depth)
    given, reading = data, as_meant(route.name, data)
    data = reading.data
    check_fields(route.name, data)
    reading.keywords = check_structure(data, limits)
    prompts = [data.get(name) for name in ("messages", "input", "prompt")]
    check_media(prompts)
    prompt = next(filter(None, prompts), "")
    if route.name == CHAT:
        _check_contents(data.get("messages") or [])
    stream = data.get("stream") is True
    inputs = _inputs(route, data)
    choices = max(data.get("n") or 1, data.get("best_of") or 1)
    sequences = choices if route.task == "embed" else choices * inputs
    if sequences > limits.sequences:
        raise errors.bad_request(
            f"The request asks for {sequences} sequences (inputs × n), at most {limits.sequences} are allowed.",
            param="n",
            code="too_many_values",
        )
    limit = next((data[n] for n in ("max_completion_tokens", "max_tokens", "max_output_tokens") if data.get(n)), 0)
    transcript: Transcript | None = None
    if route.name in (RESPONSES, INPUT_TOKENS):
        # As the client sent it: that is what it lists, and what a later turn is read from.
        transcript = transcript_of(given, counts=route.name == INPUT_TOKENS)
    elif route.name == CHAT:
        transcript = kept_completion(given)
    media_chars, media_tokens = media_in(prompt)
    prompt_tokens = max(0, body_bytes - media_chars) // 4 + media_tokens
    at_once = not stream or route.name == RESPONSES  # a stream of which ends with all of them
    _check_logprobs(data, prompt_tokens, (limit or _OPEN_LENGTH) * sequences if at_once else 0, choices)
    completes = route.task != "embed" and route.name not in (INPUT_TOKENS, COUNT_TOKENS)
    return Checked(
        model=data["model"],
        stream=stream,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        tokens=prompt_tokens + min(limit or DEFAULT_COMPLETION_TOKENS, 4096) * sequences,
        asked=TokenRequest(prompt_tokens, (limit or _UNBOUNDED) * sequences if completes else 0, sequences),
        weight=max(1, -(-sequences // _SEQUENCES_OF_ONE), -(-inputs // _INPUTS_OF_ONE)),
        asks_usage=stream and (data.get("stream_options") or {}).get("include_usage") is True,
        body_bytes=body_bytes,
        media_chars=media_chars,
        cut=data.get("truncate_prompt_tokens") is not None or data.get("truncation") == "auto",
        cache_salt=data.get("cache_salt") or "",
        named="\n".join(str(data.get(name) or "") for name in ("prompt_cache_key", "user", "safety_identifier")),
        ignored=reading.headers,
        continuation=continuation_of(route.name, data) if stream else None,
        transcript=transcript,
        rewritten=b"" if data is given else orjson.dumps(data),
    )


def _check_contents(messages: list[dict[str, Any]]) -> None:
    """Raises HttpError 400 for a message that says nothing: only the assistant's calls may stand without a content."""
    for place, message in enumerate(messages):
        others = message.keys() - {"role", "content", "name"}
        if message.get("content") is None and not (
            message["role"] == "function"
            or (message["role"] == "assistant" and any(message[name] is not None for name in others))
        ):
            raise errors.bad_request(
                f"Invalid value for `messages[{place}].content`: expected a string or a list of parts, got null.",
                param=f"messages[{place}].content",
                code="invalid_type",
            )


def _inputs(route: Route, data: dict[str, Any]) -> int:
    """Number of separate inputs in the body. Raises HttpError 400 where there is none, or of another type."""
    name = "prompt" if route.name == "completions" else "input" if route.task == "embed" else ""
    if name and not (name == "input" and data.get("messages") is not None and data.get("input") is None):
        return prompts_in(name, data.get(name))
    name = "input" if route.name in (RESPONSES, INPUT_TOKENS) else "messages"
    if data.get(name) is None:
        raise errors.bad_request(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    return 1


def _text_bytes(prompt: Any, media_chars: int) -> int:
    """Bytes of the longest prompt's text; 0 for one of tokens."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return len(orjson.dumps(prompt)) - media_chars
    texts = [prompt] if isinstance(prompt, str) else prompt or ()
    return max((len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str)), default=0)


def _check_logprobs(data: dict[str, Any], prompt_tokens: int, answer_tokens: int, choices: int) -> None:
    """Bounds the log-probabilities of one answer. answer_tokens: of all that it has at once. Raises HttpError 400."""
    wanted, most = data.get("logprobs"), data.get("top_logprobs") or 0
    each = wanted + 1 if type(wanted) is int else most + 1 if wanted or most else 0
    of_prompts = 0 if data.get("prompt_logprobs") is None else data["prompt_logprobs"] + 1
    of_prompts += each if data.get("echo") else 0
    total = each * answer_tokens + of_prompts * prompt_tokens * choices
    if total > _LOGPROBS:
        raise errors.bad_request(
            f"The request asks for {total} log-probabilities (tokens × alternatives × answers), expected at most "
            f"{_LOGPROBS}.",
            param="prompt_logprobs" if data.get("prompt_logprobs") is not None else "logprobs",
            code="too_many_values",
        )


def check_length(checked: Checked, context: int) -> None:
    """Raises HttpError 400 for a prompt that cannot fit into so many tokens, or is far too long to be cut to them."""
    most = context * (_BYTES_OF_A_KEPT_TOKEN if checked.cut else _BYTES_OF_A_TOKEN)
    given = _text_bytes(checked.prompt, checked.media_chars) if checked.body_bytes > most else 0
    if given > most:
        raise errors.bad_request(
            f"This model's maximum context length is {context} tokens, but the prompt has {given} bytes, which are "
            "more tokens than that. Shorten it.",
            code="context_length_exceeded",
        )


def with_model(body: bytes, model: str) -> bytes:
    """A checked body with `model` as its model. It appends a second key: both parsers take the last, and the client's
    other bytes stay unchanged."""
    return b'%b,"model":%b}' % (body.rstrip()[:-1], orjson.dumps(model))


def with_fields(body: bytes, fields: bytes) -> bytes:
    """A checked body with more fields, each as `,"name":value`; of equal names the engine takes the last."""
    return b"%b%b}" % (body[: body.rindex(b"}")], fields)
