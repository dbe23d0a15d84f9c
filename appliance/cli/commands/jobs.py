"""`appliance job submit|logs|wait|update` and `plan`: make jobs and follow them, and whether they would fit."""

from __future__ import annotations

import json
import time
import uuid
from argparse import Namespace
from typing import Any

from appliance.cli import output
from appliance.cli.command import COMMANDS, POLL_S, TIMEOUT, WORK_TIMEOUT_S, Doing, Session, command, patient, until
from appliance.cli.commands.data import file_path, uploaded_id
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.options import (
    Option,
    auto_or,
    either,
    flag,
    future,
    given,
    json_file,
    named,
    number,
    opt,
    or_null,
    part,
    picked,
)
from appliance.cli.resources import JOB, JOBS, Row, has_ended, segment
from train.methods.methods import DEFAULT, METHODS

_PUBLISH = (
    "checkpoints (the default): the last three epochs can be asked by name, and the last is the result. "
    "end: the result alone. epoch: each epoch answers as soon as it is over. "
    "best: the result is the version whose validation was best."
)
_AUTO_OR_NUMBER = auto_or(number(lambda text: int(text) if text.isdigit() else float(text)))


_COMMON = (
    opt("--epochs N", "auto or a number; passes over the data.", dest="n_epochs", type=_AUTO_OR_NUMBER),
    opt("--batch-size N", "auto or a number; sequences per step, on all devices.", type=_AUTO_OR_NUMBER),
    opt("--learning-rate-multiplier X", "auto or a number.", type=_AUTO_OR_NUMBER),
    opt("--lora-rank R", "Train adapters of this rank.", type=int),
    *either("--full", "--lora", "Train every weight, or adapters. Default: by the model's size."),
    opt("--zero-stage N", "DeepSpeed ZeRO, 0 to 3.", type=number(int, 0, 3)),
    opt("--tensor-parallel N", "Devices that share one copy of the model.", type=number(int, 1)),
    opt("--max-length TOKENS", "Longest sequence of training.", type=int),
)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def options() -> tuple[Option, ...]:
    """--method, and an option for every hyperparameter."""
    kinds = "; ".join(f"{method.name}: {method.summary}" for method in METHODS.values())
    own: dict[str, list[str]] = {}
    for method in METHODS.values():
        for option in method.options:
            bounds = f"auto ({option.auto:g}) or a number up to {option.high:g}"
            own.setdefault(option.name, []).append(f"Of --method {method.name}: {option.help}. {bounds}")
    return (
        opt("--method METHOD", f"{kinds}.", choices=tuple(METHODS), default=DEFAULT.name),
        opt(
            "--set NAME=VALUE",
            "Any other hyperparameter, its value JSON or text; repeatable.",
            dest="set_",
            type=named(_json_or_text),
            action="append",
        ),
        *_COMMON,
        *(opt(f"--{name.replace('_', '-')} X", "; ".join(help), type=_AUTO_OR_NUMBER) for name, help in own.items()),
    )


def hyperparameters(args: Namespace) -> dict[str, Any]:
    """The hyperparameters in the arguments. Raises BadUsage if one is given twice."""
    values = picked(args, options()[2:])
    for name, value in args.set_ or ():
        if name in values:
            raise BadUsage(f"{name} is given twice: once as an option and once with --set")
        values[name] = value
    return values


_DEVICES = (
    opt("--min-devices N", "Never on fewer.", type=number(int, 1)),
    opt("--max-devices N", "Never on more.", type=number(int, 1)),
    opt("--priority N", "Higher goes first. Default: 0.", type=int),
    opt(
        "--deadline TIME|none",
        "8h, or a date, to its end; near it the job goes first.",
        dest="deadline_s",
        type=or_null(future),
    ),
    *either("--preemptible", "--no-preemptible", "May it be suspended for others? Default: yes."),
)
"""How a job may use the devices."""


def job_path(job_id: str) -> str:
    return f"{JOBS}/{segment(job_id)}"


