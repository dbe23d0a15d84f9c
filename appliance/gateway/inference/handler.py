"""Handles one inference request: places and sends it (placement.py), relays its answer, retries or continues it.

Rules, in the order in which they bind:
- Until the client has received a byte of the engine's answer, it does not see an engine failure: the handler places the
  request again (another replica, or held until one opens), as often as retry.py allows.
- After that, a greedy stream continues if another engine can generate the same tokens (continuation.py); any other
  stream ends with an SSE error event.
- It relays the bytes of a good answer unchanged; answer.py decides what the client sees.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from appliance.gateway.answers.continuation import RESUME_PATH, Continuation
from appliance.gateway.answers.transcript import Transcript
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import PROMPT_FIELDS
from appliance.gateway.http import wire
from appliance.gateway.http.upstream import UpstreamConnection
from appliance.gateway.inference.answer import ERROR_EVENT, error_event_code, event_error
from appliance.gateway.inference.placement import Placement
from appliance.gateway.inference.retry import TRIAL_S, Verdict, is_suspect, verdict_on
from appliance.gateway.payload.request_check import with_fields
from appliance.gateway.routing.router import Model

log = logging.getLogger("appliance.gateway")

ERROR_BODY_BYTES: Final = 64 * 1024
# Largest answer of an engine to a token-counting request.
TOKEN_IDS_BYTES: Final = 64 << 20
_JSON: Final = b"application/json"
_EVENT_STREAM: Final = b"text/event-stream"


class InferenceHandler(Placement):
    """See the module's docstring."""

    # -- Handler

    def start(self) -> None:
        self.place(self.request.received_s)

    def client_lost(self) -> None:
        self._left()
        self.answer.client = None
        self._leave_queue()
        self._drop_upstream()

    def _left(self) -> None:
        """The client no longer waits. If an engine is computing for it, the key is charged for that."""
        attempt = self._attempt
        if attempt.conn is not None and self.answer.client is not None:
            self.request.left_after_s = max(time.monotonic() - attempt.sent_s, 1e-6)
            self.request.unread = self.answer.client.write_paused

    def client_paused(self, paused: bool) -> None:
        attempt = self._attempt
        conn = attempt.conn
        if conn is not None:
            if paused:
                conn.pause_reading()
            else:
                attempt.progress_s = time.monotonic()
                conn.resume_reading()

    def cancel(self, error: HttpError) -> None:
        """End the request from outside (revoked key, shutdown)."""
        if error.status < 500:
            self._left()
        self._leave_queue()
        self._drop_upstream()
        self._fail(error)

    def tick(self, now_s: float) -> None:
        attempt = self._attempt
        if attempt.ticket is not None:
            if self.checked.stream and now_s >= attempt.comment_s:
                self._comment(now_s)
            return
        if attempt.conn is None:
            return
        if attempt.alone and attempt.choice is not None and now_s - attempt.sent_s > TRIAL_S:
            self.state.acquit(attempt.choice)
        if self.answer.client is not None and not self.answer.client.write_paused:
            if now_s - attempt.progress_s > self.state.limits.upstream_silence_s:
                self._silent()

    def _silent(self) -> None:
        """It waits no longer. The engine is to blame if it gives no sign of life; otherwise this request waited in its
        queue, or asked for a long answer, and pays like one whose client leaves. (When engines were always blamed, they
        got no requests for a while, and clients that asked for so much paid nothing.)"""
        self.state.metrics.events["upstream_silent"] += 1
        log.warning("the engine was silent for too long", extra=self.request.ids)
        choice = self._attempt.choice
        hangs = choice is not None and self.state.router.hangs(choice)
        if not hangs:
            self._left()
        self._drop_upstream(failed=hangs)
        self._fail(errors.engine_failed(504))

    # -- the engine's answer

    def upstream_data(self, conn: UpstreamConnection, body: bytes, done: bool) -> None:
        attempt = self._attempt
        if done:
            attempt.conn = None
        if self.answer.client is None:
            return
        now = attempt.progress_s = conn.read_s
        if attempt.relayed:
            self._relay(body, done)
            return
        named = conn.headers.get(wire.VERSION)
        if named is not None and not self._may_be_adapter():
            # The engine knows the version of its first token; the table may lag behind a swap.
            self.request.model_version = named.decode("latin-1")
        status, kind = conn.status, conn.headers.get(b"content-type", _JSON)
        if status == 200 and kind[: len(_EVENT_STREAM)] == _EVENT_STREAM:
            self._first_of_stream(body, done, now)
            return
        if done and status < 400 and attempt.kept is None:
            self._whole(status, kind, body, now)
            return
        kept = attempt.kept
        if kept is None:
            kept = attempt.kept = []
        kept.append(body)
        attempt.kept_bytes += len(body)
        if status >= 400:
            if attempt.kept_bytes > ERROR_BODY_BYTES:
                self._drop_upstream()
                self._refused(status, b"")
            elif done:
                self._refused(status, b"".join(kept), conn)
        elif done:
            self._whole(status, kind, b"".join(kept), now)
        elif attempt.kept_bytes > self._buffered_bytes():
            self._first_bytes(now)
            if self.checked.transcript is not None and self.checked.transcript.stores:
                self.state.metrics.events["responses_not_stored"] += 1
            length = conn.headers.get(b"content-length")
            self.answer.begin_body(kind, int(length) if length is not None else None, self._version())
            attempt.kept = None
            self.answer.relay(b"".join(kept))

    def _buffered_bytes(self) -> int:
        """How much of a plain answer to buffer: one to be stored or counted is needed whole."""
        transcript, limits = self.checked.transcript, self.state.limits
        if transcript is None:
            return limits.buffered_response_bytes
        if transcript.counts:
            return TOKEN_IDS_BYTES
        return max(limits.buffered_response_bytes, limits.stored_response_bytes if transcript.stores else 0)

    def _first_of_stream(self, body: bytes, done: bool, now: float) -> None:
        if body.startswith(ERROR_EVENT) and self._first_event_fails(body):
            return
        if body:
            self._first_bytes(now)
            if self.answer.head_sent:
                self.answer.write(b": version %b\n\n" % self._version())
            else:
                self.answer.begin_stream(self._version())
            self._relay(body, done)
        elif done:
            self._failed(errors.engine_failed())

    def upstream_lost(self, conn: UpstreamConnection) -> None:
        attempt = self._attempt
        attempt.conn = None
        if self.answer.client is None:
            return
        if conn.malformed:
            # This concerns only this request: its engine lives, and others need not avoid it.
            self.state.metrics.events["upstream_malformed"] += 1
            log.error("the head of an engine's answer cannot be read", extra=self.request.ids)
            self._failed(errors.engine_failed(), died=False, blame=False)
            return
        if conn.reused and not conn.answered:
            # Either the engine had just closed an idle connection, which is not a failure, or it died. A dead one takes
            # no new connection.
            attempt.reconnects = True
            attempt.connecting = self.state.pool.connect(conn.path, self._connected)
            return
        self.engine_lost()

    def engine_lost(self) -> None:
        self.state.metrics.events["upstream_died"] += 1
        log.warning("the engine broke off", extra=self.request.ids)
        self._failed(errors.engine_failed())

    def _failed(self, error: HttpError, *, died: bool = True, blame: bool = True) -> None:
        """The attempt failed: send the request again, let another engine continue it, or report the error. died:
        whether the engine did. blame: avoid its replica for a moment."""
        attempt, now = self._attempt, time.monotonic()
        choice, deaths, suspect = attempt.choice, attempt.deaths, False
        if died and choice is not None:
            of_this_one = self.state.router.died(choice, now)
            if attempt.broke_off(choice.replica.id):
                deaths = max(deaths + of_this_one, 1)
            suspect = of_this_one and is_suspect(now - attempt.sent_s, attempt.relayed)
        if not blame:
            self._count(failed=True)
        self._drop_upstream(failed=blame)
        continuation, model = self.checked.continuation, self.state.router.models.get(self.checked.model)
        resumable = continuation is not None and model is not None and continuation.can_resume(model.max_model_len)
        verdict = verdict_on(
            attempt.number + 1,
            deaths,
            attempt.echoes,
            relayed=attempt.relayed,
            resumable=resumable,
            unreached=attempt.unreached,
        )
        if verdict is Verdict.FAIL:
            self._fail(error)
        elif verdict is Verdict.CONDEMN:
            self.state.metrics.events["condemned"] += 1
            log.warning("two engines died of this request: it is not sent again", extra=self.request.ids)
            self._fail(errors.engines_died_of_it())
        elif verdict is Verdict.AGAIN:
            self.state.metrics.events["retried"] += 1
            self._attempt = attempt.after_failure(deaths, alone=suspect)
            self.place()
        else:
            assert continuation is not None and model is not None
            self._continue(continuation, model, deaths)

    def _continue(self, continuation: Continuation, model: Model, deaths: int) -> None:
        """The engine died in mid-stream: another one generates the rest."""
        body = continuation.resume_body(model.max_model_len)
        self.state.metrics.events["continued"] += 1
        log.info("the stream is continued on another engine", extra=self.request.ids)
        if body is None:
            ending = continuation.ending()
            self.answer.end(ending if self.checked.transcript is None else self._noted(ending, done=True))
            return
        self._attempt = self._attempt.continued(deaths, RESUME_PATH, with_fields(body, self._salt))
        self.place()

    def _refused(self, status: int, body: bytes, conn: UpstreamConnection | None = None) -> None:
        """A complete error answer of the engine, nothing relayed yet."""
        if conn is not None and wire.UNREACHED in conn.headers:
            # The node of this engine is gone, and no byte of the request got there: no engine died because of it.
            self.state.metrics.events["upstream_unreached"] += 1
            self._attempt.unreached += 1
            self._failed(errors.engine_failed(), died=False)
            return
        route = self.request.route
        error = errors.from_upstream(status, body, PROMPT_FIELDS.get(route.name if route is not None else "", "input"))
        if conn is not None:
            error.retry_after_s = wire.retry_after_s(conn.headers)
            if error.retry_after_s is not None:
                error.retry_after_s = min(error.retry_after_s, errors.MAX_RETRY_AFTER_S)
            if status < 500 and wire.COMPUTED in conn.headers:
                prompt, written = wire.computed(conn.headers[wire.COMPUTED])
                self.request.refused_prompt += prompt
                self.request.refused_completion += written
        moved = status == 404 and error.message.startswith("The model ")
        if moved or _engine_dead(error):
            # A dying engine answers 500 before it ends; a 404 for a model in our table means that the engine has just
            # swapped to another one. The next table resolves both. Any other 500 is the request's own fault: retrying
            # it, or avoiding the replica, would let one client starve the others.
            if moved:
                error = errors.unavailable(error.message, "model_not_ready", self.state.config.holds.retry_after_s)
            # A missing adapter is not a fault of the engine, which still serves its base and other adapters.
            self._failed(error, died=not moved, blame=not (moved and self._may_be_adapter()))
            return
        if status in (401, 403):
            error = errors.engine_failed()
        elif status == 404 and error.message == "Not Found":
            error = errors.wrong_task(self.checked.model, self.request.route_name)
        if status < 500 and self.asks_the_other_version(error):
            return
        self._end_dispatch(failed=True if status >= 500 else None)
        self._fail(error)

    def _first_event_fails(self, body: bytes) -> bool:
        """True if a stream that begins with an error could be handled without telling the client."""
        if error_event_code(body) is None:
            return False
        error = event_error(body)
        if not _engine_dead(error):
            return error.status < 500 and self.asks_the_other_version(error)
        self._failed(error)
        return True

    def _first_bytes(self, now: float) -> None:
        request, attempt = self.request, self._attempt
        choice = attempt.choice
        assert choice is not None
        attempt.relayed = True
        attempt.first_byte_s = now
        self.state.router.succeed(choice)
        if attempt.alone:
            self.state.acquit(choice)
        if self.checked.stream:
            self.state.router.started(choice)
        if not attempt.continues:
            request.first_byte_s = now
            self.state.metrics.first_byte(request, now)
            if self.checked.stream:
                self.state.metrics.first_token(choice.model, now - request.received_s)
            if attempt.only and self.checked.stream and choice.load.inflight == 1:
                self.state.metrics.prefilled(choice.model, self.checked.prompt_tokens, now - attempt.sent_s)

    def _whole(self, status: int, content_type: bytes, body: bytes, now: float) -> None:
        self._first_bytes(now)
        version = self._version()
        transcript = self.checked.transcript
        if transcript is not None:
            self._check_room(transcript, body)
            body = transcript.whole(body)
            self._ended(transcript)
        self._end_dispatch(failed=False)
        self.answer.whole(status, content_type, body, version, now)

    def _check_room(self, transcript: Transcript, body: bytes) -> None:
        """Call before the response object is created, because the object says whether it is stored."""
        caller = self.request.caller
        owner, size = "" if caller is None else caller.owner, len(transcript.input) + transcript.held + len(body)
        if transcript.stores and not self.copies.has_room(owner, size):
            transcript.forgo()
            self.state.metrics.events["responses_not_stored"] += 1

    def _ended(self, transcript: Transcript) -> None:
        """After a complete answer, note its cost and send a copy of what must be stored to the controller."""
        caller, tokens = self.request.caller, self.request.tokens
        if transcript.final and transcript.tells_usage:
            tokens.prompt, tokens.completion = transcript.prompt_tokens, transcript.completion_tokens
        if transcript.final and transcript.stores and caller is not None:
            self.copies.add(caller.owner, transcript.copy(caller.id))
        transcript.final = b""

    def _noted(self, body: bytes, *, done: bool) -> bytes:
        """The part of a stream's bytes that goes to the client, once its transcript has read them."""
        transcript, limits = self.checked.transcript, self.state.limits
        assert transcript is not None
        self._check_room(transcript, body)
        before = transcript.held
        body = transcript.take(body, limits.stored_response_bytes, last=done)
        if transcript.held > before:
            try:
                self.state.take_body(self.request, transcript.held - before)
            except HttpError:
                transcript.forgo()
                self.state.metrics.events["responses_not_stored"] += 1
        self._ended(transcript)
        return body

    def _relay(self, body: bytes, done: bool) -> None:
        continuation = self.checked.continuation if self.answer.sse else None
        if continuation is not None:
            # An engine's last event reports its death; it must not reach a client whose stream will continue.
            at = body.find(ERROR_EVENT)
            if at >= 0 and error_event_code(body[at:]) is not None:
                error = event_error(body[at:])
                if _engine_dead(error):
                    body = continuation.take(body[:at])
                    self.answer.relay(body if self.checked.transcript is None else self._noted(body, done=False))
                    self._failed(error)
                    return
            body = continuation.take(body)
        # Comes after the continuation of a stream: only there do another engine's events have the stream's form and id.
        if self.checked.transcript is not None and self.answer.sse:
            body = self._noted(body, done=done)
        if not done:
            if body:
                self.answer.relay(body)
            return
        if self.answer.ends_well(body):
            self._end_dispatch(failed=self.answer.engine_failed(body))
            self.answer.end(body)
            return
        self.answer.relay(body)
        self.state.metrics.events["stream_unfinished"] += 1
        self._failed(errors.engine_failed(), blame=continuation is not None)

    def _version(self) -> bytes:
        return self.request.model_version.encode("latin-1")


def _engine_dead(error: HttpError) -> bool:
    return errors.engine_dead(error)
