"""`appliance profile`: where the time of what runs goes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, group
from appliance.cli.complete import jobs as complete_jobs
from appliance.cli.errors import CommandFailed
from appliance.cli.operations import Patience

JOB = Annotated[str, typer.Argument(metavar="JOB_ID", autocompletion=complete_jobs)]
_NEWEST = 100  # events: of so many a profile is one, once it is there
_ENDED = ("succeeded", "failed", "cancelled")

app = group("Where does the time of a running job go?")


@app.callback()
def profile() -> None:
    """Where does the time of a running job go?"""


@box_command(
    app,
    "appliance profile job ftjob-abc123                  of its next three steps",
    "appliance profile job ftjob-abc123 --steps 10 -o json | jq .share",
)
def job(
    session: Session,
    job_id: JOB,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=50, help="So many, within a minute.")] = 3,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1)] = 300.0,
) -> None:
    """Profile a job's next steps on its first rank: compute, communication, input, idle, and the longest operators.

    The trace file opens in ui.perfetto.dev or chrome://tracing. The job goes on, somewhat slower for so many steps.
    """
    known = {event["id"] for event in _events(session, job_id)}
    session.client.post(f"{paths.admin_job(job_id)}/profile", {"steps": steps})
    patience = Patience(timeout)
    while True:
        # Before its events: if it has ended by then, they are all there.
        now = patience.get(session, paths.job(job_id))
        for event in _events(session, job_id):
            if event["id"] in known:
                continue
            if found := (event.get("data") or {}).get("profile"):
                session.show(found, _table)
                return
            if event["level"] == "warn" and "profile" in event["message"]:
                raise CommandFailed(event["message"])
        if now is not None and now["status"] in _ENDED:
            raise CommandFailed(f"{job_id} has ended before its steps were profiled")
        patience.pause(f"{job_id} has not done the steps to be profiled after {patience.limit}; an event tells of them")


def _events(session: Session, job_id: str) -> list[dict[str, Any]]:
    return session.client.get(f"{paths.job(job_id)}/events", limit=_NEWEST)["data"]


def _table(found: dict[str, Any]) -> Any:
    seconds, steps = found["seconds"], found["steps"]
    shares = output.table(
        ("WHERE", ">SHARE", ">S/STEP"),
        ((name, f"{took / seconds:.1%}", f"{took / steps:.4f}") for name, took in found["share"].items()),
        empty="",
    )
    operators = output.table(
        ("OPERATOR", "WHERE", ">SHARE", ">CALLS"),
        ((o["name"], o["kind"], f"{o['seconds'] / seconds:.1%}", o["count"]) for o in found["operators"]),
        empty="no operator was seen",
    )
    trace = f"trace: {found['trace']} in the job's folder, {formats.size(found['bytes'])}" if found["trace"] else ""
    note = trace or "no trace file: it would be too long; ask for fewer steps"
    return output.stack(f"{steps} steps in {seconds:.2f} s, up to step {found['step']}", shares, operators, note)
