"""Answers one inference request: finds a place on a replica or waits for one, sends it, relays the answer, retries.

`Inference.answer` is the whole story; the methods stand below it in the order in which it calls them. The rules:
- Until the client has a byte of the engine's answer it sees no failure of an engine: the request goes to another
  replica, or waits until one opens, three times at most. An engine that dies may have died of the request, so it goes
  to one more after that, and to no third.
- After that a greedy stream goes on if another engine can generate the same tokens (answers/continuation.py); any
  other ends with an error event.
- Of a good answer the bytes pass unchanged, but for what stream.py rewrites.
- A request of class batch (header `x-appliance-class: batch`) is never held, and is no demand.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import aiohttp

from appliance.gateway.answers.continuation import ASK_FOR_TOKEN_IDS, CHAT, COMPLETIONS, RESUME_PATH
from appliance.gateway.answers.transcript import token_count
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import COUNT_TOKENS, INPUT_TOKENS, PROMPT_FIELDS
from appliance.gateway.http import wire
from appliance.gateway.http.upstreams import AttemptFailed, Failure, answer_of, is_alive, read_up_to
from appliance.gateway.requests.request_check import Checked, with_fields, with_model
from appliance.gateway.routing.holds import Ticket
from appliance.gateway.routing.router import Choice, Work
from appliance.gateway.routing.table import OPEN, cache_salt
from appliance.gateway.server.controller import Copies
from appliance.gateway.server.exchange import Exchange
from appliance.gateway.server.state import State
from appliance.gateway.server.stream import ERROR_EVENT, Stream, event_error

log = logging.getLogger("appliance.gateway")

_ERROR_BYTES: Final = 64 * 1024
# Largest answer of an engine to a request that counts tokens.
_TOKEN_IDS_BYTES: Final = 64 << 20
_ASK_FOR_USAGE: Final = b',"stream_options":{"include_usage":true}'
_HELD: Final = b": held\n\n"
MAX_FAILURES: Final = 3
MAX_DEATHS: Final = 2


class Inference:
    """One request. model: as its client calls it; row: of the table that it is placed by, the model's or its canary's.

    body: as engines get it, empty where nothing is left to ask for. failures: how many engines had it in vain; avoided:
    the replicas; died_on: those of them that broke off. relayed: the client has a byte of an answer; continues: its
    stream goes on at another engine. waiting_since_s: since when it waits for a place, 0.0 if it does not;
    seen_awake_s: when one of its engines was last awake meanwhile.
    """

    def __init__(self, state: State, copies: Copies, exchange: Exchange, checked: Checked, body: bytes) -> None:
        request, caller = exchange.request, exchange.request.caller
        self.state, self.copies, self.exchange, self.checked = state, copies, exchange, checked
        self.request, self.caller = request, caller
        self.model = self.row = checked.model
        self.path = request.route.engine_path.decode()
        # Separates its owner's entries in an engine's cache of prefixes from those of others.
        salt = "" if state.config.prefix_cache_shared else cache_salt(caller.owner, checked.cache_salt)
        self.salt = b',"cache_salt":"%b"' % salt.encode() if salt else b""
        hides_usage = checked.stream and not checked.asks_usage and request.route.name in (CHAT, COMPLETIONS)
        asks = (_ASK_FOR_USAGE if hides_usage else b"") + (ASK_FOR_TOKEN_IDS if checked.continuation else b"")
        self.body = with_fields(body, self.salt + asks) if self.salt or asks else body
        self.stream = Stream(request, checked, hides_usage=hides_usage, most_bytes=state.limits.stored_response_bytes)
        self.work = exchange.work = Work(
            caller.owner,
            checked.tokens,
            checked.prompt_tokens,
            sequences=0 if request.route.name in (INPUT_TOKENS, COUNT_TOKENS) else checked.sequences,
            beginning=zlib.crc32(checked.prefix(), zlib.crc32(salt.encode())),
            batch=request.headers.get(wire.CLASS) == b"batch",
        )
        canary = state.router.models[self.model].canary
        self.conversation = None if canary is None else zlib.crc32(checked.conversation())
        checked.forget_prompt()
        self.failures = 0
        self.avoided: set[str] = set()
        self.died_on: set[str] = set()
        self.relayed = self.continues = False
        self.waiting_since_s = self.seen_awake_s = 0.0
        if not self.work.batch:
            state.metrics.rows[self.model].arrived(checked.prompt_tokens, request.received_s)

    async def answer(self) -> None:
        """Raises HttpError where it has no answer."""
        while self.body:
            choice = await self._place()
            try:
                await self._attempt(choice)
                self._compare(choice, failed=self.stream.has_error)
                return
            except HttpError:
                self._compare(choice, failed=True)
                raise
            except AttemptFailed as failure:
                self._prepare_retry(failure, choice)
            finally:
                self.exchange.choice = None
                self.state.ended(choice)
        await self._send_ending()

    # -- a place

    async def _place(self) -> Choice:
        """A place on a replica, at once or after waiting. Raises HttpError."""
        state, work, row = self.state, self.work, self.state.router.models.get(self.model)
        if row is None:
            raise state.unknown_model(self.model, self.caller)  # it was removed while this waited
        host, rows, choice = row.host or self.model, self._rows(), None
        # Those who wait go first; otherwise a stream of new requests could starve them.
        if work.batch or not work.sequences or state.holds.next(host) is None:
            choice = state.router.choose(rows, work, time.monotonic(), self.avoided)
        if choice is None and work.batch:
            raise errors.engine_failed() if self.died_on else errors.batch_gives_way()
        if choice is None and self.continues and self.row != self.model:
            raise errors.engine_failed()  # the canary is gone in mid-stream, and no other version goes on with it
        if choice is None:
            choice = await self._wait(host, rows)
        self.row = self.request.row = choice.model
        self.exchange.choice = choice
        self.request.replica, self.request.model_version = choice.replica.id, choice.replica.version
        state.on_change(False)
        return choice

    def _rows(self) -> tuple[str, ...]:
        """The canary for its share; the model for what failed there, or what the canary has no room for."""
        if self.continues:
            return (self.row,)
        if self.failures or self.conversation is None:
            return (self.model,)
        canary = self.state.router.canary_for(self.model, self.caller.id, self.conversation)
        return (self.model,) if canary is None else (canary, self.model)

    async def _wait(self, host: str, rows: tuple[str, ...]) -> Choice:
        """Wait for a place. Raises HttpError 503 where it may not wait (any longer)."""
        state, request, now_s = self.state, self.request, time.monotonic()
        self.waiting_since_s = self.waiting_since_s or now_s
        if state.next_try_s(self.model) is not None:
            raise state.not_ready(self.model, "its engines do not start")
        place = asyncio.get_running_loop().create_future()
        ticket = Ticket(self.model, host, rows, self.work, self.avoided, place)
        if not state.holds.add(ticket):
            raise state.not_ready(self.model, "too many requests are waiting")
        request.row, self.exchange.ticket = self.model, ticket
        try:
            state.held(self.model)
            with self._span("hold"):
                return await self._place_before_deadline(place)
        except BaseException:
            if not state.holds.remove(ticket) and place.done() and place.exception() is None:
                state.ended(place.result())  # it got a place and left in the same turn
            raise
        finally:
            self.exchange.ticket = None
            state.on_change(False)
            state.metrics.held_for.observe(time.monotonic() - now_s)

    def _span(self, name: str, **attributes: str | int) -> AbstractContextManager[bytes]:
        """A part of the request's trace, if traces are exported. It gives the `traceparent` of what is inside."""
        tracing = self.state.tracing
        return nullcontext(self.request.trace) if tracing is None else tracing.part(name, **attributes)

    async def _place_before_deadline(self, place: asyncio.Future[Choice]) -> Choice:
        """A stream's client gets comments meanwhile, so that proxies keep the connection. Raises HttpError 503."""
        exchange, holds = self.exchange, self.state.config.holds
        pause_s = holds.sse_grace_s
        while (left_s := self._deadline_s() - time.monotonic()) > 0:
            await asyncio.wait((place,), timeout=min(left_s, pause_s))
            if place.done():
                return place.result()
            if self.checked.stream and pause_s < left_s:
                if not exchange.head_sent:
                    await exchange.begin_stream(None)
                if not exchange.connection.flow.write_paused:
                    await exchange.write(_HELD)
                pause_s = holds.sse_interval_s
        raise self.state.not_ready(self.model, "no replica became ready in time")

    def _deadline_s(self) -> float:
        """It waits longer for an engine that is awake, and busy, than for one to wake."""
        model, longest_s = self.state.router.models.get(self.model), self.state.config.holds.hold_s
        if model is None or any(replica.state == OPEN for replica in model.replicas):
            self.seen_awake_s = time.monotonic()
            return self.waiting_since_s + longest_s
        return min(self.waiting_since_s + longest_s, max(self.waiting_since_s, self.seen_awake_s) + model.hold_s)

    # -- one attempt

    async def _attempt(self, choice: Choice) -> None:
        """Send the request to an engine and relay its answer. Raises AttemptFailed."""
        state, request = self.state, self.request
        headers = {
            "content-type": "application/json",
            # Not the client's id but a new one for each attempt: an engine must never see one twice.
            "x-request-id": state.new_request_id().decode(),
            "x-vllm-priority": str(choice.priority),
        }
        body, session = self._body_for(choice), state.engines.of(choice.replica.socket)
        request.sent_s = time.monotonic()
        if not self.failures and not self.waiting_since_s:
            state.metrics.added.observe(request.sent_s - request.received_s)
        attempt = self.failures + 1
        model, version = state.router.models.get(self.row), request.model_version
        pinned_version = version if model is not None and self.row == f"{model.pins}@{version}" else ""
        with self._span("attempt", replica=request.replica, version=request.model_version, attempt=attempt) as trace:
            if trace:
                headers["traceparent"] = trace.decode()
            async with answer_of(session, self.path, headers, body, state.limits.upstream_silence_s) as response:
                named = response.headers.get("x-appliance-model-version")
                # The engine knows the version of its first token; the table may lag behind a swap.
                if named not in (None, pinned_version) and pinned_version:
                    raise self._moved(f"`{self.row}` is served no more.")
                if named is not None and not self._may_be_adapter():
                    request.model_version = named
                if response.status >= 400:
                    raise await self._refusal(response, session)
                if response.content_type == "text/event-stream":
                    await self._relay_stream(response, choice, session)
                else:
                    await self._relay_whole(response, choice)

    def _body_for(self, choice: Choice) -> bytes:
        """The body with the name by which this row's engines know the model."""
        body, model = self.body, self.state.router.models.get(self.row)
        name = self.row if model is None else model.adapter or model.pins or self.row
        if name != self.model:
            body = with_model(body, name)
        if self.request.route.task == "embed":  # for which vLLM reads no header
            body = with_fields(body, b',"priority":%d' % choice.priority)
        return body

    async def _relay_stream(
        self, response: aiohttp.ClientResponse, choice: Choice, session: aiohttp.ClientSession
    ) -> None:
        exchange, stream, began = self.exchange, self.stream, False
        stream.begin()
        async for piece in response.content.iter_any():
            passed: list[bytes] = []
            for event in stream.events(piece):
                # An engine's last event reports its own death, which must not reach a client whose stream goes on.
                hides_death = not self.relayed or self.checked.continuation is not None
                if hides_death and event.startswith(ERROR_EVENT) and await self._is_fatal(event, session):
                    await exchange.write(b"".join(passed))
                    raise AttemptFailed(Failure.DIED)
                if not began:
                    began = True
                    await self._begin(choice)
                passed.append(stream.passed(event))
            self._keep_copy()  # the client may leave once it has the last event
            await exchange.write(b"".join(passed))
        if not began:
            raise AttemptFailed(Failure.DIED)
        if not stream.ended:
            self.state.metrics.events["stream_unfinished"] += 1
            raise AttemptFailed(Failure.BROKEN if self.checked.continuation is None else Failure.DIED)
        await exchange.finish()

    async def _begin(self, choice: Choice) -> None:
        """The head of a stream, or a comment where the client has it: it was held, or goes on."""
        self._first_bytes(choice)
        self.state.router.started(choice)
        if not self.exchange.head_sent:
            await self.exchange.begin_stream(self._version())
        else:
            await self.exchange.write(b": version %b\n\n" % self._version())

    async def _relay_whole(self, response: aiohttp.ClientResponse, choice: Choice) -> None:
        """A plain answer is kept until it is whole, so that another engine can still give it, unless it is too long."""
        exchange, transcript, limits = self.exchange, self.checked.transcript, self.state.limits
        counts = self.request.route.name == INPUT_TOKENS
        stores = transcript is not None and transcript.stores
        most = limits.stored_response_bytes if stores else limits.buffered_response_bytes
        most = _TOKEN_IDS_BYTES if counts else most
        body = await read_up_to(response.content, most + 1)
        self._first_bytes(choice)
        kind = response.headers.get("content-type", "application/json").encode("latin-1")
        headers, is_whole = [(wire.VERSION, self._version())], len(body) <= most
        if is_whole and transcript is not None:
            body = token_count(body) if counts else transcript.whole(body)
            self._keep_copy()
        elif stores:
            self.state.metrics.events["responses_not_stored"] += 1
        self.stream.read_whole(body)
        if exchange.head_sent:
            raise errors.engine_failed()  # comments have opened a stream, and the engine gave a plain answer
        if is_whole:
            await exchange.whole(response.status, kind, body, headers)
        else:
            if response.content_length is not None:
                headers.append((b"content-length", b"%d" % response.content_length))
            await exchange.begin(200, [(b"content-type", kind), *headers])
            await exchange.write(body)
            async for piece in response.content.iter_any():
                self.stream.read_whole(piece)
                await exchange.write(piece)
            await exchange.finish()

    def _first_bytes(self, choice: Choice) -> None:
        now_s, request, state = time.monotonic(), self.request, self.state
        self.relayed = True
        state.router.succeed(choice)
        if self.continues:
            return
        request.first_byte_s = now_s
        if self.work.batch:
            return
        state.metrics.first_byte(request, now_s)
        if self.checked.stream:
            state.metrics.rows[choice.model].first_token(now_s - request.received_s)
            if choice.load.inflight == 1:
                state.metrics.rows[choice.model].prefilled(self.checked.prompt_tokens, now_s - request.sent_s)

    async def _send_ending(self) -> None:
        """All tokens of a stream were sent before its engine died: only its ending is missing."""
        assert self.checked.continuation is not None
        ending = b"".join(map(self.stream.relayed, self.checked.continuation.ending()))
        self._keep_copy()
        await self.exchange.finish(ending)

    def _keep_copy(self) -> None:
        """Once an answer is whole that is to be stored."""
        transcript = self.checked.transcript
        if transcript is not None and transcript.final and transcript.stores:
            self.copies.add(transcript.copy(self.caller.id))
            transcript.final = b""  # once

    # -- refusals and failures

    async def _refusal(self, response: aiohttp.ClientResponse, session: aiohttp.ClientSession) -> Exception:
        """What an error answer of the engine means; nothing of it is relayed."""
        body, status = await read_up_to(response.content, _ERROR_BYTES), response.status
        error = errors.from_upstream(status, body, PROMPT_FIELDS.get(self.request.route.name, "input"))
        if status == 404:
            return self._moved(error.message)
        if status >= 500 and not await is_alive(session):
            return AttemptFailed(Failure.DIED)
        return error

    async def _is_fatal(self, event: bytes, session: aiohttp.ClientSession) -> bool:
        """Whether the engine died of the error in this event."""
        error = event_error(event)
        return error is not None and error.status >= 500 and not await is_alive(session)

    def _moved(self, message: str) -> AttemptFailed:
        """The engine has just swapped to another model or version, or an adapter is gone; the next table tells."""
        retry_s = self.state.config.holds.retry_after_s
        return AttemptFailed(Failure.MOVED, errors.unavailable(message, "model_not_ready", retry_s))

    def _prepare_retry(self, failure: AttemptFailed, choice: Choice) -> None:
        """Prepare the next attempt. Raises HttpError where there is none."""
        state, request, why = self.state, self.request, failure.why
        state.metrics.events[f"upstream_{why.name.lower()}"] += 1
        log.warning("%s", why.value, extra=request.ids)
        if why in (Failure.UNREACHED, Failure.DIED) or (why is Failure.MOVED and not self._may_be_adapter()):
            state.router.fail(choice, time.monotonic())
        if why is Failure.UNREACHED:
            return
        if why is not Failure.MOVED:
            self._compare(choice, failed=True)
        self.waiting_since_s = 0.0
        self.failures += 1
        self.avoided.add(choice.replica.id)
        if why is Failure.DIED:
            self.died_on.add(choice.replica.id)
        if len(self.died_on) >= MAX_DEATHS:
            state.metrics.events["condemned"] += 1
            log.warning("two engines died of this request: it is not sent again", extra=request.ids)
            message = (
                "Two engines of this model ended while they had this request, so it is sent to no other. Please change "
                "it, or ask whoever runs the box what the engines' logs say."
            )
            raise HttpError(502, message, code=errors.ENGINES_DIED, should_retry=False)
        if self.failures >= MAX_FAILURES:
            raise failure.error
        if self.relayed:
            self._continue(failure)
        else:
            state.metrics.events["retried"] += 1

    def _continue(self, failure: AttemptFailed) -> None:
        """Ask for the rest of its stream. Raises HttpError where no other engine can go on with it."""
        continuation, model = self.checked.continuation, self.state.router.models.get(self.model)
        if continuation is None or model is None or not continuation.can_resume(model.max_model_len):
            raise failure.error
        self.state.metrics.events["continued"] += 1
        log.info("the stream is continued on another engine", extra=self.request.ids)
        rest = continuation.resume_body(model.max_model_len)
        self.continues, self.path = True, RESUME_PATH.decode()
        self.body = b"" if rest is None else with_fields(rest, self.salt)

    def _compare(self, choice: Choice, *, failed: bool) -> None:
        """Count the attempt for its version while the model has a canary."""
        now_s, request, first_s = time.monotonic(), self.request, self.request.first_byte_s
        self.state.comparison.add(
            self.model,
            choice.replica.version,
            failed=failed,
            first_byte_s=first_s - request.sent_s if first_s >= request.sent_s else None,
            duration_s=now_s - request.sent_s,
        )

    def _version(self) -> bytes:
        return self.request.model_version.encode("latin-1")

    def _may_be_adapter(self) -> bool:
        """Also of a model that was deleted since: what an engine then says of its version is not about it."""
        model = self.state.router.models.get(self.row)
        return model is None or bool(model.adapter)
