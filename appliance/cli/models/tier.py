"""`appliance tier`: shared memory, disk and the remote store, and what is still on its way between them."""

from __future__ import annotations

from typing import Any

from appliance.cli import formats, output
from appliance.cli.command import EVERY, WATCH, Session, box_command, group
from appliance.cli.operations import TIMEOUT, WAIT, finish

app = group("Tiers: where the bytes of models and jobs are kept.")


@box_command(app, "appliance tier list", "appliance tier list --watch", "appliance tier list -o json", name="list")
def list_tiers(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """List tiers: what each holds, what is still to be copied to it, and its last error."""
    session.follow(lambda: session.client.get("/admin/v1/tiers"), _table, watch, every)


@box_command(app, "appliance tier verify", "appliance tier verify -o json")
def verify(session: Session, wait: WAIT = True, timeout: TIMEOUT = None) -> None:
    """Read every copy of every model, adapter and snapshot, and compare it with its checksums.

    Exit code 1 names every copy that is damaged. On disk or in the remote store such a copy is replaced from the next
    tier when it is needed; in memory it goes at once, if nobody reads it and a tier has it whole.
    """
    started = session.client.post("/admin/v1/tiers/verify")
    session.show(finish(session, started, wait, timeout), _checked)


def _checked(operation: dict[str, Any]) -> Any:
    result = operation.get("result") or {}
    rows = [("operation", operation["id"]), ("state", operation["state"])]
    if result:
        rows += [
            ("whole copies", result["copies"]),
            ("without checksums yet", result["unsealed"]),
            ("tensors", result["tensors"]),
            ("read", formats.size(result["bytes"])),
        ]
    return output.fields(*rows)


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("TIER", "WHERE", ">VERSIONS", ">SNAPSHOTS", ">SIZE", ">BACKLOG", "NOW", "LAST ERROR"),
        (
            (
                *formats.cells(t, "name where versions snapshots"),
                formats.size(t["bytes"]),
                _backlog(t),
                _now(t),
                _error(t),
            )
            for t in answer["data"]
        ),
        empty="no tiers",
    )


def _backlog(tier: dict[str, Any]) -> str:
    return f"{tier['backlog']} ({formats.size(tier['backlog_bytes'])})" if tier["backlog"] else "-"


def _now(tier: dict[str, Any]) -> str:
    busy = tier["busy"]
    return f"{busy['name']}, {formats.size(busy['done_bytes'])} written" if busy else "-"


def _error(tier: dict[str, Any]) -> str:
    return f"{formats.clock(tier['last_error_s'])} {tier['last_error']}" if tier["last_error"] else "-"
