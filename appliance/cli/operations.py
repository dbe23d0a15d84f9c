"""Waiting for long work of the box that a command has started."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from appliance.cli import output, paths
from appliance.cli.command import Session
from appliance.cli.errors import CommandFailed, Unreachable, WaitTimedOut

WAIT = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return when it is done, or with the operation's id at once.")
]
TIMEOUT = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Give up waiting; the box goes on.")
]
LOOK_EVERY_S = 0.5
PATIENCE_S = 120.0


class Patience:
    """For commands that follow a box: they go on while it restarts, and stop when their time is over.

    A box that is Unreachable counts as gone only after PATIENCE_S. `timeout_s` None waits for ever.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._since_s: float | None = None
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.limit = "" if timeout_s is None else f"{timeout_s:g} s"

    def pause(self, late: str) -> None:
        """Sleep until the next look. Raises WaitTimedOut, saying `late`, when the time is over."""
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise WaitTimedOut(late)
        time.sleep(LOOK_EVERY_S)

    def get(self, session: Session, path: str, **query: Any) -> Any | None:
        """The answer; None while the box is away. Raises CliError, and Unreachable in the end."""
        try:
            answer = session.client.get(path, **query)
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


def finish(session: Session, started: dict[str, Any], wait: bool, timeout_s: float | None) -> dict[str, Any]:
    """The operation once it has ended, or as it began without `wait`. Raises CommandFailed if it failed."""
    operation = started["operation"]
    if not wait:
        return operation
    patience = Patience(timeout_s)
    with output.progress(_message(operation)) as meter:
        while operation["state"] == "running":
            patience.pause(
                f"{operation['kind']} goes on as operation {operation['id']}; it took longer than {patience.limit}"
            )
            answer = patience.get(session, f"/admin/v1/operations/{paths.segment(operation['id'])}")
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
