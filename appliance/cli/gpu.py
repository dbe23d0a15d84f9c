"""`appliance gpu`: which devices there are and who holds them."""

from __future__ import annotations

from typing import Any

from appliance.cli import formats, output
from appliance.cli.command import EVERY, WATCH, Session, examples, for_box, group

app = group("Devices: GPUs, or logical CPU devices where there is none.")


@app.command("list", epilog=examples("appliance gpu list", "appliance gpu list --watch", "appliance gpu list -o json"))
@for_box
def list_devices(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """Every device with its health and its holder: a job, a replica, or nobody."""
    session.follow(lambda: session.client.get("/admin/v1/devices"), _table, watch, every)


def holder(device: dict[str, Any]) -> str:
    held = device.get("holder")
    return f"{held['kind']} {held['id']}" if held else "-"


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("DEVICE", "KIND", "NAME", ">MEMORY", "HEALTH", "HOLDER"),
        (
            (d["id"], d["kind"], d["name"], formats.size(d["memory_bytes"]), d["health"], holder(d))
            for d in answer["data"]
        ),
        empty="no devices",
    )
