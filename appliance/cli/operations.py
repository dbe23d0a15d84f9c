"""Long work of the box that a command starts and waits for."""

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
_LOOK_EVERY_S = 0.5
PATIENCE_S = 120.0


class Patience:
    """Rides out a box that restarts while a command follows it: Unreachable counts only after PATIENCE_S of it."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def get(self, session: Session, path: str, **query: Any) -> Any | None:
        """The answer; None while the box is away. Raises CliError, also Unreachable in the end."""
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
    """The operation when it has ended (or as it began, without `wait`). Raises CommandFailed if it failed."""
    operation = started["operation"]
    if not wait:
        return operation
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    patience = Patience()
    with output.progress(_message(operation)) as meter:
        while operation["state"] == "running":
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise WaitTimedOut(f"{operation['kind']} goes on as operation {operation['id']}; it took longer than "
                                   f"{timeout_s:g} s")  # fmt: skip
            time.sleep(_LOOK_EVERY_S)
            answer = patience.get(session, f"/admin/v1/operations/{paths.segment(operation['id'])}")
            operation = answer["operation"] if answer else operation
            meter.update(_message(operation), done=operation["progress"].get("done"),
                         total=operation["progress"].get("total"))  # fmt: skip
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
