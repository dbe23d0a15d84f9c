"""`appliance mode set|history`: who the devices belong to, serving or training."""

from __future__ import annotations

from argparse import Namespace

from appliance.cli import output
from appliance.cli.command import WAIT, Session, command
from appliance.cli.options import number, opt
from appliance.cli.resources import MODE, POLICY, draw_handover, draw_mode, limit, mode_fields, segment

WAIT_S = 900.0
_ANSWER_MARGIN_S = 30.0
_HANDOVERS = "id ?began=started_s reason state >time=seconds ?>bytes >steps:total ?asked_by ?error"


@command(
    "mode set",
    POLICY,
    *MODE,
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
    body, query = mode_fields(args, (POLICY, *MODE)), {"wait": True, "timeout_s": args.timeout} if args.wait else None
    with output.progress(f"mode {args.policy}: the devices move"):
        answer = session.client.send(
            "PUT", "/admin/v1/mode", body=body, query=query, timeout_s=args.timeout + _ANSWER_MARGIN_S
        )
    session.show(answer, draw_mode)


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
