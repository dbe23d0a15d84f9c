"""Answers one inference request: finds a replica or waits for one, sends it there, relays the answer, tries again.

Rules, in the order in which they bind:
- Until the client has a byte of the engine's answer it sees no failure of an engine: the request goes to another
  replica, or waits until one opens, as often as attempts.py allows.
- After that a greedy stream goes on if another engine can generate the same tokens (answers/continuation.py); any
  other ends with an error event.
- Of a good answer the bytes pass unchanged, but for what relayed_stream.py and the transcript of a stored one rewrite.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import aiohttp

from appliance.gateway.answers.continuation import ASK_FOR_TOKEN_IDS, CHAT, COMPLETIONS, RESUME_PATH
from appliance.gateway.answers.usage import ASK_FOR_USAGE
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import PROMPT_FIELDS
from appliance.gateway.http import wire
from appliance.gateway.http.sessions import read_up_to
from appliance.gateway.inference.attempts import MAX_UNREACHED, Attempts, Verdict
from appliance.gateway.inference.copies import Copies
from appliance.gateway.inference.engines import AttemptFailed, asked
from appliance.gateway.inference.relayed_stream import ERROR_EVENT, RelayedStream, event_error
from appliance.gateway.payload.request_check import Checked, with_fields, with_model
from appliance.gateway.routing.holds import Refusal
from appliance.gateway.routing.router import Choice
from appliance.gateway.routing.table import OPEN, cache_salt, salt_field
from appliance.gateway.state.exchange import ClientGone, Exchange
from appliance.gateway.state.state import State

log = logging.getLogger("appliance.gateway")

_ERROR_BYTES: Final = 64 * 1024
# Largest answer of an engine to a request that counts tokens.
_TOKEN_IDS_BYTES: Final = 64 << 20
_HELD: Final = b": held\n\n"


class _NotThisVersion(Exception):
    """A canary has refused the request: only the active version can tell which of the two is at fault."""


class Inference:
    """One request. row: the row of the table that it counts for; its model's, or the canary's while it is there."""

    def __init__(self, state: State, copies: Copies, exchange: Exchange, checked: Checked, body: bytes) -> None:
        route, caller = exchange.request.route, exchange.request.caller
        assert route is not None and caller is not None
        self.state, self.copies, self.exchange, self.checked = state, copies, exchange, checked
        self.request, self.caller = exchange.request, caller
        self.attempts = Attempts()
        self.row = checked.model
        self.path = route.engine_path.decode()
        hides_usage = checked.stream and not checked.asks_usage and route.name in (CHAT, COMPLETIONS)
        self.stream = RelayedStream(self.request, hides_usage=hides_usage)
        # The body is a checked object; if two fields have the same name, the engine takes the last.
        added = self.salt = b"" if state.config.prefix_cache_shared else self._salt()
        if hides_usage:
            added += ASK_FOR_USAGE
        if checked.continuation is not None:
            added += ASK_FOR_TOKEN_IDS
        self.body = with_fields(body, added) if added else body
        self.relayed = self.continues = False
        self.held_until_s = 0.0
        self.canary_error: HttpError | None = None
        exchange.row, exchange.prompt_tokens = self.row, checked.prompt_tokens
        exchange.waiting_tokens = checked.prompt_tokens if checked.stream else 0

    def _salt(self) -> bytes:
        """Separates its owner's entries in an engine's cache of prefixes from those of others."""
        self.checked.owner, own = self.caller.cache_salt, self.checked.cache_salt
        return salt_field(cache_salt(self.caller.owner, own).encode())

    async def answer(self) -> None:
        """Raises HttpError where it has no answer."""
        while True:
            if self.continues and not self.body:
                await self._end_of_stream()
                return
            choice = await self._placed()
            failed: bool | None = None
            try:
                await self._ask(choice)
                failed = self.stream.engine_failed or (None if self.stream.request_failed else False)
                return
            except AttemptFailed as failure:
                failed = True if failure.sent and (failure.blame or failure.died) else None
                self._after(failure, choice)
            except HttpError as error:
                failed = True if error.status >= 500 else None
                raise
            except _NotThisVersion:
                self.attempts.sent += 1
            finally:
                self._left(choice, failed)

    async def _end_of_stream(self) -> None:
        """All tokens of a stream were sent before its engine died: only its ending is missing."""
        assert self.checked.continuation is not None
        ending = self.checked.continuation.ending()
        if self.checked.transcript is not None:
            ending = self._noted(ending, last=True)
        await self.exchange.finish(self.stream.take(ending, last=True))

    def _left(self, choice: Choice, failed: bool | None) -> None:
        """It is on this replica no longer. failed: for the comparison of versions; None: it counts for none."""
        state, request = self.state, self.request
        if failed is not None and state.comparison.compares:
            now_s, first_s = time.monotonic(), request.first_byte_s
            state.comparison.add(
                self.checked.model,
                choice.replica.version,
                self.caller.owner,
                failed=failed,
                first_byte_s=first_s - request.sent_s if first_s >= request.sent_s else None,
                duration_s=now_s - request.sent_s,
            )
            if self.attempts.refused_by and not failed:
                state.comparison.refused(self.checked.model, self.attempts.refused_by, self.caller.owner)
        if request.spans is not None:
            request.spans.attempt_ended(bool(failed))
        state.ended(choice)

    # -- a place

    async def _placed(self) -> Choice:
        state, name = self.state, self.checked.model
        if name not in state.router.models:
            raise state.unknown_model(name, self.caller)  # it was removed while this waited
        # Those who wait go first; otherwise a stream of new requests could starve them.
        choice = None if state.holds.count and state.holds.first(name) else self.choose(time.monotonic())
        if choice is None:
            if self.continues and self.row != name:
                raise errors.engine_failed()  # the canary is gone in mid-stream, and no other version goes on with it
            choice = await self._held()
        self.row = self.exchange.row = choice.model
        self.request.replica, self.request.model_version = choice.replica.id, choice.replica.version
        self.exchange.socket = choice.replica.socket
        state.changed()
        return choice

    def choose(self, now_s: float) -> Choice | None:
        """The canary for its share; the model for what failed there, or what it has no room for."""
        router, checked, name = self.state.router, self.checked, self.checked.model
        rows = [name]
        if self.continues:
            rows = [self.row]
        elif not self.attempts.sent and router.models[name].canary is not None:
            canary = router.canary_for(name, self.caller.id, checked.conversation)
            rows = [name] if canary is None else [canary, name]
        for row in rows:
            if row in router.models:
                choice = router.choose(
                    row,
                    checked.tokens,
                    checked.stream,
                    checked.prefix,
                    now_s,
                    checked.prompt_tokens,
                    tuple(self.attempts.lost),
                    self.caller.owner,
                )
                if choice is not None:
                    return choice
        return None

    async def _held(self) -> Choice:
        """Waits for a replica. Raises HttpError 503 where it may not wait (any longer)."""
        state, request, name = self.state, self.request, self.checked.model
        self.exchange.row = name
        now_s = time.monotonic()
        if not self.held_until_s:
            self.held_until_s = now_s + min(state.router.models[name].hold_s, state.config.holds.hold_s)
        if state.next_try_s(name) is not None:
            raise self._not_ready(Refusal.TROUBLE)
        ticket = state.holds.add(name, self, len(self.body), self.held_until_s, now_s, owner=self.caller.owner)
        if isinstance(ticket, Refusal):
            raise self._not_ready(ticket)
        self.place: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        if request.spans is not None:
            request.spans.hold()
        state.metrics.events["held"] += 1
        state.held(name)
        # Others may have their share already, and those before it may have none.
        state.place_held_soon(name)
        try:
            return await self._wait(self.held_until_s)
        except BaseException as ended:
            if not state.holds.remove(ticket) and self.place.done() and self.place.exception() is None:
                state.ended(self.place.result())  # it got a place and left in the same turn
            if isinstance(ended, TimeoutError):
                raise self._not_ready(Refusal.DEADLINE) from None
            raise
        finally:
            state.changed()
            state.metrics.held_for.observe(time.monotonic() - now_s)
            if request.spans is not None:
                request.spans.unhold()

    async def _wait(self, until_s: float) -> Choice:
        """A stream's client is told that it waits, so that proxies keep the connection. Raises TimeoutError."""
        holds, pause_s = self.state.config.holds, self.state.config.holds.sse_grace_s
        while True:
            left_s = until_s - time.monotonic()
            is_last = left_s <= pause_s or not self.checked.stream
            await asyncio.wait((self.place,), timeout=left_s if is_last else pause_s)
            if self.place.done():
                return self.place.result()
            if is_last:
                raise TimeoutError
            pause_s = holds.sse_interval_s
            if not self.exchange.head_sent:
                await self.exchange.begin_stream(None)
            if not self.exchange.connection.flow.write_paused:
                await self.exchange.write(_HELD)

    def refuse_hold(self, refusal: Refusal | HttpError) -> None:
        """Call for one whose ticket is out of the queue."""
        if not self.place.done():
            error = refusal if isinstance(refusal, HttpError) else self._not_ready(refusal)
            self.place.set_exception(error)

    def _not_ready(self, refusal: Refusal) -> HttpError:
        state, name = self.state, self.checked.model
        state.metrics.events["hold_refused"] += 1
        log.info("held no longer: %s", refusal.value, extra=self.request.ids)
        if self.canary_error is not None:
            return self.canary_error
        model, retry_s = state.router.models.get(name), state.config.holds.retry_after_s
        if model is None or model.trouble is None:
            told = f"The model `{name}` is not ready: {refusal.value}. Please retry."
            return errors.unavailable(told, "model_not_ready", retry_s)
        next_try_s = state.next_try_s(name)
        return errors.not_serving(name, model.trouble.reason, retry_s if next_try_s is None else next_try_s)

    # -- one attempt

    async def _ask(self, choice: Choice) -> None:
        """Raises AttemptFailed, HttpError for a refusal, _NotThisVersion."""
        state, request = self.state, self.request
        body, model = self.body, state.router.models.get(self.row)
        if model is not None and model.adapter:
            body = with_model(body, model.adapter)
        elif self.row != self.checked.model:
            body = with_model(body, self.row)
        # Not the client's id but a new one for each attempt: an engine must never see one twice.
        headers = {"content-type": "application/json", "x-request-id": state.new_request_id().decode()}
        headers["x-appliance-owner"] = self.caller.cache_salt.decode()
        trace = request.trace if request.spans is None else request.spans.attempt()
        if trace:
            headers["traceparent"] = trace.decode()
        now_s = time.monotonic()
        if not self.attempts.sent and not self.held_until_s:
            state.metrics.added.observe(now_s - request.received_s)
        request.sent_s = now_s
        only = choice.load.inflight == 1
        session = state.engines.of(choice.replica.socket)
        try:
            async with asked(session, self.path, headers, body, state.limits.upstream_silence_s) as response:
                named = response.headers.get("x-appliance-model-version")
                if named is not None and not self._may_be_adapter():
                    # The engine knows the version of its first token; the table may lag behind a swap.
                    request.model_version = named
                if response.status >= 400:
                    await self._refused(response)
                elif response.content_type == "text/event-stream":
                    await self._relay_stream(response, choice, only)
                else:
                    await self._relay_whole(response, choice)
        except (asyncio.CancelledError, ClientGone):
            request.left_after_s = max(time.monotonic() - request.sent_s, 1e-6)  # an engine was computing for it
            raise

    def _first_bytes(self, choice: Choice, only: bool = False) -> None:
        now_s, request, state = time.monotonic(), self.request, self.state
        self.relayed = True
        self.exchange.waiting_tokens = 0
        state.router.succeed(choice)
        if self.checked.stream:
            state.router.started(choice)
        if self.continues:
            return
        request.first_byte_s = now_s
        state.metrics.first_byte(request, now_s)
        if self.checked.stream:
            state.metrics.first_token(choice.model, now_s - request.received_s)
            if only and choice.load.inflight == 1:
                state.metrics.prefilled(choice.model, self.checked.prompt_tokens, now_s - request.sent_s)

    async def _relay_stream(self, response: aiohttp.ClientResponse, choice: Choice, only: bool) -> None:
        exchange, transcript = self.exchange, self.checked.transcript
        attempt_began = False
        async for piece in response.content.iter_any():
            if not attempt_began:
                attempt_began = True
                if not self.relayed and piece.startswith(ERROR_EVENT):
                    self._refused_first(piece)
                self._first_bytes(choice, only)
                if not exchange.head_sent:
                    await exchange.begin_stream(self._version())
                else:  # it was held, or goes on
                    await exchange.write(b": version %b\n\n" % self._version())
            piece, died = self._of_continuation(piece)
            if transcript is not None:
                piece = self._noted(piece)
            await exchange.write(self.stream.take(piece))
            if died is not None:
                raise AttemptFailed(died, died=True)
        if not attempt_began:
            raise AttemptFailed(errors.engine_failed(), died=True)
        rest = self._noted(b"", last=True) if transcript is not None else b""
        rest = self.stream.take(rest, last=True)
        if not self.stream.ended_well():
            self.state.metrics.events["stream_unfinished"] += 1
            await exchange.write(rest)
            raise AttemptFailed(errors.engine_failed(), died=self.checked.continuation is not None, blame=False)
        await exchange.finish(rest)

    def _of_continuation(self, piece: bytes) -> tuple[bytes, HttpError | None]:
        """The client's part of a stream that another engine could go on with. An engine's last event reports its own
        death, which must not reach such a client."""
        continuation = self.checked.continuation
        if continuation is None:
            return piece, None
        events = continuation.take(piece)
        at = events.find(ERROR_EVENT)
        error = event_error(events[at:]) if at >= 0 else None
        if error is not None and errors.engine_dead(error):
            return events[:at], error
        return events, None

    async def _relay_whole(self, response: aiohttp.ClientResponse, choice: Choice) -> None:
        """A plain answer is kept until it is whole, so that another engine can still give it, unless it is too long."""
        exchange, transcript = self.exchange, self.checked.transcript
        kind = response.headers.get("content-type", "application/json").encode("latin-1")
        limits = self.state.limits
        most = limits.buffered_response_bytes
        if transcript is not None:
            most = (
                _TOKEN_IDS_BYTES if transcript.counts else max(most, transcript.stores * limits.stored_response_bytes)
            )
        body = await read_up_to(response.content, most + 1)
        self._first_bytes(choice)
        version = (wire.VERSION, self._version())
        if len(body) > most:
            if exchange.head_sent:  # as a stream
                raise errors.engine_failed()
            if transcript is not None and transcript.stores:
                self.state.metrics.events["responses_not_stored"] += 1
            length = response.content_length
            framing = [] if length is None else [(b"content-length", b"%d" % length)]
            await exchange.begin(200, [(b"content-type", kind), version, exchange.processing(), *framing])
            self.stream.read_usage(body)
            await exchange.write(body)
            async for piece in response.content.iter_any():
                self.stream.read_usage(piece)
                await exchange.write(piece)
            await exchange.finish()
            return
        if transcript is not None:
            self._check_room(len(body))
            body = transcript.whole(body)
            self._kept()
        self.stream.read_usage(body)
        if exchange.head_sent:  # comments have opened a stream, and the engine gave a plain answer
            await exchange.finish(b"data: %b\n\n" % body)
        else:
            await exchange.whole(response.status, kind, body, (version, exchange.processing()))

    # -- what is kept of a stored answer

    def _noted(self, piece: bytes, *, last: bool = False) -> bytes:
        """What of a stream's bytes goes to the client, once its transcript has read them."""
        transcript, state = self.checked.transcript, self.state
        assert transcript is not None
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

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        """A whole error answer of the engine, of which nothing is relayed. Always raises."""
        body = await read_up_to(response.content, _ERROR_BYTES)
        headers, status = response.headers, response.status
        if wire.UNREACHED.decode() in headers:
            # The node of this engine is gone, and no byte got there: no engine died of it.
            self.state.metrics.events["upstream_unreached"] += 1
            self.attempts.unreached += 1
            raise AttemptFailed(errors.engine_failed(), sent=False)
        route = self.request.route_name
        error = errors.from_upstream(status, body, PROMPT_FIELDS.get(route, "input"))
        after = headers.get("retry-after", "")
        if after.isdigit() and len(after) < 10:
            error.retry_after_s = min(int(after), errors.MAX_RETRY_AFTER_S)
        if status < 500 and (computed := headers.get(wire.COMPUTED.decode())):
            prompt, written = wire.computed(computed.encode())
            self.request.refused_prompt += prompt
            self.request.refused_completion += written
        if status == 404 and error.message.startswith("The model "):
            # The engine has just swapped to another model, or an adapter is gone; the next table tells.
            gone = errors.unavailable(error.message, "model_not_ready", self.state.config.holds.retry_after_s)
            raise AttemptFailed(gone, blame=not self._may_be_adapter())
        if errors.engine_dead(error):
            raise AttemptFailed(error, died=True)
        if status in (401, 403):
            raise errors.engine_failed()
        if status == 404 and error.message == "Not Found":
            error = errors.wrong_task(self.checked.model, route)
        self._refuse_or_ask_the_other(error)

    def _refused_first(self, piece: bytes) -> None:
        """A stream's first event tells of an error. Raises where the client need not see it."""
        error = event_error(piece)
        if error is not None and errors.engine_dead(error):
            raise AttemptFailed(error, died=True)
        if error is not None and error.status < 500 and self._other_version_can_tell():
            self._refuse_or_ask_the_other(error)

    def _refuse_or_ask_the_other(self, error: HttpError) -> None:
        if error.status < 500 and self._other_version_can_tell():
            self.attempts.refused_by, self.canary_error = self.request.model_version, error
            raise _NotThisVersion
        raise error

    def _other_version_can_tell(self) -> bool:
        """Whether a canary has it and the active version is awake: what may be the client's mistake wakes none."""
        model = self.state.router.models.get(self.checked.model)
        if self.row == self.checked.model or self.continues or model is None:
            return False
        return any(replica.state == OPEN for replica in model.replicas)

    def _after(self, failure: AttemptFailed, choice: Choice) -> None:
        """Prepares the next attempt. Raises HttpError where there is none."""
        attempts, state, replica = self.attempts, self.state, choice.replica.id
        if failure.blame:
            state.router.fail(choice, time.monotonic())
        if not failure.sent:
            state.metrics.events["connect_failed"] += 1
            log.warning("cannot reach the engine: %s", failure.__cause__ or failure, extra=self.request.ids)
            if attempts.unreached >= MAX_UNREACHED:
                raise failure.error
            return
        if failure.error.status == 504:
            state.metrics.events["upstream_silent"] += 1
            log.warning("the engine was silent for too long", extra=self.request.ids)
            if choice.replica.avoid:  # the engine gives no sign of life to anybody
                state.router.fail(choice, time.monotonic())
            else:
                self.request.left_after_s = time.monotonic() - self.request.sent_s
            raise failure.error
        attempts.sent += 1
        if failure.died:
            state.metrics.events["upstream_died"] += 1
            log.warning("the engine broke off", extra=self.request.ids)
            if replica not in attempts.lost:
                attempts.lost.append(replica)
        continuation, model = self.checked.continuation, state.router.models.get(self.checked.model)
        resumable = continuation is not None and model is not None and continuation.can_resume(model.max_model_len)
        verdict = attempts.verdict(relayed=self.relayed, resumable=resumable)
        if verdict is Verdict.FAIL:
            raise failure.error
        if verdict is Verdict.CONDEMN:
            state.metrics.events["condemned"] += 1
            log.warning("two engines died of this request: it is not sent again", extra=self.request.ids)
            raise errors.engines_died_of_it()
        if verdict is Verdict.AGAIN:
            state.metrics.events["retried"] += 1
            return
        assert continuation is not None and model is not None
        state.metrics.events["continued"] += 1
        log.info("the stream is continued on another engine", extra=self.request.ids)
        body = continuation.resume_body(model.max_model_len)
        self.continues, self.path, self.held_until_s = True, RESUME_PATH.decode(), 0.0
        # None: all its tokens were sent, and only the ending is missing.
        self.body = b"" if body is None else with_fields(body, self.salt)

    def _version(self) -> bytes:
        return self.request.model_version.encode("latin-1")

    def _may_be_adapter(self) -> bool:
        """Also of a model that was deleted since: what an engine then says of its version is not about it."""
        model = self.state.router.models.get(self.row)
        return model is None or bool(model.adapter)
