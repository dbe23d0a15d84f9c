"""Places one inference request: chooses or waits for a replica, sends the request there, and releases the replica's
load afterwards. handler.py handles the result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from appliance.gateway.access.request import Request
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.upstream import UpstreamConnection, cancel
from appliance.gateway.inference.answer import Answer
from appliance.gateway.inference.response_copies import ResponseCopies
from appliance.gateway.payload.continuation import ASK_FOR_TOKEN_IDS, CHAT, COMPLETIONS
from appliance.gateway.payload.request_check import Checked, with_fields, with_model
from appliance.gateway.payload.usage import ASK_FOR_USAGE
from appliance.gateway.routing.holds import Refusal, Ticket
from appliance.gateway.routing.router import Choice
from appliance.gateway.routing.table import cache_salt
from appliance.gateway.state.placeable import Placeable
from appliance.gateway.state.state import State

log = logging.getLogger("appliance.gateway")

_HELD_COMMENT: Final = b": held\n\n"


class Placement(Placeable):
    """See the module's docstring. `answer.client` is None once the client is gone or the response is finished."""

    # Defaults stand in the class, as access.request.Request says.
    _conn: UpstreamConnection | None = None
    _held_since_s: float = 0.0
    _hold_deadline_s: float = 0.0
    _attempts: int = 0
    _relayed: bool = False
    _continued: bool = False
    _progress_s: float = 0.0
    _comment_s: float = 0.0
    _alone: bool = False
    _moved_from: str = ""
    _sent_s: float = 0.0
    _first_byte_s: float = 0.0

    def __init__(
        self, state: State, copies: ResponseCopies, client: Client, request: Request, checked: Checked
    ) -> None:
        route = request.route
        assert route is not None
        self.state = state
        self.copies = copies
        self.request = request
        self.checked = checked
        self._path = route.engine_path
        self._row = checked.model
        self._choice: Choice | None = None
        self._ticket: Ticket[Placeable] | None = None
        self._connecting: asyncio.Task[None] | None = None
        body = request.chunks[0]
        request.chunks = []
        asks = checked.stream and not checked.asks_usage and route.name in (CHAT, COMPLETIONS)
        self.answer = Answer(client, request, hides_usage=asks)
        # The body is a checked object; of two fields with one name the engine takes the last.
        added = self._salt = self._salt_field()
        if asks:
            added = b"%b%b" % (added, ASK_FOR_USAGE)
        if checked.continuation is not None:
            added = b"%b%b" % (added, ASK_FOR_TOKEN_IDS)
        self._body = with_fields(body, added) if added else body

    def _salt_field(self) -> bytes:
        """Separates its owner's prefix cache entries from other owners', so that neither latency nor `cached_tokens`
        reveals them; empty if all may share the cache."""
        caller, checked = self.request.caller, self.checked
        if caller is None or self.state.config.prefix_cache_shared:
            return b""
        own, checked.owner = checked.cache_salt, caller.cache_salt
        return b',"cache_salt":"%b"' % (cache_salt(caller.owner, own).encode() if own else checked.owner)

    @property
    def row(self) -> str:
        """The table row it counts for: the canary's while it is placed there, else its model's."""
        return self.checked.model if self._choice is None else self._choice.model

    @property
    def waiting_prompt_tokens(self) -> int:
        """Estimated prompt tokens if it is known to have no first token yet. On a replica only streams show this."""
        at_replica = self._choice is not None and self.checked.stream and not self._relayed
        return self.checked.prompt_tokens if self._ticket is not None or at_replica else 0

    @property
    def waits_at(self) -> tuple[str, float]:
        """See Placeable. Once is enough, and only streams show whether they have a first token."""
        choice = self._choice
        if choice is None or self._conn is None or not self.checked.stream or self._relayed or self._continued:
            return "", 0.0
        if self._moved_from or self._attempts or self._row != self.checked.model or self.answer.client is None:
            return "", 0.0
        return choice.replica.id, self._sent_s

    def move(self) -> None:
        if self._choice is not None:
            self._moved_from = self._choice.replica.id
            self.state.metrics.events["moved"] += 1
            self._drop_upstream()
            self.place()

    # -- placing

    def place(self, now: float = 0.0) -> None:
        """Send the request to a replica that can take it, or hold it. now: the monotonic clock, if it was just read."""
        state, checked = self.state, self.checked
        if checked.model not in state.router.models:
            # It existed when the request arrived: the model, or this version of it, was removed while the request
            # waited.
            self._leave_queue()
            self._fail(state.unknown_model(checked.model, self.request.caller))
            return
        now = now or time.monotonic()
        # Waiting requests go first; otherwise a stream of new requests could starve them.
        if self._ticket is None and state.holds.count and state.holds.held(checked.model):
            self._hold(now)
            return
        choice = self._choose(now)
        if choice is None:
            if self._continued and self._row != checked.model:
                # The canary is gone in mid-stream; another version cannot continue its answer.
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
        state.changed()
        conn = state.pool.acquire(replica.socket)
        if conn is not None:
            self._send(conn)
        else:
            self._connecting = state.pool.connect(replica.socket, self._connected)

    def _choose(self, now: float) -> Choice | None:
        """Use the canary for its share; the model takes requests that failed there or for which it has no capacity."""
        router, checked = self.state.router, self.checked
        pending = checked.prompt_tokens
        if self._continued:
            if self._row not in router.models:
                return None
            return router.choose(
                self._row, checked.tokens, checked.stream, checked.prefix, now, pending, self._moved_from
            )
        choice = None
        if not self._attempts:
            canary = None
            if router.models[checked.model].canary is not None:
                caller = self.request.caller
                canary = router.canary_for(checked.model, caller.id if caller else "", checked.conversation)
            if canary is not None:
                choice = router.choose(
                    canary, checked.tokens, checked.stream, checked.prefix, now, pending, self._moved_from
                )
        return choice or router.choose(
            checked.model, checked.tokens, checked.stream, checked.prefix, now, pending, self._moved_from
        )

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        self._connecting = None
        if self.answer.client is None or self._choice is None:
            if isinstance(result, UpstreamConnection):
                self.state.pool.put(result)
        elif isinstance(result, OSError):
            # Nothing was sent: count no attempt, but mark the replica suspect.
            self.state.metrics.events["connect_failed"] += 1
            log.warning("cannot connect to the engine's socket: %s", result, extra=self.request.ids)
            self._undispatch(failed=True)
            self.place()
        else:
            self._send(result)

    def _send(self, conn: UpstreamConnection) -> None:
        request = self.request
        now = time.monotonic()
        if not self._attempts and not self._held_since_s:
            self.state.metrics.added.observe(now - request.received_s)
        self._conn = conn
        self._progress_s = now
        # Not the client's id but a new one for each attempt: an engine must never see one twice.
        engine_id = self.state.new_request_id()
        self._sent_s = request.sent_s = now
        self._first_byte_s = 0.0
        body, model = self._body, self.state.router.models.get(self._row)
        if model is not None and model.adapter:
            body = with_model(body, model.adapter)
        elif self._row != self.checked.model:
            body = with_model(body, self._row)
        trace = request.trace if request.spans is None else request.spans.attempt()
        conn.start(self, wire.engine_request(self._path, engine_id, body, trace))
        client = self.answer.client
        if client is not None and client.write_paused:
            conn.pause_reading()

    def _hold(self, now: float) -> None:
        state = self.state
        if not self._held_since_s:
            self._held_since_s = now
            hold_s = min(state.router.models[self.checked.model].hold_s, state.config.holds.hold_s)
            self._hold_deadline_s = now + hold_s
            self._comment_s = now + state.config.holds.sse_grace_s
        if state.next_try_s(self.checked.model) is not None:
            self.hold_refused(Refusal.TROUBLE)
            return
        result = state.holds.add(self.checked.model, self, len(self._body), self._hold_deadline_s, now)
        if isinstance(result, Refusal):
            self.hold_refused(result)
            return
        self._ticket = result
        if self.request.spans is not None:
            self.request.spans.hold()
        state.metrics.events["held"] += 1
        state.held(self.checked.model)

    def look_again(self) -> None:
        caller = self.request.caller
        assert caller is not None
        try:
            self.state.callable_model(self.checked.model, caller)
        except HttpError as error:
            self._leave_queue()
            self._fail(error)

    def hold_refused(self, refusal: Refusal) -> None:
        """It may not wait (any longer). Its ticket is already removed from the queue."""
        self._ticket = None
        self.state.metrics.events["hold_refused"] += 1
        log.info("held no longer: %s", refusal.value, extra=self.request.ids)
        self._fail(self._not_ready(refusal))

    def _not_ready(self, refusal: Refusal) -> HttpError:
        state, name = self.state, self.checked.model
        model = state.router.models.get(name)
        if model is None or model.trouble is None:
            return errors.unavailable(
                f"The model `{name}` is not ready: {refusal.value}. Please retry.",
                "model_not_ready",
                state.config.holds.retry_after_s,
            )
        next_try_s = state.next_try_s(name)
        return errors.not_serving(
            name, model.trouble.reason, state.config.holds.retry_after_s if next_try_s is None else next_try_s
        )

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            if self.request.spans is not None:
                self.request.spans.unhold()
            if self.state.holds.remove(ticket):
                self.state.metrics.held_for.observe(time.monotonic() - self._held_since_s)
                self.state.changed()

    def _comment(self, now_s: float) -> None:
        self._comment_s = now_s + self.state.config.holds.sse_interval_s
        if not self.answer.head_sent:
            self.answer.begin_stream(None)
        self.answer.write(_HELD_COMMENT)

    # -- given back

    def _drop_upstream(self, *, failed: bool = False) -> None:
        cancel(self._connecting, self._conn)
        self._connecting = self._conn = None
        self._undispatch(failed=failed)

    def _undispatch(self, *, failed: bool) -> None:
        if self._choice is not None and failed:
            self.state.router.fail(self._choice, time.monotonic())
        self._end_dispatch(failed=True if failed else None)

    def _end_dispatch(self, *, failed: bool | None) -> None:
        """failed: its result in the comparison of versions; None: do not count it."""
        if failed is not None:
            self._count(failed=failed)
        if self.request.spans is not None:
            self.request.spans.attempt_ended(bool(failed))
        if self._choice is not None:
            choice, self._choice = self._choice, None
            self.state.ended(choice)

    def _count(self, *, failed: bool) -> None:
        if not self.state.comparison.compares:
            return
        choice, now, first_s = self._choice, time.monotonic(), self._first_byte_s
        if choice is not None:
            self.state.comparison.add(
                self.checked.model,
                choice.replica.version,
                failed=failed,
                first_byte_s=first_s - self._sent_s if first_s else None,
                duration_s=now - self._sent_s,
            )

    def _fail(self, error: HttpError) -> None:
        if self.answer.client is not None and self.answer.head_sent and self.answer.sse:
            self.state.metrics.events["stream_error"] += 1
        self.answer.fail(error)

    def _is_adapter(self) -> bool:
        model = self.state.router.models.get(self._row)
        return model is not None and bool(model.adapter)
