"""Defines the gateway's errors, and formats each for clients as OpenAI's error object.

    GatewayError
    ├── ConfigInvalid    the process was started with unusable settings
    └── HttpError         an answer to a client: status and {"error": {"message", "type", "param", "code"}}

Shapes after https://platform.openai.com/docs/guides/error-codes and the behaviour of the `openai` client:
it retries 408, 409, 429 and 5xx, obeys Retry-After up to 120 s and `x-should-retry`.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any, Final

import orjson

from runtime.moments import minute
from runtime.pydantic_words import words_of_check

MAX_RETRY_AFTER_S = 120
JSON_TYPES: Final = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


class GatewayError(Exception):
    """Base of all errors of this package."""


class ConfigInvalid(GatewayError):
    """Settings the gateway cannot start with; the message names the key, the value and what is expected."""


class HttpError(GatewayError):
    """An error sent to a client.

    status: HTTP status. retry_after_s: sent as Retry-After, at most 120 s. should_retry: sent as
    `x-should-retry` when not None. allow: the methods in a 405's Allow. close: the connection is unusable afterwards.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
        allow: str | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = None if retry_after_s is None else min(max(retry_after_s, 1), MAX_RETRY_AFTER_S)
        self.should_retry = should_retry
        self.allow = allow
        self.close = close

    def body(self) -> bytes:
        return error_object(self.message, self.kind, self.param, self.code)


