"""`appliance job`: fine-tuning jobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import EVERY, WATCH, Session, box_command, group
from appliance.cli.jobs.follow import end_well, print_logs, wait_for_end
from appliance.cli.jobs.queue import JOB, JOBS
from appliance.cli.jobs.queue import app as queue
from appliance.cli.jobs.submit import app as submit
from appliance.cli.mode.power import energy_line
from appliance.cli.tensorboard import app as tensorboard

app = group("Fine-tuning jobs.")
app.registered_commands += [*submit.registered_commands, *queue.registered_commands, *tensorboard.registered_commands]


@box_command(app, "appliance job list", "appliance job list --watch", "appliance job list -o json", name="list")
def list_jobs(
    session: Session,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many to show, the newest first.")] = 100,
    watch: WATCH = False,
    every: EVERY = 2.0,
) -> None:
    """List jobs: how far each is, which devices it holds, and what it waits for.

    A key of the scope fine_tuning alone gets its owner's, as OpenAI's API has them.
    """
    session.follow(
        lambda: session.own_unless_all(
            lambda: session.client.listed("/admin/v1/jobs", limit), lambda: session.client.listed(paths.JOBS, limit)
        ),
        jobs_table,
        watch,
        every,
    )


@box_command(app, "appliance job get ftjob-abc123", "appliance job get ftjob-abc123 -o json | jq .loss")
def get(session: Session, job_id: JOB, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """Show everything the box knows of one job."""
    session.follow(
        lambda: session.own_unless_all(
            lambda: session.client.get(paths.admin_job(job_id)), lambda: session.client.get(paths.job(job_id))
        ),
        _one,
        watch,
        every,
    )


@box_command(
    app,
    "appliance job logs ftjob-abc123",
    "appliance job logs -f ftjob-abc123             until it ends; Ctrl-C leaves the job alone",
    "appliance job logs -f ftjob-abc123 -o json     one event per line",
)
def logs(
    session: Session,
    job_id: JOB,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends.")] = False,
) -> None:
    """Show events and metrics: loss, tokens/s, devices, time to finish.

    With -f the exit code is 0 if the job succeeded and 1 if it did not.
    """
    print_logs(session, job_id, follow)


@box_command(
    app,
    "appliance job wait ftjob-abc123",
    "appliance job wait ftjob-abc123 --timeout 600 || echo not yet",
    "appliance job wait ftjob-abc123 -o json | jq -r .fine_tuned_model",
)
def wait(
    session: Session,
    job_id: JOB,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Then exit code 124; the job goes on.")
    ] = None,
) -> None:
    """Return when the job has ended: exit code 0 if it succeeded, 1 if it failed or was cancelled."""
    job = wait_for_end(session, job_id, timeout)
    if session.as_json:
        output.print_json(job)
    end_well(job)


@box_command(app, "appliance job pause ftjob-abc123", "appliance job pause ftjob-abc123 ftjob-def456")
def pause(session: Session, job_ids: JOBS) -> None:
    """Suspend jobs at their next step; they give their devices back and keep their state."""
    _ask(session, job_ids, "pause")


@box_command(app, "appliance job resume ftjob-abc123", "appliance job resume ftjob-abc123 ftjob-def456")
def resume(session: Session, job_ids: JOBS) -> None:
    """Resume paused jobs at the steps where they stopped, on the devices there are."""
    _ask(session, job_ids, "resume")


@box_command(app, "appliance job cancel ftjob-abc123", "appliance job cancel ftjob-abc123 ftjob-def456")
def cancel(session: Session, job_ids: JOBS) -> None:
    """Cancel jobs for good. Exit code 5 if one of them has ended already."""
    _ask(session, job_ids, "cancel")


def jobs_table(answer: dict[str, Any]) -> Any:
    if any(map(_is_own, answer["data"])):
        return output.table(
            ("JOB", "STATUS", "MODEL", "CREATED", "ERROR"),
            (
                (
                    j["id"],
                    j["status"],
                    j["fine_tuned_model"] or j["model"],
                    formats.moment(j["created_at"]),
                    formats.short((j["error"] or {}).get("message")),
                )
                for j in answer["data"]
            ),
            empty="",
        )
    return output.table(
        ("JOB", "STATUS", "PHASE", "MODEL", ">DEVICES", ">STEP", ">LOSS", ">TOKENS/S", ">ETA", "REASON"),
        (
            (
                *formats.cells(j, "id status phase"),
                j["fine_tuned_model"] or j["model"],
                len(j["devices"]),
                _step(j),
                formats.loss(j["loss"]),
                formats.count(j["tokens_per_s"]),
                _eta(j),
                formats.short(j["reason"]),
            )
            for j in answer["data"]
        ),
        empty="no jobs; `appliance job submit --help` shows how to make one",
    )


def _ask(session: Session, job_ids: list[str], verb: str) -> None:
    session.post_each(paths.job, job_ids, verb, lambda job: f"{job['id']}: {verb} accepted, status {job['status']}")


def _is_own(job: dict[str, Any]) -> bool:
    """Whether it is OpenAI's object, which keys without the scope read get: it has no phase, devices and step."""
    return job.get("object") == "fine_tuning.job"


