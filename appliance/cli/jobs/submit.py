"""`appliance job submit`: a file and a few numbers become a fine-tuning job."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import Session, box_command, given, group, with_options
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import BadUsage
from appliance.cli.jobs import file as files
from appliance.cli.jobs.follow import end_well, print_logs, wait_for_end
from appliance.cli.jobs.hyperparameters import NO_TRAINING, Training, judged_by, with_training
from appliance.cli.jobs.request import DEVICES, NO_FIELDS, device_fields, json_file, pairs

app = group("The making of fine-tuning jobs; `appliance job` takes this command in.")


@box_command(
    app,
    "appliance job submit --model starter --file train.jsonl --wait",
    "appliance job submit --model starter --file train.jsonl --validation-file valid.jsonl --suffix gsm8k --epochs 3",
    "appliance job submit --model llama-1b --file file-abc123 --lora-rank 16 --set lora_dropout=0.05",
    "appliance job submit --model llama-1b --file train.jsonl --full --zero-stage 2 --max-length 2048",
    "appliance job submit --model llama-8b --file train.jsonl --tensor-parallel 2 --zero-stage 2",
    "appliance job submit --model starter --method dpo --file pairs.jsonl --beta 0.1 --lora-rank 16",
    "appliance job submit --model starter --method reinforcement --file prompts.jsonl --grader grader.json",
    "appliance job submit --model starter --method distillation --file prompts.jsonl --teacher fraud@v2",
    "appliance job submit --model starter --file train.jsonl --epochs 3 --publish epoch   a version after each",
    "appliance job submit --model starter --file train.jsonl --validation-file v.jsonl --epochs 9 --publish best \\",
    "    --set early_stopping_patience=2",
    "appliance job submit --model starter --file today.jsonl --publish-as fraud --no-activate   a version of `fraud`",
    "appliance job submit --model starter --file today.jsonl --publish-as fraud --gate eval_abc123   only if not worse",
    "appliance job submit --model starter --file train.jsonl --priority 5 --deadline 8h --sizes 2,4 --no-preemptible",
    "",
    "Further names for --set: lora_alpha, lora_dropout, lora_targets, lora_publish (adapter, merged), precision,",
    "learning_rate, lr_scheduler (cosine, linear, constant, wsd), warmup_ratio, weight_decay, max_grad_norm,",
    "on_loss_spike (none, pause, rollback, lower_rate), data_order (shuffled, given, loss),",
    "gradient_accumulation, micro_batch, packing, eval_interval, early_stopping_patience, activation_checkpointing,",
    "offload, snapshot_every_s, step_patience_s; for methods that learn from the",
    "model's own answers also rollouts (engine, ranks), staleness (0 to 4), in_flight.",
)
@with_training
@with_options("devices", DEVICES, device_fields)
def submit(
    session: Session,
    model: Annotated[str, typer.Option("--model", help="The model to begin from.", autocompletion=complete_models)],
    file: Annotated[str, typer.Option("--file", metavar="PATH|FILE_ID", help="Training data.")],
    validation_file: Annotated[
        str | None, typer.Option("--validation-file", metavar="PATH|FILE_ID", help="Data to measure the loss on.")
    ] = None,
    training: Training = NO_TRAINING,
    grader: Annotated[
        Path | None,
        typer.Option("--grader", metavar="PATH", help="What gives answers their reward, JSON (docs/graders.md)."),
    ] = None,
    response_format: Annotated[
        Path | None,
        typer.Option(
            "--response-format", metavar="PATH", help="The form that answers are held to, JSON (docs/reinforcement.md)."
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            metavar="MODEL[@VERSION]",
            help="The model to come nearer to (docs/distillation.md).",
            autocompletion=complete_models,
        ),
    ] = None,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Part of the new model's name.")] = None,
    publish_as: Annotated[
        str | None,
        typer.Option("--publish-as", metavar="NAME", help="Make a version of this model, new or one of yours."),
    ] = None,
    activate: Annotated[
        bool, typer.Option("--activate/--no-activate", help="Does the version answer at once? Default: yes.")
    ] = True,
    gate: Annotated[
        str | None,
        typer.Option("--gate", metavar="EVAL_ID", help="The version answers unless this evaluation shows it is worse."),
    ] = None,
    pass_rate: Annotated[
        float | None,
        typer.Option("--pass-rate-at-least", min=0, max=1, help="With --gate: the share of items that has to pass."),
    ] = None,
    publish: Annotated[
        Literal["checkpoints", "end", "epoch", "best"] | None,
        typer.Option(
            "--publish",
            help="checkpoints: the last three epochs can be asked by name, and the last is the result. end: the result "
            "alone. epoch: each epoch answers as soon as it is over. best: the result is the version whose validation "
            "was the best, not the last. Default: checkpoints.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="NAME=VALUE", help="To find it again; repeatable.")
    ] = None,
    devices: dict[str, Any] = NO_FIELDS,
    hold: Annotated[bool, typer.Option("--hold", help="Stays in the queue until `job release`.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end, as `job logs -f` does.")] = False,
) -> None:
    """Fine-tune a model on a file of conversations, or of what else the method learns from. Files are uploaded and
    checked before any device is taken."""
    _check_judge(training, grader=grader, teacher=teacher)
    if pass_rate is not None and gate is None:
        raise BadUsage("--pass-rate-at-least belongs to --gate")
    if response_format is not None and training.judged_by != "grader":
        raise BadUsage(f"--response-format belongs to --method {' and '.join(judged_by('grader'))}")
    block = given(
        hyperparameters=training.hyperparameters(publish=publish),
        grader=None if grader is None else json_file("--grader", grader),
        response_format=None if response_format is None else json_file("--response-format", response_format),
        teacher=teacher,
    )
    body = given(
        model=model,
        suffix=suffix,
        publish_as=publish_as,
        activate=None if activate else False,
        gate=None if gate is None else given(eval_id=gate, pass_rate_at_least=pass_rate),
        seed=seed,
        metadata=dict(pairs("--metadata", metadata or [])) or None,
        method={"type": training.method, training.method: block},
        **devices,
        held=hold or None,
    )
    if validation_file and Path(validation_file).expanduser().resolve() == Path(file).expanduser().resolve():
        raise BadUsage(
            f"--validation-file is {validation_file!r}, as is --file: a loss on what was learnt from says nothing; "
            "give lines that the job does not train on"
        )
    with files.kept_if_taken(session) as uploaded:
        body["training_file"] = file_id(session, "--file", file, uploaded)
        if validation_file:
            body["validation_file"] = file_id(session, "--validation-file", validation_file, uploaded)
        # The key keeps a copy of this request, sent again by something on the way, from making a second job.
        job = session.client.send("POST", paths.JOBS, body=body, headers={"idempotency-key": str(uuid.uuid4())})
    if not wait:
        session.show(job, lambda made: made["id"])
        return
    if session.as_json:
        job = wait_for_end(session, job["id"], None)
        output.print_json(job)
        end_well(job)
        return
    print(formats.printable(job["id"]), flush=True)
    print_logs(session, job["id"], follow=True)


_JUDGES = {
    "grader": "a file with a grader as JSON; docs/graders.md has some",
    "teacher": "a model of the box, which has the same tokens as the student; docs/distillation.md",
}


def _check_judge(training: Training, **given_judges: Any) -> None:
    """Raises BadUsage."""
    for name, value in given_judges.items():
        if name == training.judged_by and value is None:
            raise BadUsage(f"--method {training.method} needs --{name}, {_JUDGES[name]}")
        if name != training.judged_by and value is not None:
            theirs = " and ".join(judged_by(name))
            raise BadUsage(f"--{name} belongs to --method {theirs}; --method is {training.method}")


def file_id(session: Session, option: str, given: str, uploaded: list[str]) -> str:
    """The id of an uploaded file, or of one that is uploaded now and added to `uploaded`. One with bad lines is left on
    the box, which knows why. Raises BadUsage and CommandFailed."""
    path = Path(given).expanduser()
    if path.is_file():
        sent = files.send(session, path, "fine-tune")
        files.refuse_bad(sent)
        uploaded.append(sent["id"])
        return sent["id"]
    if given.startswith("file-"):
        return given
    raise BadUsage(f"{option} is {given!r}; expected a file on this machine, or the id of an uploaded one (file-…)")
