"""`appliance model canary` and `promote`: a version takes a share of the requests before it gets all."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, group, seconds_given
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import BadUsage

MODEL = Annotated[str, typer.Argument(metavar="MODEL", autocompletion=complete_models)]

_SHARE, _WATCHED, _REQUESTS = "10%", "10m", 50

app = group("Canaries; `appliance model` takes these commands in.")


@box_command(
    app,
    "appliance model canary ft:starter:local::a1b2c3d4 step-120 --share 10%",
    "appliance model canary ft:starter:local::a1b2c3d4 step-120 --share 5% --auto --for 30m",
    "appliance model canary ft:starter:local::a1b2c3d4           how it does",
    "",
    "`appliance model promote MODEL` gives it all requests, `appliance model rollback MODEL` none.",
)
def canary(
    session: Session,
    model: MODEL,
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]")] = None,
    share: Annotated[str, typer.Option("--share", metavar="PERCENT", help="At most 90%.")] = _SHARE,
    auto: Annotated[bool, typer.Option("--auto", help="Promote it or roll it back without being asked.")] = False,
    watch_for: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long it is watched: 10m, 2h.")
    ] = _WATCHED,
    min_requests: Annotated[
        int, typer.Option("--min-requests", metavar="N", min=1, help="Requests that each version must have had.")
    ] = _REQUESTS,
) -> None:
    """Give a version a share of a model's requests and compare it with the one before; without VERSION, show that.

    Compared are errors, time to first byte and duration. A conversation stays on one version. With --auto, more errors,
    times beyond 1.5 x or an engine that does not start roll it back; otherwise it is promoted when its time is over.
    """
    path = f"{paths.model(model)}/canary"
    if version is None:
        if auto or (share, watch_for, min_requests) != (_SHARE, _WATCHED, _REQUESTS):
            raise BadUsage(f"which version is to get a share? `appliance model show {model}` lists those of {model}")
        session.show(session.client.get(path), fields)
        return
    watch_s = seconds_given("--for", watch_for)
    body = {"version": version, "share": _part(share), "auto": auto, "watch_s": watch_s, "min_requests": min_requests}
    session.show(session.client.send("PUT", path, body=body), fields)


@box_command(app, "appliance model promote ft:starter:local::a1b2c3d4")
def promote(session: Session, model: MODEL) -> None:
    """Give the canary of a model all its requests, swapped in under running ones."""
    answer = session.client.send("POST", f"{paths.model(model)}/promote", body={}, timeout_s=600)
    session.show(answer, lambda done: f"{done['model']}: {done['from']} -> {done['to']}")


def fields(row: dict[str, Any]) -> Any:
    decision = row["decision"]
    about = output.fields(
        ("canary", f"{row['version']} of {row['model']}, {row['share'] * 100:g}% of the requests"),
        ("state", row["state"].replace("_", " ") + (", on its own" if row["auto"] else "")),
        ("began", formats.moment(row["created_s"])),
        ("ended", formats.moment(row["ended_s"])),
        ("now" if decision else "because", formats.or_dash(row["message"])),
        *([("verdict", f"{decision['verdict']}: {decision['reason']}")] if decision else []),
    )
    table = output.table(
        ("VERSION", ">REQUESTS", ">ERRORS", ">FIRST BYTE P95", ">DURATION P95"),
        (
            (
                version,
                f"{v['requests']:,}",
                f"{v['errors']:,}",
                formats.duration(v["first_byte_p95_s"]),
                formats.duration(v["duration_p95_s"]),
            )
            for version, v in (row["versions"] or {}).items()
        ),
        empty="",
    )
    return output.stack(about, table)


def _part(text: str) -> float:
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = 0.0
    if not 0 < part <= 0.9:
        raise BadUsage(f"--share is {text!r}; expected 0.1% to 90%, or a part such as 0.1")
    return part
