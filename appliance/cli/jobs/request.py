"""Options that commands about jobs share: what is trained (`job submit`, `plan job`), and how it may use the devices
(`job submit`, `job update`)."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any, Literal

import typer

from appliance.cli.errors import BadUsage
from appliance.cli.formats import seconds_of

_SHAPES = "auto or a number"
EPOCHS = Annotated[str | None, typer.Option("--epochs", metavar="N", help=f"{_SHAPES}; passes over the data")]
BATCH_SIZE = Annotated[
    str | None, typer.Option("--batch-size", metavar="N", help=f"{_SHAPES}; sequences per step, over all devices")
]
LEARNING_RATE = Annotated[str | None, typer.Option("--learning-rate-multiplier", metavar="X", help=_SHAPES)]
LORA_RANK = Annotated[int | None, typer.Option("--lora-rank", metavar="R", help="Train adapters of this rank.")]
FULL = Annotated[
    bool | None, typer.Option("--full/--lora", help="Train every weight, or adapters. Default: by the model's size.")
]
ZERO_STAGE = Annotated[int | None, typer.Option("--zero-stage", min=0, max=3, help="DeepSpeed ZeRO.")]
TENSOR_PARALLEL = Annotated[
    int | None, typer.Option("--tensor-parallel", metavar="N", min=1, help="Devices that share one copy of the model.")
]
MAX_LENGTH = Annotated[int | None, typer.Option("--max-length", metavar="TOKENS")]
PUBLISH = Annotated[
    Literal["end", "epoch"] | None,
    typer.Option(
        "--publish", help="epoch: a version of the model after each epoch, which the next one replaces. Default: end."
    ),
]
SET = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other hyperparameter; repeatable.")
]

MIN_DEVICES = Annotated[int | None, typer.Option("--min-devices", metavar="N", min=1, help="Never on fewer.")]
MAX_DEVICES = Annotated[int | None, typer.Option("--max-devices", metavar="N", min=1, help="Never on more.")]
SIZES = Annotated[
    str | None, typer.Option("--sizes", metavar="N,N,…", help="Only on these numbers of devices, e.g. 2,4,8.")
]
PRIORITY = Annotated[int | None, typer.Option("--priority", help="Higher goes first; default 0.")]
DEADLINE = Annotated[
    str | None,
    typer.Option("--deadline", metavar="TIME", help="8h from now, or 2026-11-22T06:00; it goes first when it presses."),
]
PREEMPTIBLE = Annotated[
    bool | None,
    typer.Option("--preemptible/--no-preemptible", help="May it be suspended for others? Default: yes."),
]


def auto_or_number(option: str, text: str | None) -> int | float | str | None:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise BadUsage(f"{option} is {text!r}; expected auto or a number") from None


def device_fields(
    sizes: str | None, priority: int | None, deadline: str | None, preemptible: bool | None
) -> dict[str, Any]:
    """Fields of the request; None where nothing was given. Raises BadUsage."""
    return {
        "allowed_sizes": None if sizes is None else _sizes(sizes),
        "priority": priority,
        "deadline_s": None if deadline is None else moment_of("--deadline", deadline),
        "preemptible": preemptible,
    }


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise BadUsage(f"--sizes is {text!r}; expected numbers of devices with commas between, e.g. 2,4,8")
    return [int(part) for part in parts]


def moment_of(option: str, text: str) -> float:
    """Seconds since 1970 of a time from now (8h) or of a date with a time, local unless it says otherwise."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    seconds = seconds_of(text)
    if seconds is None:
        raise BadUsage(f"{option} is {text!r}; expected a time from now such as 8h, or a date such as 2026-11-22T06:00")
    return time.time() + seconds
