"""Defines the fields allowed in inference requests, by route, and their size limits. Pure.

An allowlist: it refuses fields not named here, including engine fields not reviewed yet (a test compares these tables
with the pinned vLLM's request models and with OpenAI's SDK). OpenAI refuses an unknown field in the same words; an
engine would ignore it silently.
"""

from __future__ import annotations

from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError


class Rule:
    """The check of a field. `PASSES` checks nothing: the engine does, or request_check.py elsewhere."""

    def check(self, name: str, value: Any) -> None:
        """Raises HttpError 400. value: not None."""


class Items(Rule):
    """A list or object of at most `most` items, or one text; texts in it of at most `chars` characters."""

    def __init__(self, most: int, chars: int = 1024) -> None:
        self.most = most
        self.chars = chars

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, str):
            self._text(name, value)
        elif isinstance(value, list | dict):
            if len(value) > self.most:
                raise _bad(name, f"{len(value)} items given, at most {self.most} are allowed.")
            for item in value:
                if isinstance(item, str):
                    self._text(name, item)
            if isinstance(value, dict):
                for item in value.values():
                    if isinstance(item, str):
                        self._text(name, item)

    def _text(self, name: str, text: str) -> None:
        if len(text) > self.chars:
            raise _bad(name, f"a text of {len(text)} characters given, at most {self.chars} are allowed.")


class Refused(Rule):
    """Accepted only as null, false or 0, which ask for nothing."""

    def __init__(self, why: str) -> None:
        self.why = why

    def check(self, name: str, value: Any) -> None:
        if value is not False and value != 0:
            raise errors.bad_request(
                f"The parameter `{name}` is not accepted by this server: {self.why}.",
                param=name,
                code="unsupported_parameter",
            )


class Unpadded(Rule):
    """Padding to the model's length turns an input of one letter into a whole context of work."""

    def check(self, name: str, value: Any) -> None:
        if value != "do_not_pad":
            raise errors.bad_request(
                f"The parameter `{name}` is accepted by this server as 'do_not_pad' alone.",
                param=name,
                code="unsupported_parameter",
            )


