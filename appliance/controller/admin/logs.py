"""/admin/v1/logs: the logs of the box's processes on the machine that it is at home on, and their newest lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query

from appliance.controller.context.context import ControllerContext
from appliance.controller.http.routers import needs
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import ADMIN
from runtime.log_files import LogFile, end_of, logs_in

_END_BYTES = 256 * 1024
_MOST_FILES = 500


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router. Logs name people and what they asked for: administrators alone read them."""

    def folder() -> Path:
        return Path(context.box["data_dir"]) / "logs"

    @router.get("/logs")
    @needs(ADMIN)
    def list_logs() -> dict[str, Any]:
        """The logs that may be read, those written last first."""
        found = _readable(folder())[:_MOST_FILES]
        data = [{"name": one.name, "bytes": one.size, "changed_at": one.changed_s} for one in found]
        return {"object": "list", "data": data}

    @router.get("/logs/{name:path}")
    @needs(ADMIN)
    def show_log(name: str, lines: Annotated[int, Query(ge=1, le=5000)] = 500) -> dict[str, Any]:
        """The last `lines` of a log, 256 KiB at most."""
        # Only names in the list are opened: what a client writes is never a path.
        if name not in {one.name for one in _readable(folder())}:
            raise NotFound(f"No log {shown(name)}; GET /admin/v1/logs lists them.", param="name", code="log_not_found")
        return {"name": name, "lines": _end(folder() / name, lines)}


def _readable(folder: Path) -> list[LogFile]:
    return [one for one in logs_in(folder) if not one.is_packed]


def _end(path: Path, lines: int) -> list[str]:
    try:
        text, before = end_of(path, _END_BYTES)
    except FileNotFoundError:
        return []  # turned over meanwhile
    found = text.splitlines()
    # The first line is cut.
    return found[1 if before and len(found) > 1 else 0 :][-lines:]
