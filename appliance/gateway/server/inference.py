"""Answers one inference request: takes a place on a replica or waits for one, sends it, relays the answer, retries.

`Inference.answer` is the whole story; its methods follow in the order of their calls. The rules:
- Until the client has a byte of the engine's answer it sees no failure of an engine: the request goes to another
  replica, or waits until one opens, three times at most. An engine that dies may have died of the request, so it goes
  to one more after that, and to no third.
- After that a greedy stream continues if another engine can generate the same tokens (requests/answers.py); any
  other ends with an error event.
- The bytes of a good answer pass unchanged, except for what `_rewrite` changes.
- A request of class batch (header `x-appliance-class: batch`) gives way to people, and is no demand."""

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

# Largest answer of an engine to a request that counts tokens.
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
# More bytes than the object with an answer's usage has.
_USAGE_BYTES: Final = 1024
TOO_LATE: Final = "no replica became ready in time"
MAX_FAILURES: Final = 3
MAX_DEATHS: Final = 2


class EngineFailure(enum.Enum):
    """Why an engine gave no answer, as the log says it. UNREACHED: it got no byte of the request. BROKEN: the answer is
    not HTTP, or lacks its end; the engine may still serve other requests."""

    UNREACHED = "cannot reach the engine"
    DIED = "the engine broke off"
    BROKEN = "the engine's answer is not whole"
    MOVED = "the engine serves another model by now"


class AttemptFailed(Exception):
    """error: what the client gets if the request is not sent again."""

    def __init__(self, reason: EngineFailure, error: HttpError | None = None) -> None:
        super().__init__(reason.value)
        self.reason, self.error = reason, error or errors.engine_failed()


