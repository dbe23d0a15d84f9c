"""Samples the devices of a job or an engine with the tool of their maker: `appliance profile … --nsight FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.cli import output
from appliance.cli.command import Session
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.own_process import said_by


def sample(session: Session, holder: dict[str, str], file: str, seconds: int) -> None:
    """Sample the devices that `holder` ({"kind": "job" | "model", "id"}) has now, for so many seconds, into `file`.
    Raises BadUsage and CommandFailed."""
    if session.box_file is None:
        raise BadUsage("--nsight samples devices of the machine that the command runs on; run it there, without --url")
    status = session.client.get("/admin/v1/status")
    devices = _held(status, holder)
    if not devices:
        raise CommandFailed(f"{holder['id']} has no device now, so there is nothing to sample")
    home = status["devices"][0]["node"]
    if away := [device["id"] for device in devices if device["node"] != home]:
        raise CommandFailed(f"{', '.join(away)} is not on this machine; sample it where it is")
    (kind,) = {device["kind"] for device in devices}
    path = Path(file).expanduser().absolute()
    indexes = [str(device["index"]) for device in devices]
    with output.progress(f"{', '.join(device['id'] for device in devices)} sampled for {seconds} s"):
        said_by("runtime.devices.hardware_trace", kind, str(seconds), str(path), *indexes)
    told = {"devices": [device["id"] for device in devices], "seconds": seconds, "file": str(path)}
    session.show(
        told, lambda one: f"{', '.join(one['devices'])}: {seconds} s in {one['file']}; open it with Nsight Systems"
    )


def _held(status: dict[str, Any], holder: dict[str, str]) -> list[dict[str, Any]]:
    ids = {holder["id"]}
    if holder["kind"] == "model":
        ids = {replica["id"] for replica in status["replicas"] if replica["model"] == holder["id"]}
    return [device for device in status["devices"] if device["holder"] and device["holder"]["id"] in ids]