class OneOf(Rule):
    """Accepted as one of these words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in self.words:
            shown = value[:64] if isinstance(value, str) else type(value).__name__
            raise _bad(name, f"'{shown}' given, expected one of {', '.join(self.words)}.")


class OwnTools(Items):
    """Tools that the client runs; the reading of the request has left out all others. kinds: their types. named: the
    type must be given, because the engine knows fifteen and would compare a tool without a type with all."""

    def __init__(self, most: int, chars: int, kinds: tuple[str, ...], named: bool) -> None:
        super().__init__(most, chars)
        self.kinds = kinds
        self.named = named

    def check(self, name: str, value: Any) -> None:
        super().check(name, value)
        if not isinstance(value, list):
            return
        for place, tool in enumerate(value):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind not in self.kinds and (self.named or kind is not None):
                given = f"the type '{kind[:64]}'" if isinstance(kind, str) else "no type"
                raise errors.bad_request(
                    f"{name}[{place}] has {given}, expected '{self.kinds[0]}': a tool that your program runs.",
                    param=f"{name}[{place}].type",
                    code="unsupported_tool",
                )


PASSES: Final = Rule()
# The engine searches every sequence for each of these texts at every step.
_WORDS: Final = Items(64, 256)
# As many as OpenAI takes, and engines.
_STOPS: Final = Items(4, 256)
# One number per named token of the vocabulary, in a separate table for each request.
_TOKENS: Final = Items(1024)
_COUNTS: Final = "tokens are counted by the events of a stream, which this would change"
_ENGINES: Final = "it tells engines of other engines or of other requests"
_TEMPLATE: Final = "the model's own template is used"
_MEDIA: Final = "media are handled as this server's settings say"
_PROMPT: Final = "the prompt as the engine sees it is not shown"
_UNUSED: Final = "this server does not offer it"


def _passing(names: str) -> dict[str, Rule]:
    """These fields, separated by spaces, are passed on as they are."""
    return dict.fromkeys(names.split(), PASSES)


_OPENAI_ONLY: Final[dict[str, Rule]] = _passing(
    "safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention service_tier store metadata "
    "moderation"
)

# What engines say to each other.
_INNER: Final[dict[str, Rule]] = {
    "watermarking": Refused(_UNUSED),
    "kv_transfer_params": Refused(_ENGINES),
    "ec_transfer_params": Refused(_ENGINES),
    "vllm_xargs": Refused(_ENGINES),
    "mm_payload": Refused(_MEDIA),
    "return_mm_kwargs": Refused(_MEDIA),
}

# Fields of all text routes of an engine.
_SAMPLING: Final[dict[str, Rule]] = {
    **_passing(
        "model stream stream_options user temperature top_p top_k min_p seed frequency_penalty presence_penalty "
        "repetition_penalty ignore_eos skip_special_tokens include_stop_str_in_output priority structured_outputs "
        "cache_salt"
    ),
    "logit_bias": _TOKENS,
    "stop": _STOPS,
    "stop_token_ids": _WORDS,
    "request_id": Refused(_ENGINES),
    "session_id": Refused(_ENGINES),
    **_INNER,
}

# Additional fields of chat and completions.
_TOKENWISE: Final[dict[str, Rule]] = {
    **_SAMPLING,
    **_passing(
        "max_tokens n logprobs length_penalty min_tokens spaces_between_special_tokens truncate_prompt_tokens "
        "truncation_side prompt_logprobs add_special_tokens echo response_format return_tokens_as_token_ids "
        "return_token_ids thinking_token_budget"
    ),
    "allowed_token_ids": _TOKENS,
    "logprob_token_ids": Items(20),
    "bad_words": _WORDS,
    "use_beam_search": Refused("a search keeps many sequences, which are not counted"),
    "stream_interval": Refused(_COUNTS),
    "return_token_offsets": Refused(_PROMPT),
    "return_prompt_text": Refused(_PROMPT),
    "routed_experts_prompt_start": Refused(_PROMPT),
    "repetition_detection": Refused(_UNUSED),
}

# OpenAI takes as many.
_TOOLS: Final = Items(128, 512)
_FUNCTION_TOOLS: Final = OwnTools(128, 512, ("function",), False)
_NAMED_TOOLS: Final = OwnTools(128, 512, ("function", "namespace", "custom"), True)
_CUSTOM_TOOLS: Final = OwnTools(128, 512, ("custom",), False)
_KWARGS: Final = Items(64, 4096)
_TEMPLATES: Final[dict[str, Rule]] = {
    "chat_template_kwargs": _KWARGS,
    "chat_template": Refused(_TEMPLATE),
    "media_io_kwargs": Refused(_MEDIA),
    "mm_processor_kwargs": Refused(_MEDIA),
}

FIELDS: Final[dict[str, dict[str, Rule]]] = {
    "chat.completions": {
        **_OPENAI_ONLY,
        **_TOKENWISE,
        **_passing(
            "messages max_completion_tokens top_logprobs tool_choice parallel_tool_calls reasoning_effort "
            "include_reasoning add_generation_prompt continue_final_message"
        ),
        # OpenAI's fields that an engine does not know.
        **_passing("audio function_call modalities prediction verbosity web_search_options"),
        "best_of": PASSES,
        "tools": _FUNCTION_TOOLS,
        "functions": _TOOLS,
        "documents": Items(256, 1 << 16),
        **_TEMPLATES,
        "prompt_embeds": Refused("only text and tokens are"),
    },
    "completions": {
        **_TOKENWISE,
        "prompt": PASSES,
        "best_of": PASSES,
        "suffix": Items(0, 1 << 16),
        "prompt_embeds": Refused("only text and tokens are"),
        # The controller's batches and some clients send OpenAI's newer fields on every route.
        **_OPENAI_ONLY,
    },
    "responses": {
        **_OPENAI_ONLY,
        **_SAMPLING,
        **_passing(
            "input instructions background conversation prompt previous_response_id max_output_tokens max_tool_calls "
            "parallel_tool_calls reasoning include_reasoning text tool_choice top_logprobs truncation "
            "context_management access_programs personality image verbosity"
        ),
        "logprobs": PASSES,
        "metadata": PASSES,  # answers.kept_completion.check_metadata
        "include": Items(32, 128),
        "tools": _NAMED_TOOLS,
        **_TEMPLATES,
        "enable_response_messages": Refused(_PROMPT),
        "previous_input_messages": Refused("go on from a response with `previous_response_id`"),
    },
    "messages": {
        **_passing(
            "model messages max_tokens output_config thinking stream system temperature tool_choice top_k top_p "
            "cache_salt"
        ),
        # Anthropic's fields that an engine does not know.
        **_passing(
            "cache_control context_management inference_geo output_format service_tier speed betas user_profile_id"
        ),
        "metadata": Items(16, 512),
        "stop_sequences": _STOPS,
        "tools": _CUSTOM_TOOLS,
        "chat_template_kwargs": _KWARGS,
        "container": Refused(_UNUSED),
        "mcp_servers": Refused("this server fetches nothing"),
        **_INNER,
        "chat_template": Refused(_TEMPLATE),
    },
    "embeddings": {
        "padding": Unpadded(),
        # OpenAI's. An engine's `bytes` has a header with 100 bytes for each input, and its `bytes_only` no JSON.
        "encoding_format": OneOf("float", "base64"),
        **_passing(
            "model input messages user dimensions embed_dtype endianness use_activation add_special_tokens "
            "add_generation_prompt continue_final_message truncate_prompt_tokens truncation_side priority cache_salt "
            "stream"
        ),
        **_TEMPLATES,
        "request_id": Refused(_ENGINES),
    },
}
FIELDS["responses.input_tokens"] = FIELDS["responses"]
FIELDS["messages.count_tokens"] = {
    name: rule for name, rule in FIELDS["messages"].items() if name not in ("max_tokens", "stream")
}


def check_fields(route: str, data: dict[str, Any]) -> None:
    """Raises HttpError 400 naming the first field that is unknown, refused or too large."""
    rules = FIELDS[route]
    for name, value in data.items():
        rule = rules.get(name)
        if rule is None:
            shown = name if len(name) <= 80 else name[:80] + "…"
            raise errors.bad_request(
                f"Unrecognized request argument supplied: {shown}", param=shown, code="unknown_parameter"
            )
        if rule is not PASSES and value is not None:
            rule.check(name, value)


def _bad(name: str, what: str) -> HttpError:
    return errors.bad_request(f"Invalid value for `{name}`: {what}", param=name)
