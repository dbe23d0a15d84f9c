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


@command(
    "plan serve",
    opt("model MODEL", "A model of the box.", names="model"),
    opt("--replicas N", "Engines of it.", type=number(int, 1), default=1),
    opt("--tensor-parallel N", "Devices that share one replica.", type=number(int, 1), default=1),
)
def serve(session: Session, args: Namespace) -> None:
    """Show the memory that engines would take: weights and KV cache per device, versions in shared memory.

    It exits with 1 when it does not fit, so a script can ask before it submits.

    Examples:
      appliance plan serve llama-8b --replicas 4
      appliance plan serve llama-70b --tensor-parallel 4 -o json
    """
    engines = picked(args, "model replicas tensor_parallel")
    _show(session, session.client.post(_PATH, {"serve": engines}))


@command(
    "plan job",
    opt("--model MODEL", "The model to begin from.", names="model", required=True),
    opt("--file PATH|FILE_ID", "Training data, whose tokens are counted; kept only if lines are bad."),
    *options(),
    opt("--devices N", "Use at most N. Default: all of the box.", type=number(int, 1)),
    opt("--examples N", "Without --file: N of 200 tokens. Default: 1000.", type=number(int, 1)),
)
def job(session: Session, args: Namespace) -> None:
    """Show what a fine-tuning job would choose, and its memory per device. The job that follows chooses the same.

    It exits with 1 when it does not fit, so a script can ask before it submits.

    Examples:
      appliance plan job --model llama-8b --file train.jsonl           what the job would choose, its tokens counted
      appliance plan job --model llama-8b --full --zero-stage 3 --devices 4
    """
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


def _show(session: Session, plan: dict[str, Any]) -> None:
    session.show(plan)
    if not plan["fits"]:
        raise CommandFailed("it does not fit")