@command(
    "job submit",
    opt("--model MODEL", "The model to begin from.", required=True),
    opt("--file PATH|FILE_ID", "Training data.", required=True),
    opt("--validation-file PATH|FILE_ID", "Data to measure the loss on."),
    *options(),
    opt("--grader PATH", "What gives answers their reward, JSON (docs/graders.md).", type=json_file),
    opt("--response-format PATH", "The form that answers are held to, JSON (docs/reinforcement.md).", type=json_file),
    opt("--teacher MODEL[@VERSION]", "The model to come nearer to (docs/distillation.md)."),
    opt("--suffix TEXT", "Part of the new model's name."),
    opt("--publish-as NAME", "Make a version of this model, new or one of yours."),
    *either("--activate", "--no-activate", "Does the version answer at once? Default: yes."),
    opt("--gate EVAL_ID", "The version answers unless this evaluation shows it is worse."),
    opt("--pass-rate-at-least SHARE", "With --gate: the share of items that has to pass.", type=part),
    opt("--publish", _PUBLISH, choices=("checkpoints", "end", "epoch", "best")),
    opt("--seed N", "For the order of the data and new weights.", type=number(int, 0)),
    opt("--metadata NAME=VALUE", "To find it again; repeatable.", type=named(), action="append"),
    *_DEVICES,
    flag("--wait", "Follow it to its end, as `job logs -f` does."),
)
def submit(session: Session, args: Namespace) -> None:
    """Fine-tune a model on a file of conversations, or of what else the method learns from.

    Files are uploaded and checked before any device is taken.

    Further names for --set: lora_alpha, lora_dropout, lora_targets, lora_publish (adapter, merged), precision,
    learning_rate, lr_scheduler (cosine, linear, constant, wsd), warmup_ratio, weight_decay, max_grad_norm,
    micro_batch, packing, eval_interval, early_stopping_patience,
    activation_checkpointing, offload, kernels (torch, liger), snapshot_every_s; for methods that learn from the model's
    own answers also staleness (0 to 4).

    Examples:
      appliance job submit --model smollm2-135m --file train.jsonl --wait
      appliance job submit --model llama-1b --file file-abc123 --lora-rank 16 --set lora_dropout=0.05
      appliance job submit --model smollm2-135m --method dpo --file pairs.jsonl --beta 0.1 --validation-file valid.jsonl
      appliance job submit --model smollm2-135m --method reinforcement --file prompts.jsonl --grader grader.json
      appliance job submit --model smollm2-135m --method distillation --file prompts.jsonl --teacher fraud@v2
      appliance job submit --model smollm2-135m --file today.jsonl --publish-as fraud --gate eval_abc123   if not worse
      appliance job submit --model smollm2-135m --file a.jsonl --priority 5 --deadline 8h --no-preemptible
    """
    block = picked(args, "grader response_format teacher")
    block["hyperparameters"] = hyperparameters(args) | picked(args, "publish")
    body = picked(args, "model suffix publish_as seed activate") | picked(args, _DEVICES)
    body |= given(
        gate=given(eval_id=args.gate, pass_rate_at_least=args.pass_rate_at_least) or None,
        metadata=dict(args.metadata or ()) or None,
    )
    body["method"] = {"type": args.method, args.method: block}
    body["training_file"] = uploaded_id(session, "--file", args.file)
    if args.validation_file:
        body["validation_file"] = uploaded_id(session, "--validation-file", args.validation_file)
    # With the key, a proxy that repeats this request makes no second job.
    job = session.client.send("POST", JOBS, body=body, headers={"idempotency-key": str(uuid.uuid4())})
    if not args.wait:
        session.show(job, lambda job: job["id"])
    elif session.as_json:
        _show_ended(session, job["id"], None)
    else:
        print(output.printable(job["id"]), flush=True)
        _print_logs(session, job["id"], follow=True)


COMMANDS["job update"] = Row(
    "job update",
    "PATCH /admin/v1/jobs/{id}",
    """Change how an unfinished job may use the devices. It takes effect at once.

    Examples:
      appliance job update ftjob-abc123 --priority 10 --deadline 2026-11-22T06:00 --max-devices 4
      appliance job update ftjob-abc123 --deadline none     takes it away""",
    "{id} is changed",
    (JOB, *_DEVICES),
).command()


@command("job logs", JOB, flag("-f --follow", "Until the job ends."))
def logs(session: Session, args: Namespace) -> None:
    """Show events and metrics: loss, tokens/s, devices, time to finish.

    With -f the exit code is 0 if the job succeeded and 1 if it did not.

    Examples:
      appliance job logs -f ftjob-abc123             until it ends; Ctrl-C leaves the job alone
    """
    _print_logs(session, args.id, args.follow)


