"""Checks the body of an inference request and returns the facts that the gateway needs, or raises HttpError. Pure.

orjson parses a body once and refuses NaN, infinities, lone surrogates and invalid UTF-8. fields.py checks the fields,
and normalize.py rewrites the body for engines. Engines limit the compilation of schemas (serve.vllm.grammars); here
schemas are limited in size, and keywords that no engine enforces are refused.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.router import Work
from appliance.gateway.core.routes import COUNT_TOKENS, INPUT_TOKENS, RESPONSES, Route
from appliance.gateway.requests.answers import CHAT, CompletionTranscript, Continuation, Transcript, continuation_of
from appliance.gateway.requests.fields import check_fields, prompts_in, refused
from appliance.gateway.requests.normalize import normalize
from serve.core.keywords import counted, defined, nodes, unenforced

_COMPLETION_TOKENS: Final = 256  # estimate for a request without a token limit
_PREFIX_CHARS: Final = 512
_MOST_NESTED: Final = 1 << 16  # limit of lists and objects in a body, enough for 1,024 tools with fifty properties each
# Limits on all schemas and grammars of a request together. llguidance takes 0.5 s to compile this many bytes.
_MOST: Final = (
    ("bytes of schemas, expressions and choices", lambda form: len(orjson.dumps(form)), 256 * 1024),
    ("items in all `minItems` and `maxItems`", counted, 10_000),
    ("definitions", defined, 256),
)
# Fields that contain schemas, regular expressions or choices.
_FORMS: Final = frozenset({"response_format", "text", "output_config", "structured_outputs", "tools"})
_OTHER_FORMS: Final = ("grammar", "structural_tag", "whitespace_pattern")  # refused: these expose engine internals
# Fields of a message with a URL (in OpenAI's form or vLLM's short form), or with media in place of a URL.
_URLS: Final = frozenset("image_url video_url audio_url file_url image_embeds audio_embeds image_pil".split())
_INLINE: Final = re.compile(r"data:(image|audio)/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)
_IMAGE_TOKENS: Final = 1_024
_SOUND_CHARS: Final = 1_700  # base64 characters of sound per token: a second of speech is 32,000 bytes and 25 tokens


@dataclass(kw_only=True)
class Checked(Work):
    """A checked request.

    data: the body for the engine. ignored: headers that name the omitted items. conversation: a hash of the first
    question and the client's ids, so that all turns of a conversation share it."""

    model: str
    data: dict[str, Any]
    stream: bool
    conversation: int
    ignored: Sequence[tuple[bytes, bytes]]
    continuation: Continuation | None
    transcript: Transcript | None


def check_body(route: Route, body: bytes, limits: Limits) -> Checked:
    """Check one inference request body (JSON text in bytes).

    Raises HttpError 400 with the parameter, the given value and the expected value.
    """
    return check_object(route, parsed_body(body, limits.json_depth), len(body), limits)


def parsed_body(body: bytes, json_depth: int) -> dict[str, Any]:
    """Parse a body that must be an object with a `model` name. Raises HttpError 400."""
    opened = body.count(b"[") + body.count(b"{")  # an upper bound: brackets inside texts count too
    if opened > 16 * _MOST_NESTED:  # parsing them would block the gateway for seconds
        raise errors.bad_request("The request body has too many lists and objects.", code="too_many_values")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        text = f"We could not parse the JSON body of your request: {error}"
        raise errors.bad_request(text, code="invalid_json") from None
    if not isinstance(data, dict):
        raise errors.bad_request("The request body is not a JSON object.", code="invalid_json")
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise errors.bad_request("You must provide a model parameter: a non-empty string.", param="model")
    if opened > json_depth:
        check_depth(data, json_depth)
    return data


