"""`appliance gpu`: which devices there are, who holds them, and taking one out of use."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import EVERY, WATCH, Session, box_command, group
from appliance.cli.operations import TIMEOUT, Patience
from appliance.cli.paths import segment

app = group("Devices: GPUs, or logical CPU devices where there is none.")
DEVICE = Annotated[str, typer.Argument(metavar="DEVICE", help="As `gpu list` names it, e.g. n0/3.")]


@box_command(app, "appliance gpu list", "appliance gpu list --watch", "appliance gpu list -o json", name="list")
def list_devices(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """List devices with their health and holder (a job, a replica or nobody), and of GPUs heat, power and use.

    Devices of a node that was lost stay in the list until it joins again, or until `gpu forget`.
    """
    session.follow(lambda: session.client.get("/admin/v1/devices"), _table, watch, every)


@box_command(
    app,
    'appliance gpu drain n0/3 --reason "row remap pending"',
    "appliance gpu drain n0/3 --no-wait",
)
def drain(
    session: Session,
    device: DEVICE,
    reason: Annotated[str, typer.Option("--reason", help="Shown in `gpu list` and in the audit log.")] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when nobody holds it any more.")] = True,
    timeout: TIMEOUT = None,
) -> None:
    """Take a device out of use: its engine or job moves elsewhere without losing a request or a step.

    Drained devices stay so over restarts. Waiting may be interrupted: the box goes on. Exit code 124 if it takes
    longer than --timeout.
    """
    answer = session.client.post(f"/admin/v1/devices/{device}/drain", {"reason": reason})
    if wait:
        answer = _until_free(session, device, answer, timeout)
    session.show(answer, _state)


@box_command(app, "appliance gpu undrain n0/3")
def undrain(session: Session, device: DEVICE) -> None:
    """Put a device back into use, whether a person or the box itself took it out."""
    session.show(session.client.post(f"/admin/v1/devices/{device}/undrain"), _state)


@box_command(app, "appliance gpu forget n1")
def forget(
    session: Session,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The first part of its devices' names, e.g. n1.")],
) -> None:
    """Remove the devices of a lost node from the list. A node that joins again is usable again."""
    session.show(session.client.delete(f"/admin/v1/nodes/{segment(node)}"), _forgotten)


def holder(device: dict[str, Any]) -> str:
    held = device.get("holder")
    return f"{held['kind']} {held['id']}" if held else "-"


def health(device: dict[str, Any]) -> str:
    """The health as the box says it; for a device that drains and that nobody holds, what it is instead."""
    if device["health"] != "draining" or device.get("holder") is not None:
        return device["health"]
    return "cordoned" if device.get("cordon") == "box" else "drained"


def _until_free(session: Session, device_id: str, device: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
    patience = Patience(timeout_s)
    with output.progress(f"draining {device_id}") as meter:
        while device["holder"] is not None and device["drain"] is not None:
            meter.update(f"draining {device_id}: {holder(device)} is leaving")
            patience.pause(
                f"{device_id} is drained, but {holder(device)} has not left it within {patience.limit}; the box "
                "goes on, `appliance gpu list` shows when it is free"
            )
            answer = patience.get(session, "/admin/v1/devices")
            device = next((d for d in answer["data"] if d["id"] == device_id), device) if answer else device
    return device


def _forgotten(answer: dict[str, Any]) -> str:
    count = len(answer["devices"])
    return f"{answer['id']} is forgotten with {count} device{'s' * (count != 1)}"


def _reason(device: dict[str, Any]) -> str:
    reason, lost = device.get("health_reason") or "", device.get("lost")
    return f"{reason}, since {formats.moment(lost['since_s'])}" if lost else reason


def _state(device: dict[str, Any]) -> str:
    why = f" ({device['health_reason']})" if device.get("health_reason") else ""
    return f"{device['id']}: {health(device)}{why}, held by {'nobody' if device['holder'] is None else holder(device)}"


def meters(device: dict[str, Any]) -> tuple[str, ...]:
    """Under the heads USED, HEAT, POWER, BUSY."""
    found = device.get("meters") or {}
    used, heat, power, busy = (found.get(name) for name in ("memory_used_bytes", "temperature_c", "power_w", "busy"))
    limit = found.get("power_limit_w")
    slowed = "".join(f" ({word.replace('_', ' ')})" for word in found.get("throttled") or ())
    return (
        "-" if used is None else formats.size(used),
        "-" if heat is None else f"{heat} °C",
        "-" if power is None else f"{power:.0f} W" + (f" of {limit:.0f} W" if limit else "") + slowed,
        "-" if busy is None else f"{busy:.0%}",
    )


def _table(answer: dict[str, Any]) -> Any:
    """The table of devices, with what they tell of themselves where any does: logical ones do not."""
    rows = answer["data"]
    metered = any(row.get("meters") for row in rows)
    return output.table(
        (
            *("DEVICE", "KIND", "NAME", ">MEMORY"),
            *((">USED", ">HEAT", ">POWER", ">BUSY") if metered else ()),
            *("HEALTH", "HOLDER", "REASON"),
        ),
        (
            (
                *(d["id"], d["kind"], d["name"], formats.size(d["memory_bytes"])),
                *(meters(d) if metered else ()),
                *(health(d), holder(d), _reason(d)),
            )
            for d in rows
        ),
        empty="no devices",
    )
