"""`appliance mode`: who the devices belong to, serving or training."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal

import typer

from appliance.cli import formats, output
from appliance.cli.command import EVERY, WATCH, Session, examples, for_box, group
from appliance.cli.errors import BadUsage, CliError, WaitTimedOut

app = group("Modes: who the devices belong to, serving or training.")

WAIT_S = 900.0
_LOOK_EVERY_S = 0.3
_ANSWER_MARGIN_S = 30.0


@app.command(epilog=examples("appliance mode show", "appliance mode show -o json"))
@for_box
def show(session: Session, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """The mode, since when it holds, and how many devices serving keeps in any case."""
    session.follow(lambda: session.client.get("/admin/v1/mode"), _fields, watch, every)


@app.command(
    "set",
    epilog=examples(
        "appliance mode set serve                 every device serves; jobs are suspended and wait",
        "appliance mode set train                 jobs get every device; requests are held meanwhile",
        "appliance mode set split --train 6       six devices for jobs, the others serve",
        "appliance mode set auto                  training takes what serving does not need, and gives it back",
        "appliance mode set train --no-wait       return at once; `appliance mode history` shows how it went",
    ),
)
@for_box
def set_mode(
    session: Session,
    policy: Annotated[Literal["serve", "train", "split", "auto"], typer.Argument(metavar="serve|train|split|auto")],
    train: Annotated[
        str | None, typer.Option("--train", metavar="N|auto", help="With split: devices that training may have.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the devices have moved.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, max=WAIT_S)] = WAIT_S,
) -> None:
    """Move devices between serving and training. No request is dropped and no job loses a step.

    Waiting may be interrupted: the box goes on. Exit code 124 if it takes longer than --timeout.
    """
    body = _wanted(policy, train)
    if not wait:
        answer = session.client.send("PUT", "/admin/v1/mode", body=body)
    else:
        with output.progress(f"mode {body['policy']}") as meter:
            answer = _put_and_watch(session, body, timeout, meter)
    session.show(answer, lambda done: output.stack(_fields(done), _outcome(done.get("handover"))))


@app.command(
    epilog=examples("appliance mode history", "appliance mode history --limit 3", "appliance mode history -o json")
)
@for_box
def history(
    session: Session,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="So many hand-overs, the newest first.")] = 10,
) -> None:
    """The hand-overs of devices, step by step with their times."""
    session.show(session.client.get("/admin/v1/handovers", limit=limit), _history)


def handover_steps(handover: dict[str, Any]) -> Any:
    """A hand-over as a title and a table of its steps."""
    title = f"hand-over {handover['id']}: {handover['reason']} ({handover['state']}"
    if handover.get("ended_s") is not None and handover.get("started_s") is not None:
        title += f", {formats.duration(handover['ended_s'] - handover['started_s'])}"
    rows = [
        (step["verb"], formats.or_dash(step["target"]), step["state"], _seconds(step), _detail(step.get("detail")))
        for step in handover["steps"]
    ]
    steps = output.table(("  STEP", "TARGET", "STATE", ">TIME", "DETAIL"), _indented(rows), empty="  no steps")
    return output.above(f"{title})", steps)


def _wanted(policy: str, train: str | None) -> dict[str, Any]:
    if train is None:
        if policy == "split":
            raise BadUsage("the mode split needs --train N: how many devices training may have")
        return {"policy": policy}
    if policy not in ("split", "auto"):
        raise BadUsage(f"--train belongs to the mode split, not to {policy}")
    if train == "auto":
        # A split whose line the box itself draws is what it calls auto.
        return {"policy": "auto"}
    if policy == "auto":
        raise BadUsage("the mode auto decides by itself how many devices train; --train N belongs to the mode split")
    if not (train.isascii() and train.isdigit()):
        raise BadUsage(f"--train is {train!r}; expected a number of devices, or auto")
    return {"policy": "split", "train_devices": int(train)}


def _put_and_watch(session: Session, body: dict[str, Any], timeout_s: float, meter: output.Meter) -> Any:
    """The box answers when the devices have moved; until then its status tells what it is doing."""
    result: dict[str, Any] = {}

    def put() -> None:
        try:
            result["answer"] = session.client.send(
                "PUT", "/admin/v1/mode", body=body, query={"wait": True, "timeout_s": timeout_s},
                timeout_s=timeout_s + _ANSWER_MARGIN_S,
            )  # fmt: skip
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
            raise WaitTimedOut(f"the mode is set, but the devices have not moved within {timeout_s:.0f} s; the box "
                               "goes on, `appliance mode history` shows how far it is")  # fmt: skip
        raise error
    return result["answer"]


def _doing(session: Session) -> str | None:
    try:
        handover = session.client.get("/admin/v1/status")["handover"]
    except CliError:
        return None  # only an ornament: the request that waits tells what is wrong
    running = [step for step in (handover or {}).get("steps", ()) if step["state"] in ("running", "started")]
    return " · ".join(f"{step['verb'].replace('_', ' ')} {formats.or_dash(step['target'])}" for step in running) or None


def _fields(mode: dict[str, Any]) -> Any:
    return output.fields([
        ("mode", mode["policy"]),
        ("train devices", "as many as serving does not need" if mode["train_devices"] is None and
         mode["policy"] == "auto" else formats.or_dash(mode["train_devices"])),
        ("since", formats.moment(mode["since_s"] or None)),
        ("serving floor", mode["serving_floor"]),
    ])  # fmt: skip


def _outcome(handover: dict[str, Any] | None) -> Any:
    return handover_steps(handover) if handover else None


def _history(answer: dict[str, Any]) -> Any:
    if not answer["data"]:
        return "no hand-overs yet"
    return output.stack(*(handover_steps(handover) for handover in answer["data"]))


def _indented(rows: list[tuple]) -> list[tuple]:
    return [(f"  {first}", *rest) for first, *rest in rows]


def _seconds(step: dict[str, Any]) -> str:
    if step.get("started_s") is None or step.get("ended_s") is None:
        return "-"
    return formats.duration(step["ended_s"] - step["started_s"])


def _detail(detail: dict[str, Any] | None) -> str:
    """Plain values only: what is nested is for `-o json`."""
    shown = []
    for name, value in (detail or {}).items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            continue
        if name.endswith("_bytes") or name == "bytes":
            text = formats.size(value)
        elif name.endswith("_s") or name == "seconds":
            text = formats.duration(value)
        else:
            text = str(value)
        shown.append(f"{name.removesuffix('_bytes').removesuffix('_s')} {text}")
    return ", ".join(shown) or "-"
