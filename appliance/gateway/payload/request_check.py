"""Checks an inference body. Pure: takes bytes, returns the few facts the gateway needs or raises HttpError.

A body's size bounds what parsing costs: orjson reads it once and refuses NaN, infinities, lone surrogates, invalid
UTF-8 and nesting past 1024 levels. readings/ makes of it what the client means; where that is another body, the
engine gets that one, and else the raw bytes, which it parses with the same last-key-wins rule.
"""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import orjson

from appliance.gateway.answers.continuation import CHAT, Continuation, continuation_of
from appliance.gateway.answers.kept_completion import check_metadata, kept_completion
from appliance.gateway.answers.transcript import Transcript, transcript_of
from appliance.gateway.answers.usage import TokenRequest
from appliance.gateway.core import errors
from appliance.gateway.core.config import Limits
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import COUNT_TOKENS, INPUT_TOKENS, MESSAGES, RESPONSES, Route
from appliance.gateway.payload.fields import check_fields
from appliance.gateway.payload.nesting import check_depth, check_media
from appliance.gateway.payload.shapes import (
    ANTHROPIC_ROLES,
    MESSAGE_ROLES,
    check_items,
    check_messages,
    check_tools,
    same_kind,
    too_many,
)
from appliance.gateway.payload.structure import check_structure
from appliance.gateway.readings.media_tokens import media_in
from appliance.gateway.readings.request import as_meant
from weights.format.legacy_functions import LegacyRefused, as_tools, is_legacy

Pairs = Sequence[tuple[bytes, bytes]]

MODEL_NAME_CHARS: Final = 512
_BRACKETS: Final = 1 << 20
DEFAULT_COMPLETION_TOKENS: Final = 256
_UNBOUNDED: Final = 1 << 20
PREFIX_CHARS: Final = 512
CACHE_SALT_CHARS: Final = 256

_INT64: Final = (1 << 63) - 1


class Checked:
    """tokens: estimate of prompt plus completion; prompt_tokens: of the prompt alone. asks_usage: the client wants its
    stream's usage as an event. continuation: of a stream that can go on after its engine's death. transcript: of a
    request of /v1/responses, and of a chat completion that is to be kept."""

    asks_usage: bool = False
    transcript: Transcript | None = None

    # How many open requests it counts as for its owner: an engine holds all vectors of an answer until they are read.
    weight: int = 1

    # The body as an engine reads it, if that is another one than the client's; and headers that name what is left out.
    rewritten: bytes = b""
    ignored: Pairs = ()

    # Of the body as sent; characters of media in the prompt. cut: an engine shortens a prompt that is too long.
    body_bytes: int = 0
    media_chars: int = 0
    cut: bool = False

    # Owner of the prefix cache entries it uses: equal prompts of different owners do not share a prefix.
    owner: bytes = b""

    # What the client calls the person or the conversation that it serves.
    named: str = ""

    def __init__(self, model: str, stream: bool, completion: int, sequences: int, prompt: int, beginning: Any) -> None:
        """completion: maximum tokens of each sequence, 0: not given; prompt: the prompt's tokens; beginning: messages,
        items or prompt."""
        self.model = model
        self.stream = stream
        self.tokens = prompt + min(completion or DEFAULT_COMPLETION_TOKENS, 4096) * sequences
        self.prompt_tokens = prompt
        self.asked = TokenRequest(prompt, (completion or _UNBOUNDED) * sequences, sequences)
        self.cache_salt = ""
        self._beginning = beginning
        self.continuation: Continuation | None = None

    def prompt_bytes(self) -> int:
        """Of the longest prompt's text; 0 for one of tokens, and for one that an engine may shorten."""
        prompt = self._beginning
        if self.cut:
            return 0
        if isinstance(prompt, str):
            return len(prompt.encode("utf-8", "replace"))
        if prompt and isinstance(prompt[0], dict):
            return len(orjson.dumps(prompt)) - self.media_chars
        return max((len(text.encode("utf-8", "replace")) for text in prompt if isinstance(text, str)), default=0)

    def prefix(self) -> bytes:
        """Equal for requests with the same beginning: system prompt and first question, whatever their JSON form."""
        return b"%b%b" % (self.owner, self._opening()[:PREFIX_CHARS].encode("utf-8", "replace"))

    def conversation(self) -> bytes:
        """Equal for all turns of a conversation, and for no two that differ in their first question."""
        first = self._beginning
        if isinstance(first, list) and first and isinstance(first[0], dict):
            asked = (item for item in first if isinstance(item, dict) and item.get("role") == "user")
            first = next(asked, first[0]).get("content")
        return f"{self.named}\n{_texts_of(first)}".encode("utf-8", "replace")

    def _opening(self) -> str:
        source = self._beginning
        if not isinstance(source, list):
            return _start_of(source)
        parts = []
        for item in source[:2]:
            parts.append(_start_of(item.get("content") if isinstance(item, dict) else item))
            if isinstance(item, dict) and item.get("role") == "user":
                break  # the answer follows, which the first turn does not have
        return "\n".join(parts)


