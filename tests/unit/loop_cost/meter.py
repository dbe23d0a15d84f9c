"""Counts what runs on the event loop's own thread: what SQLite does, what is read from it, JSON, calls, folders listed.

A counter is no clock: it says the same on a busy machine. What other threads do is not counted; the loop is free then.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
from fastapi import routing
from fastapi._compat import v2

PATIENCE_S = 10.0
"""For what a request has begun to end, which it does; what has not is cancelled."""


@dataclass
class Cost:
    """steps: instructions of SQLite's virtual machine. pages: of the database that they looked at, 0 where that cannot
    be known. rows, bytes: fetched, and their texts. parsed: bytes of JSON read or written. calls: of functions.
    entries: of folders that were listed. wrong: errors that pydantic has written down of one body."""

    steps: int = 0
    pages: int = 0
    rows: int = 0
    bytes: int = 0
    parsed: int = 0
    calls: int = 0
    entries: int = 0
    wrong: int = 0

    def add(self, other: Cost) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def most(self, other: Cost) -> None:
        for name in COUNTS:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


COUNTS = tuple(one.name for one in fields(Cost))
_HERE = Cost.add.__code__.co_filename


@dataclass
class Told:
    """all: together. longest: of each count, the most of one callback or step of a task. round: the most of one round
    of the loop, of all that were ready when it began: whoever comes meanwhile waits for all of them."""

    all: Cost
    longest: Cost
    round: Cost = field(default_factory=Cost)


class Meter:
    """Use `installed` around all of a store's life, and `of` for each thing that is to be counted."""

    def __init__(self, sources: bool = False) -> None:
        """sources: also say in `by` which statements and functions there were."""
        self._thread = threading.get_ident()
        self._on = False
        self._now, self._steps = Cost(), list[None]()
        self._told, self._round = Told(Cost(), Cost()), Cost()
        self._connections: list[sqlite3.Connection] = []
        self._sources, self._statement = sources, ""
        self.by: Counter[str] = Counter()

    async def of(self, work: Awaitable[Any]) -> tuple[Any, Told]:
        """What the work comes to, and what it and what it has begun have cost until all that has ended."""
        others = asyncio.all_tasks()
        await asyncio.sleep(0)  # in a step of its own: not what whoever asks has done before
        self._told, self._now, self._round = Told(Cost(), Cost()), Cost(), Cost()
        self.by.clear()
        self._take()
        self._now = Cost()
        self._on = True
        sys.setprofile(self._called)
        try:
            came = await work
            begun = asyncio.all_tasks() - others
            if begun:
                _, left = await asyncio.wait(begun, timeout=PATIENCE_S)
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
        finally:
            sys.setprofile(None)
            self._end_of_turn()
            self._end_of_round()
            self._on = False
        return came, self._told

    @contextmanager
    def installed(self) -> Iterator[None]:
        kept: list[tuple[Any, str, Any]] = []

        def put(where: Any, name: str, value: Any) -> None:
            kept.append((where, name, getattr(where, name)))
            setattr(where, name, value)

        meter, run, connect = self, asyncio.Handle._run, sqlite3.connect
        once, validate = vars(asyncio.BaseEventLoop)["_run_once"], v2.ModelField.validate

        class Row(sqlite3.Row):
            def __new__(cls, cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> Row:
                if meter._counts():
                    meter._now.rows += 1
                    meter._now.bytes += sum(len(value) for value in values if isinstance(value, str | bytes))
                return super().__new__(cls, cursor, values)  # type: ignore[arg-type]

        def turn(handle: Any) -> None:
            try:
                run(handle)
            finally:
                if meter._on:
                    meter._end_of_turn()

        def whole_round(loop: Any) -> None:
            try:
                once(loop)
            finally:
                if meter._on:
                    meter._end_of_round()

        def validated(*args: Any, **named: Any) -> Any:
            value, errors = validate(*args, **named)
            if meter._counts():
                meter._now.wrong += len(errors)
            return value, errors

        def connected(*args: Any, **named: Any) -> sqlite3.Connection:
            made: sqlite3.Connection = connect(*args, **named)
            if threading.get_ident() == meter._thread:
                made.set_progress_handler(partial(meter._steps.append, None), 1)
                if meter._sources:
                    made.set_trace_callback(meter._traced)
                meter._connections.append(made)
            return made

        put(sqlite3, "Row", Row)
        put(sqlite3, "connect", connected)
        put(asyncio.Handle, "_run", turn)
        put(asyncio.BaseEventLoop, "_run_once", whole_round)
        put(v2.ModelField, "validate", validated)
        # It reads the source of an endpoint that is asked first, and knows it by its id: one that an endpoint of a
        # former app had is known already, by chance.
        put(routing, "_extract_endpoint_context", lambda _: {})
        for where, name in ((json, "loads"), (orjson, "loads")):
            put(where, name, self._of_argument(getattr(where, name)))
        for where, name in ((json, "dumps"), (orjson, "dumps")):
            put(where, name, self._of_result("parsed", getattr(where, name)))
        put(os, "listdir", self._of_result("entries", os.listdir))
        collected = gc.isenabled()
        gc.disable()  # what it calls when it comes would be counted, and it comes at any time
        try:
            yield
        finally:
            if collected:
                gc.enable()
            for where, name, value in reversed(kept):
                setattr(where, name, value)

    # --- how it counts

    def _counts(self) -> bool:
        return self._on and threading.get_ident() == self._thread

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        # Millions of times, half of them of returns.
        if (event == "call" or event == "c_call") and (code := frame.f_code).co_filename is not _HERE:  # noqa: PLR1714
            self._now.calls += 1
            if self._sources:
                self.by[f"calls {code.co_filename}:{code.co_name}"] += 1

    def _traced(self, statement: str) -> None:
        self._take()
        self._statement = f"{_asking()}: {re.sub('[0-9]+|.(ann|bob).*?[^a-z]', '_', ' '.join(statement.split()))[:120]}"

    def _take(self) -> None:
        steps = len(self._steps)
        self._steps.clear()
        self._now.steps += steps
        if steps:
            for connection in self._connections:
                self._now.pages += pages_of(connection)
        if self._sources and steps:
            self.by[f"steps {self._statement}"] += steps

    def _end_of_turn(self) -> None:
        self._take()
        self._told.all.add(self._now)
        self._told.longest.most(self._now)
        self._round.add(self._now)
        self._now = Cost()

    def _end_of_round(self) -> None:
        self._told.round.most(self._round)
        self._round = Cost()

    def _of_argument(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(text: Any, *args: Any, **named: Any) -> Any:
            if self._counts():
                self._now.parsed += len(text)
            return real(text, *args, **named)

        return counted

    def _of_result(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """what: the number of the span that grows by the length of what is made."""

        def counted(*args: Any, **named: Any) -> Any:
            made = real(*args, **named)
            if self._counts():
                setattr(self._now, what, getattr(self._now, what) + len(made))
            return made

        return counted


def _asking() -> str:
    """The lines that ask the store: within it, and before."""
    frame: FrameType | None = sys._getframe(2)
    found: list[str] = []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if "/appliance/" in name and not name.endswith("store/database.py"):
            found.append(f"{name.partition('/appliance/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


MAPS = Path("/proc/self/maps")
_CACHE_HIT, _CACHE_MISS = 7, 8  # SQLITE_DBSTATUS_…


def _status() -> Any:
    """SQLite's own function, of the library that Python itself has loaded; None where it has none to itself."""
    if not MAPS.exists():
        return None
    found = next((line.split()[-1] for line in MAPS.read_text().splitlines() if "libsqlite3.so" in line), None)
    if found is None:
        return None
    library = ctypes.CDLL(found)
    pointer = ctypes.POINTER(ctypes.c_int)
    library.sqlite3_db_status.argtypes = [ctypes.c_void_p, ctypes.c_int, pointer, pointer, ctypes.c_int]
    return library.sqlite3_db_status


_STATUS = _status()


def pages_of(connection: sqlite3.Connection) -> int:
    """Pages that the connection has looked at since this was asked last."""
    if _STATUS is None:
        return 0
    # A Python object's count and type, and then the library's own pointer.
    handle = ctypes.c_void_p.from_address(id(connection) + 2 * ctypes.sizeof(ctypes.c_void_p))
    found, highest, total = ctypes.c_int(), ctypes.c_int(), 0
    for what in (_CACHE_HIT, _CACHE_MISS):
        _STATUS(handle, what, ctypes.byref(found), ctypes.byref(highest), 1)
        total += found.value
    return total
