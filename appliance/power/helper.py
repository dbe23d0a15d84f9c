"""The power helper: sets power and clock limits of this machine's devices as root, for the box's user alone.

    python -m appliance.power.helper --socket /run/appliance-power/socket --user appliance

A client sends lines of JSON over the socket and gets a line for each. What it has set holds as long as its connection:
when that ends, however its process died, each device gets back what it had before. What was before stands in a file
beside the socket too, from which the helper restores when it starts, should it have died itself. One client at a time
has limits set.

    {"do": "limits"}                                      -> {"devices": {UUID: {"limit_w", "least_w", "most_w"}}}
    {"do": "set", "devices": {UUID: {"limit_w": 400, "clock_mhz": 1410}}}
                                                          -> {"set": [UUID], "refused": {UUID: "why"}}

A `set` stands for all that this client wants: a limit that it does not name any more is restored.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import pwd
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.devices.kind import PowerControl, PowerRefused
from runtime.devices.kinds import hardware_first
from runtime.network.sockets import private_socket

log = logging.getLogger("appliance.power.helper")

MOST_BYTES = 64 * 1024
MOST_CLOCK_MHZ = 20_000
_PEER = struct.Struct("3i")


@dataclass(slots=True)
class Before:
    """What a device had before it was changed: its limit in watts, and whether its clock was bounded. None and False:
    that was left alone."""

    limit_w: float | None = None
    clock: bool = False


class Limits:
    """What was set, and the way back. `kept`: the file that outlives this process."""

    def __init__(self, control: PowerControl, kept: Path):
        self._control, self._kept = control, kept
        self._before: dict[str, Before] = {}

    def recover(self) -> None:
        """Restore what an earlier helper had set and could not restore itself."""
        try:
            kept = json.loads(self._kept.read_text())
        except FileNotFoundError:
            return
        self._before = {uuid: Before(one["limit_w"], one["clock"]) for uuid, one in kept.items()}
        log.warning("an earlier helper left limits of %d devices; they are restored", len(self._before))
        self.set({})

    def devices(self) -> dict[str, Any]:
        """Raises PowerRefused."""
        return {
            uuid: {"limit_w": one.limit_w, "least_w": one.least_w, "most_w": one.most_w}
            for uuid, one in self._control.limits().items()
        }

    def set(self, wanted: dict[str, dict[str, float]]) -> dict[str, str]:
        """Set these limits, and restore all others. Returns, by UUID, what could not be done and why."""
        try:
            known = self._control.limits()
        except PowerRefused as error:
            return dict.fromkeys((*wanted, *self._before), str(error))
        refused = {}
        for uuid in dict.fromkeys((*wanted, *self._before)):
            one = wanted.get(uuid, {})
            limit_w, clock_mhz = one.get("limit_w"), one.get("clock_mhz")
            try:
                if uuid not in known:
                    raise PowerRefused("this machine has no such device whose limits can be set")
                bounds = known[uuid]
                if limit_w is not None and not bounds.least_w <= limit_w <= bounds.most_w:
                    raise PowerRefused(
                        f"{limit_w:g} W is not possible; between {bounds.least_w:g} and {bounds.most_w:g} W are"
                    )
                self._set_limit(uuid, limit_w, bounds.limit_w)
                self._set_clock(uuid, clock_mhz)
            except PowerRefused as error:
                refused[uuid] = str(error)
        for uuid in [uuid for uuid, before in self._before.items() if before == Before()]:
            del self._before[uuid]
        self._keep()
        return refused

    def _set_limit(self, uuid: str, limit_w: float | None, now_w: float) -> None:
        before = self._before.setdefault(uuid, Before())
        if limit_w is None:
            if before.limit_w is not None:
                self._control.set_limit(uuid, before.limit_w)
                before.limit_w = None
            return
        if before.limit_w is None:
            before.limit_w = now_w
            self._keep()  # first: killed in between, the next helper restores what is still so
        self._control.set_limit(uuid, limit_w)

    def _set_clock(self, uuid: str, most_mhz: float | None) -> None:
        # The driver does not tell which clocks are locked, so none is what is restored.
        before = self._before.setdefault(uuid, Before())
        if most_mhz is None:
            if before.clock:
                self._control.set_clock(uuid, None)
                before.clock = False
            return
        if not before.clock:
            before.clock = True
            self._keep()
        self._control.set_clock(uuid, round(most_mhz))

    def _keep(self) -> None:
        limits = {uuid: {"limit_w": one.limit_w, "clock": one.clock} for uuid, one in self._before.items()}
        if not limits:
            self._kept.unlink(missing_ok=True)
            return
        fresh = self._kept.with_suffix(".new")
        fresh.write_text(json.dumps(limits))
        fresh.replace(self._kept)


class Helper:
    """Serves clients. users: who may ask, by number; root always may."""

    def __init__(self, limits: Limits, users: Sequence[int]):
        self._limits, self._users = limits, {0, *users}
        self._owner: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, user = _peer(writer)
        try:
            while line := await reader.readline():
                known = user in self._users
                answer = self._answer(line, writer) if known else {"error": f"user {user} may not ask"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
                if not known:
                    log.error("process %d of user %d may not ask", pid, user)
                    return
        except (ValueError, ConnectionError) as error:  # a line without end, or a client that is gone
            log.warning("process %d is let go: %s", pid, error)
        finally:
            if self._owner is writer:
                self._owner = None
                log.info("process %d has gone; its limits are restored", pid)
                self._restore()
            writer.close()

    def _restore(self) -> None:
        for uuid, why in self._limits.set({}).items():
            log.error("the limits of %s could not be restored: %s", uuid, why)

    def close(self) -> None:
        """Restore everything."""
        self._restore()

    def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if request["do"] == "limits":
                return {"devices": self._limits.devices()}
            if request["do"] != "set":
                return {"error": f"{request['do']!r} is not known; expected 'limits' or 'set'"}
            wanted = _checked(request["devices"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return {"error": f"this cannot be read: {type(error).__name__}: {error}"}
        except PowerRefused as error:
            return {"error": str(error)}
        if self._owner is not None and self._owner is not writer:
            return {"error": f"process {_peer(self._owner)[0]} has limits set; one client at a time may"}
        self._owner = writer
        refused = self._limits.set(wanted)
        return {"set": [uuid for uuid in wanted if uuid not in refused], "refused": refused}


def _checked(devices: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Raises ValueError."""
    for uuid, limits in devices.items():
        if limits.keys() - {"limit_w", "clock_mhz"}:
            raise ValueError(f"{uuid}: expected limit_w and clock_mhz")
        for name, value in limits.items():
            if value is not None and (isinstance(value, bool) or not 0 < float(value) <= MOST_CLOCK_MHZ):
                raise ValueError(f"{uuid}: {name} is {value!r}")
    return devices


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Process and user at the other end."""
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(raw)
    return pid, user


def unsafe(files: Sequence[str], owners: Sequence[int] = (0,)) -> str:
    """Why root must not run these files: somebody else may write one, or its folder; "" if nobody can."""
    for file in files:
        for path in (Path(file).resolve(), Path(file).resolve().parent):
            found = path.stat()
            if found.st_uid not in owners or found.st_mode & 0o022:
                return f"{path} is not root's alone to write; install the appliance as root, as images/README.md has it"
    return ""


async def run(path: Path, user: int, control: PowerControl) -> None:
    """Serve at `path` until SIGTERM, then restore."""
    path.unlink(missing_ok=True)
    listener = private_socket(path)
    os.chown(path, user, -1)
    limits = Limits(control, path.with_name(f"{path.name}.before.json"))
    limits.recover()
    helper, stop = Helper(limits, [user]), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await asyncio.start_unix_server(helper.serve, sock=listener, limit=MOST_BYTES)
    log.info("sets limits for user %d at %s", user, path)
    await stop.wait()
    server.close()
    helper.close()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.power.helper", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--user", required=True, help="who the box runs as")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    control = next((found for kind in hardware_first() if kind.present() and (found := kind.power_control())), None)
    if control is None:
        print("error: nothing here sets limits of this machine's devices", file=sys.stderr)
        return 1
    if os.geteuid() == 0 and (why := unsafe([__file__, *control.code()])):
        print(f"error: {why}", file=sys.stderr)
        return 1
    try:
        user = pwd.getpwnam(options.user).pw_uid
    except KeyError:
        print(f"error: this machine has no user {options.user!r}", file=sys.stderr)
        return 1
    asyncio.run(run(options.socket, user, control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
