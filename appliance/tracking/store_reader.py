"""Reads jobs and their events from the box's database: read-only, in short looks, beside the controller."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from appliance.store.readers import reading_uri

EVENTS_AT_ONCE = 500
BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """integrations: as the request has them. params: what was asked for and decided, for people. phase: succeeded,
    failed or cancelled once `finished`. error: why it failed. version: the last one that it published of
    `output_model`."""

    id: str
    name: str
    output_model: str
    phase: str
    started: bool
    finished_s: float | None
    error: str
    version: str | None
    integrations: list[dict[str, Any]]
    params: dict[str, str]

    @property
    def finished(self) -> bool:
        return self.finished_s is not None


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at a step: seq is its place among all events of the box, kind which of a step's two looks it
    is, at_s Unix seconds, values by name (`train/loss`), all of them finite."""

    seq: int
    step: int
    kind: Literal["train", "validation"]
    at_s: float
    values: dict[str, float]


class StoreReader:
    """Each look opens the database again, so that it may be called from any thread and none outlives it. Raises
    sqlite3.Error."""

    def __init__(self, database: Path):
        self._uri = reading_uri(database)

    def newest_job(self) -> int:
        """The number of the last job that was made; 0 without any."""
        with self._open() as db:
            return int(db.execute("SELECT coalesce(max(seq), 0) FROM jobs").fetchone()[0])

    def unfinished(self) -> list[str]:
        with self._open() as db:
            return [row["id"] for row in db.execute("SELECT id FROM jobs WHERE finished_s IS NULL ORDER BY seq")]

    def not_begun(self) -> set[str]:
        """Jobs that still wait for their first device."""
        with self._open() as db:
            return {
                row["id"] for row in db.execute("SELECT id FROM jobs WHERE started_s IS NULL AND finished_s IS NULL")
            }

    def made_since(self, job: int) -> list[str]:
        """Jobs with a number behind this one."""
        with self._open() as db:
            return [row["id"] for row in db.execute("SELECT id FROM jobs WHERE seq > ? ORDER BY seq", [job])]

    def job(self, job_id: str) -> Job | None:
        with self._open() as db:
            row = db.execute("SELECT * FROM jobs WHERE id = ?", [job_id]).fetchone()
            if row is None:
                return None
            version = db.execute(
                "SELECT version FROM checkpoints WHERE job_id = ? ORDER BY seq DESC LIMIT 1", [job_id]
            ).fetchone()
            names = [name for name in ("training_file", "validation_file") if row[name] is not None]
            hashes = {
                f"{name}_sha256": found["sha256"]
                for name in names
                if (found := db.execute("SELECT sha256 FROM files WHERE id = ?", [row[name]]).fetchone()) is not None
            }
        error = json.loads(row["error"]) if row["error"] else None
        return Job(
            id=row["id"],
            name=row["suffix"] or row["id"],
            output_model=row["output_model"],
            phase=row["phase"],
            started=row["started_s"] is not None,
            finished_s=row["finished_s"],
            error=str((error or {}).get("message", "")),
            version=None if version is None else version["version"],
            integrations=json.loads(row["integrations"] or "[]"),
            params={
                **_flat(json.loads(row["resolved"] or "{}")),
                **{name: str(row[name]) for name in ("model", "method", "seed", *names)},
                **hashes,
            },
        )

    def points(self, job_id: str, after: int) -> list[Point]:
        """At most EVENTS_AT_ONCE, in order, of events behind `after`. One for each event of figures, even if it is left
        with none."""
        with self._open() as db:
            rows = db.execute(
                "SELECT seq, data, created_s FROM job_events WHERE job_id = ? AND seq > ? AND type = 'metrics' "
                "ORDER BY seq LIMIT ?",
                [job_id, after, EVENTS_AT_ONCE],
            ).fetchall()
        return [_point(row["seq"], row["created_s"], json.loads(row["data"])) for row in rows]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._uri, uri=True, timeout=BUSY_S)) as db:
            db.row_factory = sqlite3.Row
            yield db


def _point(seq: int, at_s: float, data: dict[str, Any]) -> Point:
    """The names are those of TensorBoard's files, which have a validation of the whole file once."""
    kind: Literal["train", "validation"] = "train" if "train_loss" in data else "validation"
    prefix = "train_" if kind == "train" else "valid_"
    values = {
        f"{kind}/{name.removeprefix(prefix)}": float(value)
        for name, value in data.items()
        if name not in ("step", "total_steps")
        and not name.startswith("full_")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Point(seq, int(data["step"]), kind, at_s, finite)


def _flat(table: dict[str, Any], before: str = "") -> dict[str, str]:
    """{"options": {"beta": 0.1}} is {"options.beta": "0.1"}."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        elif value is not None:
            flat[f"{before}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
