"""Work of ours that a command has done in a process of its own."""

from __future__ import annotations

import importlib.util
import sys

from appliance.cli.errors import BadUsage


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours in a process of its own: importing it would take longer than all else."""
    look_for_all()
    # -P: a folder here that is called `train` or `serve` must not hide ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def look_for_all() -> None:
    """Raises BadUsage where the command alone is installed (the extra `client`)."""
    if importlib.util.find_spec("ray") is None:
        raise BadUsage(
            "this command is for a box on this machine, and here is the client alone (appliance[client]); --url names "
            "a box elsewhere, for the commands that take it"
        )
