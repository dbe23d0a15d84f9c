"""The fields that inference requests may have, with type and bounds, by route. Pure.

This is an allowlist: engines silently ignore unknown fields, OpenAI and this gateway refuse them. Nulls are removed
before the check; normalize.py later rewrites fields that engines do not know (`GUIDED`, `functions`). Tests compare
the fields with vLLM's request models and with OpenAI's SDK."""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, Final, Literal, Union

from msgspec import Meta, Struct, ValidationError, convert, defstruct

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

_MESSAGES: Final = 2048  # limit of messages in a conversation, and of parts in a message
_MAX_TOKENS: Final = 1 << 20
_INT64: Final = (1 << 63) - 1


def _in(kind: Any, low: float, high: float) -> Any:
    """Return the type of a number from `low` to `high`."""
    return Annotated[kind, Meta(ge=low, le=high)]


def _upto(kind: Any, most: int, least: int = 0) -> Any:
    """Return the type of a text, list or object with `least` to `most` items."""
    return Annotated[kind, Meta(min_length=least, max_length=most)]


def _array(item: Any, most: int, least: int = 0) -> Any:
    return _upto(list[item], most, least)


class _Part(Struct):
    """A content part, checked here because an engine's error would list every type that did not match."""

    type: str


_CONTENT: Final = str | _array(_Part, _MESSAGES)
_CHAT_CONTENT: Final = str | _array(_Part | list[_Part], _MESSAGES)
# Role -> type and default of the content of a message with this role.
_CONTENTS: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("system", "developer", "user"), (_CHAT_CONTENT,)),
    **{"assistant": (_CHAT_CONTENT | None, None), "tool": (Any, None), "function": (Any, None)},
}
_OTHERS: Final = [("name", str | None, None), ("tool_calls", list[dict[str, Any]] | None, None)]
_MESSAGE: Final = Union[  # noqa: UP007 - of a tuple
    tuple(defstruct(role, [("content", *of), *_OTHERS], tag_field="role", tag=role) for role, of in _CONTENTS.items())
]


class _AnthropicMessage(Struct):
    role: Literal["system", "user", "assistant"]
    content: _CONTENT  # type: ignore[valid-type]


class _Item(Struct):
    type: str | None = None
    role: str | None = None
    content: _CONTENT | None = None  # type: ignore[valid-type]


_VARIABLE = bool | _in(int, -131_072, 131_072) | float | _upto(str, 4096) | None
# Field -> type. Fields without a type are passed on as they are.
_TYPES: Final[dict[str, Any]] = {
    "model": str,
    **dict.fromkeys(("stream", "store", "background", "logprobs"), bool),
    "stream_options": dict[str, bool | None],
    **dict.fromkeys(("n", "best_of"), _in(int, 1, 64)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _in(int, 1, _MAX_TOKENS)),
    "min_tokens": _in(int, 0, _MAX_TOKENS),
    "truncate_prompt_tokens": _in(int, -1, 1 << 31),
    "dimensions": _in(int, 1, 1 << 20),
    "temperature": _in(float, 0, 2),
    **dict.fromkeys(("top_p", "min_p"), _in(float, 0, 1)),
    "top_k": _in(int, -1, 1 << 31),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _in(float, -2, 2)),
    "repetition_penalty": _in(float, 0, 10),
    "length_penalty": _in(float, -10, 10),
    "seed": _in(int, -_INT64 - 1, _INT64 - 64),  # answers after the first use the next seeds
    "priority": _in(int, 0, 0),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs"), _in(int, 0, 20)),
    "logprob_token_ids": _array(Any, 20),
    "logit_bias": _upto(dict[str, Any], 1024),
    "allowed_token_ids": _array(Any, 1024),
    "stop": _upto(str, 256) | _array(_upto(str, 256), 4),  # OpenAI allows at most 4 texts
    "stop_sequences": _array(_upto(str, 256), 4),
    "stop_token_ids": _array(Any, 64),
    "bad_words": _array(_upto(str, 256), 64),  # limited, because an engine searches for each word at every step
    "suffix": _upto(str, 0),
    "messages": _array(_MESSAGE, _MESSAGES, 1),
    **dict.fromkeys(("tools", "functions"), _array(dict[str, Any], 128)),
    "documents": _array(Any, 256),
    **dict.fromkeys(("response_format", "structured_outputs", "text", "output_config"), dict[str, Any]),
    "include": _array(_upto(str, 128), 32),
    "metadata": _upto(dict[_upto(str, 64), _upto(str, 512)], 16),  # type: ignore[misc]
    "previous_response_id": _upto(str, 256, 1),
    "cache_salt": _upto(str, 256, 1),
    "chat_template_kwargs": _upto(dict[str, _VARIABLE], 64),  # type: ignore[valid-type]
    "encoding_format": Literal["float", "base64"],
    "padding": Literal["do_not_pad"],  # other values would pad a one-letter input to the whole context
}

