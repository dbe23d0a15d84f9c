"""`appliance top`: what every device does now, live."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.box.gpu import health, meters
from appliance.cli.command import EVERY, Session, box_command, group

app = group("What every device does now.")


@box_command(app, "appliance top", "appliance top --every 5", "appliance top --once")
def top(
    session: Session,
    every: EVERY = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, as without a terminal.")] = False,
) -> None:
    """Show what every device does now, live, until Ctrl-C.

    Its engine or job, requests, steps, tokens per second; of GPUs use, memory, heat and power; and who waits, and why.

    With `-o json` what `appliance status -o json` answers, once.
    """
    live = sys.stdout.isatty() and not once and not session.as_json
    session.follow(lambda: session.client.get("/admin/v1/status"), _drawn, live, every)


def _drawn(now: dict[str, Any]) -> Any:
    metered = any(device.get("meters") for device in now["devices"])
    jobs = {job["id"]: job for job in now["jobs"]}
    replicas = {replica["id"]: replica for replica in now["replicas"]}
    devices = output.table(
        ("DEVICE", "HOLDER", "WHAT IT DOES", ">", *((">USED", ">HEAT", ">POWER", ">BUSY") if metered else ())),
        (
            (device["id"], *_doing(device, jobs, replicas), *(meters(device) if metered else ()))
            for device in now["devices"]
        ),
        empty="no devices",
    )
    return output.stack(_head(now), devices, output.notes(_waiting(now)))


def _head(now: dict[str, Any]) -> str:
    """One line: the mode, and what the whole box does."""
    held = sum(device["holder"] is not None for device in now["devices"])
    inflight, waiting = (sum(one[name] for one in now["requests"].values()) for name in ("inflight", "held"))
    speed = sum(job["tokens_per_s"] or 0.0 for job in now["jobs"] if job["devices"])
    parts = [
        f"mode {now['mode']['policy']}",
        f"{held} of {len(now['devices'])} devices held",
        f"{inflight} request{'s' * (inflight != 1)} running, {waiting} waiting",
        f"training {formats.count(speed)} tokens/s" if speed else "no training",
    ]
    return ", ".join(parts)


def _doing(
    device: dict[str, Any], jobs: dict[str, dict[str, Any]], replicas: dict[str, dict[str, Any]]
) -> tuple[str, str, str]:
    """Who holds it, what that does, and how much of it."""
    if device["health"] != "ok":
        return health(device), device.get("health_reason") or "", ""
    held = device.get("holder")
    if held is None:
        return "-", "free", ""
    if held["kind"] == "replica" and (replica := replicas.get(held["id"])) is not None:
        count = replica["inflight"]
        state = "" if replica["state"] == "open" else f" ({replica['state']})"
        return f"engine {held['id']}", f"{replica['model']}@{replica['version']}{state}", f"{count} requests"
    if held["kind"] == "job" and (job := jobs.get(held["id"])) is not None:
        step = f"step {job['step']}/{job['total_steps']}" if job["total_steps"] else job["phase"]
        speed = f"{formats.count(job['tokens_per_s'])} tokens/s" if job["tokens_per_s"] else ""
        left = f", {formats.duration(job['eta_s'])} left" if job["eta_s"] else ""
        return f"job {held['id']}", f"{job['output_model'] or job['model']}: {step}{left}", speed
    return f"{held['kind']} {held['id']}", "", ""


def _waiting(now: dict[str, Any]) -> list[str]:
    """Who waits, and why."""
    requests = [
        f"{one['held']} request{'s' * (one['held'] != 1)} for {model} wait for an engine"
        for model, one in sorted(now["requests"].items())
        if one["held"]
    ]
    jobs = [f"job {job['id']} waits: {job['reason']}" for job in now["jobs"] if not job["devices"] and job["reason"]]
    return [*requests, *jobs, *(now.get("notes") or ())]
