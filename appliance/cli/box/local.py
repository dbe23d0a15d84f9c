"""What commands for the box of this machine share: its configuration, and processes that do the work for them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli.errors import BadUsage

if TYPE_CHECKING:
    from appliance.config import BoxConfig

CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="APPLIANCE_CONFIG",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Default: appliance.toml in the data directory, if there is one.",
    ),
]


def resolved(config: Path | None, **box: Any) -> BoxConfig:
    """The configuration, with these [box] settings from the command line. Raises BadUsage."""
    _look_for_all()
    # Fenced: pydantic and the configuration would double the time of `--help`.
    from appliance.config import ConfigError, load_config

    try:
        return load_config(config, box)
    except ConfigError as error:
        raise BadUsage(str(error)) from error


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours in a process of its own: importing it would take longer than all else."""
    _look_for_all()
    # -P: a folder here that is called `train` or `serve` must not hide ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def _look_for_all() -> None:
    """Raises BadUsage where the command alone is installed (the extra `client`)."""
    if importlib.util.find_spec("ray") is None:
        raise BadUsage(
            "this command is for a box on this machine, and here is the client alone (appliance[client]); --url names "
            "a box elsewhere, for the commands that take it"
        )
