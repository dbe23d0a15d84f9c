"""`appliance plan`: whether a model or a job would fit the box, before anything is started."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, box_command, given, group
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import CommandFailed
from appliance.cli.jobs.methods import METHOD, NO_OWN, OWN, with_methods
from appliance.cli.jobs.request import (
    FULL,
    LORA_RANK,
    MAX_LENGTH,
    SET,
    TENSOR_PARALLEL,
    ZERO_STAGE,
    auto_or_number,
)
from appliance.cli.jobs.submit import with_pairs
from train.methods.methods import DEFAULT

app = group("Would it fit? An estimate before anything is started.")

# The answer's numbers of a device that have a line of their own.
_ELSEWHERE = ("device_bytes", "room_bytes", "host_bytes")
_FOOT = "It exits with 1 when it does not fit, so a script can ask before it submits."


@box_command(
    app,
    "appliance plan serve llama-8b                          one replica on one device",
    "appliance plan serve llama-8b --replicas 4",
    "appliance plan serve llama-70b --tensor-parallel 4 -o json",
    "",
    _FOOT,
    name="serve",
)
def serve(
    session: Session,
    model: Annotated[str, typer.Argument(help="A model of the box.", autocompletion=complete_models)],
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", min=1, help="Engines of it.")] = 1,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", metavar="N", min=1, help="Devices that share one replica.")
    ] = 1,
) -> None:
    """Memory of engines: weights and KV cache per device, versions in shared memory."""
    body = {"model": model, "replicas": replicas, "tensor_parallel": tensor_parallel}
    _answer(session, {"serve": body})


@box_command(
    app,
    "appliance plan job --model llama-8b                    what 'auto' would choose",
    "appliance plan job --model llama-8b --full --zero-stage 3 --devices 4",
    "appliance plan job --model llama-8b --tensor-parallel 4 --zero-stage 2",
    "appliance plan job --model llama-8b --lora-rank 16 --max-length 8192 --set micro_batch=2",
    "appliance plan job --model llama-8b --method dpo --lora-rank 16   rows of two sequences: twice the activations",
    "",
    _FOOT,
    name="job",
)
@with_methods
def job(
    session: Session,
    model: Annotated[str, typer.Option("--model", help="The model to begin from.", autocompletion=complete_models)],
    method: METHOD = DEFAULT.name,
    devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", min=1, help="At most so many. Default: all of the box.")
    ] = None,
    examples_: Annotated[
        int, typer.Option("--examples", metavar="N", min=1, help="Of the training file; 'auto' depends on it.")
    ] = 1000,
    batch_size: Annotated[str | None, typer.Option("--batch-size", metavar="N", help="auto or a number")] = None,
    lora_rank: LORA_RANK = None,
    full: FULL = None,
    zero_stage: ZERO_STAGE = None,
    tensor_parallel: TENSOR_PARALLEL = None,
    max_length: MAX_LENGTH = None,
    set_: SET = None,
    own: OWN = NO_OWN,
) -> None:
    """Memory of a fine-tuning job: weights, gradients, optimizer and activations per device, snapshot and result."""
    chosen = given(
        batch_size=auto_or_number("--batch-size", batch_size),
        lora_rank=lora_rank,
        full=full,
        zero_stage=zero_stage,
        max_length=max_length,
        tensor_parallel=tensor_parallel,
        **own,
    )
    hyperparameters = with_pairs(chosen, set_ or [])
    asked = given(model=model, method=method, hyperparameters=hyperparameters, devices=devices, examples=examples_)
    _answer(session, {"job": asked})


def _answer(session: Session, body: dict[str, Any]) -> None:
    plan = session.client.send("POST", "/admin/v1/plan", body=body)
    session.show(plan, _table)
    if not plan["fits"]:
        raise CommandFailed("it does not fit")


def _table(plan: dict[str, Any]) -> Any:
    numbers = plan["numbers"]
    device, host = numbers["device"], numbers["host"]
    rows = _sizes({name: device[name] for name in device if name.endswith("_bytes") and name not in _ELSEWHERE})
    if device.get("kv_cache_tokens"):
        rows.append(("KV cache holds", f"{device['kv_cache_tokens']:,} tokens"))
    rows.append(("per device", f"{formats.size(device['device_bytes'])} of {formats.size(device['room_bytes'])}"))
    offload = numbers.get("offload", {"host_bytes": 0})
    away = _sizes(offload) if offload["host_bytes"] else []
    about = [("model", plan["model"]), ("devices", numbers["devices"])]
    chosen = ", ".join(f"{name} {value}" for name, value in plan.get("hyperparameters", {}).items())
    verdict = plan["waits"] or ("fits" if plan["fits"] else "does not fit")
    if plan["kind"] == "job":
        about += [("with", chosen), ("may run on", f"{formats.or_dash(plan['sizes'])} devices")]
    return output.stack(
        output.fields(*about),
        output.above("On each device", output.fields(*rows)),
        output.above("In shared memory", output.fields(*_sizes(host))),
        output.above("In host memory, by offloading", output.fields(*away)) if away else None,
        *plan["problems"],
        *plan["warnings"],
        "Instead: " + "; ".join(plan["instead"]) if plan["instead"] else None,
        verdict,
    )


def _sizes(numbers: dict[str, int | None]) -> list[tuple[str, object]]:
    named = ((name.removesuffix("_bytes").replace("_", " "), value) for name, value in numbers.items())
    return [(name, formats.size(value)) for name, value in named if value is not None]
