"""What commands for the box of this machine share: its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli.errors import BadUsage
from appliance.cli.own_process import look_for_all

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
    look_for_all()
    # Fenced: pydantic and the configuration would double the time of `--help`.
    from appliance.config import ConfigError, load_config

    try:
        return load_config(config, box)
    except ConfigError as error:
        raise BadUsage(str(error)) from error