_OPENAI: Final = (
    "safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention service_tier store metadata "
    "moderation user "
)
_SAMPLING: Final = (
    "model stream stream_options temperature top_p top_k min_p seed frequency_penalty presence_penalty "
    "repetition_penalty ignore_eos skip_special_tokens include_stop_str_in_output priority structured_outputs "
    "cache_salt logit_bias stop stop_token_ids "
)
_TOKENWISE: Final = f"""{_SAMPLING} {_OPENAI}
    max_tokens n best_of logprobs length_penalty min_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs add_special_tokens echo response_format return_tokens_as_token_ids return_token_ids
    thinking_token_budget allowed_token_ids logprob_token_ids bad_words guided_json guided_regex guided_choice"""
_RESPONSES: Final = f"""{_SAMPLING} {_OPENAI}
    guided_json guided_regex guided_choice chat_template_kwargs input instructions background prompt
    previous_response_id max_output_tokens max_tool_calls
    tools parallel_tool_calls reasoning include_reasoning text tool_choice top_logprobs truncation context_management
    access_programs personality image verbosity logprobs include client_metadata"""
_COUNTED: Final = """
    model messages output_config thinking system temperature tools tool_choice top_k top_p cache_salt cache_control
    context_management inference_geo output_format service_tier speed betas user_profile_id metadata stop_sequences
    chat_template_kwargs"""


def _fields(names: str, **types: Any) -> dict[str, Any]:
    """Map fields to types. types: types that differ on this route."""
    return {name: types.get(name, _TYPES.get(name, Any)) for name in names.split()}


_NULL: Final = type(None)
_INPUT: Final = str | _array(_Item, 1024)
_ANTHROPIC: Final = {
    "messages": _array(_AnthropicMessage, _MESSAGES, 1),
    "metadata": _upto(dict[str, Any], 16),
    "system": _CONTENT,
}
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "chat.completions": _fields(
        f"""{_TOKENWISE} chat_template_kwargs messages max_completion_tokens top_logprobs tools tool_choice
        parallel_tool_calls functions function_call reasoning_effort include_reasoning add_generation_prompt
        continue_final_message documents audio modalities prediction verbosity web_search_options"""
    ),
    # With `echo`, 0 new tokens are useful.
    "completions": _fields(
        f"{_TOKENWISE} prompt suffix", max_tokens=_in(int, 0, _MAX_TOKENS), logprobs=_in(int, 0, 20)
    ),
    "responses": _fields(_RESPONSES, input=_INPUT, prompt=_NULL),
    "responses.input_tokens": _fields(_RESPONSES, input=_INPUT, prompt=_NULL, stream=_NULL, background=_NULL),
    "messages": _fields(f"{_COUNTED} max_tokens stream", **_ANTHROPIC),
    "messages.count_tokens": _fields(_COUNTED, **_ANTHROPIC),
    "embeddings": _fields(
        """chat_template_kwargs model input messages user dimensions embed_dtype endianness use_activation
        add_special_tokens add_generation_prompt continue_final_message truncate_prompt_tokens truncation_side priority
        cache_salt stream padding encoding_format"""
    ),
}
# Field -> why every route refuses it; false and 0 are allowed, because they request nothing.
REFUSED: Final = {
    **dict.fromkeys(
        "kv_transfer_params ec_transfer_params vllm_xargs request_id session_id mm_payload return_mm_kwargs "
        "media_io_kwargs mm_processor_kwargs return_token_offsets return_prompt_text routed_experts_prompt_start "
        "repetition_detection watermarking container enable_response_messages use_beam_search stream_interval".split(),
        "it is not offered",
    ),
    "chat_template": "the model's own template is used",
    "prompt_embeds": "only text and tokens are accepted",
    "previous_input_messages": "continue a response with `previous_response_id`",
    "mcp_servers": "this server does not connect to other servers",
    "conversation": "it does not store conversations: continue a response with `previous_response_id`",
}
# Refused variables: engines pass them from `chat_template_kwargs` to the render function. With `tokenize`, `padding`
# and `max_length`, 200 bytes would be padded to a whole context.
_NO_VARIABLES: Final = frozenset(
    "chat_template max_length padding return_dict return_tensors tokenize tokenizer_kwargs truncation".split()
)
_STRUCTS: Final = {
    route: defstruct(
        "Request",
        [
            (name, kind) if name in ("messages", "input") and route != "embeddings" else (name, kind, None)
            for name, kind in fields.items()
        ],
        forbid_unknown_fields=True,
        kw_only=True,
    )
    for route, fields in FIELDS.items()
}
_TOKENS: Final = _array(_in(int, 0, (1 << 32) - 1), 1 << 23)
# Type of a prompt's first element -> type of the whole prompt.
_PROMPTS: Final = {int: _TOKENS, str: _array(str, 2048), list: _array(_TOKENS, 2048)}


