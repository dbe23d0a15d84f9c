"""Waiting for what a command has started: with patience across restarts of the box, and a line of progress."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from appliance.cli import output
from appliance.cli.command import Session
from appliance.cli.errors import CommandFailed, Unreachable, WaitTimedOut
from appliance.cli.options import either, number, opt

WAIT = either("--wait", "--no-wait", "Return when it is done (the default).", True)
TIMEOUT = opt("--timeout SECONDS", "Give up waiting, exit code 124; the box goes on.", type=number(float, 0))
POLL_S = 0.5
PATIENCE_S = 120.0


class Patience:
    """For commands that follow a box: they go on while it restarts. It counts as gone after PATIENCE_S."""

    def __init__(self) -> None:
        self._gone_s = math.inf

    def call(self, fetch: Callable[[], Any]) -> Any | None:
        """The answer; None while the box is away. Raises CliError, and Unreachable in the end."""
        try:
            answer = fetch()
        except Unreachable as error:
            if self._gone_s == math.inf:
                self._gone_s = time.monotonic() + PATIENCE_S
                output.say(f"{error}; trying again for {PATIENCE_S:.0f} s")
            if time.monotonic() > self._gone_s:
                raise
            return None
        self._gone_s = math.inf
        return answer


Doing = tuple[str, float | None, float | None]
"""What a piece of work is doing, how much of it is done, and of how much; None where that is not known."""


def until(
    fetch: Callable[[], Any],
    ended: Callable[[Any], Any],
    doing: Callable[[Any], Doing],
    timeout_s: float | None,
    name: str,
) -> Any:
    """The answer of `fetch` once it has `ended`, with a line of progress. Raises WaitTimedOut."""
    patience, began_s = Patience(), time.monotonic()
    with output.progress(name) as meter:
        while True:
            if (now := patience.call(fetch)) is not None:
                if ended(now):
                    return now
                meter(*doing(now))
            if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                raise WaitTimedOut(f"{name} is not done after {timeout_s:g} s; it goes on")
            time.sleep(POLL_S)


def finish(session: Session, started: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """The operation once it has ended, or as it began with --no-wait. Raises CommandFailed if it failed."""
    operation = started["operation"]
    if not args.wait:
        return operation
    if operation["state"] == "running":
        operation = until(
            lambda: session.client.get(f"/admin/v1/operations/{operation['id']}")["operation"],
            lambda now: now["state"] != "running",
            _doing,
            args.timeout,
            f"{operation['kind']} (operation {operation['id']})",
        )
    if operation["state"] == "failed":
        error = operation["error"]
        named = f" ({error['code']})" if error.get("code") else ""
        raise CommandFailed(f"{operation['kind']} failed{named}: {error['message']}")
    return operation


def _doing(operation: dict[str, Any]) -> Doing:
    progress = operation.get("progress") or {}
    message = ": ".join(filter(None, [operation["kind"], progress.get("message")]))
    return message, progress.get("done"), progress.get("total")
