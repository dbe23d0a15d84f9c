"""The fields that inference requests may have, by route: type and bounds of each, declared once. Pure.

An allowlist: engines ignore unknown fields silently, OpenAI refuses them, and so does this gateway. A test compares the
tables with vLLM's request models and with OpenAI's SDK.
"""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, ValidationError, convert, defstruct

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

MAX_MESSAGES: Final = 2048
"""Of one conversation, and as many parts."""
MAX_ITEMS: Final = 1024
MAX_INPUTS: Final = 2048
_MAX_TOKENS: Final = 1 << 20
_INT64: Final = (1 << 63) - 1


def _int(low: int, high: int) -> Any:
    return Annotated[int, Meta(ge=low, le=high)]


def _float(low: float, high: float) -> Any:
    return Annotated[float, Meta(ge=low, le=high)]


def _text(most: int, least: int = 0) -> Any:
    return Annotated[str, Meta(min_length=least, max_length=most)]


def _one_of(*words: str) -> Any:
    return Annotated[str, Meta(pattern=f"^({'|'.join(words)})$")]


def _array(item: Any, most: int, least: int = 0) -> Any:
    return Annotated[list[item], Meta(min_length=least, max_length=most)]


def _object(value: Any, most: int, key: Any = str) -> Any:
    return Annotated[dict[key, value], Meta(max_length=most)]


class _Part(Struct):
    """Where an engine finds another value it compares it with each of its types, and lists all that do not fit."""

    type: str


_PARTS: Final = _array(_Part, MAX_MESSAGES)


class _Message(Struct):
    role: _one_of("system", "developer", "user", "assistant", "tool", "function")  # type: ignore[valid-type]
    content: str | _PARTS | None = None  # type: ignore[valid-type]
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None


class _AnthropicMessage(Struct):
    role: _one_of("system", "user", "assistant")  # type: ignore[valid-type]
    content: str | _PARTS  # type: ignore[valid-type]


class _Item(Struct):
    content: str | _PARTS | None = None  # type: ignore[valid-type]


class _StreamOptions(Struct):
    include_usage: bool | None = None


_TYPES: Final[dict[str, Any]] = {
    "model": str,
    "stream": bool,
    "stream_options": _StreamOptions,
    "store": bool,
    "background": bool,
    "n": _int(1, 64),
    "best_of": _int(1, 64),
    "max_tokens": _int(1, _MAX_TOKENS),
    "max_completion_tokens": _int(1, _MAX_TOKENS),
    "max_output_tokens": _int(1, _MAX_TOKENS),
    "min_tokens": _int(0, _MAX_TOKENS),
    "truncate_prompt_tokens": _int(-1, 1 << 31),
    "dimensions": _int(1, 1 << 20),
    "temperature": _float(0, 2),
    "top_p": _float(0, 1),
    "min_p": _float(0, 1),
    "top_k": _int(-1, 1 << 31),
    "frequency_penalty": _float(-2, 2),
    "presence_penalty": _float(-2, 2),
    "repetition_penalty": _float(0, 10),
    "length_penalty": _float(-10, 10),
    "seed": _int(-_INT64 - 1, _INT64 - 64),  # further answers have the seeds after it
    "priority": _int(0, 0),
    "logprobs": bool,
    "top_logprobs": _int(0, 20),
    "prompt_logprobs": _int(0, 20),
    "logprob_token_ids": _array(Any, 20),
    "logit_bias": _object(Any, 1024),
    "allowed_token_ids": _array(Any, 1024),
    "stop": _text(256) | _array(_text(256), 4),  # as many as OpenAI takes
    "stop_sequences": _array(_text(256), 4),
    "stop_token_ids": _array(Any, 64),
    "bad_words": _array(_text(256), 64),  # an engine searches every sequence for each at every step
    "suffix": _text(0),
    "messages": _array(_Message, MAX_MESSAGES, 1),
    "tools": _array(dict[str, Any], 128),
    "functions": _array(dict[str, Any], 128),
    "documents": _array(Any, 256),
    "include": _array(_text(128), 32),
    "metadata": _object(_text(512), 16, key=_text(64)),
    "previous_response_id": _text(256, 1),
    "cache_salt": _text(256, 1),
    "chat_template_kwargs": _object(bool | _int(-131_072, 131_072) | float | _text(4096) | None, 64),
    "encoding_format": _one_of("float", "base64"),
    "padding": _one_of("do_not_pad"),  # otherwise an input of one letter would become a whole context of work
}
"""Field -> type; each may be null too. Fields without a type are passed on as they are."""

