"""One inference request: place it, hold it, send it, retry or continue it.

Rules, in the order in which they bind:
- Until a byte of the engine's answer has gone to the client, a failure of the engine is nobody's business: the
  request is placed again (another replica, or held until one opens), at most MAX_ATTEMPTS times, so that a
  request that kills engines cannot kill them all.
- After that, a greedy stream goes on where another engine can write the same tokens (continuation.py); any other
  stream ends with an SSE error event.
- Bytes of a good answer are relayed as they are; what the client sees is answer.py's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from . import errors, wire
from .answer import ERROR_EVENT, Answer, error_event_code, event_error
from .continuation import ASK_FOR_TOKEN_IDS, CHAT, COMPLETIONS, RESUME_PATH
from .errors import ApiError
from .holds import Refusal, Ticket
from .request_check import Checked, with_model
from .router import Choice
from .upstream import UpstreamConnection
from .usage import ASK_FOR_USAGE
from .wire import Request

if TYPE_CHECKING:
    from .gateway import Gateway
    from .server import ClientConnection

log = logging.getLogger("appliance.gateway")

MAX_ATTEMPTS: Final = 3
ERROR_BODY_BYTES: Final = 64 * 1024
_JSON: Final = b"application/json"
_HELD_COMMENT: Final = b": held\n\n"


class Exchange:
    """See the module's docstring. `answer.client` is None once the client is gone or the response is finished."""

    # Defaults stand in the class, as wire.Request says.
    _conn: UpstreamConnection | None = None
    _held_since_s: float = 0.0
    _hold_deadline_s: float = 0.0
    _attempts: int = 0
    _relayed: bool = False
    _continued: bool = False
    _kept: list[bytes] | None = None
    _kept_bytes: int = 0
    _progress_s: float = 0.0
    _comment_s: float = 0.0
    _alone: bool = False
    _sent_s: float = 0.0
    _first_byte_s: float = 0.0

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request, checked: Checked) -> None:
        route = request.route
        assert route is not None
        self.gateway = gateway
        self.request = request
        self.checked = checked
        self._path = route.path
        self._row = checked.model
        self._choice: Choice | None = None
        self._ticket: Ticket[Exchange] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._body = request.chunks[0]
        request.chunks = []
        asks = checked.stream and not checked.asks_usage and route.name in (CHAT, COMPLETIONS)
        self.answer = Answer(client, request, hides_usage=asks)
        # The body is an object that was checked; of two fields of one name the engine takes the last.
        if asks:
            self._body = self._body[: self._body.rindex(b"}")] + ASK_FOR_USAGE
        if checked.continuation is not None:
            self._body = self._body[: self._body.rindex(b"}")] + ASK_FOR_TOKEN_IDS

    @property
    def row(self) -> str:
        """The row of the table it counts for: that of the canary while it is there, else its model's."""
        return self.checked.model if self._choice is None else self._choice.model

    @property
    def waiting_prompt_tokens(self) -> int:
        """Estimated prompt tokens if it is known to have no first token yet. At a replica only streams say so."""
        at_replica = self._choice is not None and self.checked.stream and not self._relayed
        return self.checked.prompt_tokens if self._ticket is not None or at_replica else 0

    # -- Handler

    def start(self) -> None:
        self.place(self.request.received_s)

    def body(self, data: bytes) -> None:
        raise AssertionError("an inference request starts when its body is complete")

    def body_end(self) -> None:
        raise AssertionError("an inference request starts when its body is complete")

    def client_lost(self) -> None:
        self.answer.client = None
        self._leave_queue()
        self._drop_upstream()

    def client_paused(self, paused: bool) -> None:
        conn = self._conn
        if conn is not None:
            if paused:
                conn.pause_reading()
            else:
                self._progress_s = time.monotonic()
                conn.resume_reading()

    def cancel(self, error: ApiError) -> None:
        """End the request from outside (revoked key, shutdown)."""
        self._leave_queue()
        self._drop_upstream()
        self._fail(error)

    def tick(self, now_s: float) -> None:
        if self._ticket is not None:
            if self.checked.stream and now_s >= self._comment_s:
                self._comment(now_s)
        elif self._conn is not None and self.answer.client is not None and not self.answer.client.write_paused:
            if now_s - self._progress_s > self.gateway.limits.upstream_silence_s:
                self.gateway.metrics.events["upstream_silent"] += 1
                log.warning("the engine was silent for too long", extra=self.request.ids)
                self._drop_upstream(failed=True)
                self._fail(errors.engine_failed(504))

    # -- placing

    def place(self, now: float = 0.0) -> None:
        """Send the request to a replica that can take it, or hold it. now: the monotonic clock, if it was just read."""
        gateway, checked = self.gateway, self.checked
        if checked.model not in gateway.router.models:
            # It was there when the request came: the model, or this version of it, went while it waited.
            self._leave_queue()
            self._fail(gateway.unknown_model(checked.model, self.request.principal))
            return
        now = now or time.monotonic()
        # Whoever waits goes first, or a stream of new requests could starve them.
        if self._ticket is None and gateway.holds.count and gateway.holds.held(checked.model):
            self._hold(now)
            return
        choice = self._choose(now)
        if choice is None:
            if self._continued and self._row != checked.model:
                # The canary is gone in the middle of its stream; what the other version would go on with is no answer.
                self._fail(errors.engine_failed())
                return
            if self._ticket is None:
                self._hold(now)
            return
        if self._ticket is not None:
            self._leave_queue()
        replica, request = choice.replica, self.request
        self._choice, self._row = choice, choice.model
        self._alone = choice.load.inflight == 1
        request.replica, request.model_version = replica.id, replica.version
        gateway.changed()
        conn = gateway.pool.acquire(replica.socket)
        if conn is not None:
            self._send(conn)
        else:
            self._connecting = gateway.pool.connect(replica.socket, self._connected)

    def _choose(self, now: float) -> Choice | None:
        """The canary takes its share while it can; what failed there, and what it has no room for, the model takes."""
        router, checked = self.gateway.router, self.checked
        if self._continued:
            if self._row not in router.models:
                return None
            return router.choose(self._row, checked.tokens, checked.stream, checked.prefix, now)
        choice = None
        if not self._attempts:
            canary = None
            if router.models[checked.model].canary is not None:
                principal = self.request.principal
                canary = router.canary_for(checked.model, principal.id if principal else "", checked.conversation)
            if canary is not None:
                choice = router.choose(canary, checked.tokens, checked.stream, checked.prefix, now)
        return choice or router.choose(checked.model, checked.tokens, checked.stream, checked.prefix, now)

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        if self.answer.client is None or self._choice is None:
            if isinstance(result, UpstreamConnection):
                self.gateway.pool.put(result)
        elif isinstance(result, OSError):
            # Nothing was sent: this costs the request no attempt, only the replica its good name.
            self.gateway.metrics.events["connect_failed"] += 1
            log.warning("the engine's socket cannot be reached: %s", result, extra=self.request.ids)
            self._undispatch(failed=True)
            self.place()
        else:
            self._send(result)

    def _send(self, conn: UpstreamConnection) -> None:
        request = self.request
        now = time.monotonic()
        if not self._attempts and not self._held_since_s:
            self.gateway.metrics.added.observe(now - request.received_s)
        self._conn = conn
        self._progress_s = now
        self._kept, self._kept_bytes = None, 0
        # Not the client's id, and a new one for each attempt: an engine must never see one twice.
        engine_id = self.gateway.new_request_id()
        self._sent_s, self._first_byte_s = now, 0.0
        body, model = self._body, self.gateway.router.models.get(self._row)
        if model is not None and model.adapter:
            body = with_model(body, model.adapter)
        elif self._row != self.checked.model:
            body = with_model(body, self._row)
        trace = request.trace if request.spans is None else request.spans.attempt(request)
        conn.start(self, wire.engine_request(self._path, engine_id, body, trace))
        client = self.answer.client
        if client is not None and client.write_paused:
            conn.pause_reading()

    def _hold(self, now: float) -> None:
        gateway = self.gateway
        if not self._held_since_s:
            self._held_since_s = now
            hold_s = min(gateway.router.models[self.checked.model].hold_s, gateway.config.holds.hold_s)
            self._hold_deadline_s = now + hold_s
            self._comment_s = now + gateway.config.holds.sse_grace_s
        result = gateway.holds.add(self.checked.model, self, len(self._body), self._hold_deadline_s, now)
        if isinstance(result, Refusal):
            self.hold_refused(result)
            return
        self._ticket = result
        if self.request.spans is not None:
            self.request.spans.hold()
        gateway.metrics.events["held"] += 1
        gateway.held(self.checked.model)

    def hold_refused(self, refusal: Refusal) -> None:
        """It may not wait (any longer). Its ticket is already out of the queue."""
        self._ticket = None
        self.gateway.metrics.events["hold_refused"] += 1
        log.info("held no longer: %s", refusal.value, extra=self.request.ids)
        self._fail(
            errors.unavailable(
                f"The model `{self.checked.model}` is not ready: {refusal.value}. Please retry.",
                "model_not_ready",
                self.gateway.config.holds.retry_after_s,
            )
        )

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            if self.request.spans is not None:
                self.request.spans.unhold()
            if self.gateway.holds.remove(ticket):
                self.gateway.metrics.held_for.observe(time.monotonic() - self._held_since_s)
                self.gateway.changed()

    def _comment(self, now_s: float) -> None:
        self._comment_s = now_s + self.gateway.config.holds.sse_interval_s
        if not self.answer.head_sent:
            self.answer.begin_stream(None)
        self.answer.write(_HELD_COMMENT)

    # -- the engine's answer

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        if done:
            self._conn = None
        if self.answer.client is None:
            return
        now = self._progress_s = conn.read_s
        if self._relayed:
            self._relay(body, done)
            return
        named = conn.headers.get(wire.VERSION)
        if named is not None and not self._is_adapter():
            # The engine knows what its first token came from. The table may be a moment behind a swap.
            self.request.model_version = named.decode("latin-1")
        status, kind = conn.status, conn.headers.get(b"content-type", _JSON)
        if status == 200 and kind.startswith(b"text/event-stream"):
            self._first_of_stream(body, done, now)
            return
        if done and status < 400 and self._kept is None:
            self._whole(status, kind, body, now)
            return
        kept = self._kept
        if kept is None:
            kept = self._kept = []
        kept.append(body)
        self._kept_bytes += len(body)
        if status >= 400:
            if self._kept_bytes > ERROR_BODY_BYTES:
                self._drop_upstream()
                self._refused(status, b"")
            elif done:
                self._refused(status, b"".join(kept), conn)
        elif done:
            self._whole(status, kind, b"".join(kept), now)
        elif self._kept_bytes > self.gateway.limits.buffered_response_bytes:
            self._first_bytes(now)
            length = conn.headers.get(b"content-length")
            self.answer.begin_body(kind, int(length) if length is not None else None, self._version())
            self._kept = None
            self.answer.write(b"".join(kept))

    def _first_of_stream(self, body: bytes, done: bool, now: float) -> None:
        if body.startswith(ERROR_EVENT) and self._first_event_fails(body, done):
            return
        if body:
            self._first_bytes(now)
            if self.answer.head_sent:
                self.answer.write(b": version %b\n\n" % self._version())
            else:
                self.answer.begin_stream(self._version())
            self._relay(body, done)
        elif done:
            self._retry(errors.engine_failed())

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        self._conn = None
        if self.answer.client is None:
            return
        stale = conn.reused and not conn.answered
        if not stale:
            self.gateway.metrics.events["upstream_died"] += 1
            log.warning("the engine broke off", extra=self.request.ids)
        if self._relayed:
            self._undispatch(failed=True)
            self._continue_or_fail(errors.engine_failed())
        elif stale:
            # The engine had closed an idle connection just as we used it: no failure, a fresh one will do.
            self._undispatch(failed=False)
            self.place()
        else:
            self._retry(errors.engine_failed())

    def upstream_paused(self, paused: bool) -> None:
        return  # the request was written whole; nothing of it can be paused

    def _retry(self, otherwise: ApiError, *, blame: bool = True) -> None:
        self._attempts += 1
        if not blame:
            self._count(failed=True)
        self._undispatch(failed=blame)
        if self._attempts >= MAX_ATTEMPTS:
            self._fail(otherwise)
            return
        self.gateway.metrics.events["retried"] += 1
        self.place()

    def _continue_or_fail(self, error: ApiError) -> None:
        """The engine is gone in the middle of a stream: another one writes the rest, if that is possible."""
        continuation, model = self.checked.continuation, self.gateway.router.models.get(self.checked.model)
        self._attempts += 1
        if continuation is None or model is None or self._attempts >= MAX_ATTEMPTS:
            self._fail(error)
            return
        if not continuation.can_resume(model.max_model_len):
            self._fail(error)
            return
        body = continuation.resume_body(model.max_model_len)
        self.gateway.metrics.events["continued"] += 1
        log.info("the stream is continued on another engine", extra=self.request.ids)
        if body is None:
            self.answer.end(continuation.ending())
            return
        self._path, self._body = RESUME_PATH, body
        self._relayed = False
        self._continued = True
        # It is held anew, if no engine is there: with the whole time that the model's requests may wait.
        self._held_since_s = 0.0
        self.place()

    def _refused(self, status: int, body: bytes, conn: UpstreamConnection | None = None) -> None:
        """A complete error answer of the engine, nothing relayed yet."""
        error = errors.from_upstream(status, body)
        if conn is not None:
            error.retry_after_s = wire.retry_after_s(conn.headers)
            if error.retry_after_s is not None:
                error.retry_after_s = min(error.retry_after_s, errors.MAX_RETRY_AFTER_S)
        moved = status == 404 and error.message.startswith("The model ")
        if moved or _engine_dead(error):
            # A dying engine answers 500 before it vanishes; a 404 for a model of our table means that the engine
            # was given another one a moment ago. Both pass with the next table. Any other 500 is the request's
            # own: retrying it, or avoiding the replica for it, would let one client starve the others.
            if moved:
                error = errors.unavailable(error.message, "model_not_ready", self.gateway.config.holds.retry_after_s)
            # An adapter that nobody has any more says nothing about the engine, which serves its base and others.
            self._retry(error, blame=not (moved and self._is_adapter()))
            return
        if status in (401, 403):
            error = errors.engine_failed()
        elif status == 404 and error.message == "Not Found":
            error = errors.wrong_task(self.checked.model, self.request.route_name)
        self._end_dispatch(failed=status >= 500)
        self._fail(error)

    def _first_event_fails(self, body: bytes, done: bool) -> bool:
        """True if a stream that begins with a server error could be handled without telling the client."""
        if error_event_code(body) is None:
            return False
        error = event_error(body)
        if not _engine_dead(error):
            return False
        if not done:
            self._drop_upstream(failed=True)
        self._retry(error)
        return True

    def _first_bytes(self, now: float) -> None:
        request, choice = self.request, self._choice
        assert choice is not None
        self._relayed = True
        self._first_byte_s = now
        self.gateway.router.succeed(choice)
        if not self._continued:
            request.first_byte_s = now
            self.gateway.metrics.first_byte(request, now)
            if self._alone and self.checked.stream and choice.load.inflight == 1:
                self.gateway.metrics.prefilled(choice.model, self.checked.prompt_tokens, now - self._sent_s)

    def _whole(self, status: int, content_type: bytes, body: bytes, now: float) -> None:
        self._first_bytes(now)
        version = self._version()
        self._end_dispatch(failed=False)
        self.answer.whole(status, content_type, body, version, now)

    def _relay(self, body: bytes, done: bool) -> None:
        continuation = self.checked.continuation if self.answer.sse else None
        if continuation is not None:
            # The engine's death, as its own last event says it, must not reach a client whose stream will go on.
            at = body.find(ERROR_EVENT)
            if at >= 0 and error_event_code(body[at:]) is not None:
                error = event_error(body[at:])
                if _engine_dead(error):
                    self.answer.relay(continuation.take(body[:at]))
                    self._drop_upstream(failed=True)
                    self._continue_or_fail(error)
                    return
            body = continuation.take(body)
        if not done:
            if body:
                self.answer.relay(body)
            return
        if self.answer.ends_well(body):
            self._end_dispatch(failed=self.answer.error_seen or body.find(ERROR_EVENT) >= 0)
            self.answer.end(body)
            return
        self.answer.relay(body)
        self.gateway.metrics.events["stream_unfinished"] += 1
        if continuation is None:
            self._count(failed=True)
        self._undispatch(failed=continuation is not None)
        self._continue_or_fail(errors.engine_failed())

    def _fail(self, error: ApiError) -> None:
        if self.answer.client is not None and self.answer.head_sent and self.answer.sse:
            self.gateway.metrics.events["stream_error"] += 1
        self.answer.fail(error)

    def _is_adapter(self) -> bool:
        model = self.gateway.router.models.get(self._row)
        return model is not None and bool(model.adapter)

    def _version(self) -> bytes:
        return self.request.model_version.encode("latin-1")

    # -- bookkeeping

    def _drop_upstream(self, *, failed: bool = False) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._conn is not None:
            conn, self._conn = self._conn, None
            conn.abort()
        self._undispatch(failed=failed)

    def _undispatch(self, *, failed: bool) -> None:
        if self._choice is not None and failed:
            self.gateway.router.fail(self._choice, time.monotonic())
        self._end_dispatch(failed=True if failed else None)

    def _end_dispatch(self, *, failed: bool | None) -> None:
        """failed: what it counts as in a comparison of versions; None: as nothing."""
        if failed is not None:
            self._count(failed=failed)
        if self.request.spans is not None:
            self.request.spans.attempt_ended(bool(failed))
        if self._choice is not None:
            choice, self._choice = self._choice, None
            self.gateway.ended(choice)

    def _count(self, *, failed: bool) -> None:
        if not self.gateway.comparison.compares:
            return
        choice, now, first_s = self._choice, time.monotonic(), self._first_byte_s
        if choice is not None:
            self.gateway.comparison.add(
                self.checked.model,
                choice.replica.version,
                failed=failed,
                first_byte_s=first_s - self._sent_s if first_s else None,
                duration_s=now - self._sent_s,
            )


def _engine_dead(error: ApiError) -> bool:
    # vLLM's EngineDeadError, as its HTTP handlers and its stream generators spell it.
    return error.status >= 500 and "EngineCore" in error.message
