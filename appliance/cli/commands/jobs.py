"""`appliance job submit|logs|wait|update` and `appliance profile`: make jobs, and follow them."""

from __future__ import annotations

import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from appliance.cli import formats, output, views
from appliance.cli.command import Session, command, either, flag, given, named, number, opt, picked
from appliance.cli.commands import training
from appliance.cli.commands.data import kept_if_taken, uploaded_id
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.resources import JOB, JOBS, segment
from appliance.cli.waiting import POLL_S, Doing, Patience, until
from train.methods.methods import METHODS

FINISHED = frozenset({"succeeded", "failed", "cancelled"})
_PUBLISH = (
    "checkpoints (the default): the last three epochs can be asked by name, and the last is the result. "
    "end: the result alone. epoch: each epoch answers as soon as it is over. "
    "best: the result is the version whose validation was best."
)
_JUDGES = {
    "grader": "a file with a grader as JSON; docs/graders.md has some",
    "teacher": "a model of the box, which has the same tokens as the student; docs/distillation.md",
}


def job_path(job_id: str) -> str:
    return f"{JOBS}/{segment(job_id)}"


@command(
    "job submit",
    opt("--model MODEL", "The model to begin from.", required=True, names="model"),
    opt("--file PATH|FILE_ID", "Training data.", required=True),
    opt("--validation-file PATH|FILE_ID", "Data to measure the loss on."),
    *training.options(),
    opt("--grader PATH", "What gives answers their reward, JSON (docs/graders.md)."),
    opt("--response-format PATH", "The form that answers are held to, JSON (docs/reinforcement.md)."),
    opt("--teacher MODEL[@VERSION]", "The model to come nearer to (docs/distillation.md).", names="model"),
    opt("--suffix TEXT", "Part of the new model's name."),
    opt("--publish-as NAME", "Make a version of this model, new or one of yours."),
    *either("--activate", "--no-activate", "Does the version answer at once? Default: yes.", True),
    opt("--gate EVAL_ID", "The version answers unless this evaluation shows it is worse."),
    opt(
        "--pass-rate-at-least SHARE",
        "With --gate: the share of items that has to pass, 0 to 1.",
        type=number(float, 0, 1),
    ),
    opt("--publish", _PUBLISH, choices=("checkpoints", "end", "epoch", "best")),
    opt("--seed N", "For the order of the data and new weights.", type=number(int, 0)),
    opt("--metadata NAME=VALUE", "To find it again; repeatable.", type=named(), action="append"),
    *training.DEVICES,
    flag("--hold", "Stays in the queue until `job release`."),
    flag("--wait", "Follow it to its end, as `job logs -f` does."),
)
def submit(session: Session, args: Namespace) -> None:
    """Fine-tune a model on a file of conversations, or of what else the method learns from. Files are uploaded and
    checked before any device is taken.

    Further names for --set: lora_alpha, lora_dropout, lora_targets, lora_publish (adapter, merged), precision,
    learning_rate, lr_scheduler (cosine, linear, constant, wsd), warmup_ratio, weight_decay, max_grad_norm,
    data_order (shuffled, given), gradient_accumulation,
    micro_batch, packing, eval_interval, early_stopping_patience, activation_checkpointing, offload,
    snapshot_every_s, step_patience_s; for methods that learn from the model's own answers also rollouts (engine,
    ranks), staleness (0 to 4).

    Examples:
      appliance job submit --model starter --file train.jsonl --wait
      appliance job submit --model starter --file train.jsonl --validation-file valid.jsonl --suffix gsm8k --epochs 3
      appliance job submit --model llama-1b --file file-abc123 --lora-rank 16 --set lora_dropout=0.05
      appliance job submit --model llama-1b --file train.jsonl --full --zero-stage 2 --max-length 2048
      appliance job submit --model llama-8b --file train.jsonl --tensor-parallel 2 --zero-stage 2
      appliance job submit --model starter --method dpo --file pairs.jsonl --beta 0.1 --lora-rank 16
      appliance job submit --model starter --method reinforcement --file prompts.jsonl --grader grader.json
      appliance job submit --model starter --method distillation --file prompts.jsonl --teacher fraud@v2
      appliance job submit --model starter --file train.jsonl --epochs 3 --publish epoch   a version after each
      appliance job submit --model starter --file train.jsonl --validation-file v.jsonl --epochs 9 --publish best \\
          --set early_stopping_patience=2
      appliance job submit --model starter --file today.jsonl --publish-as fraud --no-activate   a version of `fraud`
      appliance job submit --model starter --file today.jsonl --publish-as fraud --gate eval_abc123   if not worse
      appliance job submit --model starter --file train.jsonl --priority 5 --deadline 8h --sizes 2,4 --no-preemptible
    """
    method = METHODS[args.method]
    for judge in ("grader", "teacher"):
        value = getattr(args, judge)
        if judge == method.judged_by and value is None:
            raise BadUsage(f"--method {method.name} needs --{judge}, {_JUDGES[judge]}")
        if judge != method.judged_by and value is not None:
            raise BadUsage(f"--{judge} belongs to --method {training.judged_by(judge)}; --method is {method.name}")
    if args.pass_rate_at_least is not None and args.gate is None:
        raise BadUsage("--pass-rate-at-least belongs to --gate")
    if not args.activate and args.publish_as is None:
        raise BadUsage("--no-activate needs --publish-as NAME")
    if args.response_format is not None and method.judged_by != "grader":
        raise BadUsage(f"--response-format belongs to --method {training.judged_by('grader')}")
    block: dict[str, Any] = {"hyperparameters": training.hyperparameters(args) | picked(args, "publish")}
    for name, option in (("grader", "--grader"), ("response_format", "--response-format")):
        if (path := getattr(args, name)) is not None:
            block[name] = training.json_file(option, path)
    body = picked(args, "model suffix publish_as seed") | given(
        activate=None if args.activate else False,
        gate=given(eval_id=args.gate, pass_rate_at_least=args.pass_rate_at_least) or None,
        metadata=dict(args.metadata or ()) or None,
        held=args.hold or None,
    )
    body |= training.device_fields(args)
    body["method"] = {"type": method.name, method.name: block | picked(args, "teacher")}
    held_out, trained_on = (Path(one or "").expanduser().resolve() for one in (args.validation_file, args.file))
    if args.validation_file and held_out == trained_on:
        raise BadUsage(
            f"--validation-file is {args.validation_file!r}, as is --file: a loss on what was learnt from says "
            "nothing; give lines that the job does not train on"
        )
    with kept_if_taken(session) as made:
        body["training_file"] = uploaded_id(session, "--file", args.file, made)
        if args.validation_file:
            body["validation_file"] = uploaded_id(session, "--validation-file", args.validation_file, made)
        # The key keeps a copy of this request, sent again by something on the way, from making a second job.
        job = session.client.send("POST", JOBS, body=body, headers={"idempotency-key": str(uuid.uuid4())})
    if not args.wait:
        session.show(job, lambda made: made["id"])
    elif session.as_json:
        job = wait_for_end(session, job["id"], None)
        output.print_json(job)
        _end_well(job)
    else:
        print(formats.printable(job["id"]), flush=True)
        _print_logs(session, job["id"], follow=True)