@command("job wait", JOB, TIMEOUT)
def wait(session: Session, args: Namespace) -> None:
    """Return when the job has ended: exit code 0 if it succeeded, 1 if it failed or was cancelled.

    Examples:
      appliance job wait ftjob-abc123 --timeout 600 || echo not yet
    """
    _show_ended(session, args.id, args.timeout)


def _show_ended(session: Session, job_id: str, timeout_s: float | None) -> None:
    def doing(job: dict[str, Any]) -> Doing:
        return f"{job_id} {job['status']}{_eta(job)}", None, None

    job = until(lambda: session.client.get(job_path(job_id)), has_ended, doing, timeout_s, job_id)
    if session.as_json:
        output.print_json(job)
    _end_well(job)


def _eta(job: dict[str, Any]) -> str:
    """The time to the estimated finish, "" where there is none."""
    left_s = (job.get("estimated_finish") or 0) - time.time()
    return f", ETA {output.duration(left_s)}" if left_s >= 1 and not has_ended(job) else ""


def _end_well(job: dict[str, Any]) -> None:
    """Print how a finished job ended. Raises CommandFailed unless it succeeded."""
    if job["status"] == "succeeded":
        output.say(f"{job['id']} succeeded: {job['fine_tuned_model']}")
        return
    reason = (job.get("error") or {}).get("message")
    ended = "was cancelled" if job["status"] == "cancelled" else "failed"
    raise CommandFailed(f"{job['id']} {ended}{f': {reason}' if reason else ''}")


def _print_logs(session: Session, job_id: str, follow: bool) -> None:
    """Print every event so far and, if `follow`, those to come. Raises CommandFailed if the followed job ended
    badly."""
    last_id: str | None = None

    def fetch() -> Any:
        job = session.client.get(job_path(job_id))  # before its events: those of an ended job are complete
        events = session.client.listed(f"{job_path(job_id)}/events", limit=1000, order="asc", after=last_id)
        return job, events["data"]

    look = patient(fetch) if follow else fetch
    while True:
        if fetched := look():
            job, events = fetched
            for event in events:
                # The estimate is of now, so it belongs to the newest line only.
                line = _event_line(event) + (_eta(job) if follow and event is events[-1] else "")
                print(output.json_text(event) if session.as_json else output.printable(line), flush=True)
                last_id = event["id"]
            if not follow:
                return
            if has_ended(job):
                return _end_well(job)
        time.sleep(POLL_S)


def _event_line(event: dict[str, Any]) -> str:
    """One event for a person."""
    data, at = event.get("data") or {}, time.strftime("%H:%M:%S", time.localtime(event["created_at"]))
    if event["type"] != "metrics":
        mark = "" if event["level"] == "info" else f"{event['level']}: "
        return f"{at}  {mark}{event['message']}"
    metrics = (
        f"{name.replace('_per_s', '/s').replace('_', ' ')} {output.by_name(name, value)}"
        for name, value in data.items()
        if name not in ("step", "total_steps") and type(value) in (int, float)
    )
    return "  ".join([at, f"step {data.get('step')}/{data.get('total_steps') or '-'}", *metrics])


@command(
    "plan job",
    opt("--model MODEL", "The model to begin from.", required=True),
    opt("--file PATH|FILE_ID", "Training data, whose tokens are counted; an uploaded copy is deleted."),
    *options(),
    opt("--devices N", "Use at most N. Default: all of the box.", type=number(int, 1)),
)
def plan_job(session: Session, args: Namespace) -> None:
    """Show what a fine-tuning job would choose, and the best three layouts with their memory, hours and energy.

    The job that follows takes the first. It exits with 1 when none fits, so a script can ask before it submits.

    Examples:
      appliance plan job --model llama-8b --file train.jsonl           what the job would choose, its tokens counted
      appliance plan job --model llama-8b --full --zero-stage 3 --devices 4
    """
    body = picked(args, "model method devices") | {"hyperparameters": hyperparameters(args)}
    if args.file is not None:
        body["training_file"] = uploaded_id(session, "--file", args.file)
    try:
        with output.progress(f"the box counts the tokens of {args.file}"):
            plan = session.client.send("POST", "/admin/v1/plan", body=body, timeout_s=WORK_TIMEOUT_S)
    finally:
        if (file_id := body.get("training_file")) != args.file:  # uploaded for this plan
            session.client.send("DELETE", file_path(file_id))
    session.show(plan)
    if not plan["fits"]:
        raise CommandFailed("no layout of this job fits; the plan shows what would fit")
