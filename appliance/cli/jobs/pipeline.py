"""`appliance pipeline`: turns new data into a version that answers, as a file of a few lines says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import EVERY, WATCH, Session, box_command, group
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.jobs.request import table_file
from appliance.cli.operations import TIMEOUT, Patience

app = group("Pipelines: from data to a version that answers, by a few lines of TOML (docs/pipelines.md).")
PIPELINE = Annotated[str, typer.Argument(metavar="FILE|NAME", help="A TOML file, or one that the box knows.")]
RUN_PREFIX = "piperun_"
_RUNS_SHOWN = 10


@box_command(
    app,
    "appliance pipeline run nightly.toml --wait",
    "appliance pipeline run nightly           one that the box knows by its name",
    "",
    "The box runs it: it goes on when this command ends, and when the box restarts. With --wait the exit code is 0",
    "whether the version answers or was judged not to, and 1 if a step failed.",
)
def run(
    session: Session,
    pipeline: PIPELINE,
    wait: Annotated[bool, typer.Option("--wait", help="Show its steps until it has ended.")] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Run a pipeline now: take new data, train, judge, and let the version answer, as its file says."""
    name = _put(session, pipeline)
    made = session.client.post(f"{paths.pipeline(name)}/runs")
    if not wait:
        session.show(made, lambda row: row["id"])
        return
    done = _wait(session, made["id"], timeout)
    session.show(done, _run)
    if done["state"] != "succeeded":
        raise CommandFailed(f"{done['id']} {done['state']}: {done['reason']}")


@box_command(app, "appliance pipeline list", name="list")
def list_pipelines(session: Session) -> None:
    """List pipelines: when each runs next, and how its last run ended."""
    session.show(session.client.listed("/v1/pipelines", most=100), _table)


@box_command(
    app,
    "appliance pipeline show nightly           its runs",
    "appliance pipeline show piperun_abc123 --watch",
)
def show(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME|RUN_ID")],
    watch: WATCH = False,
    every: EVERY = 2.0,
) -> None:
    """Show a pipeline with its newest runs, or one run with its steps."""
    if name.startswith(RUN_PREFIX):
        session.follow(lambda: session.client.get(paths.pipeline_run(name)), _run, watch, every)
        return

    def fetch() -> dict[str, Any]:
        found = session.client.get(paths.pipeline(name))
        return found | {"runs": session.client.get(f"{paths.pipeline(name)}/runs", limit=_RUNS_SHOWN)["data"]}

    session.follow(fetch, _one, watch, every)


@box_command(app, "appliance pipeline cancel piperun_abc123")
def cancel(session: Session, run_id: Annotated[str, typer.Argument(metavar="RUN_ID")]) -> None:
    """Cancel a run with its job and its gate."""
    session.show(
        session.client.post(f"{paths.pipeline_run(run_id)}/cancel"), lambda row: f"{row['id']}: {row['state']}"
    )


@box_command(
    app,
    "appliance pipeline schedule nightly.toml",
    "appliance pipeline schedule nightly --off           it runs when asked alone",
    "",
    'In the file: schedule.cron = "0 2 * * *" and schedule.tz = "Europe/Berlin", or schedule.on_new_data = true.',
)
def schedule(
    session: Session,
    pipeline: PIPELINE,
    off: Annotated[bool, typer.Option("--off", help="Stop running it by its schedule.")] = False,
) -> None:
    """Have the box run a pipeline by the schedule in its file, with this key."""
    name = _put(session, pipeline)
    answer = session.client.post(f"{paths.pipeline(name)}/schedule", {"on": not off})
    session.show(answer, lambda row: f"{row['name']}: {_when(row)}")