_INNER: Final = "watermarking kv_transfer_params ec_transfer_params vllm_xargs mm_payload return_mm_kwargs "
_OPENAI: Final = (
    "safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention service_tier store metadata "
    "moderation user "
)
_SAMPLING: Final = _INNER + (
    "model stream stream_options temperature top_p top_k min_p seed frequency_penalty presence_penalty "
    "repetition_penalty ignore_eos skip_special_tokens include_stop_str_in_output priority structured_outputs "
    "cache_salt logit_bias stop stop_token_ids request_id session_id "
)
_TOKENWISE: Final = (
    _SAMPLING
    + _OPENAI
    + (
        "max_tokens n best_of logprobs length_penalty min_tokens spaces_between_special_tokens truncate_prompt_tokens "
        "truncation_side prompt_logprobs add_special_tokens echo response_format return_tokens_as_token_ids "
        "return_token_ids thinking_token_budget allowed_token_ids logprob_token_ids bad_words use_beam_search "
        "stream_interval return_token_offsets return_prompt_text routed_experts_prompt_start repetition_detection "
        "prompt_embeds "
    )
)
_RENDERING: Final = "chat_template_kwargs chat_template media_io_kwargs mm_processor_kwargs request_id "
_RESPONSES: Final = (
    _SAMPLING
    + _OPENAI
    + _RENDERING
    + (
        "input instructions background conversation prompt previous_response_id max_output_tokens max_tool_calls tools "
        "parallel_tool_calls reasoning include_reasoning text tool_choice top_logprobs truncation context_management "
        "access_programs personality image verbosity logprobs include enable_response_messages previous_input_messages"
    )
)
_COUNTED: Final = _INNER + (
    "model messages output_config thinking system temperature tools tool_choice top_k top_p cache_salt cache_control "
    "context_management inference_geo output_format service_tier speed betas user_profile_id metadata stop_sequences "
    "chat_template_kwargs chat_template container mcp_servers "
)


def _fields(names: str, **types: Any) -> dict[str, Any]:
    """Field -> type. types: those that are other ones on this route."""
    return {name: types.get(name, _TYPES.get(name, Any)) for name in names.split()}


_NULL: Final = type(None)
_INPUT: Final = str | _array(_Item, MAX_ITEMS)
_ANTHROPIC: Final = {
    "messages": _array(_AnthropicMessage, MAX_MESSAGES, 1),
    "metadata": _object(Any, 16),
    "system": str | _PARTS,
}
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "chat.completions": _fields(
        _TOKENWISE + _RENDERING + "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls "
        "functions function_call reasoning_effort include_reasoning add_generation_prompt continue_final_message "
        "documents audio modalities prediction verbosity web_search_options"
    ),
    # 0 tokens beside `echo`.
    "completions": _fields(_TOKENWISE + "prompt suffix", max_tokens=_int(0, _MAX_TOKENS), logprobs=_int(0, 20)),
    "responses": _fields(_RESPONSES, input=_INPUT, prompt=_NULL),
    "responses.input_tokens": _fields(_RESPONSES, input=_INPUT, prompt=_NULL, stream=_NULL, background=_NULL),
    "messages": _fields(_COUNTED + "max_tokens stream", **_ANTHROPIC),
    "messages.count_tokens": _fields(_COUNTED, **_ANTHROPIC),
    "embeddings": _fields(
        _RENDERING + "model input messages user dimensions embed_dtype endianness use_activation add_special_tokens "
        "add_generation_prompt continue_final_message truncate_prompt_tokens truncation_side priority cache_salt "
        "stream padding encoding_format"
    ),
}

