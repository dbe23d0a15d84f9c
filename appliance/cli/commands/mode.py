"""`appliance mode set|plan|history` and `mode schedule add`: who the devices belong to, serving or training."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from appliance.cli import output
from appliance.cli.command import WAIT, Session, command
from appliance.cli.errors import BadUsage
from appliance.cli.options import auto_or, number, opt, picked, seconds
from appliance.cli.resources import draw_handover, draw_mode, limit, segment

WAIT_S = 900.0
_ANSWER_MARGIN_S = 30.0
_HANDOVERS = "id ?began=started_s reason state >time=seconds ?>bytes >steps:total ?asked_by ?error"
_POLICY = opt("policy serve|train|split|auto", choices=("serve", "train", "split", "auto"))
_DEVICES = (
    opt("--train N|auto", "With split: devices that training may have.", dest="train_devices", type=auto_or(int)),
    opt("--floor N", "Devices that serving keeps. Default: [box] serving_floor.", dest="serving_floor", type=int),
)


def _wanted(args: Namespace) -> dict[str, Any]:
    """The body of the request. A split whose line the box itself draws is what it calls auto. Raises BadUsage."""
    if args.policy == "split" and args.train_devices is None:
        raise BadUsage("split needs --train N, the devices that training may have, or --train auto")
    if args.policy == "split" and args.train_devices == "auto":
        return {**picked(args, "serving_floor"), "policy": "auto"}
    return picked(args, "policy serving_floor train_devices")


@command(
    "mode set",
    _POLICY,
    *_DEVICES,
    *WAIT,
    opt("--timeout SECONDS", "Then exit code 124.", type=number(float, 1, WAIT_S), default=WAIT_S),
)
def set_mode(session: Session, args: Namespace) -> None:
    """Move devices between serving and training. No request is dropped and no job loses a step.

    It holds until it is set again, or until a window of `mode schedule` begins or ends, and survives restarts.
    Waiting may be interrupted: the box goes on.

    Examples:
      appliance mode set serve                 every device serves; jobs are suspended and wait
      appliance mode set train --floor 1       jobs get every device but one, which keeps serving
      appliance mode set split --train 6       six devices for jobs, the others serve
      appliance mode set auto                  training takes what serving does not need, and gives it back
    """
    body, query = _wanted(args), {"wait": True, "timeout_s": args.timeout} if args.wait else None
    with output.progress(f"mode {body['policy']}: the devices move"):
        answer = session.client.send(
            "PUT", "/admin/v1/mode", body=body, query=query, timeout_s=args.timeout + _ANSWER_MARGIN_S
        )
    session.show(answer, draw_mode)


@command(
    "mode plan",
    replace(_POLICY, settings={**_POLICY.settings, "nargs": "?"}),
    *_DEVICES,
)
def plan(session: Session, args: Namespace) -> None:
    """Show what a mode would do now and why, in one sentence per step. Does nothing.

    Examples:
      appliance mode plan                              what the scheduler would do right now, in the mode that holds
      appliance mode plan train --floor 1              what `mode set train --floor 1` would do
    """
    body = None if args.policy is None else _wanted(args)
    answer = session.client.post("/admin/v1/mode/plan", body)
    session.show(answer, lambda found: output.view({**found, "steps": found["steps"] or ["Nothing would move."]}))


@command("mode history", opt("id ID", "Only this one.", nargs="?"), limit(10))
def history(session: Session, args: Namespace) -> None:
    """Show hand-overs of devices: bytes, seconds, who asked; of one its steps, each with its details.

    Examples:
      appliance mode history --limit 3
      appliance mode history 42                  one of them, with its details
    """
    if args.id is not None:
        session.show(session.client.get(f"/admin/v1/handovers/{segment(args.id)}"), draw_handover)
    else:
        answer = session.client.get("/admin/v1/handovers", limit=args.limit)
        session.show(answer, lambda found: output.listing(_HANDOVERS, found["data"], empty="no hand-overs yet"))


@command(
    "mode schedule add",
    opt("cron CRON", "When it begins: five fields in quotes."),
    _POLICY,
    *_DEVICES,
    opt("--until CRON", "When it ends."),
    opt("--for TIME", "Its length, such as 9h, 90m or 1h30m.", dest="for_s", type=seconds),
    opt("--tz ZONE", "IANA name of the time zone.", default="UTC"),
)
def add(session: Session, args: Namespace) -> None:
    """Put a mode in force whenever the clock says so.

    The five fields are minute hour day-of-month month day-of-week, in the time zone --tz. A mode set by hand
    holds until the next window begins or ends; between windows that end, the mode set by hand holds.

    Examples:
      appliance mode schedule add "0 22 * * *" train --until "0 6 * * *" --tz Europe/Berlin --floor 1
    """
    session.show(session.client.post("/admin/v1/mode/schedule", picked(args, "cron tz until for_s") | _wanted(args)))
