"""`appliance plan`: whether a model or a job would fit the box, before anything is started."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from appliance.cli import output
from appliance.cli.command import WORK_TIMEOUT_S, Session, command, number, opt, picked
from appliance.cli.commands import training
from appliance.cli.commands.data import file_path, uploaded_id
from appliance.cli.errors import BadUsage, CommandFailed

_PATH = "/admin/v1/plan"
_CONFIG = (
    opt(
        "--config DIR|FILE|NAME",
        "In place of a model of the box: a config.json, its directory, or a published model's name or size (70b).",
    ),
    opt("--accelerator NAME", "With --config: h100, a100, 48gb …"),
)


def _without_box(args: Namespace) -> bool:
    return args.config is not None


@command(
    "plan serve",
    opt("model MODEL", "A model of the box.", nargs="?", names="model"),
    opt("--replicas N", "Engines of it.", type=number(int, 1), default=1),
    opt("--tensor-parallel N", "Devices that share one replica.", type=number(int, 1), default=1),
    *_CONFIG,
    opt("--devices N", "With --config: of the machine. Default: 8.", type=number(int, 1)),
    without_box=_without_box,
)
def serve(session: Session, args: Namespace) -> None:
    """Show the memory that engines would take: weights and KV cache per device, versions in shared memory.

    It exits with 1 when it does not fit, so a script can ask before it submits.

    Examples:
      appliance plan serve llama-8b                          one replica on one device
      appliance plan serve llama-8b --replicas 4
      appliance plan serve llama-70b --tensor-parallel 4 -o json
      appliance plan serve --config llama-3.3-70b --tensor-parallel 2 --accelerator h100      needs no box
    """
    if (args.model is None) == (args.config is None):
        raise BadUsage("give either MODEL (one of the box) or --config (any other)")
    engines = picked(args, "replicas tensor_parallel")
    if args.config is not None:
        _show(session, _imagined(args, False, **engines))
        return
    if args.accelerator is not None or args.devices is not None:
        raise BadUsage("--accelerator and --devices go with --config; the devices of the box are known")
    _show(session, session.client.post(_PATH, {"serve": engines | {"model": args.model}}))


@command(
    "plan job",
    opt("--model MODEL", "The model to begin from.", names="model"),
    opt("--file PATH|FILE_ID", "Training data, whose tokens are counted; kept only if lines are bad."),
    *_CONFIG,
    *training.options(),
    opt("--devices N", "Use at most N. Default: all of the box.", type=number(int, 1)),
    opt("--examples N", "Without --file: N of 200 tokens. Default: 1000.", type=number(int, 1)),
    without_box=_without_box,
)
def job(session: Session, args: Namespace) -> None:
    """Show what a fine-tuning job would choose, and its memory per device. The job that follows chooses the same.

    It exits with 1 when it does not fit, so a script can ask before it submits.

    Examples:
      appliance plan job --model llama-8b --file train.jsonl           what the job would choose, its tokens counted
      appliance plan job --model llama-8b --full --zero-stage 3 --devices 4
      appliance plan job --model llama-8b --method dpo --lora-rank 16   rows of two sequences: twice the activations
      appliance plan job --model llama-8b --file file-abc123 --lora-rank 16 --set micro_batch=2
      appliance plan job --config llama-3.3-70b --devices 8 --accelerator h100 --full      needs no box
      appliance plan job --config ./Qwen2.5-7B-Instruct --devices 2 --accelerator 48gb     a directory with config.json
    """
    hyperparameters = training.hyperparameters(args)
    if (args.model is None) == (args.config is None):
        raise BadUsage("give either --model (one of the box) or --config (any other)")
    if args.file is not None and args.examples is not None:
        raise BadUsage("--file has its examples; --examples is for a plan without one")
    if args.config is not None:
        if args.file is not None:
            raise BadUsage("--file needs the model's tokenizer, so a model of the box (--model); give --examples N")
        _show(session, _imagined(args, True, **picked(args, "examples method"), given=hyperparameters))
        return
    if args.accelerator is not None:
        raise BadUsage("--accelerator goes with --config; the devices of the box are known")
    body = picked(args, "model method devices examples") | {"hyperparameters": hyperparameters}
    uploaded: list[str] = []
    if args.file is not None:
        body["training_file"] = uploaded_id(session, "--file", args.file, uploaded)
    try:
        with output.progress(f"the box counts the tokens of {args.file}"):
            plan = session.client.send("POST", _PATH, body={"job": body}, timeout_s=WORK_TIMEOUT_S)
    finally:
        for one in uploaded:
            session.client.delete(file_path(one))
    _show(session, plan)


def _imagined(args: Namespace, of_job: bool, **wanted: Any) -> dict[str, Any]:
    """Raises BadUsage."""
    # Late: it doubles the time of every other command's `--help`.
    from appliance.controller.jobs.planned import ACCELERATORS, BadShape, plan_imagined, serve_imagined

    if args.accelerator is None:
        known = ", ".join(ACCELERATORS)
        raise BadUsage(f"--config needs --accelerator: one of {known}, or the memory of each, such as 48gb")
    plan: Any = plan_imagined if of_job else serve_imagined
    try:
        return plan(args.config, devices=args.devices or 8, accelerator=args.accelerator, **wanted)
    except BadShape as error:
        raise BadUsage(str(error)) from error


def _show(session: Session, plan: dict[str, Any]) -> None:
    session.show(plan, _drawn)
    if not plan["fits"]:
        raise CommandFailed("it does not fit")


def _drawn(plan: dict[str, Any]) -> Any:
    if (estimate := plan.get("estimate")) is None:
        return output.view(plan)
    words = {
        "device_hours": f"{_range(estimate['device_hours'])}, estimated, not measured",
        "hours": f"{_range(estimate['hours'])}, without loading and publishing",
        "energy": f"{_range(estimate['kwh'])} kWh at the board's {estimate['watts_per_device']} W, an upper bound",
    }
    return output.view({**plan, **words, "estimate": None})


def _range(ends: list[float]) -> str:
    return " to ".join(f"{end:.2g}" if end < 100 else f"{end:,.0f}" for end in ends)