class Inference:
    """One request. model: as its client calls it. body: as engines get it.

    failures: the last failure by replica; failed: attempts that count towards MAX_FAILURES. waiting_since_s: since when
    no engine takes it, 0.0 if one does. answer_begun: the client has a byte of an answer; continues: another engine
    continues its stream. stream_ended: its last event came; an HTTP message that ends without it is a truncation that
    no client would notice. has_error: the engine reported an error in the stream."""

    def __init__(self, state: State, controller: Controller, exchange: Exchange, checked: Checked) -> None:
        caller, route = exchange.caller, exchange.route
        self.state, self.controller, self.exchange, self.checked = state, controller, exchange, checked
        self.model, self.path = checked.model, route.engine_path
        # Separates its owner's entries in an engine's cache of prefixes from those of others.
        salt = checked.data.get("cache_salt", "")
        salt = salt if state.config.prefix_cache_shared else cache_salt(caller.owner, salt)
        self.salt = {"cache_salt": salt} if salt else {}
        client_reads_usage = checked.data.get("stream_options", {}).get("include_usage") is True
        self.hides_usage = checked.stream and not client_reads_usage and route.name in (CHAT, COMPLETIONS)
        usage = {"stream_options": {"include_usage": True}} if self.hides_usage else {}
        token_ids = {"return_token_ids": True} if checked.continuation else {}
        self.body = orjson.dumps({**checked.data, **self.salt, **usage, **token_ids})
        checked.data = {}  # it may be large, and the request may wait for long
        checked.owner, checked.batch = caller.owner, exchange.use.batch
        checked.beginning = zlib.crc32(salt.encode(), checked.beginning)
        self.failures: dict[str, EngineFailure] = {}
        self.failed, self.waiting_since_s = 0, 0.0
        self.answer_begun = self.continues = self.stream_ended = self.has_error = False
        if not self.checked.batch:
            state.metrics.loads[self.model].arrived(checked.prompt_tokens, time.time())

    async def answer(self) -> None:
        """Answer the request, by as many attempts as it takes. Raises HttpError."""
        exchange = self.exchange
        while True:
            choice, failed = await self._place(), None  # None: the attempt counts for no version of a canary
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
        """Return a place on a replica, at once or after waiting. Raises HttpError."""
        state, work, exchange, model = self.state, self.checked, self.exchange, self.state.router.models.get(self.model)
        if model is None:
            raise state.unknown_model(self.model, exchange.caller)  # it was removed while this waited
        # The canary for its share; the model for requests that failed there, or for which the canary has no room.
        is_retry, caller = self.continues or self.failures, exchange.caller.id
        canary = () if is_retry else state.router.canary_for(model, caller, work.conversation)
        names = (*canary, exchange.routed_model if self.continues else self.model)
        host, choice = model.host or self.model, None
        # Those who wait go first; otherwise a stream of new requests could starve them.
        is_first = state.holds.queues.keys().isdisjoint({(host, False), (host, work.batch)})
        if not work.sequences or is_first:
            choice = state.router.choose(names, work, time.monotonic(), self.failures)
        if choice is None and self.continues and exchange.routed_model != self.model:
            raise errors.engine_failed()  # the canary is gone in mid-stream, and no other version continues it
        if choice is None:
            choice = await self._wait((host, work.batch), names)
        exchange.routed_model, exchange.choice = choice.model, choice
        exchange.replica, exchange.model_version = choice.replica.id, choice.replica.version
        return choice

    async def _wait(self, queue: tuple[str, bool], names: tuple[str, ...]) -> Choice:
        """Wait for a place. Raises HttpError 503 where it may not wait (any longer)."""
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
            state.report_now()  # a sleeping model wakes on it
        pause_s = state.config.holds.sse_grace_s
        try:
            state.holds.place(state.router, time.monotonic())
            with self._span("hold"):
                while (left_s := self._wait_left_s()) > 0:
                    await asyncio.wait((place,), timeout=min(left_s, pause_s))
                    if place.done():
                        return place.result()
                    if self.checked.stream and pause_s < left_s:
                        # Comments, so that proxies keep the connection.
                        if not exchange.connection.flow.write_paused:
                            await exchange.events(b": held\n\n")
                        pause_s = state.config.holds.sse_interval_s
                raise state.not_ready(self.model, TOO_LATE)
        except BaseException:
            if not state.holds.remove(ticket) and place.done() and place.exception() is None:
                state.ended(place.result())  # it got a place and left in the same turn
            raise
        finally:
            exchange.ticket = None

    def _span(self, name: str, **attributes: str | int) -> AbstractContextManager[bytes]:
        """A part of the request's trace, if traces are exported. Yields the `traceparent` for the part."""
        tracing = self.state.tracing
        return nullcontext(self.exchange.trace) if tracing is None else tracing.part(name, **attributes)

    def _wait_left_s(self) -> float:
        return self.waiting_since_s + self.state.config.holds.hold_s - time.monotonic()

    # -- one attempt

    async def _attempt(self, choice: Choice) -> None:
        """Send the request to an engine and relay its answer. Raises AttemptFailed, also where the answer breaks off,
        and HttpError 504. Leaving early closes the engine's connection, by which vLLM aborts the request."""
        state, exchange, replica = self.state, self.exchange, choice.replica
        model = state.router.models.get(choice.model)
        # The name by which the engine knows the model.
        name = choice.model if model is None else model.adapter or model.pins or choice.model
        body = self.body if name == self.model else with_fields(self.body, model=name)
        if exchange.route.task == "embed":  # for which vLLM reads no header
            body = with_fields(body, priority=choice.priority)
        exchange.sent_s = time.monotonic()
        if not self.failures and not self.waiting_since_s:
            state.metrics.added.observe(exchange.sent_s - exchange.received_s)
        with self._span("attempt", replica=replica.id, version=replica.version, attempt=self.failed + 1) as trace:
            # Not the client's id but a new one for each attempt: an engine must never see one twice.
            ids = state.new_request_id(), choice.priority, b"traceparent: %b\r\n" % trace if trace else b""
            request = _HEAD % (self.path, len(body), *ids) + body
            try:
                connection = await state.engines.connect(replica.socket)
            except (aiohttp.ClientConnectorError, TimeoutError) as error:
                raise AttemptFailed(EngineFailure.UNREACHED) from error
            try:
                # A rollout's whole long answer comes at once, and its caller has a timeout of its own.
                patient = policy_of(self.model) is not None
                await self._relay(*await state.engines.send(connection, request, patient=patient), choice, model)
                connection.release()
            except aiohttp.SocketTimeoutError as error:
                raise errors.engine_failed(504) from error  # the request itself asks for too much
            except HttpProcessingError as error:
                raise AttemptFailed(EngineFailure.BROKEN) from error
            except (aiohttp.ClientError, OSError) as error:
                raise AttemptFailed(EngineFailure.DIED) from error
            finally:
                connection.close()  # unless it was released

    async def _relay(self, head: Head, content: aiohttp.StreamReader, choice: Choice, model: Model | None) -> None:
        """Relay an answer by its status and type. model: the row of the table by which the request was placed."""
        state, exchange, replica, status = self.state, self.exchange, choice.replica, head.code
        # The engine knows the version of its first token; the table may lag behind a swap.
        engine_version = head.headers.get("x-appliance-model-version")
        pinned = model is not None and choice.model == f"{model.pins}@{replica.version}"
        if pinned and engine_version not in (None, replica.version):
            raise self._moved(f"`{choice.model}` is served no more.")
        if engine_version is not None and not self._may_be_adapter():
            exchange.model_version = engine_version
        if status >= 400:  # nothing of it is relayed
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
                # An engine's last event reports its own death, which must not reach a client whose stream continues.
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
                    if exchange.head_sent:  # it was held, or is continued
                        relayed.append(b": version %b\n\n" % version)
                relayed.append(self._rewrite(event))
            self._keep_copy()  # the client may leave once it has the last event
            if began:
                await exchange.events(b"".join(relayed), version)
        if not self.stream_ended:
            dead = not began or continuation is not None
            raise AttemptFailed(EngineFailure.DIED if dead else EngineFailure.BROKEN)
        await exchange.finish()

    def _rewrite(self, event: bytes) -> bytes:
        """Return an engine's event as the client gets it; empty for none.

        Events of a stored answer are noted, usage is read and removed where the client did not request it, errors get
        the API's shape; all other events pass unchanged."""
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
            # An engine writes it into the event with the usage if it is asked for usage, else into these.
            event = b'%b,"system_fingerprint":%b}' % (event[:-1], orjson.dumps(exchange.model_version))
        elif self.hides_usage and _NO_CHOICES in event:
            return b""
        self.stream_ended |= event.startswith(_LAST)
        # Inside JSON text the quote would be escaped, so this counts events, whatever they contain.
        exchange.stream_events += _EVENT in event
        if errors.ERROR_EVENT in event and (error := errors.from_event(event)) is not None:
            self.stream_ended = self.has_error = True
            return error_event(error, exchange, exchange.stream_events - 1)
        return event + b"\n\n"

    async def _relay_whole(self, head: Head, content: aiohttp.StreamReader, choice: Choice) -> None:
        """Keep a plain answer until it is whole, so that another engine can still give it, unless it is too long."""
        exchange, transcript, limits = self.exchange, self.checked.transcript, self.state.limits
        is_count = exchange.route.name == INPUT_TOKENS
        stores = transcript is not None and transcript.stores
        most = limits.stored_response_bytes if stores else limits.buffered_response_bytes
        most = _TOKEN_IDS_BYTES if is_count else most
        body = await read_up_to(content, most + 1)
        self._begun(choice)
        if exchange.head_sent:
            raise errors.engine_failed()  # comments have opened a stream, and the engine gave a plain answer
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
            tail = tail[-_USAGE_BYTES:] + body  # the usage may be cut anywhere
            self._read_usage(tail)
            await exchange.write(body)
            body = await content.readany()
        await exchange.finish()

    def _read_usage(self, body: bytes) -> None:
        """Read the tokens in an answer. Those of /v1/responses repeat the request, whose tools may have any text, so
        their usage comes from the transcript."""
        if self.exchange.route.name in (RESPONSES, INPUT_TOKENS):
            body = b"" if self.checked.transcript is None else self.checked.transcript.usage
        if USAGE in body:
            self.exchange.tokens.read(body)

    def _begun(self, choice: Choice) -> None:
        """Note the first bytes of an engine's answer."""
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
        """Queue the copy of a whole answer that is to be stored."""
        transcript = self.checked.transcript
        if transcript is not None and transcript.final and transcript.stores:
            self.controller.keep(transcript.copy(self.exchange.caller.id))
            transcript.final = b""  # once

    # -- failures

    def _moved(self, message: str) -> AttemptFailed:
        """The failure of an engine that has just swapped to another model or version, or lost the adapter."""
        retry_s = self.state.config.holds.retry_after_s
        return AttemptFailed(EngineFailure.MOVED, errors.unavailable(message, "model_not_ready", retry_s))

    def _prepare_retry(self, failure: AttemptFailed, choice: Choice) -> None:
        """Prepare the next attempt. Raises HttpError where there is none."""
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
            text = "Two engines of this model ended while they had this request. Change it, or see the engines' logs."
            raise HttpError(502, text, code=errors.ENGINES_DIED, should_retry=False)
        if self.failed >= MAX_FAILURES:
            raise failure.error
        if not self.answer_begun:
            state.metrics.events["retried"] += 1
            return
        # Request the rest of the stream, if another engine can continue it.
        continuation, model = self.checked.continuation, state.router.models.get(self.model)
        rest = continuation.resume_body(model.max_model_len) if continuation and model else None
        if rest is None:
            raise failure.error
        state.metrics.events["continued"] += 1
        self.continues, self.path = True, RESUME_PATH
        self.body = with_fields(rest, **self.salt)

    def _may_be_adapter(self) -> bool:
        """Whether the version that the engine names may be its base's; also for a model that was deleted since."""
        model = self.state.router.models.get(self.exchange.routed_model)
        return model is None or bool(model.adapter) or policy_of(self.model) is not None
