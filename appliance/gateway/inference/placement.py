"""Places one inference request: chooses or waits for a replica, sends the request there, and releases the replica's
load afterwards. handler.py handles the result.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

from appliance.gateway.access.request import Request
from appliance.gateway.answers.continuation import ASK_FOR_TOKEN_IDS, CHAT, COMPLETIONS
from appliance.gateway.answers.usage import ASK_FOR_USAGE
from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from appliance.gateway.http import wire
from appliance.gateway.http.client import Client
from appliance.gateway.http.upstream import UpstreamConnection, cancel
from appliance.gateway.inference.answer import Answer
from appliance.gateway.inference.attempt import Attempt
from appliance.gateway.inference.response_copies import ResponseCopies
from appliance.gateway.payload.request_check import Checked, with_fields, with_model
from appliance.gateway.routing.holds import Refusal
from appliance.gateway.routing.router import OPEN, Choice
from appliance.gateway.routing.table import cache_salt, salt_field
from appliance.gateway.state.placeable import Placeable
from appliance.gateway.state.state import State

log = logging.getLogger("appliance.gateway")

_HELD_COMMENT: Final = b": held\n\n"


class Placement(Placeable):
    """See the module's docstring. `answer.client` is None once the client is gone or the response is finished."""

    def __init__(
        self, state: State, copies: ResponseCopies, client: Client, request: Request, checked: Checked
    ) -> None:
        route = request.route
        assert route is not None
        self.state = state
        self.copies = copies
        self.request = request
        self.checked = checked
        body = request.chunks[0]
        request.chunks = []
        asks = checked.stream and not checked.asks_usage and route.name in (CHAT, COMPLETIONS)
        self.answer = Answer(client, request, hides_usage=asks)
        # The body is a checked object; if two fields have the same name, the engine takes the last.
        added = self._salt = self._salt_field()
        if checked.ending:
            added = b"%b%b" % (added, checked.ending)
        if asks:
            added = b"%b%b" % (added, ASK_FOR_USAGE)
        if checked.continuation is not None:
            added = b"%b%b" % (added, ASK_FOR_TOKEN_IDS)
        self._attempt = Attempt(checked.model, route.engine_path, with_fields(body, added) if added else body)

    def _salt_field(self) -> bytes:
        """Separates its owner's prefix cache entries from other owners', so that neither latency nor `cached_tokens`
        reveals them; empty if all may share the cache."""
        caller, checked = self.request.caller, self.checked
        if caller is None or self.state.config.prefix_cache_shared:
            return b""
        checked.owner = caller.cache_salt
        own = checked.cache_salt
        return salt_field(cache_salt(caller.owner, own).encode()) if own else caller.salt_field

    @property
    def row(self) -> str:
        choice = self._attempt.choice
        return self.checked.model if choice is None else choice.model

    @property
    def waiting_prompt_tokens(self) -> int:
        attempt = self._attempt
        at_replica = attempt.choice is not None and self.checked.stream and not attempt.relayed
        return self.checked.prompt_tokens if attempt.ticket is not None or at_replica else 0

    @property
    def prompt_tokens(self) -> int:
        """See Placeable."""
        return self.checked.prompt_tokens

    @property
    def waits_at(self) -> tuple[str, float]:
        """See Placeable. Once is enough, and only streams show whether they have a first token."""
        attempt = self._attempt
        choice = attempt.choice
        if choice is None or attempt.conn is None or not self.checked.stream or attempt.relayed or attempt.continues:
            return "", 0.0
        if attempt.moved_from or attempt.number or attempt.row != self.checked.model or self.answer.client is None:
            return "", 0.0
        return choice.replica.id, attempt.sent_s

    def move(self) -> None:
        attempt = self._attempt
        if attempt.choice is not None:
            self.state.metrics.events["moved"] += 1
            again = attempt.repeated()
            again.moved_from = attempt.choice.replica.id
            self._drop_upstream()
            self._attempt = again
            self.place()

    # -- placing

    def place(self, now: float = 0.0) -> None:
        state, checked = self.state, self.checked
        if checked.model not in state.router.models:
            # It existed when the request arrived: the model, or this version of it, was removed while the request
            # waited.
            self._leave_queue()
            self._fail(state.unknown_model(checked.model, self.request.caller))
            return
        now = now or monotonic()
        attempt = self._attempt
        # Waiting requests go first; otherwise a stream of new requests could starve them.
        if attempt.ticket is None and state.holds.count and state.holds.first(checked.model, alone=attempt.alone):
            self._hold(now)
            return
        choice = self._choose(now)
        if choice is None:
            if attempt.continues and attempt.row != checked.model:
                # The canary is gone in mid-stream; another version cannot continue its answer.
                self._fail(errors.engine_failed())
                return
            if attempt.ticket is None:
                self._hold(now)
            return
        if attempt.ticket is not None:
            self._leave_queue()
        replica, request = choice.replica, self.request
        attempt.choice, attempt.row = choice, choice.model
        attempt.only = choice.load.inflight == 1
        request.replica, request.model_version = replica.id, replica.version
        if state.comparison.compares:
            attempt.crowded = self._crowded(choice)
        state.changed()
        conn = state.pool.acquire(replica.socket)
        if conn is not None:
            self._send(conn)
        else:
            attempt.connecting = state.pool.connect(replica.socket, self._connected)

    def _choose(self, now: float) -> Choice | None:
        """Use the canary for its share; the model takes requests that failed there or for which it has no capacity."""
        router, checked, attempt = self.state.router, self.checked, self._attempt
        caller = self.request.caller
        owner = caller.owner if caller is not None else ""
        pending, avoid, alone = checked.prompt_tokens, attempt.lost, attempt.alone
        if attempt.moved_from:
            avoid = (*avoid, attempt.moved_from)
        if attempt.continues:
            if attempt.row not in router.models:
                return None
            return router.choose(
                attempt.row, checked.tokens, checked.stream, checked.prefix, now, pending, avoid, alone, owner
            )
        choice = None
        if not attempt.number:
            canary = None
            if router.models[checked.model].canary is not None:
                canary = router.canary_for(checked.model, caller.id if caller else "", checked.conversation)
            if canary is not None:
                choice = router.choose(
                    canary, checked.tokens, checked.stream, checked.prefix, now, pending, avoid, alone, owner
                )
        return choice or router.choose(
            checked.model, checked.tokens, checked.stream, checked.prefix, now, pending, avoid, alone, owner
        )

    def asks_the_other_version(self, refusal: HttpError) -> bool:
        """A canary has refused it: only the active version can tell whether the request or the canary is at fault.
        False if no canary refused it, or if the active version has no awake engine: what may be the client's mistake
        wakes none."""
        attempt, model = self._attempt, self.state.router.models.get(self.checked.model)
        if attempt.row == self.checked.model or attempt.continues:
            return False
        if model is None or all(replica.state != OPEN for replica in model.replicas):
            return False
        version = self.request.model_version
        self._drop_upstream()
        self._attempt = attempt.after_failure(attempt.deaths, alone=False)
        self._attempt.refused_by, self._attempt.refusal = version, refusal
        self.place()
        return True

    def _connected(self, result: UpstreamConnection | OSError) -> None:
        attempt = self._attempt
        attempt.connecting = None
        if self.answer.client is None or attempt.choice is None:
            if isinstance(result, UpstreamConnection):
                self.state.pool.put(result)
        elif isinstance(result, OSError) and attempt.reconnects:
            self.engine_lost()
        elif isinstance(result, OSError):
            # Nothing was sent: count no attempt, but mark the replica suspect.
            self.state.metrics.events["connect_failed"] += 1
            log.warning("cannot connect to the engine's socket: %s", result, extra=self.request.ids)
            self._undispatch(failed=True)
            self.place()
        else:
            self._send(result)

    def engine_lost(self) -> None:
        """The engine is gone, and the request was sent to it."""
        raise NotImplementedError

    def _send(self, conn: UpstreamConnection) -> None:
        request, attempt = self.request, self._attempt
        now = monotonic()
        if not attempt.number and not attempt.held_since_s:
            self.state.metrics.added.observe(now - request.received_s)
        attempt.conn = conn
        attempt.progress_s = attempt.sent_s = request.sent_s = now
        # Not the client's id but a new one for each attempt: an engine must never see one twice.
        engine_id = self.state.new_request_id()
        body, row = attempt.body, attempt.row
        model = self.state.router.models.get(row)
        if model is not None and model.adapter:
            body = with_model(body, model.adapter)
        elif row != self.checked.model:
            body = with_model(body, row)
        trace = request.trace if request.spans is None else request.spans.attempt()
        caller = request.caller
        owner = b"" if caller is None else caller.cache_salt
        conn.start(self, wire.engine_request(attempt.path, engine_id, body, trace, owner))
        client = self.answer.client
        if client is not None and client.write_paused:
            conn.pause_reading()

    def _hold(self, now: float) -> None:
        state, attempt = self.state, self._attempt
        if not attempt.held_since_s:
            attempt.held_since_s = now
            hold_s = min(state.router.models[self.checked.model].hold_s, state.config.holds.hold_s)
            attempt.hold_deadline_s = now + hold_s
            attempt.comment_s = now + state.config.holds.sse_grace_s
        if state.next_try_s(self.checked.model) is not None:
            self.hold_refused(Refusal.TROUBLE)
            return
        result = state.holds.add(
            self.checked.model,
            self,
            len(attempt.body),
            attempt.hold_deadline_s,
            now,
            alone=attempt.alone,
            owner=self.request.caller.owner if self.request.caller is not None else "",
        )
        if isinstance(result, Refusal):
            self.hold_refused(result)
            return
        attempt.ticket = result
        before = state.holds.first(self.checked.model, alone=attempt.alone)
        if before is not None and before.owner != result.owner:
            state.place_held_soon(self.checked.model)  # a request ahead of it may be in the share that this one is not
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
        self._attempt.ticket = None
        self.state.metrics.events["hold_refused"] += 1
        log.info("held no longer: %s", refusal.value, extra=self.request.ids)
        self._fail(self._attempt.refusal or self._not_ready(refusal))

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
        attempt = self._attempt
        if attempt.ticket is not None:
            ticket, attempt.ticket = attempt.ticket, None
            if self.request.spans is not None:
                self.request.spans.unhold()
            if self.state.holds.remove(ticket):
                self.state.metrics.held_for.observe(monotonic() - attempt.held_since_s)
                self.state.changed()

    def _comment(self, now_s: float) -> None:
        self._attempt.comment_s = now_s + self.state.config.holds.sse_interval_s
        if not self.answer.head_sent:
            self.answer.begin_stream(None)
        self.answer.write(_HELD_COMMENT)

    # -- given back

    def _drop_upstream(self, *, failed: bool = False) -> None:
        attempt = self._attempt
        cancel(attempt.connecting, attempt.conn)
        attempt.connecting = attempt.conn = None
        self._undispatch(failed=failed)

    def _undispatch(self, *, failed: bool) -> None:
        choice = self._attempt.choice
        if choice is not None and failed:
            self.state.router.fail(choice, monotonic())
        self._end_dispatch(failed=True if failed else None)

    def _end_dispatch(self, *, failed: bool | None) -> None:
        """failed: its result in the comparison of versions; None: do not count it."""
        if failed is not None:
            self._count(failed=failed)
        if self.request.spans is not None:
            self.request.spans.attempt_ended(bool(failed))
        attempt = self._attempt
        if attempt.choice is not None:
            choice, attempt.choice = attempt.choice, None
            self.state.ended(choice)

    def _crowded(self, choice: Choice) -> bool:
        few = self.state.comparison.few(self.checked.model, choice.model != self.checked.model)
        return choice.load.crowded_for(choice.owner, few)

    def _count(self, *, failed: bool) -> None:
        if not self.state.comparison.compares:
            return
        attempt = self._attempt
        choice, now, first_s = attempt.choice, monotonic(), attempt.first_byte_s
        if choice is not None:
            # A client that knows which version answers a conversation can fill that version's engine: others then wait
            # because of the client, not the version.
            timed = first_s and not attempt.crowded and not self._crowded(choice)
            owner, comparison = self.request.caller.owner if self.request.caller else "", self.state.comparison
            comparison.add(
                self.checked.model,
                choice.replica.version,
                owner,
                failed=failed,
                first_byte_s=first_s - attempt.sent_s if timed else None,
                duration_s=now - attempt.sent_s,
            )
            if attempt.refused_by and not failed:
                comparison.refused(self.checked.model, attempt.refused_by, owner)

    def _fail(self, error: HttpError) -> None:
        if self.answer.client is not None and self.answer.head_sent and self.answer.sse:
            self.state.metrics.events["stream_error"] += 1
        self.answer.fail(error)

    def _may_be_adapter(self) -> bool:
        """True as well of a model that was deleted since: what an engine then says of its version is not about it."""
        model = self.state.router.models.get(self._attempt.row)
        return model is None or bool(model.adapter)
