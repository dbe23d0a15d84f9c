"""`appliance mode`: who the devices belong to, serving or training."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import EVERY, WATCH, Session, box_command, group
from appliance.cli.errors import CliError, WaitTimedOut
from appliance.cli.mode.history import app as history
from appliance.cli.mode.history import handover_steps
from appliance.cli.mode.plan import app as plan
from appliance.cli.mode.request import FLOOR, TRAIN, PolicyKind, wanted
from appliance.cli.mode.schedule import app as schedule
from appliance.cli.mode.schedule import described

app = group("Modes: who the devices belong to, serving or training.")
app.add_typer(schedule, name="schedule")
app.registered_commands += [*history.registered_commands, *plan.registered_commands]

WAIT_S = 900.0
_LOOK_EVERY_S = 0.3
_ANSWER_MARGIN_S = 30.0


@box_command(app, "appliance mode show", "appliance mode show -o json")
def show(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """Show the mode, since when it holds, and how many devices serving always keeps."""
    session.follow(lambda: session.client.get("/admin/v1/mode"), _shown, watch, every)


@box_command(
    app,
    "appliance mode set serve                 every device serves; jobs are suspended and wait",
    "appliance mode set train                 jobs get every device; requests are held meanwhile",
    "appliance mode set split --train 6       six devices for jobs, the others serve",
    "appliance mode set auto                  training takes what serving does not need, and gives it back",
    "appliance mode set train --floor 1       jobs get every device but one, which keeps serving",
    "appliance mode set train --no-wait       return at once; `appliance mode history` shows how it went",
    name="set",
)
def set_mode(
    session: Session,
    policy: Annotated[PolicyKind, typer.Argument(metavar="serve|train|split|auto")],
    train: TRAIN = None,
    floor: FLOOR = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the devices have moved.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, max=WAIT_S)] = WAIT_S,
) -> None:
    """Move devices between serving and training. No request is dropped and no job loses a step.

    It holds until it is set again, or until a window of `mode schedule` begins or ends, and survives restarts.

    Waiting may be interrupted: the box goes on. Exit code 124 if it takes longer than --timeout.
    """
    body = wanted(policy, train, floor)
    if not wait:
        answer = session.client.send("PUT", "/admin/v1/mode", body=body)
    else:
        with output.progress(f"mode {body['policy']}") as meter:
            answer = _put_and_watch(session, body, timeout, meter)
    session.show(answer, _reached)


def _put_and_watch(session: Session, body: dict[str, Any], timeout_s: float, meter: output.Meter) -> Any:
    """The box answers when the devices have moved; meanwhile its status says what it is doing."""
    result: dict[str, Any] = {}

    def put() -> None:
        try:
            query = {"wait": True, "timeout_s": timeout_s}
            result["answer"] = session.client.send(
                "PUT", "/admin/v1/mode", body=body, query=query, timeout_s=timeout_s + _ANSWER_MARGIN_S
            )
        except CliError as error:
            result["error"] = error

    asking = threading.Thread(target=put, daemon=True)
    asking.start()
    asking.join(_LOOK_EVERY_S)
    while asking.is_alive():
        meter.update(_doing(session) or f"mode {body['policy']}")
        asking.join(_LOOK_EVERY_S)
    if error := result.get("error"):
        if isinstance(error, WaitTimedOut):
            raise WaitTimedOut(
                f"the mode is set, but the devices have not moved within {timeout_s:.0f} s; the box goes on, "
                "`appliance mode history` shows how far it is"
            )
        raise error
    return result["answer"]


def _doing(session: Session) -> str | None:
    try:
        handover = session.client.get("/admin/v1/status")["handover"]
    except CliError:
        return None  # this is only an ornament: the request that waits says what is wrong
    running = [step for step in (handover or {}).get("steps", ()) if step["state"] in ("running", "started")]
    return " · ".join(f"{step['verb'].replace('_', ' ')} {formats.or_dash(step['target'])}" for step in running) or None


def _reached(mode: dict[str, Any]) -> Any:
    return output.stack(_shown(mode), handover_steps(mode["handover"]) if mode["handover"] else None)


def _shown(mode: dict[str, Any]) -> Any:
    return output.stack(_fields(mode), output.notes(mode.get("notes") or ()))


def _fields(mode: dict[str, Any]) -> Any:
    bounds, floor, train = mode["bounds"], mode["serving_floor"], formats.or_dash(mode["train_devices"])
    if mode["train_devices"] is None and mode["policy"] == "auto":
        train = "as many as serving does not need"
    until = "changed"
    if mode["until_s"] is not None:
        until = f"{formats.moment(mode['until_s'])}, when a window of the schedule begins or ends"
    back, grows = formats.duration(bounds["give_back_after_s"]), formats.duration(bounds["job_dwell_s"])
    return output.fields(
        ("mode", mode["policy"]),
        ("train devices", train),
        ("serving floor", f"{floor} device{'s' * (floor != 1)}; what lies idle above it is lent"),
        ("since", formats.moment(mode["since_s"] or None)),
        ("set by", _set_by(mode)),
        ("until", until),
        ("dwell", f"serving gives back after {back} of lower demand, a running job grows after {grows}"),
        ("hand-overs", f"at most {bounds['handovers_per_hour']:.0f} per hour by the traffic of one model"),
    )


def _set_by(mode: dict[str, Any]) -> str:
    if mode["window"]:
        return f"window {mode['window']['id']}: {described(mode['window'])}"
    hand = mode["by_hand"]["by"] or "nobody yet"
    instead = mode["overridden"]
    return f"hand ({hand})" + (f", instead of window {instead['id']}: {described(instead)}" if instead else "")
