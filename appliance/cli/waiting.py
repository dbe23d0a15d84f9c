"""Waiting for what a command has started: with patience across restarts of the box, and a line of progress."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
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

    def call(self, fetch: Callable[[], Any]) -> Any | None:
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


Doing = tuple[str, float | None, float | None]
"""What a piece of work is doing, how much of it is done, and of how much; None where that is not known."""


def until(
    fetch: Callable[[], Any],
    ended: Callable[[Any], bool],
    doing: Callable[[Any], Doing],
    timeout_s: float | None,
    name: str,
) -> Any:
    """The answer of `fetch` once it has `ended`, with a line of progress. Raises WaitTimedOut."""
    patience = Patience(timeout_s)
    with output.progress(name) as meter:
        while True:
            if (now := patience.call(fetch)) is not None:
                if ended(now):
                    return now
                message, done, total = doing(now)
                meter.update(message, done=done, total=total)
            patience.pause(f"{name} is not done after {patience.limit}; it goes on")


def finish(session: Session, started: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """The operation once it has ended, or as it began with --no-wait. Raises CommandFailed if it failed."""
    operation = started["operation"]
    if args.wait and operation["state"] == "running":
        path = f"/admin/v1/operations/{quote(operation['id'], safe='')}"
        operation = until(
            lambda: session.client.get(path)["operation"],
            lambda now: now["state"] != "running",
            _doing,
            args.timeout,
            f"{operation['kind']} (operation {operation['id']})",
        )
    if args.wait and operation["state"] == "failed":
        error = operation["error"]
        named = f" ({error['code']})" if error.get("code") else ""
        raise CommandFailed(f"{operation['kind']} failed{named}: {error['message']}")
    return operation


def _doing(operation: dict[str, Any]) -> Doing:
    progress = operation.get("progress") or {}
    message = ": ".join(filter(None, [operation["kind"], progress.get("message")]))
    return message, progress.get("done"), progress.get("total")
