"""The lifeline: one connected AF_UNIX stream socket that joins a supervisor and the process forked for it.

It carries requests to the process, and answers and events back, as frames: a 4-byte big-endian length, then that many
bytes of UTF-8 JSON. End of file means a dead peer; the kernel delivers it even after kill -9. The supervisor holds a
Child; the process holds a Lifeline, which answers requests and ends the process when the supervisor dies.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from runtime.errors import ChannelClosed
from runtime.processes.kernel import kill_group


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "__fspath__"):
        return str(value)
    if hasattr(value, "item"):  # numpy and torch scalars
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent on a lifeline; send numbers, strings, lists and dicts")


class Lifeline:
    """Connects a forked entry function to its supervisor.

    The supervisor's death closes the socket; the reader thread then kills this process's whole group, so no
    engine or rank outlives the actor that holds its devices.
    """

    def __init__(self, connection: Connection):
        """connection: connection to the supervisor."""
        self._connection, self._sending = connection, threading.Lock()
        self._handlers: Future[dict[str, Callable[..., Any]]] = Future()
        # Start the thread at once: a process that is still starting must not outlive its supervisor either.
        threading.Thread(target=self._read, name="lifeline", daemon=True).start()

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Answer requests, including earlier ones, on one daemon thread.

        A handler gets the request's args as keywords, and its return value is the answer. A `concurrent.futures.Future`
        is answered when done, without blocking later requests. An exception is answered as
        `{"type", "message", "data"}`, where `data` is the exception's own `data` dict if it has one.
        """
        self._handlers.set_result(dict(handlers))

    def emit(self, event: str, **data: Any) -> None:
        """Send an event to the supervisor, from any thread. Raises ChannelClosed if it is gone."""
        self._send({"event": event, **data})

    def fatal(self, error: BaseException) -> None:
        """Send the error that ends this process, as the event "fatal". Raises ChannelClosed."""
        kinds = [kind.__name__ for kind in type(error).__mro__]
        self.emit("fatal", type=kinds[0], kinds=kinds, message=str(error))

    def _send(self, message: dict[str, Any]) -> None:
        body = encode(message)
        try:
            with self._sending:
                self._connection.send_bytes(body)
        except OSError as error:
            raise ChannelClosed("the supervisor is gone") from error

    def _read(self) -> None:
        while True:
            try:
                request = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                kill_group(os.getpgid(0))
                return
            self._answer(self._handlers.result(), request)

    def _answer(self, handlers: dict[str, Callable[..., Any]], request: dict[str, Any]) -> None:
        done: Future[Any] = Future()
        try:
            handler = handlers.get(request["call"])
            if handler is None:
                raise LookupError(f"no such call {request['call']!r}; this process answers {sorted(handlers)}")
            result = handler(**request["args"])
            if isinstance(result, Future):
                done = result
            else:
                done.set_result(result)
        except Exception as error:  # noqa: BLE001 - sent to the supervisor, which raises it there
            done.set_exception(error)
        done.add_done_callback(lambda done: self._reply(request["id"], done))

    def _reply(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        with suppress(ChannelClosed):
            if error is None:
                try:
                    self._send({"id": number, "ok": done.result()})
                    return
                except TypeError as unfit:
                    error = unfit
            traceback.print_exception(error)
            detail = {"type": type(error).__name__, "message": str(error), "data": getattr(error, "data", None)}
            self._send({"id": number, "error": detail})