def check_object(route: Route, body: dict[str, Any], body_bytes: int, limits: Limits) -> Checked:
    """Check a body of `body_bytes` that `parsed_body` returned. Raises HttpError 400 like `check_body`."""
    fields = {name: value for name, value in body.items() if value is not None}
    check_fields(route.name, fields)
    data, ignored = normalize(route.name, fields)
    if _FORMS & data.keys() or route.engine_path.startswith(b"/v1/messages"):  # Anthropic's messages may define tools
        check_structure(data, limits.json_depth)
    prompts = {name: data.get(name) for name in (route.prompt, "messages")}  # embeddings accept `messages` too
    prompt = next(filter(None, prompts.values()), "")
    media_chars, media_tokens = media_in(prompts)
    several = not route.converses and (route.prompt in data or "messages" not in data)
    inputs = prompts_in(route.prompt, data.get(route.prompt)) if several else 1
    choices = max(data.get("n", 1), data.get("best_of", 1))
    sequences = choices if route.task == "embed" else choices * inputs
    if sequences > limits.sequences:
        text = f"The request asks for {sequences} sequences (inputs × n), at most {limits.sequences} are allowed."
        raise errors.bad_request(text, param="n", code="too_many_values")
    transcript: Transcript | None = None
    if route.name in (RESPONSES, INPUT_TOKENS):
        stores, background = route.name == RESPONSES and data.get("store", True), data.get("background", False)
        if background and not stores:
            text = "`background` is true and `store` is false: a background response must be stored to be retrieved."
            raise errors.bad_request(text, param="background", code="invalid_value")
        # Stored as the client sent it, because clients list it and later turns continue from it.
        input_json, previous_id = orjson.dumps(body["input"]), data.get("previous_response_id", "")
        transcript = Transcript(input_json, previous_id, stores=stores, background=background)
    elif route.name == CHAT and data.get("store"):
        transcript = CompletionTranscript(body)
    stream = route.task != "embed" and data.get("stream", False)  # engines do not stream embeddings
    limit = next((data[n] for n in ("max_completion_tokens", "max_tokens", "max_output_tokens") if data.get(n)), 0)
    prompt_tokens = max(0, body_bytes - media_chars) // 4 + media_tokens
    opening = _opening(prompt)
    # The client's ids of its user or conversation.
    named = [str(data[name]) for name in ("prompt_cache_key", "user", "safety_identifier") if name in data]
    return Checked(
        model=data["model"],
        data=data,
        stream=stream,
        beginning=_hash("\n".join(opening)[:_PREFIX_CHARS]),
        conversation=_hash(*named, opening[-1]),
        prompt_tokens=prompt_tokens,
        tokens=prompt_tokens + min(limit or _COMPLETION_TOKENS, 4096) * sequences,
        sequences=0 if route.name in (INPUT_TOKENS, COUNT_TOKENS) else sequences,
        ignored=ignored,
        continuation=continuation_of(route.name, data) if stream else None,
        transcript=transcript,
    )


def _opening(prompt: Any) -> list[str]:
    """Return the texts of the messages up to and including the first user message."""
    messages = prompt if isinstance(prompt, list) and prompt else [prompt]
    if not isinstance(messages[0], dict):
        return [_text(prompt if isinstance(prompt, str) else prompt[:_PREFIX_CHARS])]
    first = next((place for place, message in enumerate(messages) if message.get("role") == "user"), 0)
    return [_text(message.get("content")) for message in messages[: first + 1]]


