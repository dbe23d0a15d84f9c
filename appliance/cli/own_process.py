"""Work of ours that a command has done in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from appliance.cli.errors import BadUsage, CommandFailed


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
    from runtime.processes.ended import how_it_ended  # fenced, for the time of `--help`

    return (errors.strip() or f"its process {how_it_ended(status)}").splitlines()[-1]


def look_for_all() -> None:
    """Raises BadUsage where the command alone is installed (the extra `client`)."""
    if importlib.util.find_spec("ray") is None:
        raise BadUsage(
            "this command is for a box on this machine, and here is the client alone (appliance[client]); --url names "
            "a box elsewhere, for the commands that take it"
        )
