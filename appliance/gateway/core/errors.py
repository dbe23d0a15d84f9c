"""Errors of the gateway, which clients get as OpenAI's error objects.

They follow https://platform.openai.com/docs/guides/error-codes and the `openai` client, which retries 408, 409, 429
and 5xx and obeys `x-should-retry` and a Retry-After of at most 120 s."""

from __future__ import annotations

import math
import re
import time
from dataclasses import KW_ONLY, dataclass
from typing import Final

import orjson

from runtime.logs import minute

MAX_RETRY_AFTER_S = 120
ERROR_EVENT: Final = b'data: {"error"'
GIVES_WAY: Final = "batch_gives_way"
ENGINE_FAILED: Final = "engine_failed"
ENGINES_DIED: Final = "engines_died"  # a request during which two engines died; no third engine gets the request


class ConfigInvalid(Exception):
    """Settings with which the gateway cannot start; the message has the key, its value and the expected value."""


@dataclass(eq=False)
class HttpError(Exception):
    """An error response in OpenAI's format. kind: the error's `type`; empty: derived from the status. retry_after_s: at
    most 120 s. should_retry: sent as `x-should-retry` when not None. allow: the Allow header of a 405. close: the
    connection is closed after the response."""

    status: int
    message: str
    _: KW_ONLY
    kind: str = ""
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    should_retry: bool | None = None
    allow: str | None = None
    close: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.message)
        by_status = "server_error" if self.status >= 500 else "invalid_request_error"
        self.kind = self.kind or ("rate_limit_error" if self.status == 429 else by_status)
        if self.retry_after_s is not None:
            self.retry_after_s = min(max(math.ceil(self.retry_after_s), 1), MAX_RETRY_AFTER_S)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> HttpError:
    return HttpError(400, message, param=param, code=code)


def protocol_error(message: str, status: int = 400) -> HttpError:
    """The error for malformed HTTP. It closes the connection, whose next bytes cannot be trusted."""
    return HttpError(status, message, kind="invalid_request_error", code="bad_http_request", close=True)


def body_too_large(limit: int) -> HttpError:
    message = f"The request body is over the limit of {limit} bytes."
    return HttpError(413, message, code="request_too_large", close=True)


def unknown_url(method: str, path: str) -> HttpError:
    hint = "OpenAI's clients need a base URL that ends with /v1, Anthropic's clients a base URL without /v1."
    return HttpError(404, f"Unknown request URL: {method} {path}. {hint}", code="unknown_url")


def key_ended(expires_s: float | None) -> HttpError:
    """The error for a running request whose key expired or was revoked. expires_s: Unix time of expiry, or None."""
    how = "was revoked" if expires_s is None or expires_s > time.time() else f"expired at {minute(expires_s)}"
    return HttpError(401, f"The API key of this request {how} while it ran.", code="invalid_api_key", close=True)


def session_ended() -> HttpError:
    return HttpError(401, "This login of the web page has ended. Log in again.", code="session_ended")


def unavailable(message: str, code: str, retry_after_s: float) -> HttpError:
    return HttpError(503, message, code=code, retry_after_s=retry_after_s)


def engine_failed(status: int = 502) -> HttpError:
    late = status == 504
    fault, code = ("did not answer in time", "engine_timeout") if late else ("failed while answering", ENGINE_FAILED)
    return HttpError(status, f"The engine serving this model {fault}. Please retry.", code=code)


def over_limit(message: str, kind: str, retry_after_s: float) -> HttpError:
    """Return the error 429 for a reached limit. kind: what the limit counts, "requests" or "tokens"."""
    return HttpError(429, message, kind=kind, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def from_upstream(status: int, body: bytes, prompt_field: str | None = None) -> HttpError:
    """Convert an error response of an engine or of the controller. Known bodies: OpenAI's object; vLLM's with an
    integer `code`; {"error": "text"}; FastAPI's {"detail": "text"}. Any other body leaves only the status.

    prompt_field: the request field with the prompt, which the error names when the prompt is too long."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    error = (data.get("error") or data.get("detail")) if isinstance(data, dict) else None
    fields = error if isinstance(error, dict) else {"message": error}
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    message = texts.get("message", f"The request failed with status {status}.")
    kind, param, code = texts.get("type", ""), texts.get("param"), texts.get("code")
    if code is None:  # as in an engine's error
        if status == 404 and "does not exist" in message:
            code = "model_not_found"
        elif "maximum context length" in message or "max_model_len" in message:
            code, param = "context_length_exceeded", prompt_field
        kind = kind if kind.endswith("_error") else ""
    return HttpError(status, _VALUES.sub("", message), kind=kind, param=param, code=code)


def from_event(event: bytes) -> HttpError | None:
    """Return the error in an engine's stream event that contains ERROR_EVENT; None if it is not an error event. An
    engine's text about its own failure is dropped, because clients cannot use it."""
    line = event[event.index(ERROR_EVENT) + 6 :].split(b"\n", 1)[0]
    try:
        code = orjson.loads(line)["error"].get("code")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return from_upstream(code, line) if isinstance(code, int) and 400 <= code <= 499 else engine_failed()


# The suffix of vLLM's exception texts: its internal parameter name, and a value that may be the whole prompt.
_VALUES = re.compile(r" \(parameter=[\w.\[\]]+(?:, value=.*)?\)\Z", re.DOTALL)
