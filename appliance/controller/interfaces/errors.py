"""Errors of the controller, and how each appears to a client: always as OpenAI's error object.

OperationFailed       long work ended with a reason a person can act on (raised by `LibraryOps`)
SwapFailed            the replicas could not take the wanted version (raised by `Scheduler`)

ApiError (an HTTPException)
├── BadRequest        400
│   └── InvalidValue  of one parameter
├── Unauthorized      401
├── Forbidden         403
├── NotFound          404
├── Conflict          409, never to be retried
├── BodyTooLarge      413
└── (others by their status: 429 and 413 of a bound, 507 of the disk, 503)

The `openai` client retries 408, 409, 429 and 5xx unless the answer has `x-should-retry: false`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

NEVER_RETRY = {"x-should-retry": "false"}


class OperationFailed(Exception):
    """A long operation failed for a reason that a user can act on: `code` for programs, the message for people."""

    def __init__(self, message: str, *, code: str = "operation_failed"):
        super().__init__(message)
        self.code = code


class SwapFailed(Exception):
    """Replicas could not be swapped to the wanted version; they keep the previous one or go back to it."""

    def __init__(self, model: str, wanted: str | None, reason: str):
        super().__init__(f"the replicas of {model} could not be brought to version {wanted}: {reason}")


class ApiError(HTTPException):
    """An answer with OpenAI's error object. It is an HTTPException because FastAPI passes only those through its
    parsing of request bodies unchanged.

    message: for people. param: the field at fault, dotted. code: for programs. kind: the object's `type`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers) if headers else None)
        self.message, self.kind, self.param, self.code = message, kind, param, code

    @property
    def passes(self) -> bool:
        """Whether a bound or a full disk is the reason: what is refused now may be taken later."""
        return self.status_code in (429, 507)

    def body(self) -> dict[str, Any]:
        return error_object(self.message, self.kind, self.param, self.code)


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class BadRequest(ApiError):
    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(400, message, param, code)


class InvalidValue(BadRequest):
    def __init__(self, message: str, param: str | None):
        super().__init__(message, param, "invalid_value")


class NotFound(ApiError):
    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(404, message, param, code)


class Conflict(ApiError):
    """The object's state forbids it; repeating the same request cannot help."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(409, message, param, code, headers=NEVER_RETRY)


class Forbidden(ApiError):
    def __init__(self, needed: str):
        message = f"You have insufficient permissions for this operation. The API key needs the scope: {needed}."
        super().__init__(403, message, code="insufficient_permissions")


class Unauthorized(ApiError):
    """No listener identified the sender: gateways name a key in every request, and no other client has to."""

    def __init__(self) -> None:
        message = (
            "This request has no identity. Gateways send x-appliance-key-id and x-appliance-scopes, once each, with "
            "their token; commands on the box itself use its controller.sock."
        )
        super().__init__(401, message, code="missing_identity")


class KeyRevoked(ApiError):
    """The gateways say it in the same words (`gateway.core.errors.key_ended`). how: as of `keys.how_ended`."""

    def __init__(self, how: str):
        super().__init__(401, f"The API key of this request {how} while it ran.", code="invalid_api_key")


class SessionEnded(ApiError):
    """The gateways say it in the same words (`gateway.core.errors.session_ended`)."""

    def __init__(self) -> None:
        super().__init__(401, "This login of the page has ended. Log in again.", code="session_ended")


class BodyTooLarge(ApiError):
    def __init__(self, limit_bytes: int, param: str | None = None):
        message = f"The request body is over the limit of {limit_bytes} bytes of this endpoint."
        super().__init__(413, message, param, "request_too_large")


def shown(value: Any, limit: int = 120) -> str:
    """A client's value for use in a message: bounded and without control characters."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
