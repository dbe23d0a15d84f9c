"""What `mode set` and `mode plan` ask the box for: a mode, its split and its floor."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from appliance.cli.errors import BadUsage

PolicyKind = Literal["serve", "train", "split", "auto"]
"""The modes, as `scheduler.core.workload` has them: the command line imports nothing of what runs a box."""

TRAIN = Annotated[
    str | None, typer.Option("--train", metavar="N|auto", help="With split: devices that training may have.")
]
FLOOR = Annotated[
    int | None,
    typer.Option("--floor", metavar="N", min=0, help="Devices that serving keeps. Default: [box] serving_floor."),
]


def wanted(policy: str, train: str | None, floor: int | None) -> dict[str, Any]:
    """The body of the request. Raises BadUsage."""
    kept = {} if floor is None else {"serving_floor": floor}
    if train is None:
        if policy == "split":
            raise BadUsage("the mode split needs --train N: how many devices training may have")
        return {"policy": policy, **kept}
    if policy not in ("split", "auto"):
        raise BadUsage(f"--train belongs to the mode split, not to {policy}")
    if train == "auto":
        # A split whose line the box itself draws is what it calls auto.
        return {"policy": "auto", **kept}
    if policy == "auto":
        raise BadUsage("the mode auto decides by itself how many devices train; --train N belongs to the mode split")
    if not (train.isascii() and train.isdigit()):
        raise BadUsage(f"--train is {train!r}; expected a number of devices, or auto")
    return {"policy": "split", "train_devices": int(train), **kept}
