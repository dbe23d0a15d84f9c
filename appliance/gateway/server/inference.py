"""Answers one inference request: gets a place on a replica, sends the request, relays the answer, retries.

`Inference.answer` is the main loop; the other methods follow in the order of their calls. Rules:
- Before the client has a byte of an engine's answer, failures of engines stay hidden: the request goes to another
  replica, or waits for one, at most three times. A request may be the cause of an engine's death, so after two deaths
  it is not sent again.
- Later, a greedy stream continues if another engine can generate the same tokens (requests/answers.py); any other
  stream ends with an error event.
- The bytes of a successful answer pass unchanged, except for the changes of `_rewrite`.
- A request of class batch (header `x-appliance-class: batch`) yields to interactive requests and does not
  count as demand."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import aiohttp
import orjson
from aiohttp.http import HttpProcessingError
from aiohttp.http import RawResponseMessage as Head

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.router import Choice, Ticket
from appliance.gateway.core.routes import INPUT_TOKENS, RESPONSES
from appliance.gateway.core.table import Model, cache_salt
from appliance.gateway.requests.answers import CHAT, COMPLETIONS, RESUME_PATH, USAGE, token_count
from appliance.gateway.requests.request_check import Checked, with_fields
from appliance.gateway.server.controller import Controller
from appliance.gateway.server.exchange import VERSION, Exchange, error_event
from appliance.gateway.server.state import State, read_up_to
from weights.format.names import policy_of

log = logging.getLogger("appliance.gateway")

# Limit on an engine's answer to a request that only counts tokens.
_TOKEN_IDS_BYTES: Final = 64 << 20
_HEAD: Final = (
    b"POST %b HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"x-request-id: %b\r\nx-vllm-priority: %d\r\n%b\r\n"
)
_EVENT: Final = b'data: {"'
_FINISHED: Final = b'"finish_reason":"'
_NO_CHOICES: Final = b'"choices":[],'
_LAST: Final = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
# No answer's usage object is longer than this.
_USAGE_BYTES: Final = 1024
TOO_LATE: Final = "no replica became ready in time"
MAX_FAILURES: Final = 3
MAX_DEATHS: Final = 2


class EngineFailure(enum.Enum):
    """Why an engine gave no answer, as text for the log. UNREACHED: the engine got no byte of the request. BROKEN: the
    answer is not HTTP or is truncated; the engine may still serve other requests."""

    UNREACHED = "cannot reach the engine"
    DIED = "the engine ended the answer early"
    BROKEN = "the engine's answer is incomplete"
    MOVED = "the engine now serves another model"


class AttemptFailed(Exception):
    """An attempt failed. error: the client's error if the request is not retried."""

    def __init__(self, reason: EngineFailure, error: HttpError | None = None) -> None:
        super().__init__(reason.value)
        self.reason, self.error = reason, error or errors.engine_failed()