@command("job update", JOB, *training.DEVICES)
def update(session: Session, args: Namespace) -> None:
    """Change how an unfinished job may use the devices. It takes effect at once.

    Examples:
      appliance job update ftjob-abc123 --priority 10
      appliance job update ftjob-abc123 --deadline 2026-11-22T06:00 --max-devices 4
      appliance job update ftjob-abc123 --deadline none --sizes none     takes both away
    """
    changes = training.device_fields(args)
    if not changes:
        raise BadUsage("nothing to change was given; `appliance job update --help` shows what can be")
    answer = session.client.send("PATCH", f"/admin/v1/jobs/{segment(args.id)}", body=changes)
    session.show(answer, lambda job: f"{job['id']}: changed {', '.join(sorted(changes))}")


@command("job logs", JOB, flag("-f --follow", "Until the job ends."))
def logs(session: Session, args: Namespace) -> None:
    """Show events and metrics: loss, tokens/s, devices, time to finish.

    With -f the exit code is 0 if the job succeeded and 1 if it did not.

    Examples:
      appliance job logs ftjob-abc123
      appliance job logs -f ftjob-abc123             until it ends; Ctrl-C leaves the job alone
      appliance job logs -f ftjob-abc123 -o json     one event per line
    """
    _print_logs(session, args.id, args.follow)


_TIMEOUT = opt("--timeout SECONDS", "Then exit code 124; the job goes on.", type=number(float, 0))


@command("job wait", JOB, _TIMEOUT)
def wait(session: Session, args: Namespace) -> None:
    """Return when the job has ended: exit code 0 if it succeeded, 1 if it failed or was cancelled.

    Examples:
      appliance job wait ftjob-abc123
      appliance job wait ftjob-abc123 --timeout 600 || echo not yet
      appliance job wait ftjob-abc123 -o json | jq -r .fine_tuned_model
    """
    job = wait_for_end(session, args.id, args.timeout)
    if session.as_json:
        output.print_json(job)
    _end_well(job)


def event_line(event: dict[str, Any], job: dict[str, Any] | None) -> str:
    """One event for a person. `job` gives the time to finish, while it runs; None: do not show it."""
    data, at = event.get("data") or {}, formats.clock(event["created_at"])
    if event["type"] != "metrics":
        mark = "" if event["level"] == "info" else f"{event['level']}: "
        return f"{at}  {mark}{event['message']}"
    parts = [f"step {data.get('step')}/{formats.or_dash(data.get('total_steps'))}"]
    parts += [
        f"{name.replace('_per_s', '/s').replace('_', ' ')} {formats.by_name(name, value)}"
        for name, value in data.items()
        if name not in ("step", "total_steps") and type(value) in (int, float)
    ]
    left_s = _seconds_left(job) if job else None
    return "  ".join([at, *parts, *([] if left_s is None else [f"ETA {formats.duration(left_s)}"])])


