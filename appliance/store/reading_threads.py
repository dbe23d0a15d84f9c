"""Threads that read for the event loop: owners take turns, and none has all of them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from appliance.store.errors import ReadingEnded
from appliance.store.readers import Readers, Stop

T = TypeVar("T")
THREADS = 4
"""Few: between two steps of SQLite they take turns with the loop at Python's lock."""
OF_ONE = 2


class _Wanted:
    """One reading that has been asked for; answered on the loop."""

    def __init__(self, whose: str | None, work: Callable[[], Any], loop: asyncio.AbstractEventLoop):
        self.whose, self.stop, self.answer = whose, Stop(), loop.create_future()
        self._work, self._loop, self._context = work, loop, contextvars.copy_context()

    def carry_out(self, readers: Readers, ended: Callable[[_Wanted, Any, BaseException | None], None]) -> None:
        """Runs on a thread."""
        found, error = None, None
        try:
            with readers.reading(self.stop):
                found = self._context.run(self._work)
        except BaseException as raised:  # noqa: BLE001 - all of it is raised where the reading was asked for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(ended, self, found, error)
        # An error knows where it was raised, here, and would know itself: a cycle, with all that was asked with it.
        del found, error


class ReadingThreads:
    """Used on one loop at a time. Its threads begin with the first reading."""

    def __init__(self, readers: Readers):
        self._readers = readers
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: OrderedDict[str | None, deque[_Wanted]] = OrderedDict()  # whose turn is next first
        self._at_work: Counter[str | None] = Counter()
        self._closed = False

    async def run(self, whose: str | None, work: Callable[[], T]) -> T:
        """See Database.read."""
        if self._closed:
            raise ReadingEnded
        wanted = _Wanted(whose, work, asyncio.get_running_loop())
        self._waiting.setdefault(whose, deque()).append(wanted)
        self._begin_some()
        try:
            return cast(T, await wanted.answer)
        except asyncio.CancelledError:
            wanted.stop.ask()
            self._forget(wanted)
            raise
        finally:
            del wanted  # as above: it has the error

    def close(self) -> None:
        """What waits is refused; what is at work is ended by the readers."""
        self._closed = True
        for lane in self._waiting.values():
            for wanted in lane:
                if not wanted.answer.done():
                    wanted.answer.set_exception(ReadingEnded())
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _begin_some(self) -> None:
        """As many as there are threads for, each owner's first before anyone's second."""
        for whose in list(self._waiting):
            if self._at_work.total() >= THREADS:
                return
            if self._at_work[whose] >= OF_ONE:
                continue
            lane = self._waiting[whose]
            wanted = lane.popleft()
            self._waiting.move_to_end(whose)
            if not lane:
                del self._waiting[whose]
            self._at_work[whose] += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, "reading")
            self._pool.submit(wanted.carry_out, self._readers, self._ended)

    def _ended(self, wanted: _Wanted, found: Any, error: BaseException | None) -> None:
        self._at_work[wanted.whose] -= 1
        if not self._at_work[wanted.whose]:
            del self._at_work[wanted.whose]
        if not self._closed:
            self._begin_some()
        if wanted.answer.done():
            return  # nobody waits for it any more
        if error is None:
            wanted.answer.set_result(found)
        else:
            # A future takes no StopIteration, and the caller would wait for ever.
            wanted.answer.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    def _forget(self, wanted: _Wanted) -> None:
        lane = self._waiting.get(wanted.whose)
        if lane is not None and wanted in lane:
            lane.remove(wanted)
            if not lane:
                del self._waiting[wanted.whose]
