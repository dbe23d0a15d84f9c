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
├── LimitReached      429
└── Unavailable       503 or 507

The `openai` client retries 408, 409, 429 and 5xx unless the answer has `x-should-retry: false`.
"""

from __future__ import annotations

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

    message: for people. kind: the object's `type`. param: the field at fault, dotted. code: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
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
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(400, message, param=param, code=code)


class InvalidValue(BadRequest):
    def __init__(self, message: str, param: str | None):
        super().__init__(message, param=param, code="invalid_value")


class Unauthorized(ApiError):
    """No listener identified the sender: gateways name a key in every request, and no other client has to."""

    def __init__(self) -> None:
        super().__init__(
            401,
            "This request has no identity. Gateways send x-appliance-key-id and x-appliance-scopes, once each, with "
            "their token; commands on the box itself use its controller.sock.",
            code="missing_identity",
        )


class KeyRevoked(ApiError):
    """The gateways say it in the same words (`gateway.core.errors.key_ended`). how: as of `keys.how_ended`."""

    def __init__(self, how: str):
        super().__init__(401, f"The API key of this request {how} while it ran.", code="invalid_api_key")


class SessionEnded(ApiError):
    """The gateways say it in the same words (`gateway.core.errors.session_ended`)."""

    def __init__(self) -> None:
        super().__init__(401, "This login of the page has ended. Log in again.", code="session_ended")


class Forbidden(ApiError):
    def __init__(self, needed: str):
        super().__init__(
            403,
            f"You have insufficient permissions for this operation. The API key needs the scope: {needed}.",
            code="insufficient_permissions",
        )


class NotFound(ApiError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(404, message, param=param, code=code)


class Conflict(ApiError):
    """The object's state forbids it; repeating the same request cannot help."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(409, message, param=param, code=code, headers=dict(NEVER_RETRY))


class BodyTooLarge(ApiError):
    def __init__(self, limit_bytes: int, *, param: str | None = None):
        super().__init__(
            413,
            f"The request body is over the limit of {limit_bytes} bytes of this endpoint.",
            param=param,
            code="request_too_large",
        )


class LimitReached(ApiError):
    """An owner has as much as he may. retry: less by itself, after a while."""

    def __init__(self, message: str, *, param: str | None = None, retry: bool = False):
        headers = {"retry-after": "30"} if retry else dict(NEVER_RETRY)
        super().__init__(429, message, kind="insufficient_quota", param=param, code="limit_reached", headers=headers)


class Unavailable(ApiError):
    def __init__(self, status: int, message: str, *, code: str, retry: bool):
        super().__init__(status, message, kind="server_error", code=code, headers=None if retry else dict(NEVER_RETRY))


def shown(value: Any, limit: int = 120) -> str:
    """A client's value for use in a message: bounded and without control characters."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