def _own(job: dict[str, Any]) -> Any:
    return output.stack(
        output.fields(
            ("job", job["id"]),
            ("status", job["status"]),
            ("model", job["model"]),
            ("fine-tuned model", formats.or_dash(job["fine_tuned_model"])),
            ("created", formats.moment(job["created_at"])),
            ("finished", formats.moment(job["finished_at"])),
            ("training file", formats.or_dash(job["training_file"])),
            ("validation file", formats.or_dash(job["validation_file"])),
            ("verdict", formats.or_dash((job.get("verdict") or {}).get("text"))),
            ("error", formats.or_dash((job["error"] or {}).get("message"))),
        ),
        output.table(
            ("HYPERPARAMETER", "VALUE"), _settings(job["method"][job["method"]["type"]]["hyperparameters"]), empty=""
        ),
    )


def _one(job: dict[str, Any]) -> Any:
    if _is_own(job):
        return _own(job)
    error = job.get("error") or {}
    shown = [
        ("job", job["id"]),
        ("status", f"{job['status']} ({job['phase']})"),
        ("reason", formats.or_dash(job["reason"])),
        ("model", job["model"]),
        ("fine-tuned model", formats.or_dash(job["fine_tuned_model"])),
        *([("version of", job["publish_as"])] if job.get("publish_as") else []),
        *([("gate", _gate(job["gate"]))] if job.get("gate") else []),
        ("devices", formats.or_dash(job["devices"])),
        *([("energy", energy_line(job["energy"]))] if job.get("energy") else []),
        ("owner", formats.or_dash(job["owner"])),
        ("priority", f"{job['priority']}{'' if job['preemptible'] else ', not preemptible'}"),
        ("deadline", formats.moment(job["deadline_s"])),
        ("step", _step(job)),
        ("loss", formats.loss(job["loss"])),
        ("validation loss", formats.loss(job.get("valid_loss"))),
        ("verdict", formats.or_dash((job.get("verdict") or {}).get("text"))),
        ("tokens/s", formats.count(job["tokens_per_s"])),
        ("time to finish", _eta(job)),
        ("created", formats.moment(job["created_s"])),
        ("started", formats.moment(job.get("started_s"))),
        ("finished", formats.moment(job.get("finished_s"))),
        ("training file", formats.or_dash(job.get("training_file"))),
        ("validation file", formats.or_dash(job.get("validation_file"))),
        ("error", formats.or_dash(error.get("message"))),
    ]
    settings = job.get("resolved") or job.get("hyperparameters") or {}
    table = output.table(("HYPERPARAMETER", "VALUE"), _settings(settings), empty="") if settings else None
    return output.stack(output.fields(*shown), table)


def _gate(gate: dict[str, Any]) -> str:
    return f"{gate['verdict']}: {gate['reason']}" if gate["verdict"] else f"waits for {gate['eval_id']}"


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Hyperparameters by name, each as `--set` would take it; a dash for what the box decides while the job runs."""
    return [(name, _as_set(value)) for name, value in sorted(settings.items())]


def _as_set(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return formats.or_dash(",".join(map(str, value)))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else formats.or_dash(value)


def _step(job: dict[str, Any]) -> str:
    return f"{job['step']}/{job['total_steps']}" if job.get("total_steps") else formats.or_dash(job["step"] or None)


def _eta(job: dict[str, Any]) -> str:
    return formats.duration(job["eta_s"]) if job["phase"] == "running" else "-"
