"""The event hub of open pages: gathers what changed into numbered rounds, and gives each follower what it may hear of.

A round names topics and ids, nothing else. What a follower has not taken yet is joined, so that one who does not read
holds a few names; one who goes on so is let go.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import orjson

from appliance.controller.interfaces.errors import ApiError
from appliance.controller.interfaces.principal import Principal
from appliance.controller.live.topics import hears
from runtime.when_gone import when_gone

ROUND_S: Final = 0.5
"""What changes within it is one event."""
HEARTBEAT_S: Final = 15.0
ROUNDS_KEPT: Final = 256
"""How much is kept for a follower that comes back: two minutes at least."""
MOST_IDS: Final = 100
"""Ids of a topic in an event; beyond it the topic stands without ids, and anything of it may have changed."""
MOST_OF_A_KEY, MOST = 8, 256
UNREAD_S: Final = 60.0

# Topic -> (id, owner) of what changed; None: too many, or things without an id.
Changes = dict[str, "set[tuple[str, str | None]] | None"]


@dataclass(eq=False)
class Follower:
    """One open stream. waiting: what it has not been sent, by topic; an empty set stands for anything of the topic.
    reload: it has to ask for everything, since nobody knows what it has missed."""

    caller: Principal
    number: int = 0
    waiting: dict[str, set[str]] = field(default_factory=dict)
    reload: bool = False
    since_s: float | None = None
    gone: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, number: int, changes: Changes, now_s: float) -> None:
        for topic, changed in changes.items():
            if (ids := _heard(self.caller, topic, changed)) is None:
                continue
            there = self.waiting.get(topic)
            if there is None:
                self.waiting[topic] = ids
            elif not there or not ids or len(there | ids) > MOST_IDS:
                self.waiting[topic] = set()
            else:
                self.waiting[topic] = there | ids
        self.number = number
        if self.waiting or self.reload:
            self.since_s = now_s if self.since_s is None else self.since_s
            self.wake.set()


def _heard(caller: Principal, topic: str, changed: set[tuple[str, str | None]] | None) -> set[str] | None:
    """The ids that it may hear of, an empty set for anything; None: it hears nothing of this. Asked once for a topic,
    not for each id: of all topics of 256 followers that took 0.2 s of each round."""
    everybodys = hears(caller, topic, None)
    if not everybodys and not hears(caller, topic, caller.owner):
        return None
    if changed is None:
        return set()
    return {row_id for row_id, owner in changed if everybodys or owner == caller.owner} or None


class Hub:
    """One for all followers. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run = secrets.token_hex(4)
        self._number = 0
        self._fresh: Changes = {}
        self._rounds: deque[tuple[int, Changes]] = deque(maxlen=ROUNDS_KEPT)
        self._followers: dict[Follower, None] = {}  # the oldest first
        self._of_key: Counter[str] = Counter()
        self._of_owner: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: asyncio.TimerHandle | None = None
        self._closed = False

    # -- what changes

    def begin(self) -> None:
        """From now on, on this loop, what is told reaches followers."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """The process ends: so do all streams, which their clients take up again."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        for follower in list(self._followers):
            self._let_go(follower)

    def tell(self, topic: str, row_id: str | None = None, owner: str | None = None) -> None:
        """Something of a topic changed. Never raises, and costs little: it is called within writes of the store."""
        changed = self._fresh.setdefault(topic, set())
        if changed is not None:
            if row_id is None or len(changed) >= MOST_IDS:
                self._fresh[topic] = None
            else:
                changed.add((row_id, owner))
        if self._due is None and self._loop is not None and not self._closed:
            self._due = self._loop.call_later(ROUND_S, self._end_round)

    def is_followed(self, topic: str) -> bool:
        return any(hears(follower.caller, topic, None) for follower in self._followers)

    def _end_round(self) -> None:
        self._due = None
        self._number += 1
        changes, self._fresh = self._fresh, {}
        self._rounds.append((self._number, changes))
        now_s = self._clock()
        for follower in list(self._followers):
            if follower.since_s is not None and now_s - follower.since_s > UNREAD_S:
                self._let_go(follower)
            else:
                follower.take(self._number, changes, now_s)

    # -- who follows

    def follow(self, caller: Principal, last: str | None) -> AsyncGenerator[bytes, None]:
        """The events for one more follower, as Server-Sent Events, beginning behind the event `last` where that is
        known. Raises ApiError 429."""
        key = caller.key_id or ""
        if self._closed or self._of_key[key] >= MOST_OF_A_KEY or not self._has_place(caller.owner):
            raise ApiError(
                429,
                f"Too many event streams are open: {MOST_OF_A_KEY} of one key and {MOST} of a box are allowed.",
                kind="requests",
                code="too_many_streams",
                headers={"retry-after": "30"},
            )
        follower = Follower(caller, self._number)
        self._catch_up(follower, last)
        self._followers[follower] = None
        self._of_key[key] += 1
        self._of_owner[caller.owner] += 1
        events = self._events(follower)
        when_gone(events, partial(self._let_go, follower))  # one that is never asked has no end of its own
        return events

    def _has_place(self, owner: str) -> bool:
        """Where all places are taken, the owner who has most gives one, his oldest, to whoever has fewer: with 32 keys
        one could have them all."""
        if len(self._followers) < MOST:
            return True
        (crowd, most), *_ = self._of_owner.most_common(1)
        if most <= self._of_owner[owner] + 1:
            return False
        self._let_go(next(one for one in self._followers if one.caller.owner == crowd))
        return True

    def _catch_up(self, follower: Follower, last: str | None) -> None:
        run, _, number = (last or "").partition("-")
        seen = int(number) if number.isdecimal() and len(number) < 16 else -1
        missed = [(at, changes) for at, changes in self._rounds if at > seen]
        if run != self._run or not 0 <= seen <= self._number or len(missed) != self._number - seen:
            follower.reload = True
            follower.wake.set()
        for at, changes in missed if not follower.reload else ():
            follower.take(at, changes, self._clock())

    def _let_go(self, follower: Follower) -> None:
        """A second time changes nothing."""
        if follower in self._followers:
            del self._followers[follower]
            for counted, name in (
                (self._of_key, follower.caller.key_id or ""),
                (self._of_owner, follower.caller.owner),
            ):
                counted[name] -= 1
                if not counted[name]:
                    del counted[name]
        follower.gone = True
        follower.waiting = {}
        follower.wake.set()

    async def _events(self, follower: Follower) -> AsyncGenerator[bytes, None]:
        try:
            yield b": open\n\n"
            while not follower.gone:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await follower.wake.wait()
                except TimeoutError:
                    yield b": here\n\n"
                    continue
                follower.wake.clear()
                if follower.gone:
                    return
                kind, waiting = (b"reload", {}) if follower.reload else (b"changed", follower.waiting)
                follower.reload, follower.waiting, follower.since_s = False, {}, None
                data = orjson.dumps({topic: sorted(ids) for topic, ids in waiting.items()})
                at = b"%b-%d" % (self._run.encode(), follower.number)
                follower.since_s = self._clock()
                yield b"id: %b\nevent: %b\ndata: %b\n\n" % (at, kind, data)
                follower.since_s = self._clock() if follower.waiting else None
        finally:
            self._let_go(follower)