def _start_of(value: Any) -> str:
    """The first PREFIX_CHARS of the texts in a value; it reads no more than needed, because the value may be large."""
    if isinstance(value, str):
        return value[:PREFIX_CHARS]
    found: list[str] = []
    left = PREFIX_CHARS
    stack = [value]
    while stack and left > 0:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(reversed(node[:16]))
        elif isinstance(node, dict):
            stack.extend(reversed(list(islice(node.values(), 16))))
        else:
            piece = node[:left] if isinstance(node, str) else repr(node)
            found.append(piece)
            left -= len(piece) + 1
    return "\n".join(found)


def _texts_of(content: Any) -> str:
    """All of a content, whether it is a text or parts, without the marks that clients move from turn to turn."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return orjson.dumps(content).decode()
    parts = []
    for part in content:
        if isinstance(part, dict):
            text = part.get("text")
            part = text if isinstance(text, str) else {k: v for k, v in part.items() if k not in _MOVED}
        parts.append(part if isinstance(part, str) else orjson.dumps(part).decode())
    return "\n".join(parts)


_MOVED: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})
_NAMES: Final = ("prompt_cache_key", "user", "safety_identifier")


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
        raise errors.bad_request(f"The request body is a JSON {_kind(data)}, expected an object.", code="invalid_json")
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise errors.bad_request("You must provide a model parameter: a non-empty string.", param="model")
    if len(model) > MODEL_NAME_CHARS:
        raise errors.model_not_found(model)
    return data


def check_object(route: Route, data: dict[str, Any], body_bytes: int, limits: Limits) -> Checked:
    """Check a body of this many bytes, as returned by `parsed_body`. Raises HttpError 400 like `check_body`."""
    model: str = data["model"]
    stream = data.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _bad("stream", stream, "true or false")

    check_depth(data, limits.json_depth)
    given, reading = data, as_meant(route.name, data)
    meant = data = reading.data
    check_fields(route.name, data)
    if route.name == CHAT and is_legacy(data):
        data = data | _as_tools(data)
    if isinstance(data.get("tools"), list):
        check_tools(data["tools"])
    for key, rule in _rules(limits).items():
        if data.get(key) is not None and not (key == "max_tokens" and _only_echo(route, data)):
            _number(key, data[key], *rule)
    if "chat_template_kwargs" in data:
        _template_kwargs(data["chat_template_kwargs"])
    check_media(data)
    check_structure(data, limits)
    sequences = _inputs(route, data, limits)
    completion = _completion_tokens(data)
    choices = max(data.get("n") or 1, data.get("best_of") or 1)
    sequences *= choices
    if sequences > limits.sequences:
        raise errors.bad_request(
            f"The request asks for {sequences} sequences (inputs × n), at most {limits.sequences} are allowed.",
            param="n",
        )
    _check_repeated(data, body_bytes, choices)
    if not stream or route.name == RESPONSES:  # whose stream ends with all of them
        _check_answer_logprobs(route, data, completion, sequences)
    continuation = continuation_of(route.name, data) if stream else None
    beginning = data.get("messages") or data.get("prompt") or data.get("input") or ""
    asks_usage = stream is True and _asks_usage(data)
    media_chars, media_tokens = media_in(beginning) if isinstance(beginning, list) else (0, 0)
    prompt = max(0, body_bytes - media_chars) // 4 + media_tokens
    checked = Checked(model, bool(stream), completion, sequences, prompt, beginning)
    checked.ignored = reading.headers
    if meant is not given:
        checked.rewritten = orjson.dumps(meant)
    checked.named = "\n".join(str(data[name]) for name in _NAMES if isinstance(data.get(name), str))
    checked.asks_usage, checked.continuation, checked.media_chars = asks_usage, continuation, media_chars
    checked.body_bytes = body_bytes
    checked.cut = data.get("truncate_prompt_tokens") is not None or data.get("truncation") == "auto"
    checked.cache_salt = _cache_salt(data.get("cache_salt"))
    if route.task == "embed" or route.name in (INPUT_TOKENS, COUNT_TOKENS):
        checked.asked.completion_tokens = 0
    checked.weight = _weight(route, data.get("input"), sequences)
    if route.name == RESPONSES or route.name == INPUT_TOKENS:
        # As the client sent it: that is what it lists, and what a later turn is read from.
        checked.transcript = transcript_of(given, counts=route.name == INPUT_TOKENS)
        if data.get("metadata") is not None:
            check_metadata(data["metadata"])
    elif route.name == CHAT and ("store" in data or "metadata" in data):
        checked.transcript = kept_completion(given)
    return checked


# No tokenizer makes fewer tokens of a prompt worth reading; an engine would read all of it to say that it is too long.
_BYTES_OF_A_TOKEN: Final = 16


def check_length(checked: Checked, context: int) -> None:
    """Raises HttpError 400 for a prompt that cannot fit into so many tokens."""
    if checked.body_bytes <= context * _BYTES_OF_A_TOKEN:
        return
    given = checked.prompt_bytes()
    if given > context * _BYTES_OF_A_TOKEN:
        raise errors.bad_request(
            f"This model's maximum context length is {context} tokens, but the prompt has {given} bytes, which are "
            "more tokens than that. Shorten it.",
            code="context_length_exceeded",
        )


# Inputs of embeddings that count as one request: 2,048 with 4,096 numbers each are an answer of 170 MB.
_INPUTS_OF_ONE: Final = 64
# Answers that count as one request: an engine has something of each, however many wait.
_SEQUENCES_OF_ONE: Final = 16


def _weight(route: Route, inputs: Any, sequences: int) -> int:
    if route.task != "embed":
        return -(-sequences // _SEQUENCES_OF_ONE) if sequences > _SEQUENCES_OF_ONE else 1
    several = isinstance(inputs, list) and not isinstance(inputs[0], int)
    return -(-len(inputs) // _INPUTS_OF_ONE) if several else 1


def with_model(body: bytes, model: str) -> bytes:
    """A checked body with `model` as its model. It appends a second key: both parsers take the last, and the client's
    other bytes stay unchanged."""
    return b'%b,"model":%b}' % (body.rstrip()[:-1], orjson.dumps(model))


def with_fields(body: bytes, fields: bytes) -> bytes:
    """A checked body with more fields, each as `,"name":value`; of equal names the engine takes the last."""
    return b"%b%b}" % (body[: body.rindex(b"}")], fields)


@functools.lru_cache(maxsize=2)
def _rules(limits: Limits) -> dict[str, tuple[type, float, float]]:
    """(type, lowest, highest) by field."""
    return {
        "n": (int, 1, limits.n),
        "best_of": (int, 1, limits.n),
        "max_tokens": (int, 1, limits.max_tokens),
        "max_completion_tokens": (int, 1, limits.max_tokens),
        "max_output_tokens": (int, 1, limits.max_tokens),
        "min_tokens": (int, 0, limits.max_tokens),
        "top_logprobs": (int, 0, limits.top_logprobs),
        "prompt_logprobs": (int, 0, limits.top_logprobs),
        "temperature": (float, 0, 2),
        "top_p": (float, 0, 1),
        "min_p": (float, 0, 1),
        "top_k": (int, -1, 1 << 31),
        "frequency_penalty": (float, -2, 2),
        "presence_penalty": (float, -2, 2),
        "repetition_penalty": (float, 0, 10),
        "length_penalty": (float, -10, 10),
        "seed": (int, -_INT64 - 1, _INT64),
        "dimensions": (int, 1, 1 << 20),
        "truncate_prompt_tokens": (int, -1, 1 << 31),
        "priority": (int, 0, 0),
    }


def _number(name: str, value: Any, kind: type, low: float, high: float) -> None:
    right_type = isinstance(value, int) or (kind is float and isinstance(value, float))
    if not right_type or isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise _bad(name, value, f"{what} from {low} to {high}")


def _only_echo(route: Route, data: dict[str, Any]) -> bool:
    """Whether a completion asks for its prompt alone, and the probabilities of its tokens."""
    most = data["max_tokens"]
    return route.name == "completions" and data.get("echo") is True and type(most) is int and most == 0


def _as_tools(data: dict[str, Any]) -> dict[str, Any]:
    """What an engine turns `functions` and `function_call` into: that is what costs."""
    try:
        return as_tools(data)
    except LegacyRefused as error:
        raise errors.bad_request(str(error), param=error.param, code="invalid_value") from None


def _template_kwargs(kwargs: Any) -> None:
    if kwargs is None:
        return
    if not isinstance(kwargs, dict):
        raise _bad("chat_template_kwargs", kwargs, "an object")
    for name, value in kwargs.items():
        if name in NOT_FOR_TEMPLATES:
            raise errors.bad_request(
                f"The parameter `chat_template_kwargs.{name}` is not accepted by this server: only variables of the "
                "model's own template can be given.",
                param=f"chat_template_kwargs.{name}",
                code="unsupported_parameter",
            )
        if not (value is None or isinstance(value, str | bool | float) or _small(value)):
            raise _bad(
                f"chat_template_kwargs.{name}",
                value,
                f"true, false, null, a text or a number up to {_LARGEST_TEMPLATE_NUMBER}",
            )


def _small(value: Any) -> bool:
    return isinstance(value, int) and -_LARGEST_TEMPLATE_NUMBER <= value <= _LARGEST_TEMPLATE_NUMBER


# An engine passes the contents on to the function that renders and tokenizes, and these names are its own arguments:
# 200 bytes with `padding` and `max_length` made it pad a prompt to 10 million tokens, or end.
NOT_FOR_TEMPLATES: Final = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "messages", "model_config", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "self", "tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation"),
    }
)
_LARGEST_TEMPLATE_NUMBER: Final = 131_072


def _inputs(route: Route, data: dict[str, Any], limits: Limits) -> int:
    """Number of separate inputs in the body."""
    logprobs = data.get("logprobs")
    if route.name == "completions":
        if logprobs is not None:
            _number("logprobs", logprobs, int, 0, limits.top_logprobs)
    elif logprobs is not None and not isinstance(logprobs, bool):
        raise _bad("logprobs", logprobs, "true or false")
    if route.name in (CHAT, MESSAGES, COUNT_TOKENS):
        messages = data.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _bad("messages", messages, "a non-empty array of messages")
        check_messages(messages, limits, MESSAGE_ROLES if route.name == CHAT else ANTHROPIC_ROLES)
        return 1
    if route.name == RESPONSES or route.name == INPUT_TOKENS:
        items = data.get("input")
        if isinstance(items, list):
            check_items(items, limits)
        elif not isinstance(items, str):
            raise _bad("input", items, "a string or an array of items")
        return 1
    name = "input" if route.name == "embeddings" else "prompt"
    value = data.get(name)
    if name == "input" and data.get("messages") is not None:
        # Beside an input, too: the engine reads them in any case.
        check_messages(data["messages"], limits, MESSAGE_ROLES)
        if value is None:
            return 1
    if isinstance(value, str):
        return 1
    if not isinstance(value, list) or not value:
        raise _bad(name, value, "a string, or a non-empty array of strings, tokens or token arrays")
    if not same_kind(value):
        raise _bad(name, value, "a string, or an array of strings alone, tokens alone or token arrays alone")
    if isinstance(value[0], int):
        return 1
    if name == "input":
        if len(value) > limits.embedding_inputs:
            raise errors.bad_request(
                f"{len(value)} inputs given, at most {limits.embedding_inputs} are allowed.", param="input"
            )
        return 1
    return len(value)


# Log-probabilities, alternatives counted, that one answer holds at once: an engine makes an object for each, on the
# loop that sends all tokens, at some 10 µs.
_LOGPROBS: Final = 1 << 16
_BYTES_PER_TOKEN: Final = 2
# Of prompts that an answer repeats in each choice, as text or ids.
_REPEATED_BYTES: Final = 8 << 20
# Taken for the length of an answer that the request leaves open.
_OPEN_LENGTH: Final = 1024


def _check_repeated(data: dict[str, Any], body_bytes: int, choices: int) -> None:
    """Checks how much of its prompts an answer repeats, in each choice. Raises HttpError 400."""
    echo = data.get("echo")
    for name in ("echo", "return_token_ids"):
        if data.get(name) and body_bytes * choices > _REPEATED_BYTES:
            raise too_many(name, "bytes of prompts in all choices", body_bytes * choices, _REPEATED_BYTES)
    name = "prompt_logprobs" if data.get("prompt_logprobs") is not None else "logprobs"
    wanted = data.get("top_logprobs" if name == "logprobs" and "messages" in data else name)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not (echo or name == "prompt_logprobs"):
        return
    prompt = data.get("prompt")
    tokens = body_bytes // _BYTES_PER_TOKEN
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        tokens = len(prompt) if isinstance(prompt[0], int) else sum(map(len, prompt))
    if tokens * (wanted + 1) * choices > _LOGPROBS:
        raise too_many(name, "log-probabilities of prompts", tokens * (wanted + 1) * choices, _LOGPROBS)


def _check_answer_logprobs(route: Route, data: dict[str, Any], completion: int, sequences: int) -> None:
    """Checks how many log-probabilities an answer holds. Raises HttpError 400."""
    if route.name == "completions":
        each = data["logprobs"] + 1 if data.get("logprobs") is not None else 0
        name = "max_tokens"
    else:
        asked = _includes_logprobs(data) if route.name == RESPONSES else data.get("logprobs")
        each = (data.get("top_logprobs") or 0) + 1 if asked else 0
        name = "max_output_tokens" if route.name == RESPONSES else "max_completion_tokens"
    given = each * sequences * (completion or _OPEN_LENGTH)
    if given > _LOGPROBS and (completion or route.name != "completions"):  # which has 16 tokens unless told otherwise
        raise too_many(name, "log-probabilities of the answer (tokens × alternatives × answers)", given, _LOGPROBS)


def _includes_logprobs(data: dict[str, Any]) -> bool:
    """`include` asks for those of the answer's own tokens, without any `top_logprobs`."""
    include = data.get("include")
    return bool(data.get("top_logprobs")) or isinstance(include, list) and "message.output_text.logprobs" in include


def _cache_salt(salt: Any) -> str:
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 0 < len(salt) <= CACHE_SALT_CHARS:
        raise _bad("cache_salt", salt, f"a text of 1 to {CACHE_SALT_CHARS} characters")
    return salt


def _asks_usage(data: dict[str, Any]) -> bool:
    options = data.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _bad("stream_options", options, "an object")
    asks = options.get("include_usage")
    if asks is not None and not isinstance(asks, bool):
        # An engine reads "no" as false: its stream would then report no usage.
        raise _bad("stream_options.include_usage", asks, "true or false")
    return asks is True


def _completion_tokens(data: dict[str, Any]) -> int:
    """0: not said."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = data.get(name)
        if value is not None:
            return int(value)
    return 0


_SHOWN: Final = reprlib.Repr()
_SHOWN.maxstring = 80


def _bad(name: str, value: Any, expected: str) -> HttpError:
    # Not `repr`: for 8 MiB it takes longer than all other processing.
    shown = _SHOWN.repr(value)
    if len(shown) > 80:
        shown = shown[:80] + "…"
    return errors.bad_request(f"Invalid value for `{name}`: {shown} given, expected {expected}.", param=name)


def _kind(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
