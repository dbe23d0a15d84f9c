"""`appliance usage`: who spent what."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, box_command, group, seconds_given
from appliance.cli.errors import BadUsage

BY = ("key", "owner", "model", "version", "hour")
_COUNTED = ("requests", "refused", "errors", "prompt_tokens", "completion_tokens")


app = group("Who spent what: requests and tokens of inference, device-hours of training.")


@box_command(
    app,
    "appliance usage",
    "appliance usage --by model --since 7d",
    "appliance usage --by owner --since 30d -o json",
    "",
    "A key of scope inference or fine_tuning sees what its owner's keys and jobs have spent.",
)
def usage(
    session: Session,
    by: Annotated[str, typer.Option("--by", metavar="WHAT", help=f"One row for each: {', '.join(BY)}.")] = "key",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="How far back: 45m, 24h, 7d. Whole hours are counted.")
    ] = "24h",
) -> None:
    """Show who spent what: tokens by key or model, device-hours of training."""
    if by not in BY:
        raise BadUsage(f"--by {by} was given, expected {', '.join(BY)}")
    since_s = max(0.0, time.time() - seconds_given("--since", since))
    answer = session.client.get("/admin/v1/usage", by=by, since_s=since_s)
    session.show(answer, _table)


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        (answer["by"].upper(), *(one.replace("_", " ").upper() for one in _COUNTED), "DEVICE-HOURS"),
        (
            (
                row["name"],
                *(formats.count(row[one]) for one in _COUNTED),
                f"{row['device_hours']:.2f}",
            )
            for row in answer["data"]
        ),
        empty="nothing was spent in that time",
    )