def check_fields(route: str, data: dict[str, Any]) -> None:
    """Raise HttpError 400 for the first field that is unknown, refused, of another type or out of bounds."""
    if refusable := REFUSED.keys() & data.keys():
        for name in refusable:
            if data[name] is not False and data[name] != 0:
                raise refused(name, REFUSED[name])
        data = {name: value for name, value in data.items() if name not in refusable}
    try:
        convert(data, _STRUCTS[route])
    except ValidationError as error:
        raise _refusal(str(error), data) from None
    for name in _NO_VARIABLES.intersection(data.get("chat_template_kwargs", ())):
        raise refused(f"chat_template_kwargs.{name}", "only variables of the model's own template are accepted")


def prompts_in(name: str, value: Any) -> int:
    """Count the prompts in `prompt` or `input`: a text, texts, tokens, or lists of tokens. Raises HttpError 400."""
    first = value[0] if isinstance(value, list) and value else None
    try:
        convert(value, str if first is None else _PROMPTS.get(type(first), list[str]))
    except ValidationError as error:
        raise _refusal(f"{error} - at `$.{name}`", {name: value}) from None
    return 1 if first is None or isinstance(first, int) else len(value)


def refused(param: str, why: str) -> HttpError:
    text = f"The parameter `{param}` is not accepted by this server: {why}."
    return errors.bad_request(text, param=param, code="unsupported_parameter")


_TOP: Final = re.compile(r"Object (?:contains unknown field `(.*)|missing required field `(\w+))`\Z", re.DOTALL)
_PLACE: Final = re.compile(r"(.*?) - at `(?:key` in `)?\$\.?([a-z_]+[^`]*?)(?:\[\.\.\.\])?`", re.DOTALL)


def _refusal(message: str, data: dict[str, Any]) -> HttpError:
    """Turn msgspec's message, such as "Expected `int` <= 64 - at `$.n`", into an HttpError 400."""
    if (top := _TOP.match(message)) and (missing := top[2]):
        text = f"Missing required parameter: '{missing}'."
        return errors.bad_request(text, param=missing, code="missing_required_parameter")
    if top:
        text = f"Unrecognized request argument supplied: {top[1][:80]}"
        return errors.bad_request(text, param=top[1][:80], code="unknown_parameter")
    match = _PLACE.search(message)
    words, param = match.groups() if match is not None else (message, None)
    if param is not None and words.startswith("Expected `null`"):
        return refused(param, "it is not offered on this route")
    value = None if param is None else data.get(param)
    shown_value = "" if value is None or isinstance(value, list | dict) else f"{reprlib.repr(value)} given. "
    code = "invalid_type" if ", got `" in words or "missing" in words else "invalid_value"
    return errors.bad_request(f"Invalid value for `{param}`: {shown_value}{words}.", param=param, code=code)