def _text(content: Any) -> str:
    """Return a content's text, without markers such as `cache_control` that clients move between turns."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(t if isinstance(t, str) else orjson.dumps(p).decode() for t, p in zip(texts, parts, strict=True))


def _hash(*texts: str) -> int:
    return zlib.crc32("\n".join(texts).encode("utf-8", "replace"))


def with_fields(body: bytes, **fields: Any) -> bytes:
    """Append fields to a JSON object; engines use the last field of duplicate names."""
    return b"%b,%b" % (body[:-1], orjson.dumps(fields)[1:]) if fields else body


# -- depth and structured output


def check_depth(root: Any, most: int, param: str | None = None) -> None:
    """Raise HttpError 400 for a body that is nested too deeply. Iterative, because clients choose the depth."""
    stack, containers = [(root, 1)], 0
    while stack:
        node, depth = stack.pop()
        containers += 1
        if depth > most:
            text = f"The request body is nested deeper than {most} levels."
            raise errors.bad_request(text, param=param, code="invalid_json")
        if containers > _MOST_NESTED:
            text = f"The request body holds more than {_MOST_NESTED} lists and objects. Send several smaller requests."
            raise errors.bad_request(text, param=param, code="too_many_values")
        values = node.values() if isinstance(node, dict) else node
        stack += [(value, depth + 1) for value in values if isinstance(value, (dict, list))]


def check_structure(data: dict[str, Any], json_depth: int) -> None:
    """Raise HttpError 400 for structured output that engines do not enforce, or that is too large."""
    forms = list(_answer_forms(data, json_depth))
    for place, form in forms:
        if path := next(unenforced(form), ""):
            text = f"`{place}.{path}`: this keyword is not enforced here. Remove it, and check answers yourself."
            raise errors.bad_request(text, param=f"{place}.{path}", code="unsupported_schema_keyword")
    # Strict tools, also in messages; normalize.py marks a tool strict if the request demands a call.
    tools = ((name, path, tool) for name in ("tools", "messages") for path, tool in nodes(data.get(name)))
    forms += [(f"{name}[{path.partition('.')[0]}]", tool) for name, path, tool in tools if tool.get("strict")]
    for unit, measure, most in _MOST:
        sizes = [measure(form) for _, form in forms]
        if sum(sizes) > most:
            text = f"Schemas of this request have {sum(sizes)} {unit}, at most {most} are allowed. Use simpler schemas."
            param = forms[sizes.index(max(sizes))][0].partition(".")[0]
            raise errors.bad_request(text, param=param, code="structure_too_complex")


def _answer_forms(data: dict[str, Any], json_depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas of answers with their paths in the request. Raises HttpError 400."""
    for place in ("response_format", "text.format", "output_config.format", "structured_outputs"):
        field, _, inner = place.partition(".")
        form = data.get(field, {}).get(inner) if inner else data.get(field)
        if not isinstance(form, dict):  # the engine will report the wrong type
            continue
        for other in _OTHER_FORMS:
            if form.get("type") == other or form.get(other) is not None:
                text = f"`{place}`: `{other}` is not accepted, expected a JSON schema, a regular expression or choices."
                raise errors.bad_request(text, param=place, code="unsupported_parameter")
        if isinstance(schema := form.get("json"), str):
            try:
                form = {**form, "json": orjson.loads(schema)}
            except orjson.JSONDecodeError as error:
                raise errors.bad_request(f"`{place}.json` is not JSON: {error}", param=f"{place}.json") from None
            check_depth([form["json"]], json_depth, f"{place}.json")
        yield place, form


def media_in(prompts: Any) -> tuple[int, int]:
    """Count base64 characters of media, and their estimated tokens. An image has a fixed estimate, because vision
    models resize large images. Raises HttpError 400 for media that are not inline, and for references to media that an
    engine cached."""
    chars, tokens = 0, 0
    stack = [prompts]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for kind, data in _media(node):
                chars += len(data)
                tokens += _IMAGE_TOKENS if kind == "image" else len(data) // _SOUND_CHARS
            if node.get("type") == "tool_use":  # arguments of a call may have any field names
                continue
        values = node.values() if isinstance(node, dict) else node
        stack += [value for value in values if isinstance(value, (dict, list))]
    return chars, tokens


def _media(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind ("image", "audio") and base64 of the media in a part. Raises HttpError 400."""
    for name in _URLS & part.keys():
        url = part[name].get("url") if isinstance(part[name], dict) else part[name]
        inline = _INLINE.match(url) if isinstance(url, str) else None
        if inline is not None and name.startswith(inline[1].lower()):
            yield inline[1].lower(), url[inline.end() :]
        elif url is not None:
            raise _remote(name)
    if part.get("type") == "url" and "url" in part:
        raise _remote("source.url")
    if "uuid" in part:
        # vLLM caches media under this id for all clients, so an id could read another client's media.
        raise refused("uuid", "send the image or sound itself")
    data, media_type = part.get("data"), part.get("media_type")
    if isinstance(data, str) and isinstance(media_type, str) and media_type[:6] in ("image/", "audio/"):
        yield media_type[:5], data  # `part` is a `source` of Anthropic's API
    elif isinstance(data, str) and isinstance(part.get("format"), str) and "type" not in part:
        yield "audio", data  # `part` is an `input_audio` of OpenAI's API


def _remote(param: str) -> HttpError:
    text = f"`{param}`: only inline images and audio (data:image/…, data:audio/…) are accepted, no URLs."
    return errors.bad_request(text, param=param, code="remote_media_refused")
