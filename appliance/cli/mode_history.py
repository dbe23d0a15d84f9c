"""`appliance mode history`: how devices changed hands, phase by phase."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, examples

EPILOG = examples("appliance mode history", "appliance mode history --limit 3", "appliance mode history -o json")


def history(
    session: Session,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="So many hand-overs, the newest first.")] = 10,
) -> None:
    """The hand-overs of devices, step by step with their times."""
    session.show(session.client.get("/admin/v1/handovers", limit=limit), _history)


def handover_steps(handover: dict[str, Any]) -> Any:
    """A hand-over as a title and a table of its steps."""
    title = f"hand-over {handover['id']}: {handover['reason']} ({handover['state']}"
    if handover.get("ended_s") is not None and handover.get("started_s") is not None:
        title += f", {formats.duration(handover['ended_s'] - handover['started_s'])}"
    rows = [
        (step["verb"], formats.or_dash(step["target"]), step["state"], _seconds(step), _detail(step.get("detail")))
        for step in handover["steps"]
    ]
    steps = output.table(("  STEP", "TARGET", "STATE", ">TIME", "DETAIL"), _indented(rows), empty="  no steps")
    return output.above(f"{title})", steps)


def _history(answer: dict[str, Any]) -> Any:
    if not answer["data"]:
        return "no hand-overs yet"
    return output.stack(*(handover_steps(handover) for handover in answer["data"]))


def _indented(rows: list[tuple]) -> list[tuple]:
    return [(f"  {first}", *rest) for first, *rest in rows]


def _seconds(step: dict[str, Any]) -> str:
    if step.get("started_s") is None or step.get("ended_s") is None:
        return "-"
    return formats.duration(step["ended_s"] - step["started_s"])


def _detail(detail: dict[str, Any] | None) -> str:
    """Plain values only: what is nested is for `-o json`."""
    shown = []
    for name, value in (detail or {}).items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            continue
        if name.endswith("_bytes") or name == "bytes":
            text = formats.size(value)
        elif name.endswith("_s") or name == "seconds":
            text = formats.duration(value)
        else:
            text = str(value)
        shown.append(f"{name.removesuffix('_bytes').removesuffix('_s')} {text}")
    return ", ".join(shown) or "-"