_ENGINES: Final = "it tells engines of other engines or of other requests"
_MEDIA: Final = "media are handled as this server's settings say"
_PROMPT: Final = "the prompt as the engine sees it is not shown"
_UNUSED: Final = "this server does not offer it"
_REFUSED: Final = {
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "request_id", "session_id"), _ENGINES),
    **dict.fromkeys(("mm_payload", "return_mm_kwargs", "media_io_kwargs", "mm_processor_kwargs"), _MEDIA),
    **dict.fromkeys(("return_token_offsets", "return_prompt_text", "routed_experts_prompt_start"), _PROMPT),
    **dict.fromkeys(("repetition_detection", "watermarking", "container"), _UNUSED),
    "enable_response_messages": _PROMPT,
    "chat_template": "the model's own template is used",
    "prompt_embeds": "only text and tokens are",
    "use_beam_search": "a search keeps many sequences, which are not counted",
    "stream_interval": "tokens are counted by the events of a stream, which this would change",
    "previous_input_messages": "go on from a response with `previous_response_id`",
    "mcp_servers": "this server fetches nothing",
    "conversation": "it keeps no conversations: go on from a response with `previous_response_id`",
}
"""Field -> why it is refused, unless it is null, false or 0, which ask for nothing."""
NOT_FOR_TEMPLATES: Final = frozenset(
    (
        "add_generation_prompt chat_template continue_final_message conversation documents max_length messages "
        "model_config padding return_assistant_tokens_mask return_dict return_tensors self tokenize tokenizer "
        "tokenizer_kwargs tools truncation"
    ).split()
)
"""Arguments of the function that renders and tokenizes, which an engine would take from `chat_template_kwargs`: with
`padding` and `max_length` 200 bytes padded a prompt to 10 million tokens."""

_STRUCTS: Final = {
    route: defstruct(
        "Request",
        [(name, kind if kind is Any else kind | None, None) for name, kind in fields.items()],
        forbid_unknown_fields=True,
    )
    for route, fields in FIELDS.items()
}
_Tokens: Final = _array(_int(0, (1 << 32) - 1), 1 << 23)
_PROMPTS: Final = {int: _Tokens, str: _array(str, MAX_INPUTS), list: _array(_Tokens, MAX_INPUTS)}
"""Type of a prompt's first element -> type of the prompt."""


def check_fields(route: str, data: dict[str, Any]) -> None:
    """Raises HttpError 400 naming the first field that is unknown, refused, of another type or out of bounds."""
    try:
        convert(data, _STRUCTS[route])
    except ValidationError as error:
        raise _refusal(str(error), data) from None
    for name in _REFUSED.keys() & data.keys():
        if data[name] is not None and data[name] is not False and data[name] != 0:
            raise refused(name, _REFUSED[name])
    for name in NOT_FOR_TEMPLATES.intersection(data.get("chat_template_kwargs") or ()):
        raise refused(f"chat_template_kwargs.{name}", "only variables of the model's own template can be given")


def prompts_in(name: str, value: Any) -> int:
    """The number of prompts in `prompt` or `input`: a text, texts, tokens, or lists of tokens. Raises HttpError 400."""
    first = value[0] if isinstance(value, list) and value else None
    try:
        convert(value, str if first is None else _PROMPTS.get(type(first), list[str]))
    except ValidationError as error:
        raise _refusal(f"{error} - at `$.{name}`", {name: value}) from None
    return 1 if first is None or isinstance(first, int) else len(value)


def refused(param: str, why: str) -> HttpError:
    return errors.bad_request(
        f"The parameter `{param}` is not accepted by this server: {why}.", param=param, code="unsupported_parameter"
    )


_UNKNOWN: Final = "Object contains unknown field "
_PLACE: Final = re.compile(r"(.*?) - at `(?:key` in `)?\$\.?([a-z_]+[^`]*?)(?:\[\.\.\.\])?`", re.DOTALL)
_REPR: Final = reprlib.Repr()
_REPR.maxstring = 60


def _refusal(message: str, data: dict[str, Any]) -> HttpError:
    """message: msgspec's, such as "Expected `int` <= 64 - at `$.n`"."""
    if message.startswith(_UNKNOWN):
        name = message.removeprefix(_UNKNOWN).strip("`")[:80]
        return errors.bad_request(
            f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
        )
    found = _PLACE.search(message)
    words, param = found.groups() if found is not None else (message, None)
    if param is not None and words.startswith("Expected `null`"):
        return refused(param, "it is not offered on this route")
    value = None if param is None else data.get(param)
    given = "" if value is None or isinstance(value, list | dict) else f"{_REPR.repr(value)} given. "
    code = "invalid_type" if ", got `" in words or "missing" in words else "invalid_value"
    return errors.bad_request(f"Invalid value for `{param}`: {given}{words}.", param=param, code=code)
