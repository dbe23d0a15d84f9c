"""The supervisor's end of the lifeline: fork a process, call it, detect its death, kill it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

from runtime.errors import ChannelClosed, ChildDied, ChildError, ChildTimeout, WarmParentError
from runtime.logs import tail
from runtime.processes.kernel import group_alive, how_it_ended, kill_group, kills_so_far
from runtime.processes.lifeline import encode

KILLS_EVERY_S = 2.0
CORE_KILLED = "CoreKilled"  # of serve.core.errors: an engine's front end reports that its core or a worker was killed
LENGTH = struct.Struct(">I")
LAST_FRAME = re.compile(rb'\{"ended":(-?\d+)\}\Z')
KILL_TIMEOUT_S = 30.0  # killed processes that wait for a busy disk took more than 10 s to end


class Channel:
    """The supervisor's end of a lifeline. It reads without asyncio's streams: they lose unread data when a write
    fails, such as a call to a process that has just ended."""

    def __init__(self, writer: asyncio.StreamWriter):
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # the peer has said nothing yet
        self._writer = writer
        self._connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        self._connection.setblocking(False)
        self.received = bytearray()  # bytes received but not yet parsed

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises ChannelClosed if the peer is gone."""
        try:
            body = encode(message)
            self._writer.write(LENGTH.pack(len(body)) + body)
            await self._writer.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the process is gone") from error

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises ChannelClosed at end of file."""
        return json.loads(await self._exactly(*LENGTH.unpack(await self._exactly(LENGTH.size))))

    def close(self) -> None:
        self._writer.close()
        self._connection.close()

    async def _exactly(self, size: int) -> bytes:
        while len(self.received) < size:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._connection, 2**18)
            except ConnectionResetError:  # raised instead of end of file if the peer closed without reading a call
                data = b""
            if not data:
                raise ChannelClosed("the process is gone")
            self.received += data
        taken = bytes(self.received[:size])
        del self.received[:size]
        return taken


class Child:
    """One forked process and everything under it (it leads its own process group).

    Use it on one asyncio loop. The child dies if the connection closes or this process dies.
    """

    def __init__(self, channel: Channel, pid: int, name: str, log: str, log_begin: int):
        self.pid, self.name, self.log_path, self._log_begin = pid, name, log, log_begin
        self.fatal: dict[str, Any] | None = None
        self.status: int | None = None
        """Exit status (as in subprocess) of the dead process; None if its warm parent was replaced."""
        self._channel = channel
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future] = {}
        self._events: asyncio.Queue[dict | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._kills = self._newest_kills = kills_so_far()
        self._killed = self.starved = False
        self._watch = asyncio.create_task(self._watch_kills(), name=f"memory of {name}")
        self._reading = asyncio.create_task(self._read(), name=f"lifeline of {name}")

    @classmethod
    async def spawn(
        cls,
        warm_socket: str | Path,
        entry: str,
        args: dict[str, Any],
        *,
        env: dict[str, str] | None = None,
        numa_nodes: Sequence[int | None] = (),
        log_path: str | Path,
        name: str,
        timeout_s: float = 30.0,
    ) -> Child:
        """Fork `entry` ("module:function") from the warm parent listening on `warm_socket`.

        `args` must be plain JSON; `env` is set before the entry's module is imported; `numa_nodes`: nodes of the
        process's devices, near which it runs (kernel.bind_near). Raises WarmParentError if the parent is unreachable or
        does not fork within `timeout_s` seconds.
        """
        log_begin = Path(log_path).stat().st_size if Path(log_path).exists() else 0
        try:
            async with asyncio.timeout(timeout_s):
                channel = Channel((await asyncio.open_unix_connection(str(warm_socket)))[1])
                with ExitStack() as undo:
                    undo.callback(channel.close)
                    call = {"entry": entry, "args": args, "log_path": str(log_path), "name": name}
                    await channel.send({**call, "env": env or {}, "numa_nodes": list(numa_nodes)})
                    pid = (await channel.receive())["pid"]
                    undo.pop_all()
        except (OSError, ChannelClosed, TimeoutError, json.JSONDecodeError) as error:
            raise WarmParentError(
                f"the warm parent at {warm_socket} did not fork {name} within {timeout_s} s "
                f"({type(error).__name__}: {error}); see its log next to {log_path}"
            ) from error
        return cls(channel, pid, name, str(log_path), log_begin)

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    async def call(self, method: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """Run a handler of the child and return its answer.

        Raises ChildError (the child's own exception), ChildDied, or ChildTimeout after `timeout_s` s (None: never).
        """
        if not self.alive:
            raise self._death()
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._channel.send({"id": number, "call": method, "args": args})
            async with asyncio.timeout(timeout_s):
                return await answer
        except ChannelClosed as error:
            raise self._death() from error
        except TimeoutError as error:
            raise ChildTimeout(f"{self.name} (pid {self.pid}) did not answer {method!r} in {timeout_s} s") from error
        finally:
            self._waiting.pop(number, None)

    async def next_event(self) -> dict[str, Any] | None:
        """Return the child's next event, in order; None once the child is dead and all events are read."""
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)
        return event

    def log_end(self) -> str:
        """Return the last lines of the child's log."""
        return tail(self.log_path, self._log_begin)

    async def closed(self) -> None:
        """Wait until the child is dead."""
        await self._gone.wait()

    def kill(self) -> None:
        """SIGKILL the child and everything it started; does nothing if it is already dead."""
        self._killed = True
        kill_group(self.pid)

    async def kill_and_wait(self) -> None:
        """Kill the whole process group and return when all its processes are gone and their devices free."""
        self.kill()
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await self.closed()
            while group_alive(self.pid):
                await asyncio.sleep(0.002)

    def how_it_ended(self) -> str:
        """Words that complete "the process …" once it is dead."""
        return "ended" if self.status is None else how_it_ended(self.status)

    async def stop(self, timeout_s: float) -> bool:
        """Call the child's `stop` and wait for its end; kill it after `timeout_s`. True if it ended by itself."""
        try:
            async with asyncio.timeout(timeout_s):
                with suppress(ChildDied):  # the child ended before its answer arrived
                    await self.call("stop")
                await self.closed()
                return True
        except TimeoutError:
            await self.kill_and_wait()
            return False

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(await self._channel.receive())
        except ChannelClosed:  # perhaps inside a frame: the warm parent's last frame then follows the cut frame
            last = LAST_FRAME.search(self._channel.received[-32:])
            self.status = int(last[1]) if last else self.status
        finally:  # whatever ended the reading, no caller may wait for ever
            self._watch.cancel()
            # The kernel counts its kills but does not name processes. A kill in these seconds is counted as this
            # process's if it or its child was killed and not by us.
            if kills_so_far() > self._kills:
                core_killed = self.fatal is not None and CORE_KILLED in self.fatal["kinds"]
                self.starved = core_killed or not self._killed and self.status == -signal.SIGKILL
            self._gone.set()
            self.kill()  # processes that the child started must not outlive it
            self._channel.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(self._death())
            self._events.put_nowait(None)

    async def _watch_kills(self) -> None:
        while True:
            await asyncio.sleep(KILLS_EVERY_S)
            # Compare with the count before last: an engine's front end reports the kill of its core with a delay.
            self._kills, self._newest_kills = self._newest_kills, kills_so_far()

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "event" in message:
            if message["event"] == "fatal":
                self.fatal = message
            self._events.put_nowait(message)
            return
        if "ended" in message:
            self.status = message["ended"]
            return
        answer = self._waiting.get(message["id"])
        if answer is None or answer.done():
            return  # the caller no longer waits for the answer
        if error := message.get("error"):
            answer.set_exception(ChildError(error["type"], error["message"], error["data"]))
        else:
            answer.set_result(message["ok"])

    def _death(self) -> ChildDied:
        return ChildDied(self.name, self.pid, self.log_path, self.log_end(), self.starved)
