"""Checks an inference body. Pure: takes bytes, returns the few facts the gateway needs or raises HttpError.

body_weight.py counts its values before parsing. orjson parses it once and refuses NaN, infinities, lone surrogates,
invalid UTF-8 and nesting past 1024 levels. readings/ makes of it what the client means; where that is another body, the
engine gets that one, and else the raw bytes, which it parses with the same last-key-wins rule.
"""

from __future__ import annotations

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
from appliance.gateway.payload.body_weight import check_weight
from appliance.gateway.payload.fields import check_fields
from appliance.gateway.payload.followed import with_followed_schemas
from appliance.gateway.payload.item_shapes import check_items
from appliance.gateway.payload.message_shapes import ANTHROPIC_ROLES, MESSAGE_ROLES, check_messages
from appliance.gateway.payload.nesting import check_depth, check_media
from appliance.gateway.payload.shapes import check_others, check_system, check_tools, same_kind
from appliance.gateway.payload.structure import check_structure
from appliance.gateway.readings.media_tokens import media_in
from appliance.gateway.readings.request import as_meant
from weights.format.legacy_functions import LegacyRefused, as_tools, is_legacy

Pairs = Sequence[tuple[bytes, bytes]]

MODEL_NAME_CHARS: Final = 512
DEFAULT_COMPLETION_TOKENS: Final = 256
_UNBOUNDED: Final = 1 << 20
_BRACE: Final = 0x7D
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

    # To be added to the body: an answer with log-probabilities of its tokens ends where they are too many.
    ending: bytes = b""

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
    check_weight(body, limits.json_weight)
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

    number_rules = _rules(limits)
    if not stream and route.name == CHAT:
        completion = _plain_completion(data, number_rules, limits)
        if completion >= 0:
            plain = Checked(model, False, completion, 1, body_bytes // 4, data["messages"])
            plain.named = data.get("user") or ""
            return plain
    if not _is_plain(data):
        check_depth(data, limits.json_depth)
    given, reading = data, as_meant(route.name, data)
    meant = data = reading.data
    check_fields(route.name, data)
    if route.name == CHAT and is_legacy(data):
        data = data | _as_tools(data)
    check_others(data)
    if isinstance(data.get("tools"), list):
        check_tools(data["tools"])
    if "system" in data:
        check_system(data["system"])
    fields = data.keys()
    for key in fields & number_rules.keys():
        if data[key] is not None and not (key == "max_tokens" and _only_echo(route, data)):
            _number(key, data[key], *number_rules[key])
    if "chat_template_kwargs" in data:
        _template_kwargs(data["chat_template_kwargs"])
    if not _is_plain(data) or "structured_outputs" in data:
        check_media(data)
        check_structure(data, limits)
        followed = with_followed_schemas(data)
        if followed is not data:
            meant = {**meant, **{name: value for name, value in followed.items() if name in meant}}
    sequences = _inputs(route, data, limits)
    completion = _completion_tokens(data)
    if "n" in data or "best_of" in data:
        sequences *= max(data.get("n") or 1, data.get("best_of") or 1)
    if sequences > limits.sequences:
        raise errors.bad_request(
            f"The request asks for {sequences} sequences (inputs × n), at most {limits.sequences} are allowed.",
            param="n",
        )
    _repeated_prompts(route, data, body_bytes)
    ending, written = b"", 1 if not stream else _WRITTEN_AGAIN if route.name == RESPONSES else 0
    if written and ("logprobs" in data or "top_logprobs" in data or "include" in data):
        ending = _answer_logprobs(route, data, completion, sequences, written)
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
    checked.asks_usage, checked.continuation, checked.ending = asks_usage, continuation, ending
    checked.cache_salt = _cache_salt(data.get("cache_salt"))
    if data.get("include_reasoning") is False or data.get("tools"):
        checked.asked.unseen = True
    elif stream and route.name != "completions" and any(data.get(name) for name in _STEERING):
        checked.asked.unseen = True
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


# With these fields a model may write any number of tokens without text: special ones, which are not shown, and tokens
# that are held back because a stop text may begin with them. An engine sends no event for them in conversations, and an
# empty one in completions.
_STEERING: Final = ("logit_bias", "allowed_token_ids", "ignore_eos", "min_tokens", "stop", "stop_sequences")

# Inputs of embeddings that count as one request: 2,048 with 4,096 numbers each are an answer of 170 MB.
_INPUTS_OF_ONE: Final = 64
# Answers that count as one request: an engine has something of each, however many wait.
_SEQUENCES_OF_ONE: Final = 16


def _weight(route: Route, inputs: Any, sequences: int) -> int:
    if route.task != "embed":
        return -(-sequences // _SEQUENCES_OF_ONE) if sequences > _SEQUENCES_OF_ONE else 1
    several = isinstance(inputs, list) and not isinstance(inputs[0], int)
    return -(-len(inputs) // _INPUTS_OF_ONE) if several else 1


# A chat request with only numbers, these fields and messages needs no further checks.
_PLAIN_TEXT: Final = frozenset({"model", "stream", "user"})
_PLAIN_FIELDS: Final = frozenset({"role", "content", "name"})
_PLAIN_ROLES: Final = frozenset({"system", "developer", "user", "assistant"})
_PLAIN_NUMBERS: Final = frozenset(
    {"max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"}
)


def _plain_completion(data: dict[str, Any], number_rules: Rules, limits: Limits) -> int:
    """The completion's tokens of a plain chat request, -1 for one that needs the full check.

    Raises HttpError 400 for a number of the wrong type or out of bounds."""
    plain = False
    for key, value in data.items():
        if key == "messages":
            if not _plain_messages(value) or len(value) > limits.messages:
                return -1
            plain = True
        elif key in _PLAIN_TEXT:
            if key == "user" and type(value) is not str:
                return -1
        elif key not in _PLAIN_NUMBERS:
            return -1
        elif value is not None:
            kind, low, high = number_rules[key]
            _number(key, value, kind, low, high)
    return _completion_tokens(data) if plain else -1


def _plain_messages(messages: Any) -> bool:
    """Whether these messages contain only text, so that nothing can name media or be nested deeply."""
    if type(messages) is not list or not messages:
        return False
    for message in messages:
        if type(message) is not dict or "role" not in message:
            return False
        role = message["role"]
        if type(role) is not str or role not in _PLAIN_ROLES:
            return False  # only a string can be looked up in a set: a list as role was a TypeError
        if len(message) == 2 and type(message.get("content")) is str:
            continue  # as most are: the loop costs 1 % of a plain request
        for name, part in message.items():
            if type(part) is not str or name not in _PLAIN_FIELDS:
                return False
    return True


def with_model(body: bytes, model: str) -> bytes:
    """A checked body with `model` as its model. It appends a second key: both parsers take the last, and the client's
    other bytes stay unchanged."""
    return b'%b,"model":%b}' % (body.rstrip()[:-1], orjson.dumps(model))


def with_fields(body: bytes, fields: bytes) -> bytes:
    """A checked body with more fields, each as `,"name":value`; of equal names the engine takes the last."""
    end = -1 if body[-1] == _BRACE else body.rindex(b"}")  # a search costs 1 % of a plain request
    return b"%b%b}" % (body[:end], fields)


# The bounds are not annotated `float`: compiled code would convert them, and then 2^63 is not above 2^63 - 1.
Rules = dict[str, tuple[type, Any, Any]]
_RULES_OF: Final[list[tuple[Limits, Rules]]] = []


def _rules(limits: Limits) -> Rules:
    """(type, lowest, highest) by field; built once per Limits object."""
    if _RULES_OF:
        of, known = _RULES_OF[0]
        if of is limits:
            return known
    rules: Rules = {
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
    _RULES_OF[:] = [(limits, rules)]
    return rules


def _number(name: str, value: Any, kind: type, low: Any, high: Any) -> None:
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
        if not all(isinstance(message, dict) for message in messages):
            raise _bad("messages", messages, "an array of objects")
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
        if not isinstance(data["messages"], list) or not all(isinstance(message, dict) for message in data["messages"]):
            raise _bad("messages", data["messages"], "an array of objects")
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


# An engine makes an object for each, with its text, in one go on its event loop, and writes the objects of all prompts
# into one answer: 5 µs each, twice.
_PROMPT_LOGPROBS: Final = 1 << 16
_BYTES_PER_TOKEN: Final = 2
# 0.1 µs each; and 2 ns.
_PROMPT_IDS: Final = 1 << 19
_ECHOED_BYTES: Final = 8 << 20


def _repeated_prompts(route: Route, data: dict[str, Any], body_bytes: int) -> None:
    """Checks how much of its prompts an answer repeats; an engine writes it once for each choice: with `n` 64,
    log-probabilities of 65,536 tokens held its event loop for twenty seconds, and 8 MiB of text (of which it computed
    one token, because of `truncate_prompt_tokens`) became an answer of 512 MiB. Raises HttpError 400."""
    choices = max(data.get("n") or 1, data.get("best_of") or 1)
    _prompt_logprobs(data, body_bytes, choices)
    echoed = body_bytes * choices if data.get("echo") else 0
    ids = 0
    if data.get("return_token_ids") and route.name == "completions":  # a chat has them once
        ids = _prompt_tokens(data.get("prompt"), body_bytes) * choices
    for name, what, count, most in (
        ("echo", "bytes of its prompts again", echoed, _ECHOED_BYTES),
        ("return_token_ids", f"tokens of its prompts (of texts, one for {_BYTES_PER_TOKEN} bytes)", ids, _PROMPT_IDS),
    ):
        if count > most:
            raise errors.bad_request(
                f"The request asks for {count} {what}, in {choices} choices of each together; at most {most} are "
                "allowed. Send fewer prompts in one request, or ask for fewer choices.",
                param=name,
                code="too_many_values",
            )


def _prompt_tokens(prompt: Any, body_bytes: int) -> int:
    """As many as it may have at most, nearly."""
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        return len(prompt) if isinstance(prompt[0], int) else sum(map(len, prompt))
    return body_bytes // _BYTES_PER_TOKEN


def _prompt_logprobs(data: dict[str, Any], body_bytes: int, choices: int) -> None:
    wanted = data.get("prompt_logprobs")
    if wanted is None and data.get("echo"):
        wanted = data.get("top_logprobs") if "messages" in data else data.get("logprobs")
    if wanted is None or isinstance(wanted, bool):
        return
    tokens = _prompt_tokens(data.get("prompt"), body_bytes)
    if tokens * (wanted + 1) * choices > _PROMPT_LOGPROBS:
        raise errors.bad_request(
            f"The request asks for {wanted + 1} log-probabilities of each of {tokens} tokens of its prompts (of texts, "
            f"one for {_BYTES_PER_TOKEN} bytes), in {choices} choices of each, at most {_PROMPT_LOGPROBS} altogether "
            "are allowed. Send fewer prompts in one request, or ask for fewer of each token or fewer choices.",
            param="prompt_logprobs" if data.get("prompt_logprobs") is not None else "logprobs",
            code="too_many_values",
        )


# The same for answers. A stream has log-probabilities in each event, and a stream of /v1/responses has all of them
# again in each of its last three events, for which an engine keeps an object for each: 64 streams of 8,192 tokens with
# 20 each took 8 GB.
_ANSWER_LOGPROBS: Final = 1 << 16
_WRITTEN_AGAIN: Final = 3
# An answer whose request does not say how long it may be gets room for at least this many tokens.
_LEAST_TOKENS: Final = 1024
_LENGTH_OF: Final = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}


def _answer_logprobs(route: Route, data: dict[str, Any], completion: int, sequences: int, written: int) -> bytes:
    """The field that ends an answer before its log-probabilities are too many to be made and written in one go, so many
    times; empty if the request itself limits its answer, or wants none. Raises HttpError 400."""
    each = 0
    if route.name == "completions":
        each = data["logprobs"] + 1 if data.get("logprobs") is not None else 0
    elif route.name == CHAT and data.get("logprobs") or route.name == RESPONSES and _includes_logprobs(data):
        each = (data.get("top_logprobs") or 0) + 1
    if not each:
        return b""
    named = data.get("logprob_token_ids")
    each = max(each, len(named) if isinstance(named, list) else 0)
    most = _ANSWER_LOGPROBS // (each * sequences * written)
    name = _LENGTH_OF.get(route.name, "max_tokens")
    if completion > most or (not completion and most < _LEAST_TOKENS and route.name != "completions"):
        long = f"of up to {completion} tokens" if completion else "of any length"
        or_ = "" if route.name == RESPONSES else " or for fewer answers, or stream"
        raise errors.bad_request(
            f"The request asks for {each} log-probabilities of each token of {sequences} answers {long}; at most "
            f"{_ANSWER_LOGPROBS // written} altogether are written at once, so {most} tokens each. Set `{name}`, or "
            f"ask for fewer of each token{or_}.",
            param=name,
            code="too_many_values",
        )
    # An engine writes 16 tokens of a completion unless it is told otherwise.
    return b"" if completion or route.name == "completions" else b',"%b":%d' % (name.encode(), most)


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


def _is_plain(data: dict[str, Any]) -> bool:
    """Whether the only compound value in the body is a list of plain-text messages, so that nothing can name media or
    be nested deeply.

    It checks the parsed body, because searching its bytes for keys and brackets cost 5 µs per KB of text.
    """
    for key, value in data.items():
        if type(value) is list:
            if key != "messages" or not (_plain_messages(value) or not value):
                return False
        elif type(value) is dict:
            return False
    return True


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
