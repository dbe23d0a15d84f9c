"""`appliance mode plan`: what a mode would do, and why, without doing it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import output
from appliance.cli.command import Session, box_command, group
from appliance.cli.mode.request import FLOOR, TRAIN, PolicyKind, wanted

app = group("What a mode would do; `appliance mode` takes this command in.")


@box_command(
    app,
    "appliance mode plan --dry-run                    what the scheduler would do right now, in the mode that holds",
    "appliance mode plan --dry-run train --floor 1    what `mode set train --floor 1` would do",
    "appliance mode plan --dry-run split --train 6 -o json",
)
def plan(
    session: Session,
    policy: Annotated[PolicyKind | None, typer.Argument(metavar="[serve|train|split|auto]")] = None,
    train: TRAIN = None,
    floor: FLOOR = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Always on: the command only shows.")] = True,
) -> None:
    """Show what a mode would do now and why, in one sentence per step. Does nothing."""
    body = None if policy is None else wanted(policy, train, floor)
    session.show(session.client.post("/admin/v1/mode/plan", body), _plan)


def _plan(explained: dict[str, Any]) -> Any:
    steps = [f"{number}. {text}" for number, text in enumerate(explained["steps"], 1)]
    waiting = [(f"job {job_id}", text) for job_id, text in sorted(explained["waiting"].items())]
    short = [(f"model {model}", text) for model, text in sorted(explained["notes"].items())]
    standby = [(f"model {model}", text) for model, text in sorted(explained["standby"].items())]
    idle = [(f"model {model}", text) for model, text in sorted(explained.get("idle", {}).items())]
    left = output.fields(*waiting, *short) if waiting or short else None
    split = f" {explained['train_devices']}" if explained["policy"] == "split" else ""
    title = f"mode {explained['policy']}{split}, serving floor {explained['serving_floor']}:"
    return output.stack(
        "\n".join([title, *(steps or ["Nothing would move."])]),
        output.above("Would wait:", left) if left is not None else None,
        output.above("Learned:", output.fields(*standby)) if standby else None,
        output.above("Idle:", output.fields(*idle)) if idle else None,
    )