@box_command(app, "appliance pipeline rm nightly")
def rm(session: Session, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Delete a pipeline with the records of its runs. What the runs made stays."""
    session.show(session.client.delete(paths.pipeline(name)), lambda row: f"deleted {row['id']}")


def _put(session: Session, pipeline: str) -> str:
    """The name of the pipeline; a file of one is sent to the box first. Raises BadUsage."""
    path = Path(pipeline).expanduser()
    if path.is_file():
        spec = table_file("the pipeline", path)
        if not isinstance(spec, dict):
            raise BadUsage(f"{pipeline} is not a table")
        return str(session.client.post("/v1/pipelines", {"spec": spec})["name"])
    if path.suffix in (".toml", ".json") or "/" in pipeline:
        raise BadUsage(f"{pipeline} is not a file on this machine")
    return pipeline


def _wait(session: Session, run_id: str, timeout_s: float | None) -> dict[str, Any]:
    """The run once it has ended; meanwhile prints what its steps say. Raises WaitTimedOut."""
    patience, shown = Patience(timeout_s), dict[str, tuple[str, str]]()
    with output.progress(run_id) as meter:
        while True:
            found = patience.get(session, paths.pipeline_run(run_id))
            for step in found["steps"] if found else ():
                state = (step["state"], step["says"])
                if step["state"] == "running":
                    meter.update(f"{step['name']}: {step['says']}")
                elif step["state"] in ("done", "failed") and shown.get(step["name"]) != state:
                    output.say(f"{step['name']} {step['state']}{': ' if step['says'] else ''}{step['says']}")
                    shown[step["name"]] = state
            if found and found["state"] != "running":
                return dict(found)
            patience.pause(f"{run_id} is not done after {patience.limit}; it goes on")


def _run(run: dict[str, Any]) -> Any:
    about = output.fields(
        ("run", run["id"]),
        ("pipeline", run["name"]),
        ("begun by", run["trigger"]),
        ("state", run["state"] + (f", {run['outcome'].replace('_', ' ')}" if run["outcome"] else "")),
        ("reason", formats.or_dash(run["reason"])),
        ("job", formats.or_dash(run["job_id"])),
        ("gate", formats.or_dash(run["gate_id"])),
        ("began", formats.moment(run["created_at"])),
        ("ended", formats.moment(run["ended_at"])),
    )
    steps = output.table(
        ("STEP", "STATE", ">TOOK", "WHAT"),
        (
            (one["name"], one["state"], formats.duration(_took(one)), formats.or_dash(one["says"]))
            for one in run["steps"]
        ),
        empty="",
    )
    return output.stack(about, steps)


def _took(step: dict[str, Any]) -> float | None:
    known = step["began_s"] is not None and step["ended_s"] is not None
    return step["ended_s"] - step["began_s"] if known else None


def _one(found: dict[str, Any]) -> Any:
    about = output.fields(
        ("pipeline", f"{found['name']} ({found['id']})"),
        ("runs", _when(found)),
        *([("note", found["note"])] if found["note"] else []),
    )
    runs = output.table(
        ("RUN", "BEGUN BY", "STATE", "OUTCOME", "BEGAN", "REASON"),
        (
            (
                *formats.cells(run, "id trigger state"),
                formats.or_dash((run["outcome"] or "").replace("_", " ")),
                formats.moment(run["created_at"]),
                formats.short(run["reason"]),
            )
            for run in found["runs"]
        ),
        empty=f"no runs; `appliance pipeline run {found['name']}` begins one",
    )
    return output.stack(about, runs)


def _when(row: dict[str, Any]) -> str:
    if not row["scheduled"]:
        return "when asked"
    schedule = row["spec"]["schedule"]
    if schedule.get("cron"):
        return f'at "{schedule["cron"]}" {schedule["tz"]}, next {formats.moment(row["next_at"])}'
    return "when there is new data"


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("PIPELINE", "RUNS", "LAST RUN", "STATE", "OUTCOME", "REASON"),
        (
            (
                row["name"],
                _when(row),
                formats.moment(last["created_at"]) if (last := row["last_run"]) else "-",
                last["state"] if last else "-",
                formats.or_dash((last["outcome"] or "").replace("_", " ") if last else None),
                formats.short(row["note"] or (last["reason"] if last else None)),
            )
            for row in answer["data"]
        ),
        empty="no pipelines; `appliance pipeline run FILE` makes one (docs/pipelines.md)",
    )
