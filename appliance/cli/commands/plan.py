"""`appliance plan`: whether a model or a job would fit the box, before anything is started."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from appliance.cli import output
from appliance.cli.command import WORK_TIMEOUT_S, Session, command
from appliance.cli.commands.data import file_path, uploaded_id
from appliance.cli.commands.jobs import hyperparameters, options
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.options import number, opt, picked

_PATH = "/admin/v1/plan"
_CONFIG = (
    opt(
        "--config DIR|FILE|NAME",
        "In place of a model of the box: a config.json, its directory, or a published model's name or size (70b).",
    ),
    opt("--accelerator NAME", "With --config: h100, a100, 48gb …"),
)


@command(
    "plan serve",
    opt("model MODEL", "A model of the box.", nargs="?", names="model"),
    opt("--replicas N", "Engines of it.", type=number(int, 1), default=1),
    opt("--tensor-parallel N", "Devices that share one replica.", type=number(int, 1), default=1),
    *_CONFIG,
    opt("--devices N", "With --config: of the machine. Default: 8.", type=number(int, 1)),
    without_box=lambda args: args.config is not None,
)
def serve(session: Session, args: Namespace) -> None:
    """Show the memory that engines would take: weights and KV cache per device, versions in shared memory.

    It exits with 1 when it does not fit, so a script can ask before it submits.

    Examples:
      appliance plan serve llama-8b --replicas 4
      appliance plan serve llama-70b --tensor-parallel 4 -o json
      appliance plan serve --config llama-3.3-70b --tensor-parallel 2 --accelerator h100      needs no box
    """
    engines = picked(args, "replicas tensor_parallel")
    if _of_box(args):
        _show(session, session.client.post(_PATH, {"serve": engines | {"model": args.model}}))
    else:
        _show(session, _imagined(args, "serve_imagined", **engines))


@command(
    "plan job",
    opt("--model MODEL", "The model to begin from.", names="model"),
    opt("--file PATH|FILE_ID", "Training data, whose tokens are counted; kept only if lines are bad."),
    *_CONFIG,
    *options(),
    opt("--devices N", "Use at most N. Default: all of the box.", type=number(int, 1)),
    opt("--examples N", "Without --file: N of 200 tokens. Default: 1000.", type=number(int, 1)),
    without_box=lambda args: args.config is not None,
)
def job(session: Session, args: Namespace) -> None:
    """Show what a fine-tuning job would choose, and its memory per device. The job that follows chooses the same.

    It exits with 1 when it does not fit, so a script can ask before it submits.

    Examples:
      appliance plan job --model llama-8b --file train.jsonl           what the job would choose, its tokens counted
      appliance plan job --model llama-8b --full --zero-stage 3 --devices 4
      appliance plan job --config llama-3.3-70b --devices 8 --accelerator h100 --full      needs no box
    """
    if not _of_box(args):
        if args.file is not None:
            raise BadUsage("--file needs the model's tokenizer, so a model of the box (--model); give --examples N")
        wanted = picked(args, "examples method")
        _show(session, _imagined(args, "plan_imagined", **wanted, given=hyperparameters(args)))
        return
    if args.file is not None and args.examples is not None:
        raise BadUsage("--file has its examples; --examples is for a plan without one")
    body = picked(args, "model method devices examples") | {"hyperparameters": hyperparameters(args)}
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


def _of_box(args: Namespace) -> bool:
    """Whether it is a model of the box, else one of --config. Raises BadUsage."""
    if (args.model is None) == (args.config is None):
        raise BadUsage("give either a model of the box, or --config (any other)")
    if args.model is not None and args.accelerator is not None:
        raise BadUsage("--accelerator goes with --config; the devices of the box are known")
    return args.model is not None


def _imagined(args: Namespace, plan: str, **wanted: Any) -> dict[str, Any]:
    """A plan for a model and devices that no box has. Raises BadUsage."""
    import appliance.controller.jobs.planned as planned  # late: it doubles the time of every other command's `--help`

    if args.accelerator is None:
        known = ", ".join(planned.ACCELERATORS)
        raise BadUsage(f"--config needs --accelerator: one of {known}, or the memory of each, such as 48gb")
    try:
        return getattr(planned, plan)(args.config, devices=args.devices or 8, accelerator=args.accelerator, **wanted)
    except planned.BadShape as error:
        raise BadUsage(str(error)) from error


def _show(session: Session, plan: dict[str, Any]) -> None:
    session.show(plan)
    if not plan["fits"]:
        raise CommandFailed("it does not fit")
