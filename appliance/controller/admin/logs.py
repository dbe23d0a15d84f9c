"""/admin/v1/logs: the logs of the box's processes on the machine that it is at home on, and their newest lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import NotFound, shown
from appliance.controller.interfaces.principal import ADMIN, needs

_END_BYTES = 256 * 1024
_MOST_FILES = 500
_PACKED = (".gz", ".zst")


def routes(context: ControllerContext, router: APIRouter) -> None:
    """Add the routes to the admin router. Logs name people and what they asked for: administrators alone read them."""

    def folder() -> Path:
        return Path(context.box["data_dir"]) / "logs"

    @router.get("/logs", dependencies=[Depends(needs(ADMIN))])
    def list_logs() -> dict[str, Any]:
        """The logs that may be read, those written last first."""
        found = sorted(_found(folder()), reverse=True)[:_MOST_FILES]
        data = [{"name": name, "bytes": size, "changed_at": changed_s} for changed_s, size, name in found]
        return {"object": "list", "data": data}

    @router.get("/logs/{name:path}", dependencies=[Depends(needs(ADMIN))])
    def show_log(name: str, lines: Annotated[int, Query(ge=1, le=5000)] = 500) -> dict[str, Any]:
        """The last `lines` of a log, 256 KiB at most."""
        # By the names in the list alone: what a client writes is never a path.
        if name not in {one for _, _, one in _found(folder())}:
            raise NotFound(f"No log {shown(name)}; GET /admin/v1/logs lists them.", param="name", code="log_not_found")
        return {"name": name, "lines": _end(folder() / name, lines)}


def _found(folder: Path) -> list[tuple[float, int, str]]:
    """Of each log: when it was written last, its size, its name below the folder."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix not in _PACKED:
            try:
                told = path.stat()
            except FileNotFoundError:
                continue  # turned over meanwhile
            found.append((told.st_mtime, told.st_size, path.relative_to(folder).as_posix()))
    return found


def _end(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _END_BYTES))
            text = file.read(_END_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []  # turned over meanwhile
    found = text.splitlines()
    # The first line is cut.
    return found[1 if size > _END_BYTES and len(found) > 1 else 0 :][-lines:]
