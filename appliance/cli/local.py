"""What commands for the box of this machine share: its configuration, and work of ours in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli.command import opt
from appliance.cli.errors import BadUsage, CommandFailed

if TYPE_CHECKING:
    from appliance.config import BoxConfig


DEVICES = opt("--devices auto|N", "auto: every GPU, else 8 CPU devices; N: N CPU devices.")


def devices_of(text: str | None) -> str | int | None:
    """Of `DEVICES`. Raises BadUsage."""
    if text is None or text == "auto":
        return text
    if not (text.isascii() and text.isdigit()):
        raise BadUsage(f"--devices is {text!r}; expected auto or a number of logical CPU devices")
    return int(text)


def resolved(config: Path | None, **box: Any) -> BoxConfig:
    """The configuration, with these [box] settings from the command line. Raises BadUsage."""
    look_for_all()
    from appliance.config import ConfigError, load_config  # late: pydantic doubles the time of `--help`

    try:
        return load_config(config, box)
    except ConfigError as error:
        raise BadUsage(str(error)) from error


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours in a process of its own: importing it would take longer than all else."""
    look_for_all()
    # -P: a folder here that is called `train` or `serve` must not hide ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def said_by(module: str, *arguments: str, given: str = "") -> str:
    """What a process of ours prints. given: on its stdin. Raises CommandFailed with the last line of its errors."""
    done = subprocess.run(python(module, *arguments), input=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandFailed(why_it_failed(done.stderr, done.returncode))
    return done.stdout


def why_it_failed(errors: str, status: int) -> str:
    from runtime.processes.ended import how_it_ended

    return (errors.strip() or f"its process {how_it_ended(status)}").splitlines()[-1]


def look_for_all() -> None:
    """Raises BadUsage where the command alone is installed (the extra `client`)."""
    if importlib.util.find_spec("ray") is None:
        raise BadUsage(
            "this command is for a box on this machine, and here is the client alone (appliance[client]); --url names "
            "a box elsewhere, for the commands that take it"
        )