class Inference:
    """One inference request. model: the name that the client used. body: the body for engines.

    failures: the last failure of each replica. failed: attempts that count towards MAX_FAILURES. waiting_since_s: start
    of the wait for an engine, 0.0 without a wait. answer_begun: the client has a byte of an answer. continues: another
    engine continues the stream. stream_ended: the last event arrived; without it, a complete HTTP message is a
    truncated stream. has_error: the engine reported an error in the stream."""

    def __init__(self, state: State, controller: Controller, exchange: Exchange, checked: Checked) -> None:
        caller, route = exchange.caller, exchange.route
        self.state, self.controller, self.exchange, self.checked = state, controller, exchange, checked
        self.model, self.path = checked.model, route.engine_path
        # Separates the owner's prefix cache entries from other owners' entries.
        salt = checked.data.get("cache_salt", "")
        salt = salt if state.config.prefix_cache_shared else cache_salt(caller.owner, salt)
        self.salt = {"cache_salt": salt} if salt else {}
        client_reads_usage = checked.data.get("stream_options", {}).get("include_usage") is True
        self.hides_usage = checked.stream and not client_reads_usage and route.name in (CHAT, COMPLETIONS)
        usage = {"stream_options": {"include_usage": True}} if self.hides_usage else {}
        token_ids = {"return_token_ids": True} if checked.continuation else {}
        self.body = orjson.dumps({**checked.data, **self.salt, **usage, **token_ids})
        checked.data = {}  # frees a large object, because the request may wait long
        checked.owner, checked.batch = caller.owner, exchange.use.batch
        checked.beginning = zlib.crc32(salt.encode(), checked.beginning)
        self.failures: dict[str, EngineFailure] = {}
        self.failed, self.waiting_since_s = 0, 0.0
        self.answer_begun = self.continues = self.stream_ended = self.has_error = False
        if not self.checked.batch:
            state.metrics.loads[self.model].arrived(checked.prompt_tokens, time.time())

    async def answer(self) -> None:
        """Answer the request, with retries. Raises HttpError."""
        exchange = self.exchange
        while True:
            choice, failed = await self._place(), None  # None: the attempt does not count for the canary
            try:
                await self._attempt(choice)
                failed = self.has_error
                return
            except HttpError:
                failed = True
                raise
            except AttemptFailed as failure:
                failed = True if failure.reason in (EngineFailure.DIED, EngineFailure.BROKEN) else None
                self._prepare_retry(failure, choice)
            finally:
                if failed is not None:
                    self.state.comparison.add(self.model, choice.replica.version, exchange, failed=failed)
                exchange.choice = None
                self.state.ended(choice)

    # -- a place

    async def _place(self) -> Choice:
        """Get a place on a replica, at once or after a wait. Raises HttpError."""
        state, work, exchange, model = self.state, self.checked, self.exchange, self.state.router.models.get(self.model)
        if model is None:
            raise state.unknown_model(self.model, exchange.caller)  # the model was removed during the wait
        # The canary takes its share; the model takes requests that failed on the canary or found it full.
        is_retry, caller = self.continues or self.failures, exchange.caller.id
        canary = () if is_retry else state.router.canary_for(model, caller, work.conversation)
        names = (*canary, exchange.routed_model if self.continues else self.model)
        host, choice = model.host or self.model, None
        # Waiting requests go first; otherwise new requests could starve them.
        is_first = state.holds.queues.keys().isdisjoint({(host, False), (host, work.batch)})
        if not work.sequences or is_first:
            choice = state.router.choose(names, work, time.monotonic(), self.failures)
        if choice is None and self.continues and exchange.routed_model != self.model:
            raise errors.engine_failed()  # only the canary's own version could continue its stream
        if choice is None:
            choice = await self._wait((host, work.batch), names)
        exchange.routed_model, exchange.choice = choice.model, choice
        exchange.replica, exchange.model_version = choice.replica.id, choice.replica.version
        return choice

    async def _wait(self, queue: tuple[str, bool], names: tuple[str, ...]) -> Choice:
        """Wait for a place. Raises HttpError 503 if the request may not wait, or has waited too long."""
        state, exchange = self.state, self.exchange
        self.waiting_since_s = self.waiting_since_s or time.monotonic()
        if state.next_try_s(self.model) is not None:
            raise state.not_ready(self.model, "its engines do not start")
        place: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        ticket = Ticket(self.model, queue, names, self.checked, self.failures, place)
        is_first = queue not in state.holds.queues
        if not state.holds.add(ticket):
            raise state.not_ready(self.model, "too many requests are waiting")
        exchange.routed_model, exchange.ticket = self.model, ticket
        state.metrics.events["held"] += 1
        if is_first:
            state.report_now()  # the report wakes a sleeping model
        pause_s = state.config.holds.sse_grace_s
        try:
            state.holds.place(state.router, time.monotonic())
            with self._span("hold"):
                while (left_s := self._wait_left_s()) > 0:
                    await asyncio.wait((place,), timeout=min(left_s, pause_s))
                    if place.done():
                        return place.result()
                    if self.checked.stream and pause_s < left_s:
                        # SSE comments, so that proxies keep the connection open.
                        if not exchange.connection.flow.write_paused:
                            await exchange.events(b": held\n\n")
                        pause_s = state.config.holds.sse_interval_s
                raise state.not_ready(self.model, TOO_LATE)
        except BaseException:
            if not state.holds.remove(ticket) and place.done() and place.exception() is None:
                state.ended(place.result())  # it was cancelled in the loop turn in which it got a place
            raise
        finally:
            exchange.ticket = None

    def _span(self, name: str, **attributes: str | int) -> AbstractContextManager[bytes]:
        """Trace a part of the request, if traces are exported. Yields the part's `traceparent`."""
        tracing = self.state.tracing
        return nullcontext(self.exchange.trace) if tracing is None else tracing.part(name, **attributes)

    def _wait_left_s(self) -> float:
        return self.waiting_since_s + self.state.config.holds.hold_s - time.monotonic()

    # -- one attempt

    async def _attempt(self, choice: Choice) -> None:
        """Send the request to an engine and relay its answer. Raises AttemptFailed if there is no complete answer, and
        HttpError. An early exit closes the engine's connection, which makes vLLM abort the request."""
        state, exchange, replica = self.state, self.exchange, choice.replica
        model = state.router.models.get(choice.model)
        # The name by which the engine knows the model.
        name = choice.model if model is None else model.adapter or model.pins or choice.model
        body = self.body if name == self.model else with_fields(self.body, model=name)
        if exchange.route.task == "embed":  # vLLM ignores the priority header for embeddings
            body = with_fields(body, priority=choice.priority)
        exchange.sent_s = time.monotonic()
        if not self.failures and not self.waiting_since_s:
            state.metrics.added.observe(exchange.sent_s - exchange.received_s)
        with self._span("attempt", replica=replica.id, version=replica.version, attempt=self.failed + 1) as trace:
            # A new id for each attempt instead of the client's: an engine must never get an id twice.
            ids = state.new_request_id(), choice.priority, b"traceparent: %b\r\n" % trace if trace else b""
            request = _HEAD % (self.path, len(body), *ids) + body
            try:
                connection = await state.engines.connect(replica.socket)
            except (aiohttp.ClientConnectorError, TimeoutError) as error:
                raise AttemptFailed(EngineFailure.UNREACHED) from error
            try:
                # A training rollout's long answer arrives in one piece, and its caller has its own timeout.
                patient = policy_of(self.model) is not None
                await self._relay(*await state.engines.send(connection, request, patient=patient), choice, model)
                connection.release()
            except aiohttp.SocketTimeoutError as error:
                raise errors.engine_failed(504) from error  # a retry would be just as slow
            except HttpProcessingError as error:
                raise AttemptFailed(EngineFailure.BROKEN) from error
            except (aiohttp.ClientError, OSError) as error:
                raise AttemptFailed(EngineFailure.DIED) from error
            finally:
                connection.close()  # does nothing after `release`

    async def _relay(self, head: Head, content: aiohttp.StreamReader, choice: Choice, model: Model | None) -> None:
        """Relay an answer by its status and type. model: the table row by which the request was placed."""
        state, exchange, replica, status = self.state, self.exchange, choice.replica, head.code
        # The engine reports the version that it used; the table may lag behind a swap.
        engine_version = head.headers.get("x-appliance-model-version")
        pinned = model is not None and choice.model == f"{model.pins}@{replica.version}"
        if pinned and engine_version not in (None, replica.version):
            raise self._moved(f"`{choice.model}` is no longer served.")
        if engine_version is not None and not self._may_be_adapter():
            exchange.model_version = engine_version
        if status >= 400:  # an error, whose body is rewritten before it is relayed
            body = await read_up_to(content)
            error = errors.from_upstream(status, body, exchange.route.prompt)
            if status == 404:
                raise self._moved(error.message)
            if status >= 500 and not await state.engines.is_alive(replica.socket):
                raise AttemptFailed(EngineFailure.DIED)
            raise error
        if head.headers.get("content-type", "").startswith("text/event-stream"):
            await self._relay_stream(content, choice)
        else:
            await self._relay_whole(head, content, choice)

    async def _relay_stream(self, content: aiohttp.StreamReader, choice: Choice) -> None:
        state, exchange, continuation = self.state, self.exchange, self.checked.continuation
        began, partial, version = False, b"", b""
        while piece := await content.readany():
            relayed: list[bytes] = []
            *events, partial = (partial + piece).split(b"\n\n")
            for event in events:
                # A dying engine's last event is an error, which must not reach a client whose stream can continue.
                if event.startswith(errors.ERROR_EVENT) and (not self.answer_begun or continuation is not None):
                    error = errors.from_event(event)
                    fails = error is not None and error.status >= 500
                    if fails and not await state.engines.is_alive(choice.replica.socket):
                        if began:
                            await exchange.events(b"".join(relayed), version)
                        raise AttemptFailed(EngineFailure.DIED)
                if not began:
                    began = True
                    self._begun(choice)
                    state.router.started(choice)
                    version = exchange.model_version.encode("latin-1")
                    if exchange.head_sent:  # because the request was held, or its stream continues
                        relayed.append(b": version %b\n\n" % version)
                relayed.append(self._rewrite(event))
            self._keep_copy()  # before the last event, after which the client may disconnect
            if began:
                await exchange.events(b"".join(relayed), version)
        if not self.stream_ended:
            dead = not began or continuation is not None
            raise AttemptFailed(EngineFailure.DIED if dead else EngineFailure.BROKEN)
        await exchange.finish()

    def _rewrite(self, event: bytes) -> bytes:
        """Rewrite an engine's event for the client; empty to drop it.

        It records events of a stored answer, reads usage, removes usage that the client did not request, and gives
        errors the API's format. All other events pass unchanged."""
        exchange, transcript, continuation = self.exchange, self.checked.transcript, self.checked.continuation
        if continuation is not None:
            event = continuation.event(event)
        if not event:
            return b""
        if transcript is not None:
            if max(len(event), transcript.held) > self.state.limits.stored_response_bytes:
                transcript.stores = False
            event = transcript.event(event)
        self._read_usage(event)
        if self.hides_usage and _FINISHED in event:
            # With usage, engines put `system_fingerprint` into the usage event, which is dropped.
            event = b'%b,"system_fingerprint":%b}' % (event[:-1], orjson.dumps(exchange.model_version))
        elif self.hides_usage and _NO_CHOICES in event:
            return b""
        self.stream_ended |= event.startswith(_LAST)
        # JSON strings escape quotes, so this counts events and never text inside them.
        exchange.stream_events += _EVENT in event
        if errors.ERROR_EVENT in event and (error := errors.from_event(event)) is not None:
            self.stream_ended = self.has_error = True
            return error_event(error, exchange, exchange.stream_events - 1)
        return event + b"\n\n"

    async def _relay_whole(self, head: Head, content: aiohttp.StreamReader, choice: Choice) -> None:
        """Buffer a non-streamed answer until it is complete, so that a retry stays possible, unless it is too long."""
        exchange, transcript, limits = self.exchange, self.checked.transcript, self.state.limits
        is_count = exchange.route.name == INPUT_TOKENS
        stores = transcript is not None and transcript.stores
        most = limits.stored_response_bytes if stores else limits.buffered_response_bytes
        most = _TOKEN_IDS_BYTES if is_count else most
        body = await read_up_to(content, most + 1)
        self._begun(choice)
        if exchange.head_sent:
            raise errors.engine_failed()  # SSE comments were sent, but the engine did not stream
        kind = head.headers.get("content-type", "application/json").encode("latin-1")
        headers = [(VERSION, exchange.model_version.encode("latin-1"))]
        if len(body) <= most:
            if transcript is not None:
                body = token_count(body) if is_count else transcript.whole(body)
                self._keep_copy()
            self._read_usage(body)
            await exchange.whole(head.code, kind, body, headers)
            return
        if stores:
            self.state.metrics.events["responses_not_stored"] += 1
        if (length := head.headers.get("content-length")) is not None:
            headers.append((b"content-length", length.encode()))
        await exchange.begin(200, [(b"content-type", kind), *headers])
        tail = b""
        while body:
            tail = tail[-_USAGE_BYTES:] + body  # usage may be split between two pieces
            self._read_usage(tail)
            await exchange.write(body)
            body = await content.readany()
        await exchange.finish()

    def _read_usage(self, body: bytes) -> None:
        """Read the usage in an answer. Answers of /v1/responses repeat the request, whose tools may contain usage-like
        text, so their usage comes from the transcript."""
        if self.exchange.route.name in (RESPONSES, INPUT_TOKENS):
            body = b"" if self.checked.transcript is None else self.checked.transcript.usage
        if USAGE in body:
            self.exchange.tokens.read(body)

    def _begun(self, choice: Choice) -> None:
        """Record that an engine's answer has begun."""
        now_s, exchange, metrics = time.monotonic(), self.exchange, self.state.metrics
        self.answer_begun, choice.load.failures = True, 0
        if self.continues:
            return
        exchange.first_byte_s = now_s
        if self.checked.batch:
            return
        metrics.first_byte(*metrics.series_of(exchange)).observe(now_s - exchange.received_s)
        if self.checked.stream and choice.load.inflight == 1:
            metrics.loads[choice.model].prefills.append((self.checked.prompt_tokens, now_s - exchange.sent_s))

    def _keep_copy(self) -> None:
        """Queue a complete answer's copy, if it must be stored."""
        transcript = self.checked.transcript
        if transcript is not None and transcript.final and transcript.stores:
            self.controller.keep(transcript.copy(self.exchange.caller.id))
            transcript.final = b""  # so that the copy is queued only once

    # -- failures

    def _moved(self, message: str) -> AttemptFailed:
        """Return the failure of an engine that just swapped to another model or version, or removed the adapter."""
        retry_s = self.state.config.holds.retry_after_s
        return AttemptFailed(EngineFailure.MOVED, errors.unavailable(message, "model_not_ready", retry_s))

    def _prepare_retry(self, failure: AttemptFailed, choice: Choice) -> None:
        """Prepare the next attempt. Raises HttpError if there is no further attempt."""
        state, exchange, reason, now_s = self.state, self.exchange, failure.reason, time.monotonic()
        state.metrics.events[f"upstream_{reason.name.lower()}"] += 1
        log.warning("%s", reason.value, extra=exchange.ids)
        adapter_is_gone = reason is EngineFailure.MOVED and self._may_be_adapter()
        if reason is not EngineFailure.BROKEN and not adapter_is_gone:
            state.router.fail(choice, now_s)
        if reason is EngineFailure.UNREACHED:
            self.waiting_since_s = self.waiting_since_s or exchange.sent_s
            if self._wait_left_s() <= 0:
                raise state.not_ready(self.model, TOO_LATE)
            return
        self.waiting_since_s = 0.0
        self.failed += 1
        self.failures[choice.replica.id] = reason
        if [*self.failures.values()].count(EngineFailure.DIED) >= MAX_DEATHS:
            state.metrics.events["engines_died"] += 1
            text = "Two engines of this model died during this request. Change the request, or see the engines' logs."
            raise HttpError(502, text, code=errors.ENGINES_DIED, should_retry=False)
        if self.failed >= MAX_FAILURES:
            raise failure.error
        if not self.answer_begun:
            state.metrics.events["retried"] += 1
            return
        # Continue the stream on another engine, if possible.
        continuation, model = self.checked.continuation, state.router.models.get(self.model)
        rest = continuation.resume_body(model.max_model_len) if continuation and model else None
        if rest is None:
            raise failure.error
        state.metrics.events["continued"] += 1
        self.continues, self.path = True, RESUME_PATH
        self.body = with_fields(rest, **self.salt)

    def _may_be_adapter(self) -> bool:
        """Whether the engine may report its base model's version; True for a model that was deleted meanwhile."""
        model = self.state.router.models.get(self.exchange.routed_model)
        return model is None or bool(model.adapter) or policy_of(self.model) is not None