def _print_logs(session: Session, job_id: str, follow: bool) -> None:
    """Print every event so far and, if `follow`, those to come. Raises CommandFailed if the followed job ended
    badly."""
    patience, last_id = Patience(), None
    while True:
        # Read the job before its events: if it has ended by then, its last event is among them.
        job = patience.get(session, job_path(job_id)) if follow else session.client.get(job_path(job_id))
        if job is not None:
            events = patience.call(partial(_events_after, session, job_id, last_id)) or []
            for event in events:
                # The time to finish is known as of now, so it belongs to the newest line only.
                line = event_line(event, job if event is events[-1] else None)
                print(output.json_text(event) if session.as_json else formats.printable(line), flush=True)
                last_id = event["id"]
            if not follow:
                return
            if job["status"] in FINISHED:
                break
        time.sleep(POLL_S)
    _end_well(job)


def _events_after(session: Session, job_id: str, last_id: str | None) -> list[dict[str, Any]]:
    """Events that came after `last_id`, the oldest first. The API lists the newest first."""
    newer: list[dict[str, Any]] = []
    for event in _events(session, job_id):
        if event["id"] == last_id:
            break
        newer.append(event)
    return newer[::-1]


def _events(session: Session, job_id: str) -> Iterator[dict[str, Any]]:
    """The newest first, page by page."""
    page: dict[str, Any] = {"has_more": True, "data": []}
    while page["has_more"]:
        after = page["data"][-1]["id"] if page["data"] else None
        page = session.client.get(f"{job_path(job_id)}/events", limit=200, after=after)
        yield from page["data"]


def wait_for_end(session: Session, job_id: str, timeout_s: float | None) -> dict[str, Any]:
    """The job once it has ended. Raises WaitTimedOut."""

    def doing(job: dict[str, Any]) -> Doing:
        left_s = _seconds_left(job)
        return f"{job_id} {job['status']}{'' if left_s is None else f', ETA {formats.duration(left_s)}'}", None, None

    return until(lambda: session.client.get(job_path(job_id)), _has_ended, doing, timeout_s, job_id)


def _has_ended(job: dict[str, Any]) -> bool:
    return job["status"] in FINISHED


def _seconds_left(job: dict[str, Any]) -> float | None:
    """Seconds to the estimated finish; None if unknown, or less than one."""
    finish = job.get("estimated_finish")
    if finish is None or job["status"] in FINISHED:
        return None
    left_s = finish - time.time()
    return left_s if left_s >= 1 else None


def _end_well(job: dict[str, Any]) -> None:
    """Says how a finished job ended. Raises CommandFailed unless it succeeded."""
    if job["status"] == "succeeded":
        output.say(f"{job['id']} succeeded: {job['fine_tuned_model']}")
        if job.get("verdict"):
            output.say(job["verdict"]["text"])
        return
    error = job.get("error") or {}
    reason = f": {error['message']}" if error.get("message") else ""
    raise CommandFailed(f"{job['id']} {'was cancelled' if job['status'] == 'cancelled' else 'failed'}{reason}")


@command(
    "profile job",
    JOB,
    opt("--steps N", "Profile N steps, within a minute.", type=number(int, 1, 50), default=3),
    opt("--timeout SECONDS", type=number(float, 1), default=300.0),
)
def profile_job(session: Session, args: Namespace) -> None:
    """Profile a job's next steps on its first rank: compute, communication, input, idle, and the longest operators.

    The trace file opens in ui.perfetto.dev or chrome://tracing. The job goes on, somewhat slower during these steps.

    Examples:
      appliance profile job ftjob-abc123                  of its next three steps
      appliance profile job ftjob-abc123 --steps 10 -o json | jq .share
    """
    path = f"{job_path(args.id)}/events"
    known = {event["id"] for event in session.client.get(path, limit=100)["data"]}
    session.client.post(f"/admin/v1/jobs/{segment(args.id)}/profile", {"steps": args.steps})

    def look() -> dict[str, Any]:
        job = session.client.get(job_path(args.id))  # before its events: if it has ended by then, they are all there
        events = [one for one in session.client.get(path, limit=100)["data"] if one["id"] not in known]
        found = next((data for one in events if (data := (one.get("data") or {}).get("profile"))), None)
        failed = next((one["message"] for one in events if one["level"] == "warn" and "profile" in one["message"]), "")
        return {"found": found, "failed": failed or ("it has ended" if _has_ended(job) else "")}

    done = until(
        look, lambda now: now["found"] or now["failed"], lambda _: (args.id, None, None), args.timeout, args.id
    )
    if done["found"] is None:
        raise CommandFailed(f"{args.id} was not profiled: {done['failed']}")
    session.show(done["found"], views.profile)
