"""Answers one inference request: finds a place on a replica or waits for one, sends it, relays the answer, retries.

Rules, in the order in which they bind:
- Until the client has a byte of the engine's answer it sees no failure of an engine: the request goes to another
  replica, or waits until one opens, three times at most. An engine that dies may have died of the request, so it goes
  to one more after that, and to no third.
- After that a greedy stream goes on if another engine can generate the same tokens (answers/continuation.py); any
  other ends with an error event.
- Of a good answer the bytes pass unchanged, but for what relayed_stream.py and the transcript of a stored one rewrite.
- A request of class batch (header `x-appliance-class: batch`) is never held, and is no demand.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from typing import Final

import aiohttp

from appliance.gateway.answers.continuation import ASK_FOR_TOKEN_IDS, CHAT, COMPLETIONS, RESUME_PATH
from appliance.gateway.answers.usage import ASK_FOR_USAGE
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import COUNT_TOKENS, INPUT_TOKENS, PROMPT_FIELDS
from appliance.gateway.http import wire
from appliance.gateway.http.sessions import read_up_to
from appliance.gateway.inference.copies import Copies
from appliance.gateway.inference.engines import AttemptFailed, answer_of, is_alive
from appliance.gateway.inference.relayed_stream import ERROR_EVENT, RelayedStream, event_error
from appliance.gateway.payload.request_check import Checked, with_fields, with_model
from appliance.gateway.routing.holds import Refusal, Ticket
from appliance.gateway.routing.router import Choice, Work
from appliance.gateway.routing.table import OPEN, cache_salt
from appliance.gateway.state.exchange import ClientGone, Exchange
from appliance.gateway.state.state import State

log = logging.getLogger("appliance.gateway")

_ERROR_BYTES: Final = 64 * 1024
# Largest answer of an engine to a request that counts tokens.
_TOKEN_IDS_BYTES: Final = 64 << 20
_HELD: Final = b": held\n\n"
MAX_SENT: Final = 3
MAX_DEATHS: Final = 2
MAX_UNREACHED: Final = 10
"""A node that is gone may have had eight replicas."""


class _AskActiveVersion(Exception):
    """A canary has refused the request: only the active version can tell which of the two is at fault."""


class Inference:
    """One request. model: as its client calls it; row: of the table that it is placed by, the model's or its canary's.

    body: as engines get it, empty where nothing is left to ask for. sent: how often an engine had it and failed;
    unreached: how often it got to none, its node being gone; avoided: replicas where an attempt failed; died_on: those
    that broke off. relayed: the client has a
    byte of an answer; continues: its stream goes on at another engine. refused_by: a canary's version that refused it,
    with canary_error. waiting_since_s: since when it waits for a place, 0.0 if it does not;
    seen_awake_s: when one of its engines was last awake meanwhile. place: what it waits for.
    """

    def __init__(self, state: State, copies: Copies, exchange: Exchange, checked: Checked, body: bytes) -> None:
        route, caller = exchange.request.route, exchange.request.caller
        assert route is not None and caller is not None
        self.state, self.copies, self.exchange, self.checked = state, copies, exchange, checked
        self.request, self.caller = exchange.request, caller
        self.model = self.row = checked.model
        self.path = route.engine_path.decode()
        hides_usage = checked.stream and not checked.asks_usage and route.name in (CHAT, COMPLETIONS)
        self.stream = RelayedStream(self.request, hides_usage=hides_usage)
        # Separates its owner's entries in an engine's cache of prefixes from those of others.
        salt = "" if state.config.prefix_cache_shared else cache_salt(caller.owner, checked.cache_salt)
        # The body is a checked object; if two fields have the same name, the engine takes the last.
        added = self.salt = b',"cache_salt":"%b"' % salt.encode() if salt else b""
        if hides_usage:
            added += ASK_FOR_USAGE
        if checked.continuation is not None:
            added += ASK_FOR_TOKEN_IDS
        self.body = with_fields(body, added) if added else body
        self.work = Work(
            caller.owner,
            checked.tokens,
            checked.prompt_tokens,
            checked.stream,
            sequences=0 if route.name in (INPUT_TOKENS, COUNT_TOKENS) else max(checked.asked.sequences, checked.weight),
            beginning=zlib.crc32(checked.prefix(), zlib.crc32(salt.encode())),
            batch=self.request.headers.get(wire.CLASS) == b"batch",
        )
        canary = state.router.models[self.model].canary
        self.conversation = None if canary is None else zlib.crc32(checked.conversation())
        checked.forget_prompt()
        self.sent = self.unreached = 0
        self.avoided: set[str] = set()
        self.died_on: set[str] = set()
        self.relayed = self.continues = False
        self.refused_by = ""
        self.canary_error: HttpError | None = None
        self.waiting_since_s = self.seen_awake_s = 0.0
        if not self.work.batch:
            exchange.row, exchange.prompt_tokens = self.row, checked.prompt_tokens
            exchange.waiting_tokens = checked.prompt_tokens if checked.stream else 0
            state.metrics.arrived(self.model, checked.prompt_tokens, self.request.received_s)

    async def answer(self) -> None:
        """Raises HttpError where it has no answer."""
        while self.body:
            choice = await self._placed()
            failed: bool | None = None  # for the comparison of versions; None: it counts for none
            try:
                await self._attempt(choice)
                failed = self.stream.engine_failed or (None if self.stream.request_failed else False)
                return
            except AttemptFailed as failure:
                failed = True if failure.sent and (failure.blame or failure.died) else None
                self._prepare_retry(failure, choice)
            except HttpError as error:
                failed = True if error.status >= 500 else None
                raise
            except _AskActiveVersion:
                self.sent += 1
            finally:
                self._attempt_ended(choice, failed)
        await self._send_ending()

    # -- a place

    async def _placed(self) -> Choice:
        """A place on a replica, at once or after waiting. Raises HttpError."""
        state, row = self.state, self.state.router.models.get(self.model)
        if row is None:
            raise state.unknown_model(self.model, self.caller)  # it was removed while this waited
        # Those who wait go first; otherwise a stream of new requests could starve them.
        waits = self.work.sequences and not self.work.batch
        others_wait = waits and state.holds.next(row.host or self.model) is not None
        choice = None if others_wait else self.choose(time.monotonic())
        if choice is None and self.work.batch:
            raise self.canary_error or errors.batch_gives_way()
        if choice is None and self.continues and self.row != self.model:
            raise errors.engine_failed()  # the canary is gone in mid-stream, and no other version goes on with it
        if choice is None:
            choice = await self._held(row.host or self.model)
        self.row = self.request.row = choice.model
        self.exchange.choice = choice
        if not self.work.batch:
            self.exchange.row = choice.model
        self.request.replica, self.request.model_version = choice.replica.id, choice.replica.version
        state.changed()
        return choice

    def choose(self, now_s: float) -> Choice | None:
        for row in self.rows():
            if row in self.state.router.models:
                choice = self.state.router.choose(row, self.work, now_s, self.avoided)
                if choice is not None:
                    return choice
        return None

    def rows(self) -> tuple[str, ...]:
        """The canary for its share; the model for what failed there, or what the canary has no room for."""
        if self.continues:
            return (self.row,)
        if self.sent or self.conversation is None:
            return (self.model,)
        canary = self.state.router.canary_for(self.model, self.caller.id, self.conversation)
        return (self.model,) if canary is None else (canary, self.model)

    async def _held(self, host: str) -> Choice:
        """Waits for a place. Raises HttpError 503 where it may not wait (any longer)."""
        state, model, now_s = self.state, self.model, time.monotonic()
        self.exchange.row = model
        self.waiting_since_s = self.waiting_since_s or now_s
        if state.next_try_s(model) is not None:
            raise self._not_ready(Refusal.TROUBLE)
        if self._deadline_s() <= now_s:
            raise self._not_ready(Refusal.DEADLINE)
        ticket = Ticket(self, model, host, self.rows(), self.caller.owner, self.work.tokens, len(self.body))
        if (refusal := state.holds.add(ticket)) is not None:
            raise self._not_ready(refusal)
        self.place: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        if self.request.spans is not None:
            self.request.spans.hold()
        state.metrics.events["held"] += 1
        state.held(model)
        try:
            return await self._place_before_deadline()
        except BaseException:
            if not state.holds.remove(ticket) and self.place.done() and self.place.exception() is None:
                state.ended(self.place.result())  # it got a place and left in the same turn
            raise
        finally:
            state.changed()
            state.metrics.held_for.observe(time.monotonic() - now_s)
            if self.request.spans is not None:
                self.request.spans.unhold()

    async def _place_before_deadline(self) -> Choice:
        """A stream's client gets comments meanwhile, so that proxies keep the connection. Raises HttpError 503."""
        holds, stream = self.state.config.holds, self.checked.stream
        pause_s = holds.sse_grace_s if stream else holds.sse_interval_s
        while (left_s := self._deadline_s() - time.monotonic()) > 0:
            await asyncio.wait((self.place,), timeout=min(left_s, pause_s))
            if self.place.done():
                return self.place.result()
            if pause_s >= left_s:
                continue
            pause_s = holds.sse_interval_s
            if not stream:
                continue  # the deadline moves when its engines fall asleep
            if not self.exchange.head_sent:
                await self.exchange.begin_stream(None)
            if not self.exchange.connection.flow.write_paused:
                await self.exchange.write(_HELD)
        raise self._not_ready(Refusal.DEADLINE)

    def _deadline_s(self) -> float:
        """It waits longer for an engine that is awake, and busy, than for one to wake."""
        model, longest_s = self.state.router.models.get(self.model), self.state.config.holds.hold_s
        if model is None or any(replica.state == OPEN for replica in model.replicas):
            self.seen_awake_s = time.monotonic()
            return self.waiting_since_s + longest_s
        return min(self.waiting_since_s + longest_s, max(self.waiting_since_s, self.seen_awake_s) + model.hold_s)

    def refuse_hold(self, refusal: Refusal | HttpError) -> None:
        """Call for one whose ticket is out of the queue."""
        if not self.place.done():
            error = refusal if isinstance(refusal, HttpError) else self._not_ready(refusal)
            self.place.set_exception(error)

    def _not_ready(self, refusal: Refusal) -> HttpError:
        state, name = self.state, self.model
        state.metrics.events["hold_refused"] += 1
        log.info("held no longer: %s", refusal.value, extra=self.request.ids)
        if self.canary_error is not None:
            return self.canary_error
        model, retry_s = state.router.models.get(name), state.config.holds.retry_after_s
        if model is None or model.trouble is None:
            message = f"The model `{name}` is not ready: {refusal.value}. Please retry."
            return errors.unavailable(message, "model_not_ready", retry_s)
        next_try_s = state.next_try_s(name)
        return errors.not_serving(name, model.trouble.reason, retry_s if next_try_s is None else next_try_s)

    # -- one attempt

    async def _attempt(self, choice: Choice) -> None:
        """Raises AttemptFailed, HttpError for a refusal, _AskActiveVersion."""
        state, request = self.state, self.request
        body, model = self.body, state.router.models.get(self.row)
        if model is not None and model.adapter:
            body = with_model(body, model.adapter)
        elif self.row != self.model:
            body = with_model(body, self.row)
        if self.request.route is not None and self.request.route.task == "embed":  # for which vLLM reads no header
            body = with_fields(body, b',"priority":%d' % choice.priority)
        headers = {
            "content-type": "application/json",
            # Not the client's id but a new one for each attempt: an engine must never see one twice.
            "x-request-id": state.new_request_id().decode(),
            "x-vllm-priority": str(choice.priority),
        }
        trace = request.trace if request.spans is None else request.spans.attempt()
        if trace:
            headers["traceparent"] = trace.decode()
        request.sent_s = time.monotonic()
        if not self.sent and not self.waiting_since_s:
            state.metrics.added.observe(request.sent_s - request.received_s)
        alone = choice.load.inflight == 1
        session = state.engines.of(choice.replica.socket)
        try:
            async with answer_of(session, self.path, headers, body, state.limits.upstream_silence_s) as response:
                named = response.headers.get("x-appliance-model-version")
                if named is not None and not self._may_be_adapter():
                    # The engine knows the version of its first token; the table may lag behind a swap.
                    request.model_version = named
                if response.status >= 400:
                    await self._refused(response, session)
                elif response.content_type == "text/event-stream":
                    await self._relay_stream(response, choice, session, alone)
                else:
                    await self._relay_whole(response, choice)
        except (asyncio.CancelledError, ClientGone):
            ended = self.exchange.ended
            if ended is None or ended.status < 500:  # not by the box itself: what an engine computed is to be paid for
                request.left_after_s = max(time.monotonic() - request.sent_s, 1e-6)
            raise

    def _first_bytes(self, choice: Choice, alone: bool = False) -> None:
        """alone: nothing else was on the replica when it was sent."""
        now_s, request, state = time.monotonic(), self.request, self.state
        self.relayed = True
        self.exchange.waiting_tokens = 0
        state.router.succeed(choice)
        if self.checked.stream:
            state.router.started(choice)
        if self.continues:
            return
        request.first_byte_s = now_s
        if self.work.batch:
            return
        state.metrics.first_byte(request, now_s)
        if self.checked.stream:
            state.metrics.first_token(choice.model, now_s - request.received_s)
            if alone and choice.load.inflight == 1:
                state.metrics.prefilled(choice.model, self.checked.prompt_tokens, now_s - request.sent_s)

    async def _relay_stream(
        self, response: aiohttp.ClientResponse, choice: Choice, session: aiohttp.ClientSession, alone: bool
    ) -> None:
        exchange, continuation = self.exchange, self.checked.continuation
        began = False
        async for piece in response.content.iter_any():
            if not began:
                began = True
                if not self.relayed and piece.startswith(ERROR_EVENT):
                    await self._refused_first(piece, session)
                self._first_bytes(choice, alone)
                if not exchange.head_sent:
                    await exchange.begin_stream(self._version())
                else:  # it was held, or goes on
                    await exchange.write(b": version %b\n\n" % self._version())
            died = None
            if continuation is not None:
                piece = continuation.take(piece)
                # An engine's last event reports its own death, which must not reach a client whose stream goes on.
                if (at := piece.find(ERROR_EVENT)) >= 0 and (died := await self._death(piece[at:], session)):
                    piece = piece[:at]
            await exchange.write(self.stream.take(self._noted(piece)))
            if died is not None:
                raise AttemptFailed(died, died=True)
        if not began:
            raise AttemptFailed(errors.engine_failed(), died=True)
        rest = self.stream.take(self._noted(b"", last=True), last=True)
        if not self.stream.ended_well():
            self.state.metrics.events["stream_unfinished"] += 1
            await exchange.write(rest)
            raise AttemptFailed(errors.engine_failed(), died=continuation is not None, blame=False)
        await exchange.finish(rest)

    async def _send_ending(self) -> None:
        """All tokens of a stream were sent before its engine died: only its ending is missing."""
        assert self.checked.continuation is not None
        ending = self._noted(self.checked.continuation.ending(), last=True)
        await self.exchange.finish(self.stream.take(ending, last=True))

    async def _relay_whole(self, response: aiohttp.ClientResponse, choice: Choice) -> None:
        """A plain answer is kept until it is whole, so that another engine can still give it, unless it is too long."""
        exchange, transcript, state = self.exchange, self.checked.transcript, self.state
        kind = response.headers.get("content-type", "application/json").encode("latin-1")
        most = state.answer_room()
        if transcript is not None and transcript.counts:
            most = _TOKEN_IDS_BYTES
        elif transcript is not None and transcript.stores:
            most = state.limits.stored_response_bytes
        body = await read_up_to(response.content, most + 1)
        state.keep_answer(self.request, len(body))
        self._first_bytes(choice)
        is_whole, headers = len(body) <= most, [(wire.VERSION, self._version()), exchange.processing()]
        if is_whole and transcript is not None:
            self._check_room(len(body))
            body = transcript.whole(body)
            self._kept()
        elif transcript is not None and transcript.stores:
            state.metrics.events["responses_not_stored"] += 1
        self.stream.read_usage(body)
        if exchange.head_sent and not is_whole:
            raise errors.engine_failed()
        if exchange.head_sent:  # comments have opened a stream, and the engine gave a plain answer
            await exchange.finish(b"data: %b\n\n" % body)
            return
        if is_whole:
            await exchange.whole(response.status, kind, body, headers)
            return
        if response.content_length is not None:
            headers.append((b"content-length", b"%d" % response.content_length))
        await exchange.begin(200, [(b"content-type", kind), *headers])
        await exchange.write(body)
        async for piece in response.content.iter_any():
            self.stream.read_usage(piece)
            await exchange.write(piece)
        await exchange.finish()

    # -- what is kept of a stored answer

    def _noted(self, piece: bytes, *, last: bool = False) -> bytes:
        """What of a stream's bytes goes to the client, once its transcript, if it has one, has read them."""
        transcript, state = self.checked.transcript, self.state
        if transcript is None:
            return piece
        self._check_room(len(piece))
        before = transcript.held
        piece = transcript.take(piece, state.limits.stored_response_bytes, last=last)
        if transcript.held > before:
            try:
                state.take_body(self.request, transcript.held - before)
            except HttpError:
                transcript.forgo()
                state.metrics.events["responses_not_stored"] += 1
        self._kept()
        return piece

    def _check_room(self, size: int) -> None:
        """Before the object is made that says whether it is stored."""
        transcript = self.checked.transcript
        assert transcript is not None
        size += len(transcript.input) + transcript.held
        if transcript.stores and not self.copies.has_room(size):
            transcript.forgo()
            self.state.metrics.events["responses_not_stored"] += 1

    def _kept(self) -> None:
        transcript, tokens = self.checked.transcript, self.request.tokens
        assert transcript is not None
        if transcript.final and transcript.tells_usage:
            tokens.prompt, tokens.completion = transcript.prompt_tokens, transcript.completion_tokens
        if transcript.final and transcript.stores:
            self.copies.add(transcript.copy(self.caller.id))
        transcript.final = b""

    # -- refusals and failures

    async def _refused(self, response: aiohttp.ClientResponse, session: aiohttp.ClientSession) -> None:
        """A whole error answer of the engine, of which nothing is relayed. Always raises."""
        body = await read_up_to(response.content, _ERROR_BYTES)
        headers, status = response.headers, response.status
        if wire.UNREACHED.decode() in headers:
            # The node of this engine is gone, and no byte got there: no engine died of it.
            self.state.metrics.events["upstream_unreached"] += 1
            self.unreached += 1
            raise AttemptFailed(errors.engine_failed(), sent=False)
        route = self.request.route_name
        error = errors.from_upstream(status, body, PROMPT_FIELDS.get(route, "input"))
        after = headers.get("retry-after", "")
        if after.isdigit() and len(after) < 10:
            error.retry_after_s = min(int(after), errors.MAX_RETRY_AFTER_S)
        if status in (401, 403):
            raise errors.engine_failed()
        if status == 404 and error.message == "Not Found":  # of the route: the engine has another task
            error = errors.wrong_task(self.model, route)
        elif status == 404:
            # The engine has just swapped to another model, or an adapter is gone; the next table tells.
            gone = errors.unavailable(error.message, "model_not_ready", self.state.config.holds.retry_after_s)
            raise AttemptFailed(gone, blame=not self._may_be_adapter())
        if status >= 500 and not await is_alive(session):
            raise AttemptFailed(error, died=True)
        self._refuse(error)

    async def _refused_first(self, piece: bytes, session: aiohttp.ClientSession) -> None:
        """A stream's first event tells of an error. Raises where the client need not see it."""
        if (died := await self._death(piece, session)) is not None:
            raise AttemptFailed(died, died=True)
        error = event_error(piece)
        if error is not None and error.status < 500 and self._active_version_is_awake():
            self._refuse(error)

    async def _death(self, events: bytes, session: aiohttp.ClientSession) -> HttpError | None:
        """The error in the first event if its engine died of it."""
        error = event_error(events)
        return None if error is None or error.status < 500 or await is_alive(session) else error

    def _refuse(self, error: HttpError) -> None:
        """What a canary refuses, the active version is asked too. Always raises."""
        if error.status < 500 and self._active_version_is_awake():
            self.refused_by, self.canary_error = self.request.model_version, error
            raise _AskActiveVersion
        raise error

    def _active_version_is_awake(self) -> bool:
        """While a canary has the request: what may be the client's mistake wakes no engine."""
        model = self.state.router.models.get(self.model)
        if self.row == self.model or self.continues or model is None:
            return False
        return any(replica.state == OPEN for replica in model.replicas)

    def _prepare_retry(self, failure: AttemptFailed, choice: Choice) -> None:
        """Prepares the next attempt. Raises HttpError where there is none."""
        state, events, ids = self.state, self.state.metrics.events, self.request.ids
        if failure.blame:
            state.router.fail(choice, time.monotonic())
        if not failure.sent:
            events["connect_failed"] += 1
            log.warning("cannot reach the engine: %s", failure.__cause__ or failure, extra=ids)
            if self.unreached >= MAX_UNREACHED:
                raise failure.error
            return
        self.waiting_since_s = 0.0
        if failure.error.status == 504:
            events["upstream_silent"] += 1
            log.warning("the engine was silent for too long", extra=ids)
            if choice.replica.avoid:  # the engine gives no sign of life to anybody
                state.router.fail(choice, time.monotonic())
            else:
                self.request.left_after_s = time.monotonic() - self.request.sent_s
            raise failure.error
        self.sent += 1
        self.avoided.add(choice.replica.id)
        if failure.died:
            events["upstream_died"] += 1
            log.warning("the engine broke off", extra=ids)
            self.died_on.add(choice.replica.id)
        if len(self.died_on) >= MAX_DEATHS:
            events["condemned"] += 1
            log.warning("two engines died of this request: it is not sent again", extra=ids)
            raise errors.engines_died_of_it()
        if self.sent >= MAX_SENT:
            raise failure.error
        if self.relayed:
            self._continue(failure)
        else:
            events["retried"] += 1

    def _continue(self, failure: AttemptFailed) -> None:
        """Asks for the rest of its stream. Raises HttpError where no other engine can go on with it."""
        continuation, model = self.checked.continuation, self.state.router.models.get(self.model)
        if continuation is None or model is None or not continuation.can_resume(model.max_model_len):
            raise failure.error
        self.state.metrics.events["continued"] += 1
        log.info("the stream is continued on another engine", extra=self.request.ids)
        rest = continuation.resume_body(model.max_model_len)
        self.continues, self.path = True, RESUME_PATH.decode()
        self.body = b"" if rest is None else with_fields(rest, self.salt)

    def _attempt_ended(self, choice: Choice, failed: bool | None) -> None:
        """failed: for the comparison of versions; None: it counts for none."""
        state, request = self.state, self.request
        if failed is not None and state.comparison.compares:
            now_s, first_s = time.monotonic(), request.first_byte_s
            state.comparison.add(
                self.model,
                choice.replica.version,
                self.caller.owner,
                failed=failed,
                first_byte_s=first_s - request.sent_s if first_s >= request.sent_s else None,
                duration_s=now_s - request.sent_s,
            )
            if self.refused_by and not failed:
                state.comparison.refused(self.model, self.refused_by, self.caller.owner)
        if request.spans is not None:
            request.spans.attempt_ended(bool(failed))
        self.exchange.choice = None
        state.ended(choice)

    def _version(self) -> bytes:
        return self.request.model_version.encode("latin-1")

    def _may_be_adapter(self) -> bool:
        """Also of a model that was deleted since: what an engine then says of its version is not about it."""
        model = self.state.router.models.get(self.row)
        return model is None or bool(model.adapter)
