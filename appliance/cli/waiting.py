"""Waiting for what a command has started: with patience across restarts of the box, and a line of progress."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any
from urllib.parse import quote

from appliance.cli import output
from appliance.cli.command import Session, number, opt
from appliance.cli.errors import CommandFailed, Unreachable, WaitTimedOut

WAIT = (
    opt("--wait", "Return when it is done (the default).", action="store_true", default=True),
    opt("--no-wait", "Return at once, with the operation's id.", dest="wait", action="store_false"),
)
TIMEOUT = opt("--timeout SECONDS", "Give up waiting; the box goes on.", type=number(float, 0))
POLL_S = 0.5
PATIENCE_S = 120.0


class Patience:
    """For commands that follow a box: they go on while it restarts, and stop when their time is over.

    A box that is Unreachable counts as gone only after PATIENCE_S. `timeout_s` None waits for ever.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._since_s: float | None = None
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.limit = "" if timeout_s is None else f"{timeout_s:g} s"

    def pause(self, late: str, seconds: float = POLL_S) -> None:
        """Sleep until the next poll. Raises WaitTimedOut, saying `late`, when the time is over."""
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise WaitTimedOut(late)
        time.sleep(seconds)

    def get(self, session: Session, path: str, **query: Any) -> Any | None:
        """The answer; None while the box is away. Raises CliError, and Unreachable in the end."""
        return self.call(lambda: session.client.get(path, **query))

    def call(self, fetch: Any) -> Any | None:
        try:
            answer = fetch()
        except Unreachable as error:
            now_s = time.monotonic()
            if self._since_s is None:
                self._since_s = now_s
                output.say(f"{error}; trying again for {PATIENCE_S:.0f} s")
            if now_s - self._since_s > PATIENCE_S:
                raise
            return None
        self._since_s = None
        return answer


def finish(session: Session, started: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """The operation once it has ended, or as it began with --no-wait. Raises CommandFailed if it failed."""
    operation = started["operation"]
    if not args.wait:
        return operation
    patience = Patience(args.timeout)
    with output.progress(_message(operation)) as meter:
        while operation["state"] == "running":
            patience.pause(
                f"{operation['kind']} goes on as operation {operation['id']}; it took longer than {patience.limit}"
            )
            answer = patience.get(session, f"/admin/v1/operations/{quote(operation['id'], safe='')}")
            operation = answer["operation"] if answer else operation
            progress = operation["progress"]
            meter.update(_message(operation), done=progress.get("done"), total=progress.get("total"))
    if operation["state"] == "failed":
        error = operation["error"]
        named = f" ({error['code']})" if error.get("code") else ""
        raise CommandFailed(f"{operation['kind']} failed{named}: {error['message']}")
    return operation


def _message(operation: dict[str, Any]) -> str:
    progress = operation.get("progress") or {}
    parts = [operation["kind"]]
    if progress.get("message"):
        parts.append(progress["message"])
    if progress.get("total") and progress.get("unit") not in ("", None, "bytes"):
        parts.append(f"{progress['done']:g}/{progress['total']:g} {progress['unit']}")
    return ": ".join(parts)