def error_object(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> HttpError:
    return HttpError(400, message, param=param, code=code)


def not_of_type(param: str, wanted: str, given: Any) -> str:
    """What OpenAI says of a value of JSON that is of another type."""
    return f"Invalid type for '{param}': expected {wanted}, but got {JSON_TYPES[type(given)]} instead."


def protocol_error(message: str, status: int = 400) -> HttpError:
    """The bytes are not acceptable HTTP, so nothing after them on this connection can be trusted."""
    return HttpError(status, message, code="bad_http_request", close=True)


def unknown_url(method: str, path: str, meant: str = "") -> HttpError:
    """meant: the URL that there is, where the client's base URL has one /v1 too few or too many."""
    if meant:
        hint = f"Did you mean {meant}? OpenAI's clients want a base URL that ends with /v1, Anthropic's one without it."
    else:
        hint = "Please check the URL for typos, or see the documentation of this server for the routes it has."
    return HttpError(404, f"Unknown request URL: {method} {path}. {hint}", code="unknown_url")


def method_not_allowed(method: str, path: str, allowed: str) -> HttpError:
    message = f"Not allowed to {method} on {path}. Allowed: {allowed}."
    return HttpError(405, message, code="method_not_supported", allow=allowed)


def unexpected_body(method: str) -> HttpError:
    return HttpError(400, f"A {method} request has no body here. Please send it without one.", code="unexpected_body")


def missing_key() -> HttpError:
    return HttpError(
        401,
        "You didn't provide an API key. You need to provide your API key in an Authorization header using "
        "Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
        code="missing_api_key",
    )


def invalid_key() -> HttpError:
    return HttpError(401, "Incorrect API key provided, or the key was revoked.", code="invalid_api_key")


def key_expired(since_s: float) -> HttpError:
    return HttpError(
        401,
        f"This API key expired at {minute(since_s)}. Ask whoever runs this box for another one.",
        code="invalid_api_key",
    )


def key_ended(expires_s: float | None) -> HttpError:
    """expires_s: the end that the key had, None without one."""
    how = "was revoked"
    if expires_s is not None and expires_s <= time.time():
        how = f"expired at {minute(expires_s)}"
    return HttpError(401, f"The API key of this request {how} while it ran.", code="invalid_api_key", close=True)


def session_ended() -> HttpError:
    return HttpError(401, "This login of the page has ended. Log in again.", code="session_ended")


def not_for_logins() -> HttpError:
    return HttpError(
        403, "A login of the page does not do for this URL: it takes an API key.", code="insufficient_permissions"
    )


def other_page() -> HttpError:
    return HttpError(403, "A login of the page does only for what the page itself asks.", code="cross_site_request")


def missing_scope(needed: str) -> HttpError:
    return HttpError(
        403,
        f"You have insufficient permissions for this operation. The API key needs the scope: {needed}.",
        code="insufficient_permissions",
    )


def model_not_found(model: str) -> HttpError:
    shown = model if len(model) <= 200 else model[:200] + "…"
    return HttpError(
        404,
        f"The model `{shown}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def version_not_served(model: str, version: str, served: list[str]) -> HttpError:
    shown = version if len(version) <= 200 else version[:200] + "…"
    if version == "challenger":  # an alias, which no command takes for a version; a gate's may have no engine
        return HttpError(
            404,
            f"No challenger of the model `{model}` is served now; {', '.join(f'`{name}`' for name in served)} is. "
            f"`appliance model canary {model} VERSION` serves a version alongside the other.",
            param="model",
            code="model_version_not_served",
        )
    return HttpError(
        404,
        f"The version `{shown}` of the model `{model}` is not served now; {', '.join(f'`{name}`' for name in served)} "
        f"is. If there is such a version, `appliance model rollback {model} --version {shown}` serves it, and "
        f"`appliance model canary {model} {shown}` serves it alongside the other.",
        param="model",
        code="model_version_not_served",
    )


def wrong_task(model: str, route: str) -> HttpError:
    return HttpError(400, f"The model `{model}` does not support {route}.", param="model", code="model_not_supported")


def no_chat_template(model: str) -> HttpError:
    return HttpError(
        400,
        f"The model `{model}` has no chat template, so it knows no conversations: ask it with /v1/completions, or give "
        f"it one with `appliance model deploy MODEL --chat-template FILE`.",
        param="model",
        code="model_not_supported",
    )


def body_too_large(limit_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"The request body is over the limit of {limit_bytes} bytes of this endpoint.",
        code="request_too_large",
        close=True,
    )


def unavailable(message: str, code: str, retry_after_s: int) -> HttpError:
    return HttpError(503, message, kind="server_error", code=code, retry_after_s=retry_after_s)


def batch_gives_way() -> HttpError:
    return unavailable("Requests of class batch give way: no engine has room for this one.", "batch_gives_way", 1)


def not_serving(model: str, reason: str, next_try_s: float) -> HttpError:
    """The model's engines fail; the next start is in this many seconds."""
    wait_s = max(math.ceil(next_try_s), 1)
    return unavailable(
        f"The model `{model}` is not serving: {reason.rstrip('.')}. The next try is in {wait_s} s.",
        "model_not_ready",
        wait_s,
    )


def engine_failed(status: int = 502) -> HttpError:
    what = "did not answer in time" if status == 504 else "failed while answering"
    return HttpError(
        status,
        f"The engine serving this model {what}. The request can be sent again.",
        kind="server_error",
        code="engine_timeout" if status == 504 else "engine_failed",
    )


def engine_dead(error: HttpError) -> bool:
    """Whether this is vLLM's EngineDeadError, as its HTTP handlers and its stream generators spell it."""
    return error.status >= 500 and "EngineCore" in error.message


def engines_died_of_it() -> HttpError:
    """Clients that retry by themselves are told not to: each time would cost engines again."""
    return HttpError(
        502,
        "The engine serving this model ended while it had this request, and so did the next one that got it. It is not "
        "sent to a third, because that would end engine after engine. Please change the request, or ask whoever runs "
        "the box what the engines' logs say.",
        kind="server_error",
        code="engines_died",
        should_retry=False,
    )


def rate_limited(what: str, limit: int, wait_s: float, part: str = "") -> HttpError:
    return HttpError(
        429,
        f"Rate limit reached for this API key: {limit} {what} per minute{part}. Please try again in {wait_s:.3g}s.",
        kind=what,
        code="rate_limit_exceeded",
        retry_after_s=math.ceil(wait_s),
    )


def too_many_at_once(what: str, limit: int) -> HttpError:
    return HttpError(
        429,
        f"Your API keys have {limit} {what} open, which is as many as they may have at once. Please try again when one "
        "of them has ended.",
        kind="requests",
        code="rate_limit_exceeded",
        retry_after_s=1,
    )


def too_much_of_a_quota(open_tokens: int, more: int, limit: int) -> HttpError:
    return HttpError(
        429,
        f"Requests of this API key that are under way may take {open_tokens} tokens, and this one {more}; together it "
        f"may be {limit} at once, by its quota. Please try again when one of them has ended.",
        kind="tokens",
        code="rate_limit_exceeded",
        retry_after_s=1,
    )


def quota_spent(until_s: float, which: str) -> HttpError:
    """which: such as "1,000 tokens a day". No Retry-After: the quota renews in hours, and clients should not wait for
    that."""
    return HttpError(
        429,
        f"This API key has used up its quota of {which or 'tokens'}. It is renewed at {minute(until_s)}.",
        kind="insufficient_quota",
        code="insufficient_quota",
        should_retry=False,
    )


def kind_of_status(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def from_upstream(status: int, body: bytes, prompt_field: str | None = None) -> HttpError:
    """Turn an error answer of the engine or the controller into ours. prompt_field: the parameter that has the prompt,
    which is the faulty one where a prompt is too long.

    Known shapes: OpenAI's own object; vLLM's with integer `code`; {"error": "text"};
    FastAPI's {"detail": "text" | [{"loc", "msg"}]}; anything else keeps only its status.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    error = data.get("error") if isinstance(data, dict) else None
    detail = data.get("detail") if isinstance(data, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        message, param, code = error["message"], error.get("param"), error.get("code")
        kind = error.get("type")
        if _MISMATCHES.match(message):
            message, param = _mismatch(message)
        message = _VALUES.sub("", message)
        known = isinstance(code, str) or (code is None and isinstance(kind, str) and kind.endswith("_error"))
        if not isinstance(code, str):
            code = _code_from_message(status, message)
            if code == "context_length_exceeded":
                param = prompt_field
        return HttpError(
            status,
            message,
            kind=kind if known and isinstance(kind, str) else kind_of_status(status),
            param=param if isinstance(param, str) else None,
            code=code,
        )
    if isinstance(error, str):
        return HttpError(status, error, kind=kind_of_status(status))
    if isinstance(detail, str):
        return HttpError(status, detail, kind=kind_of_status(status))
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        return HttpError(status, *_validation(detail))
    return HttpError(status, f"The request failed with status {status}.", kind=kind_of_status(status))


def event_code(data: Any) -> int | None:
    """HTTP-like status inside an error event of vLLM's stream, or None if `data` is not an error event."""
    if not isinstance(data, dict) or not isinstance(data.get("error"), dict):
        return None
    code = data["error"].get("code")
    return code if isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599 else 500


def _code_from_message(status: int, message: str) -> str | None:
    if status == 404 and "does not exist" in message:
        return "model_not_found"
    if "maximum context length" in message or "max_model_len" in message:
        return "context_length_exceeded"
    return None


# What vLLM's exceptions put behind their text: names of its own, and a value that may be the whole prompt.
_VALUES = re.compile(r" \(parameter=\w+(?:, value=.*)?\)\Z", re.DOTALL)
# How vLLM lists what does not fit its types: a line for each type that a value was held against.
_MISMATCHES = re.compile(r"[0-9]+ validation errors?:\n")
_MISMATCH = re.compile(r"'type': '(?P<type>[^']*)', 'loc': '(?P<loc>[^']*)', 'msg': (?P<msg>'[^']*'|\"[^\"]*\")")
# That a value is not of one type is not a fault where another type fits but for something else.
_OTHER_TYPE = ("_type", "literal_error", "model_attributes_type")
_MESSAGE_CHARS = 2000


def _mismatch(message: str) -> tuple[str, str | None]:
    """One sentence and the parameter in OpenAI's form (`messages[0].content`), out of vLLM's list."""
    found = [match.groupdict() for match in _MISMATCH.finditer(message[: 64 * 1024])]
    if not found:
        return message[:_MESSAGE_CHARS], None
    fault = next((one for one in found if not one["type"].endswith(_OTHER_TYPE)), found[0])
    param = _param(fault["loc"])
    same = [_said(one["msg"]) for one in found if _param(one["loc"]) == param]
    what = "; or ".join(dict.fromkeys(same if fault is found[0] else [_said(fault["msg"])]))
    if fault["type"] == "missing" and param:
        return f"You must provide the parameter `{param}`.", param
    if fault["type"] == "missing":
        return "The body must be a JSON object.", None
    if not param:  # a check of several fields together, which its words name
        return f"{what}."[:_MESSAGE_CHARS], None
    return f"Invalid value for `{param}`: {what}."[:_MESSAGE_CHARS], param


def _said(quoted: str) -> str:
    """A message out of vLLM's list, without pydantic's words before those of a check and the dot behind them."""
    return words_of_check(quoted[1:-1]).removesuffix(".")


def _param(location: str) -> str:
    """'body.messages.0.ChatCompletionUserMessageParam.content' as 'messages[0].content': without names of types."""
    parts = ""
    for part in location.split("."):
        if part.isdigit():
            parts += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z0-9_]*", part) and part not in _NO_FIELDS:
            parts += f".{part}" if parts else part
    return parts


# The last five are tags by which vLLM tells the forms of one field apart.
_NO_FIELDS = frozenset(
    {"body", "str", "int", "float", "bool", "list", "dict"}
    | {"enabled", "disabled", "adaptive", "tool_definition", "tool_reference"}
)


def _validation(detail: list[Any]) -> tuple[str]:
    parts = []
    for item in detail[:5]:
        if isinstance(item, dict):
            where = ".".join(str(p) for p in item.get("loc", ()) if p != "body")
            parts.append(f"{where}: {item.get('msg', 'invalid')}" if where else str(item.get("msg", "invalid")))
    return ("; ".join(parts),)
