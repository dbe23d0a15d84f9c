"""Names for the shell's completion, asked of the box; none if there is no box."""

from __future__ import annotations

import typer

from appliance.cli.command import open_session
from appliance.cli.errors import CliError

_TIMEOUT_S = 2.0
_MOST = 500
"""The newest, in one page: nobody waits for more of them while typing."""


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, f"/admin/v1/models?limit={_MOST}", "name", incomplete)


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, f"/admin/v1/jobs?limit={_MOST}", "id", incomplete)


def _names(ctx: typer.Context, path: str, key: str, incomplete: str) -> list[str]:
    given = ctx.params
    try:
        session = open_session(ctx, given.get("url"), given.get("api_key"), given.get("data_dir"), "json")
        found = session.client.send("GET", path, timeout_s=_TIMEOUT_S)["data"]
    except CliError:
        return []  # a shell that completes must not print errors over the line being typed
    return [item[key] for item in found if item[key].startswith(incomplete)]
