"""`appliance mode history`: how devices changed hands, phase by phase."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, box_command, group
from appliance.cli.paths import segment

app = group("How devices changed hands; `appliance mode` takes this command in.")


@box_command(
    app,
    "appliance mode history",
    "appliance mode history 42                  one of them, with its details",
    "appliance mode history --limit 3 -o json",
)
def history(
    session: Session,
    handover: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only this one.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many to show, the newest first.")] = 10,
) -> None:
    """Show hand-overs of devices, phase by phase: bytes, seconds, who asked."""
    if handover is not None:
        session.show(session.client.get(f"/admin/v1/handovers/{segment(handover)}"), _with_details)
        return
    session.show(session.client.get("/admin/v1/handovers", limit=limit), _history)


def handover_steps(handover: dict[str, Any]) -> Any:
    """A hand-over as a title and a table of its steps."""
    ended = "" if handover["seconds"] is None else f", {formats.duration(handover['seconds'])}"
    moved = f", {formats.size(handover['bytes'])}" if handover["bytes"] else ""
    by = f"; asked by {handover['asked_by']} ({handover['asked_for']})" if handover["asked_by"] else ""
    title = f"hand-over {handover['id']}: {handover['reason']} ({handover['state']}{ended}{moved}{by})"
    rows = [
        (
            f"  {step['verb']}",
            formats.or_dash(step["target"]),
            step["state"],
            formats.duration(step["seconds"]),
            formats.size(step["bytes"]),
            _rate(step["bytes_per_s"]),
            formats.or_dash(step["path"]),
        )
        for step in handover["steps"]
    ]
    columns = ("  STEP", "TARGET", "STATE", ">TIME", ">BYTES", ">RATE", "PATH")
    return output.above(title, output.table(columns, rows, empty="  no steps"))


def _with_details(handover: dict[str, Any]) -> Any:
    details = output.table(
        ("STEP", "TARGET", "DETAIL"),
        ((step["verb"], formats.or_dash(step["target"]), _detail(step["detail"])) for step in handover["steps"]),
        empty="",
    )
    return output.stack(handover_steps(handover), details, handover["error"])


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{formats.size(bytes_per_s)}/s"


def _history(answer: dict[str, Any]) -> Any:
    if not answer["data"]:
        return "no hand-overs yet"
    parts = ((handover_steps(handover), _faults(handover)) for handover in answer["data"])
    return output.stack(*(part for pair in parts for part in pair))


def _faults(handover: dict[str, Any]) -> str | None:
    """What its failed steps said, a line each."""
    lines = [
        f"  {step['verb']} {formats.or_dash(step['target'])}: {step['detail']['error']}"
        for step in handover["steps"]
        if (step["detail"] or {}).get("error")
    ]
    return "\n".join(lines) or handover["error"] or None


def _detail(detail: dict[str, Any] | None) -> str:
    """Plain values, one number per worker, seconds by phase and the verdict on a fingerprint; the rest is for
    `-o json`."""
    shown = []
    for name, value in (detail or {}).items():
        if name == "fingerprint" and isinstance(value, dict):
            value = value.get("verdict")
        if isinstance(value, dict):
            shown += [f"{phase} {formats.duration(took)}" for phase, took in value.items() if _is_number(took)]
            continue
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(one, str) or _is_number(one) for one in values):
            continue
        if name in ("bytes", "bytes_read") or name.endswith("_bytes"):
            texts = map(formats.size, values)
        elif name == "seconds" or name.endswith("_s"):
            texts = map(formats.duration, values)
        else:
            texts = map(str, values)
        label = name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
        shown.append(f"{label} {' + '.join(texts)}")
    return ", ".join(shown) or "-"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
