"""`appliance profile`: where the time of what runs goes."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, group
from appliance.cli.complete import jobs as complete_jobs
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import CommandFailed
from appliance.cli.operations import Patience

JOB = Annotated[str, typer.Argument(metavar="JOB_ID", autocompletion=complete_jobs)]
MODEL = Annotated[str, typer.Argument(metavar="MODEL", autocompletion=complete_models)]
STEPS = Annotated[int, typer.Option("--steps", metavar="N", min=1, max=50, help="Profile N steps, within a minute.")]
_ENGINE_S = 150.0  # a minute for the steps, and what the profiler then takes
MOST_ROWS = 8  # runtime.profile_shares has the bound; a command imports nothing of the box
_NEWEST = 100  # events: a profile is among this many, once it is there
_ENDED = ("succeeded", "failed", "cancelled")

app = group("Show where the time of a running job or engine goes.")


@app.callback()
def profile() -> None:
    """Show where the time of a running job or engine goes."""


@box_command(
    app,
    "appliance profile job ftjob-abc123                  of its next three steps",
    "appliance profile job ftjob-abc123 --steps 10 -o json | jq .share",
)
def job(
    session: Session,
    job_id: JOB,
    steps: STEPS = 3,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1)] = 300.0,
) -> None:
    """Profile a job's next steps on its first rank: compute, communication, input, idle, and the longest operators.

    The trace file opens in ui.perfetto.dev or chrome://tracing. The job goes on, somewhat slower during these steps.
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
                session.show(found, partial(_table, asked=steps))
                return
            if event["level"] == "warn" and "profile" in event["message"]:
                raise CommandFailed(event["message"])
        if now is not None and now["status"] in _ENDED:
            raise CommandFailed(f"{job_id} has ended before its steps were profiled")
        patience.pause(f"{job_id} has not done the steps to be profiled after {patience.limit}; an event will say so")


@box_command(
    app,
    "appliance profile engine starter                    of an awake engine's next three steps",
    "appliance profile engine starter --steps 20 -o json | jq .operators",
)
def engine(
    session: Session,
    model: MODEL,
    steps: STEPS = 3,
) -> None:
    """Profile the next steps of an engine of this model, on its first worker, while it answers.

    An engine that nobody asks makes no steps: after a minute the profile ends with those that there were.
    """
    path = f"{paths.model(model)}/profile"
    session.show(
        session.client.send("POST", path, body={"steps": steps}, timeout_s=_ENGINE_S), partial(_table, asked=steps)
    )


def _events(session: Session, job_id: str) -> list[dict[str, Any]]:
    return session.client.get(f"{paths.job(job_id)}/events", limit=_NEWEST)["data"]


def _table(found: dict[str, Any], asked: int) -> Any:
    seconds, steps, of_job = found["seconds"], found["steps"], "step" in found
    fewer = f"after {MOST_ROWS} rows of data, a minute, or at the job's end" if of_job else "after a minute"
    short = f"{steps} of the {asked} steps asked for: a profile ends {fewer}" if steps < asked else None
    if not of_job and not found["operators"]:
        model = found["model"]
        asks = f"ask it while it is profiled (`appliance chat {model}`)"
        return f"{model} made no step in {seconds:.0f} s, for nobody asked it: {asks}"
    shares = output.table(
        ("WHERE", ">SHARE", ">S/STEP"),
        ((name, f"{took / seconds:.1%}", f"{took / max(1, steps):.4f}") for name, took in found["share"].items()),
        empty="",
    )
    operators = output.table(
        ("OPERATOR", "WHERE", ">SHARE", ">CALLS"),
        ((o["name"], o["kind"], f"{o['seconds'] / seconds:.1%}", o["count"]) for o in found["operators"]),
        empty="no operator was seen",
    )
    where = " in the data directory" if of_job else ""
    trace = f"trace: {found['trace']}{where}, {formats.size(found['bytes'])}" if found["trace"] else ""
    note = trace or "no trace file: it would be too long; ask for fewer steps"
    last = f", up to step {found['step']}" if of_job else f" of {found['model']}@{found['version']}"
    return output.stack(f"{steps} steps{last}, in {seconds:.2f} s", short, shares, operators, note)
