"""Defines the record of one client request, from its head to the end of its answer, that all higher packages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.gateway.access.allowance import KeyUse
from appliance.gateway.access.spans import Spans
from appliance.gateway.answers.usage import NO_TOKENS, TokenRequest, Tokens
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import Kind, Route
from appliance.gateway.routing.table import Caller

Headers = Mapping[bytes, bytes]
Pairs = Sequence[tuple[bytes, bytes]]


def path_of(target: bytes) -> bytes:
    """A target without its query."""
    return target.partition(b"?")[0]


class Request:
    """One request as the client connection parsed it. `chunks` is the body received but not yet forwarded.

    replica, model_version: its last placement, empty before; the version as the engine names it, once it answers.
    stream_events: SSE events relayed. trace: its W3C traceparent, empty without one. spans: only if traces are
    exported. estimated_tokens: charged to its key's allowance; under_way: counted against its key's quota while it is
    open; tokens: its cost as the engine reported it; refused_prompt, refused_completion: what engines had computed that
    refused it, which is added to its cost at the end (Spending.account).
    rate_headers: the answer's headers about that allowance; more_headers: what else its head asks for
    (http/answer_headers.py); ignored: headers that name the parts of it that an engine does not get. head_only: the
    answer has no body. use: its key's usage; counted: as open, weight: as how many, streams: as a stream. asked:
    its maximum cost. sent_s: when an engine got it; left_after_s: how long an engine had computed when the client
    left or its key was revoked, 0 otherwise; unread: the client had stopped reading by then; held_up: it had
    stopped at some time. refused_model: the model it named, once known to exist. session: the login of the page
    that it came by, empty for a key.
    """

    # Defaults are class attributes: most apply to most requests, and each assignment costs every request. Do not use
    # `None` for a type that is not a class of the compiled modules (see compiled.py): mypyc would leave it unset.
    keep_alive: bool = False
    content_length: int | None = None
    chunked: bool = False
    route: Route | None = None
    caller: Caller | None = None
    request_id: bytes = b""
    received_s: float = 0.0
    body_bytes: int = 0
    buffered_bytes: int = 0
    complete: bool = False
    status: int = 0
    sent_bytes: int = 0
    model: str = ""
    model_version: str = ""
    replica: str = ""
    first_byte_s: float = 0.0
    stream_events: int = 0
    trace: bytes = b""
    estimated_tokens: int = 0
    under_way: int = 0
    refused_prompt: int = 0
    refused_completion: int = 0
    rate_headers: Pairs = ()
    more_headers: Pairs = ()
    ignored: Pairs = ()
    head_only: bool = False
    counted: bool = False
    weight: int = 1
    streams: bool = False
    sent_s: float = 0.0
    left_after_s: float = 0.0
    unread: bool = False
    held_up: bool = False
    refused_model: str = ""
    session: str = ""
    asked: TokenRequest = NO_TOKENS
    use: KeyUse | None = None

    def __init__(
        self, method: bytes, target: bytes, headers: dict[bytes, bytes], version: str, path: bytes | None = None
    ) -> None:
        """path: of the target, where it is known."""
        self.method = method
        self.target = target
        self.path = path_of(target) if path is None else path
        self.headers = headers
        self.version = version
        self.chunks: list[bytes] = []
        self.tokens = Tokens()
        self.refusal: HttpError | None = None
        self.spans: Spans | None = None

    def set_target(self, target: bytes) -> None:
        """target: path and query."""
        self.target = target
        self.path = path_of(target)

    @property
    def answer_headers(self) -> Pairs:
        """Headers of any answer to it, refused or not."""
        if not self.more_headers and not self.ignored:
            return self.rate_headers
        return [*self.rate_headers, *self.more_headers, *self.ignored]

    @property
    def trace_id(self) -> str:
        """The second field of its traceparent, empty without one."""
        return self.trace[3:35].decode()

    @property
    def ids(self) -> dict[str, str]:
        """Fields for its log lines (runtime.logs)."""
        return {
            "request_id": self.request_id.decode(),
            "key_id": self.caller.id if self.caller is not None else "",
            "model": self.model,
            "version": self.model_version,
            "replica": self.replica,
            "trace_id": self.trace_id,
        }

    @property
    def route_name(self) -> str:
        return self.route.name if self.route is not None else "unknown"

    @property
    def buffered(self) -> bool:
        """Whether the gateway buffers the whole body before it handles the request."""
        return self.route is None or self.route.kind is not Kind.CONTROL
