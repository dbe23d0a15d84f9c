"""Logs as JSON lines on stderr, with the same keys in every process of the box; reads ends of log files; formats times.

A line has `time` (UTC, ISO 8601), `level`, `process`, `event` (what happened, for people) and `logger`, then the ids
that apply, and `exception` with a traceback. A process that handles one thing sets its ids once; otherwise use
`extra=`:

    log.warning("the engine died", extra={"replica": replica_id, "request_id": request_id})
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_TAIL_BYTES, _TAIL_CHARACTERS, _LINE_CHARACTERS = 16_384, 2000, 500  # one line may hold a traceback or all settings
IDS = tuple("request_id key_id model version replica job_id rank batch_id device node trace_id".split())

# Id of the request in progress: every line logged meanwhile carries it.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")


class JsonLines(logging.Formatter):
    """process: the kind of this process. ids: added to every line."""

    def __init__(self, process: str, ids: dict[str, Any]):
        super().__init__()
        self._process, self._ids = process, ids

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
            "logger": record.name,
            **self._ids,
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= {name: record.__dict__[name] for name in IDS if record.__dict__.get(name) not in (None, "")}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(process: str, level: str = "info", **ids: Any) -> None:
    """Send everything logged through `logging` to stderr: one JSON object per line, or plain text to a terminal.

    level: debug, info, warning or error. ids: added to every line of this process.
    """
    # Not sys.stderr, because vLLM wraps its `write` in the processes that it forks and puts a prefix before each line.
    stream = open(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    handler = logging.StreamHandler(stream)
    people = sys.stderr is not None and sys.stderr.isatty()
    text = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(text if people else JsonLines(process, ids))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request that it sends
    adopt_libraries()


def adopt_libraries() -> None:
    """Make libraries with their own handlers (vLLM, DeepSpeed, Ray) write through ours."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def readable(text: str) -> str:
    """Format the lines of a log as plain text; lines that are not our JSON stay unchanged."""
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            line = "\n".join(filter(None, (f"{record['level']}: {record['event']}", record.get("exception"))))
        lines.append(line)
    return "\n".join(lines)


def tail(path: str | Path, begin: int = 0) -> str:
    """The last 2,000 characters of a log as plain text, empty if there is no log. begin: bytes to skip; a log rotated
    since is read from its beginning."""
    try:
        lines = end_of(Path(path), _TAIL_BYTES, begin)
    except FileNotFoundError:
        return ""
    return "\n".join(line[:_LINE_CHARACTERS] for line in readable("\n".join(lines)).splitlines())[-_TAIL_CHARACTERS:]


def end_of(path: Path, most_bytes: int, begin: int = 0) -> list[str]:
    """The whole lines at the end of a log after its first `begin` bytes. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = begin if begin <= size else 0
        first = file.seek(max(begin, size - most_bytes))
        lines = file.read(most_bytes).decode(errors="replace").strip().splitlines()
    return lines[1 if first > begin and len(lines) > 1 else 0 :]  # the first line is truncated, so it is not JSON


def logs_in(folder: Path) -> list[dict[str, Any]]:
    """Uncompressed logs of a folder, newest first: `name` below the folder, `bytes`, `changed_at` (Unix time)."""
    logs = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.name.endswith((".gz", ".zst")):
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(FileNotFoundError):  # the log was rotated meanwhile
                status = path.stat()
                logs.append({"name": name, "bytes": status.st_size, "changed_at": status.st_mtime})
    return sorted(logs, key=lambda log: log["changed_at"], reverse=True)


def minute(unix_s: float) -> str:
    """Format a Unix time for readers, in UTC on every box: 2026-11-27 20:46 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def stamp(unix_s: float) -> str:
    """Format a Unix time for the name of a file or folder; such names sort by time."""
    return time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime(unix_s))
