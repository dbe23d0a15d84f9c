"""`appliance job submit`: a file and a few numbers become a fine-tuning job."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import output, paths
from appliance.cli.command import Session, box_command, given, group
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import BadUsage
from appliance.cli.jobs import file as files
from appliance.cli.jobs.follow import end_well, print_logs, wait_for_end
from appliance.cli.jobs.methods import METHOD, NO_OWN, OWN, USUAL, with_methods
from appliance.cli.jobs.request import (
    BATCH_SIZE,
    DEADLINE,
    EPOCHS,
    FULL,
    LEARNING_RATE,
    LORA_RANK,
    MAX_DEVICES,
    MAX_LENGTH,
    MIN_DEVICES,
    PREEMPTIBLE,
    PRIORITY,
    PUBLISH,
    SET,
    SIZES,
    TENSOR_PARALLEL,
    ZERO_STAGE,
    auto_or_number,
    device_fields,
)

app = group("The making of fine-tuning jobs; `appliance job` takes this command in.")


@box_command(
    app,
    "appliance job submit --model starter --file train.jsonl --wait",
    "appliance job submit --model starter --file train.jsonl --validation-file valid.jsonl --suffix gsm8k --epochs 3",
    "appliance job submit --model llama-1b --file file-abc123 --lora-rank 16 --set lora_dropout=0.05",
    "appliance job submit --model llama-1b --file train.jsonl --full --zero-stage 2 --max-length 2048",
    "appliance job submit --model llama-8b --file train.jsonl --tensor-parallel 2 --zero-stage 2",
    "appliance job submit --model starter --method dpo --file pairs.jsonl --beta 0.1 --lora-rank 16",
    "appliance job submit --model starter --file train.jsonl --epochs 3 --publish epoch   a version after each",
    "appliance job submit --model starter --file train.jsonl --priority 5 --deadline 8h --sizes 2,4 --no-preemptible",
    "",
    "Further names for --set: lora_alpha, lora_dropout, lora_targets, lora_publish (adapter, merged), precision,",
    "learning_rate, warmup_ratio, weight_decay, max_grad_norm, gradient_accumulation, micro_batch, packing,",
    "activation_checkpointing, offload, snapshot_every_s, step_patience_s.",
)
@with_methods
def submit(
    session: Session,
    model: Annotated[str, typer.Option("--model", help="The model to begin from.", autocompletion=complete_models)],
    file: Annotated[str, typer.Option("--file", metavar="PATH|FILE_ID", help="Training data.")],
    validation_file: Annotated[
        str | None, typer.Option("--validation-file", metavar="PATH|FILE_ID", help="Data to measure the loss on.")
    ] = None,
    method: METHOD = USUAL,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Part of the new model's name.")] = None,
    epochs: EPOCHS = None,
    batch_size: BATCH_SIZE = None,
    learning_rate_multiplier: LEARNING_RATE = None,
    lora_rank: LORA_RANK = None,
    full: FULL = None,
    zero_stage: ZERO_STAGE = None,
    tensor_parallel: TENSOR_PARALLEL = None,
    max_length: MAX_LENGTH = None,
    publish: PUBLISH = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    set_: SET = None,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="NAME=VALUE", help="To find it again; repeatable.")
    ] = None,
    min_devices: MIN_DEVICES = None,
    max_devices: MAX_DEVICES = None,
    sizes: SIZES = None,
    priority: PRIORITY = None,
    deadline: DEADLINE = None,
    preemptible: PREEMPTIBLE = None,
    hold: Annotated[bool, typer.Option("--hold", help="Stays in the queue until `job release`.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end, as `job logs -f` does.")] = False,
    own: OWN = NO_OWN,
) -> None:
    """Fine-tune a model on a file of conversations, or of what else the method learns from. Files are uploaded and
    checked before any device is taken."""
    chosen = given(
        n_epochs=auto_or_number("--epochs", epochs),
        batch_size=auto_or_number("--batch-size", batch_size),
        learning_rate_multiplier=auto_or_number("--learning-rate-multiplier", learning_rate_multiplier),
        lora_rank=lora_rank,
        full=full,
        zero_stage=zero_stage,
        tensor_parallel=tensor_parallel,
        max_length=max_length,
        publish=publish,
        **own,
    )
    hyperparameters = with_pairs(chosen, set_ or [])
    body = given(
        model=model,
        training_file=file_id(session, "--file", file),
        validation_file=file_id(session, "--validation-file", validation_file) if validation_file else None,
        suffix=suffix,
        seed=seed,
        metadata=dict(_pairs("--metadata", metadata or [])) or None,
        method={"type": method, method: {"hyperparameters": hyperparameters}},
        min_devices=min_devices,
        max_devices=max_devices,
        **device_fields(sizes, priority, deadline, preemptible),
        held=hold or None,
    )
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
    print(job["id"], flush=True)
    print_logs(session, job["id"], follow=True)


def file_id(session: Session, option: str, given: str) -> str:
    """The id of an uploaded file, or of one that is uploaded now. Raises BadUsage and CommandFailed."""
    path = Path(given).expanduser()
    if path.is_file():
        uploaded = files.send(session, path, "fine-tune")
        files.refuse_bad(uploaded)
        return uploaded["id"]
    if given.startswith("file-"):
        return given
    raise BadUsage(f"{option} is {given!r}; expected a file on this machine, or the id of an uploaded one (file-…)")


def _pairs(option: str, texts: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise BadUsage(f"{option} is {text!r}; expected NAME=VALUE")
        pairs.append((name.strip(), value))
    return pairs


def with_pairs(hyperparameters: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """Values are JSON where they can be (numbers, true, lists), else text. Raises BadUsage for a name given twice."""
    merged = dict(hyperparameters)
    for name, text in _pairs("--set", texts):
        if name in merged:
            raise BadUsage(f"{name} is given twice: once as an option and once with --set")
        try:
            merged[name] = json.loads(text)
        except ValueError:
            merged[name] = text
    return merged
