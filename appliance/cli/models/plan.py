"""`appliance plan`: whether a model or a job would fit the box, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.client import WORK_TIMEOUT_S
from appliance.cli.command import Session, box_command, given, group
from appliance.cli.complete import models as complete_models
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.jobs.hyperparameters import NO_TRAINING, Training, with_training
from appliance.cli.jobs.submit import file_id
from appliance.cli.mode.power import energy_line

app = group("Show whether a job or a model would fit, before anything is started.")

# The answer's numbers of a device that have a line of their own.
_ELSEWHERE = ("device_bytes", "room_bytes", "host_bytes")
CONFIG = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="DIR|FILE|NAME",
        help="In place of a model of the box: a config.json, its directory, or a published model's name or size (70b).",
    ),
]
ACCELERATOR = Annotated[
    str | None, typer.Option("--accelerator", metavar="NAME", help="With --config: h100, a100, 48gb …")
]
_FOOT = "It exits with 1 when it does not fit, so a script can ask before it submits."


@box_command(
    app,
    "appliance plan serve llama-8b                          one replica on one device",
    "appliance plan serve llama-8b --replicas 4",
    "appliance plan serve llama-70b --tensor-parallel 4 -o json",
    "appliance plan serve --config llama-3.3-70b --tensor-parallel 2 --accelerator h100      needs no box",
    "",
    _FOOT,
    name="serve",
    boxless="config",
)
def serve(
    session: Session,
    model: Annotated[str | None, typer.Argument(help="A model of the box.", autocompletion=complete_models)] = None,
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", min=1, help="Engines of it.")] = 1,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", metavar="N", min=1, help="Devices that share one replica.")
    ] = 1,
    config: CONFIG = None,
    accelerator: ACCELERATOR = None,
    devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", min=1, help="With --config: of the machine. Default: 8.")
    ] = None,
) -> None:
    """Show the memory that engines would take: weights and KV cache per device, versions in shared memory."""
    if (model is None) == (config is None):
        raise BadUsage("give either MODEL (one of the box) or --config (any other)")
    if config is not None:
        engines = {"replicas": replicas, "tensor_parallel": tensor_parallel}
        _show(session, _without_box(False, config, accelerator, devices, **engines))
        return
    if accelerator is not None or devices is not None:
        raise BadUsage("--accelerator and --devices go with --config; the devices of the box are known")
    body = {"model": model, "replicas": replicas, "tensor_parallel": tensor_parallel}
    _answer(session, {"serve": body})


@box_command(
    app,
    "appliance plan job --model llama-8b --file train.jsonl           what the job would choose, its tokens counted",
    "appliance plan job --model llama-8b --full --zero-stage 3 --devices 4",
    "appliance plan job --model llama-8b --method dpo --lora-rank 16   rows of two sequences: twice the activations",
    "appliance plan job --model llama-8b --file file-abc123 --lora-rank 16 --set micro_batch=2",
    "appliance plan job --config llama-3.3-70b --devices 8 --accelerator h100 --full      needs no box",
    "appliance plan job --config ./Qwen2.5-7B-Instruct --devices 2 --accelerator 48gb     a directory with config.json",
    "",
    _FOOT,
    name="job",
    boxless="config",
)
@with_training
def job(
    session: Session,
    model: Annotated[
        str | None, typer.Option("--model", help="The model to begin from.", autocompletion=complete_models)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="PATH|FILE_ID",
            help="Training data, whose tokens are counted; it is kept only if it has bad lines, to show them.",
        ),
    ] = None,
    config: CONFIG = None,
    accelerator: ACCELERATOR = None,
    device_kind: Annotated[str | None, typer.Option("--device-kind", hidden=True)] = None,
    training: Training = NO_TRAINING,
    devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", min=1, help="Use at most N. Default: all of the box.")
    ] = None,
    examples_: Annotated[
        int | None,
        typer.Option("--examples", metavar="N", min=1, help="Without --file: N examples of 200 tokens. Default: 1000."),
    ] = None,
) -> None:
    """Show what a fine-tuning job would choose, and its memory per device. The job that follows chooses the same."""
    method, hyperparameters = training.method, training.hyperparameters()
    if device_kind is not None:
        output.say("--device-kind is called --accelerator now")
        accelerator = accelerator or device_kind
    if (model is None) == (config is None):
        raise BadUsage("give either --model (one of the box) or --config (any other)")
    if file is not None and examples_ is not None:
        raise BadUsage("--file has its examples; --examples is for a plan without one")
    if config is not None:
        if file is not None:
            raise BadUsage("--file needs the model's tokenizer, so a model of the box (--model); give --examples N")
        asked = given(examples=examples_, method=method) | {"given": hyperparameters}
        _show(session, _without_box(True, config, accelerator, devices, **asked))
        return
    if accelerator is not None:
        raise BadUsage("--accelerator goes with --config; the devices of the box are known")
    body = given(model=model, method=method, hyperparameters=hyperparameters, devices=devices, examples=examples_)
    if file is None:
        _answer(session, {"job": body})
        return
    uploaded: list[str] = []
    training_file = file_id(session, "--file", file, uploaded)
    try:
        with output.progress(f"the box counts the tokens of {file}"):
            plan = session.client.send(
                "POST",
                "/admin/v1/plan",
                body={"job": body | {"training_file": training_file}},
                timeout_s=WORK_TIMEOUT_S,
            )
    finally:
        for one in uploaded:
            session.client.delete(paths.file(one))
    _show(session, plan)


def _without_box(
    of_job: bool, config: str, accelerator: str | None, devices: int | None, **asked: Any
) -> dict[str, Any]:
    """Raises BadUsage."""
    # Fenced: it would double the time of every other command's `--help`.
    from appliance.controller.jobs.planned import ACCELERATORS, BadShape, plan_imagined, serve_imagined

    if accelerator is None:
        known = ", ".join(ACCELERATORS)
        raise BadUsage(f"--config needs --accelerator: one of {known}, or the memory of each, such as 48gb")
    imagined: Callable[..., dict[str, Any]] = plan_imagined if of_job else serve_imagined
    try:
        return imagined(config, devices=devices or 8, accelerator=accelerator, **asked)
    except BadShape as error:
        raise BadUsage(str(error)) from error


def _answer(session: Session, body: dict[str, Any]) -> None:
    _show(session, session.client.send("POST", "/admin/v1/plan", body=body))


def _show(session: Session, plan: dict[str, Any]) -> None:
    session.show(plan, _table)
    if not plan["fits"]:
        raise CommandFailed("it does not fit")


def _table(plan: dict[str, Any]) -> Any:
    numbers = plan["numbers"]
    device, host = numbers["device"], numbers["host"]
    rows = _sizes({name: device[name] for name in device if name.endswith("_bytes") and name not in _ELSEWHERE})
    if numbers.get("max_model_len"):
        rows.append(("context", f"{numbers['max_model_len']:,} tokens"))
    if device.get("kv_cache_tokens"):
        whole = device.get("whole_sequences")
        at_once = f", {whole:,} of the whole context at once" if whole else ""
        rows.append(("KV cache holds", f"{device['kv_cache_tokens']:,} tokens{at_once}"))
    rows.append(("per device", f"{formats.size(device['device_bytes'])} of {formats.size(device['room_bytes'])}"))
    offload = numbers.get("offload", {"host_bytes": 0})
    away = _sizes(offload) if offload["host_bytes"] else []
    about = [("model", plan["model"]), ("devices", numbers["devices"])]
    chosen = ", ".join(f"{name} {_short(value)}" for name, value in plan.get("hyperparameters", {}).items())
    verdict = plan["waits"] or ("fits" if plan["fits"] else "does not fit")
    if plan["kind"] == "job":
        about += [
            ("data", _data(plan["data"])),
            ("with", chosen),
            ("steps", plan["data"]["steps"]),
            *_hours(plan.get("device_hours"), plan.get("estimate")),
            *([] if plan.get("device_hours") is None else [("energy", energy_line(plan["energy"]))]),
            ("may run on", _sizes_of(plan["sizes"])),
        ]
    return output.stack(
        output.fields(*about),
        output.above("On each device", output.fields(*rows)),
        output.above("In shared memory", output.fields(*_sizes(host))),
        output.above("In host memory, all ranks together", output.fields(*_host_memory(numbers["host_memory"])))
        if "host_memory" in numbers
        else None,
        output.above("In host memory, by offloading", output.fields(*away)) if away else None,
        *plan["problems"],
        *plan["warnings"],
        "Instead: " + "; ".join(plan["instead"]) if plan["instead"] else None,
        verdict,
    )


def _host_memory(needs: dict[str, int]) -> list[tuple[str, object]]:
    """What a job waits for until it is available besides the reserve."""
    shared = formats.size(needs["job_bytes"] - needs["ranks_bytes"])
    rows = [
        ("ranks", formats.size(needs["ranks_bytes"])),
        ("the job needs", f"{formats.size(needs['job_bytes'])}, with {shared} in shared memory"),
    ]
    if needs["reserve_bytes"] is not None:
        rows.append(("besides the reserve of", formats.size(needs["reserve_bytes"])))
    return rows


def _hours(hours: float | None, estimate: dict[str, Any] | None) -> list[tuple[str, object]]:
    if hours is not None:
        return [("device hours", f"{hours:.2g}, at the speed that jobs like it have had here")]
    if estimate is None:
        return [("device hours", "not known: no speed of a job like it, and none to estimate it from")]
    least, most = estimate["used"]
    assumed = f"{least:.0%} to {most:.0%} of {estimate['peak_flops'] / 1e12:g} TFLOP/s of dense bf16"
    energy = f"{_range(estimate['kwh'])} kWh at the board's {estimate['watts_per_device']} W, an upper bound"
    return [
        ("device hours", f"{_range(estimate['device_hours'])}, estimated, not measured: {assumed}"),
        ("hours", f"{_range(estimate['hours'])}, without loading and publishing"),
        ("energy", energy),
    ]


def _range(ends: list[float]) -> str:
    return " to ".join(f"{end:.2g}" if end < 100 else f"{end:,.0f}" for end in ends)


def _sizes_of(sizes: list[int]) -> str:
    if not sizes:
        return "no number of devices"
    return f"{', '.join(map(str, sizes))} device{'' if sizes == [1] else 's'}"


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value).lower()


def _data(data: dict[str, Any]) -> str:
    found = f"{data['examples']:,} examples, {data['tokens']:,} tokens, the longest {data['longest_example_tokens']:,}"
    return found if data["counted"] else f"assumed: {found}; --file counts yours"


def _sizes(numbers: dict[str, int | None]) -> list[tuple[str, object]]:
    named = ((name.removesuffix("_bytes").replace("_", " "), value) for name, value in numbers.items())
    return [(name, formats.size(value)) for name, value in named if value is not None]
