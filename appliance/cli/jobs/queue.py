"""`appliance job queue|update|hold|release`: who is next and why each job waits, and how an operator changes that."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import EVERY, WATCH, Session, box_command, group, with_options
from appliance.cli.complete import jobs as complete_jobs
from appliance.cli.errors import BadUsage
from appliance.cli.jobs.request import DEVICES, NO_FIELDS, device_changes

JOB = Annotated[str, typer.Argument(metavar="JOB_ID", autocompletion=complete_jobs)]
JOBS = Annotated[list[str], typer.Argument(metavar="JOB_ID...", autocompletion=complete_jobs)]

app = group("The queue of fine-tuning jobs; `appliance job` takes these commands in.")


@box_command(app, "appliance job queue", "appliance job queue --watch", "appliance job queue -o json")
def queue(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """List jobs in the order in which they get devices, each with why it waits, as Slurm does."""
    session.follow(lambda: session.client.get("/admin/v1/queue"), queue_table, watch, every)


@box_command(
    app,
    "appliance job update ftjob-abc123 --priority 10",
    "appliance job update ftjob-abc123 --deadline 2026-11-22T06:00 --max-devices 4",
    "appliance job update ftjob-abc123 --deadline none --sizes none     takes both away",
)
@with_options("changes", DEVICES, device_changes)
def update(session: Session, job_id: JOB, changes: dict[str, Any] = NO_FIELDS) -> None:
    """Change how an unfinished job may use the devices. It takes effect at once."""
    if not changes:
        raise BadUsage("nothing to change was given; `appliance job update --help` shows what can be")
    answer = session.client.send("PATCH", paths.admin_job(job_id), body=changes)
    session.show(answer, lambda job: f"{job['id']}: changed {', '.join(sorted(changes))}")


@box_command(app, "appliance job hold ftjob-abc123", "appliance job hold ftjob-abc123 ftjob-def456")
def hold(session: Session, job_ids: JOBS) -> None:
    """Keep jobs in the queue: they get no devices, and one that runs is suspended at its next step."""
    _set_held(session, job_ids, "hold", "is held")


@box_command(app, "appliance job release ftjob-abc123", "appliance job release ftjob-abc123 ftjob-def456")
def release(session: Session, job_ids: JOBS) -> None:
    """Release held jobs: they get devices again in their turn."""
    _set_held(session, job_ids, "release", "is released")


def _set_held(session: Session, job_ids: list[str], verb: str, said: str) -> None:
    session.post_each(paths.admin_job, job_ids, verb, lambda job: f"{job['id']} {said}")


def queue_table(answer: dict[str, Any]) -> Any:
    jobs = output.table(
        (">#", "JOB", "OWNER", ">PRIORITY", "PHASE", ">DEVICES", "MAY USE", "DEADLINE", "REASON", ""),
        (
            (
                *formats.cells(j, "position id owner priority phase"),
                len(j["devices"]),
                _may_use(j),
                formats.moment(j["deadline_s"]),
                formats.or_dash(j["reason"]),
                j["message"],
            )
            for j in answer["data"]
        ),
        empty="no job waits or runs",
    )
    if not answer["data"]:
        return jobs
    owners = output.table(
        ("OWNER", ">RUNNING", ">WAITING", ">DEVICES"),
        (formats.cells(o, "owner running waiting devices") for o in answer["owners"]),
        empty="",
    )
    return output.stack(jobs, owners)


def _may_use(job: dict[str, Any]) -> str:
    if job["allowed_sizes"]:
        return ",".join(map(str, job["allowed_sizes"]))
    return f"{job['min_devices'] or 1} to {job['max_devices'] or 'all'}"
