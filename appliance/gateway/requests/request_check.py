"""Checks an inference body. Pure: takes bytes, returns the few facts the gateway needs or raises HttpError.

A body's size bounds what parsing costs: orjson reads it once and refuses NaN, infinities, lone surrogates and invalid
UTF-8. normalize.py makes of it what engines read.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.routes import INPUT_TOKENS, RESPONSES, Route
from appliance.gateway.requests.content import check_depth, check_structure, media_in
from appliance.gateway.requests.continuation import CHAT, Continuation, continuation_of
from appliance.gateway.requests.fields import check_fields, prompts_in
from appliance.gateway.requests.normalize import normalize
from appliance.gateway.requests.transcript import Transcript, of_completion, of_response

Pairs = Sequence[tuple[bytes, bytes]]

MODEL_NAME_CHARS: Final = 512
DEFAULT_COMPLETION_TOKENS: Final = 256
PREFIX_CHARS: Final = 512
_BRACKETS: Final = 1 << 20
# No tokenizer makes fewer tokens of a prompt worth reading; an engine would read all of it to say that it is too long.
# Of a prompt that it shortens it reads all too, at up to 460 bytes of memory for each character.
_BYTES_OF_A_TOKEN: Final = 16
_BYTES_OF_A_KEPT_TOKEN: Final = 256


@dataclass
class Checked:
    """What a checked request asks for.

    prefix: a hash that requests with the same beginning share: system prompt and first question, whatever their JSON
    form; conversation: one that all turns of a conversation share, and no two that differ in their first question.
    prompt_tokens: estimated; tokens: with the completion. sequences: an engine's slots that it takes. asks_usage: the
    client wants its stream's usage as an event. data: the body as an engine reads it; ignored: headers that name what
    is left out of it. text_length: of its longest prompt, in characters, bytes or tokens. cut: an engine shortens a
    prompt that is too long.
    """

    model: str
    data: dict[str, Any]
    stream: bool
    prefix: int
    conversation: int
    prompt_tokens: int
    tokens: int
    sequences: int
    asks_usage: bool
    text_length: int
    cut: bool
    ignored: Pairs
    continuation: Continuation | None
    transcript: Transcript | None


def _opening(prompt: Any) -> list[str]:
    """The texts of the messages up to the first question, which is the last of them."""
    messages = prompt if isinstance(prompt, list) and prompt else [prompt]
    if not isinstance(messages[0], dict):
        return [_text(prompt if isinstance(prompt, str) else prompt[:PREFIX_CHARS])]
    first = next((place for place, message in enumerate(messages) if message.get("role") == "user"), 0)
    return [_text(message.get("content")) for message in messages[: first + 1]]


def _hash(*texts: str) -> int:
    return zlib.crc32("\n".join(texts).encode("utf-8", "replace"))


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
    return check_object(route, parsed_body(body), len(body), limits)


def parsed_body(body: bytes) -> dict[str, Any]:
    """Parse a body that must be an object with a `model` name. Raises HttpError 400, and 404 for an invalid name."""
    if body.count(b"[") + body.count(b"{") > _BRACKETS:  # parsed, eight megabytes of them take a second and 200 MB
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


def check_object(route: Route, given: dict[str, Any], body_bytes: int, limits: Limits) -> Checked:
    """Check a body of this many bytes, as returned by `parsed_body`. Raises HttpError 400 like `check_body`."""
    check_depth(given, limits.json_depth)
    fields = {name: value for name, value in given.items() if value is not None}
    check_fields(route.name, fields)
    data, ignored = normalize(route.name, fields)
    check_structure(data, limits.json_depth)
    prompts = [data.get(name) for name in ("messages", "input", "prompt")]
    prompt = next(filter(None, prompts), "")
    media_chars, media_tokens = media_in(prompts)
    inputs = _inputs(route, data)
    choices = max(data.get("n", 1), data.get("best_of", 1))
    sequences = choices if route.task == "embed" else choices * inputs
    if sequences > limits.sequences:
        raise errors.bad_request(
            f"The request asks for {sequences} sequences (inputs × n), at most {limits.sequences} are allowed.",
            param="n",
            code="too_many_values",
        )
    transcript: Transcript | None = None
    if route.name in (RESPONSES, INPUT_TOKENS):
        # As the client sent it: that is what it lists, and what a later turn is read from.
        transcript = of_response(given, stores=route.name == RESPONSES)
    elif route.name == CHAT:
        transcript = of_completion(given)
    stream = data.get("stream", False)
    limit = next((data[n] for n in ("max_completion_tokens", "max_tokens", "max_output_tokens") if data.get(n)), 0)
    several = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
    text_length = max(map(len, prompt)) if several else body_bytes - media_chars
    prompt_tokens = max(0, body_bytes - media_chars) // 4 + media_tokens
    opening = _opening(prompt)
    # What the client calls the person or conversation that it serves.
    named = [str(data.get(name, "")) for name in ("prompt_cache_key", "user", "safety_identifier")]
    return Checked(
        model=data["model"],
        data=data,
        stream=stream,
        prefix=_hash("\n".join(opening)[:PREFIX_CHARS]),
        conversation=_hash(*named, opening[-1]),
        prompt_tokens=prompt_tokens,
        tokens=prompt_tokens + min(limit or DEFAULT_COMPLETION_TOKENS, 4096) * sequences,
        sequences=sequences,
        asks_usage=stream and data.get("stream_options", {}).get("include_usage") is True,
        text_length=text_length,
        cut="truncate_prompt_tokens" in data or data.get("truncation") == "auto",
        ignored=ignored,
        continuation=continuation_of(route.name, data) if stream else None,
        transcript=transcript,
    )


def _inputs(route: Route, data: dict[str, Any]) -> int:
    """Number of separate inputs in the body. Raises HttpError 400 where there is none, or of another type."""
    name = "prompt" if route.name == "completions" else "input" if route.task == "embed" else ""
    if name and not (name == "input" and "messages" in data and "input" not in data):
        return prompts_in(name, data.get(name))
    name = "input" if route.name in (RESPONSES, INPUT_TOKENS) else "messages"
    if name not in data:
        raise errors.bad_request(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    return 1


def check_length(checked: Checked, context: int) -> None:
    """Raises HttpError 400 for a prompt that cannot fit into so many tokens, or is far too long to be cut to them."""
    if checked.text_length > context * (_BYTES_OF_A_KEPT_TOKEN if checked.cut else _BYTES_OF_A_TOKEN):
        raise errors.bad_request(
            f"This model's maximum context length is {context} tokens, but the prompt has {checked.text_length} bytes, "
            "which are more tokens than that. Shorten it.",
            code="context_length_exceeded",
        )


def with_fields(body: bytes, **fields: Any) -> bytes:
    """A JSON object with more fields; of equal names engines take the last."""
    return b"%b,%b" % (body[:-1], orjson.dumps(fields)[1:]) if fields else body
