"""What was spent: tokens by the hour, key, model and version; devices by the time that jobs held them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from appliance.store.database import Database

HOUR_S, DAY_S = 3600, 86400
By = Literal["key", "owner", "model", "version", "hour"]


@dataclass(frozen=True, slots=True)
class Spent:
    """One row of a report. refused: requests that never went to an engine. device_hours: of training, only in reports
    by something that jobs have too."""

    name: str
    requests: int = 0
    errors: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    device_hours: float = 0.0


def add(db: Database, rows: Iterable[Mapping[str, Any]], now_s: float) -> None:
    """Add what the gateways report. A row has key, model, version, requests, errors, prompt_tokens, completion_tokens
    and maybe refused. A refused request may have an empty model: it named none that exists."""
    hour_s = int(now_s // HOUR_S) * HOUR_S
    with db.transaction():
        for row in rows:
            db.execute(
                "INSERT INTO usage (hour_s, key_id, model, version, requests, errors, prompt_tokens,"
                " completion_tokens, refused) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " requests = requests + excluded.requests, errors = errors + excluded.errors,"
                " refused = refused + excluded.refused,"
                " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
                " completion_tokens = completion_tokens + excluded.completion_tokens",
                [
                    hour_s,
                    row["key"],
                    row["model"],
                    row["version"],
                    row["requests"],
                    row["errors"],
                    row["prompt_tokens"],
                    row["completion_tokens"],
                    row.get("refused", 0),
                ],
            )


def last_used(db: Database) -> dict[str, float]:
    """By key that has asked a model: when the last hour began in which it did."""
    newest = "SELECT id, (SELECT max(hour_s) FROM usage WHERE key_id = keys.id) AS hour_s FROM keys"
    return {row["id"]: float(row["hour_s"]) for row in db.execute(newest) if row["hour_s"] is not None}


def tokens_since(db: Database, key_id: str, since_s: float) -> int:
    """Prompt and completion tokens of a key since `since_s`, which begins an hour."""
    spent = "SELECT coalesce(sum(prompt_tokens + completion_tokens), 0) FROM usage WHERE key_id = ? AND hour_s >= ?"
    return int(db.value(spent, [key_id, int(since_s)]))


def devices_held(db: Database, job_id: str, devices: int, now_s: float) -> None:
    """Note that the job holds this many devices from now on. The same number again changes nothing."""
    with db.transaction():
        row = db.execute("SELECT seq, devices FROM device_time WHERE job_id = ? AND to_s IS NULL", [job_id]).fetchone()
        if row is not None and row["devices"] == devices:
            return
        if row is not None:
            db.execute("UPDATE device_time SET to_s = ? WHERE seq = ?", [now_s, row["seq"]])
        if devices:
            db.execute(
                "INSERT INTO device_time (job_id, devices, from_s, key_id, owner, model)"
                " SELECT ?1, ?2, ?3, key_id, owner, model FROM (SELECT 1) LEFT JOIN jobs ON jobs.id = ?1",
                [job_id, devices, now_s],
            )


def device_s(db: Database, job_ids: list[str], now_s: float) -> float:
    """Seconds of devices that these jobs have held, together."""
    found = 0.0
    for job_id in job_ids:
        found += db.value(
            "SELECT coalesce(sum(devices * max(0, coalesce(to_s, ?2) - from_s)), 0) FROM device_time WHERE job_id = ?1",
            [job_id, now_s],
        )
    return found


def close_left_open(db: Database, running: set[str]) -> None:
    """After a restart, note that jobs which do not run held their devices until the last step that they reported."""
    marks = ", ".join("?" * len(running))
    db.execute(
        "UPDATE device_time SET to_s = max(from_s, coalesce((SELECT max(created_s) FROM job_metrics"
        f" WHERE job_metrics.job_id = device_time.job_id), from_s)) WHERE to_s IS NULL AND job_id NOT IN ({marks})",
        sorted(running),
    )


BOX_ITSELF, _NO_MODEL = "the box itself", "(no model)"
_COUNTS = ("requests", "errors", "refused", "prompt_tokens", "completion_tokens")
_GROUPED: dict[By, str] = {
    "key": "key_id",
    "owner": "key_id",
    "model": "model",
    "version": "model, version",
    "hour": "hour_s",
}
# A job's devices count for the key and the owner that made it, and for the model that it tunes.
_JOB_NAME_OF: dict[By, str] = {
    "key": f"coalesce((SELECT name FROM keys WHERE keys.id = device_time.key_id), key_id, '{BOX_ITSELF}')",
    "owner": f"CASE owner WHEN '' THEN '{BOX_ITSELF}' ELSE owner END",
    "model": "model",
}
_MOST_HOURS = 2400


def report(db: Database, by: By, since_s: float, now_s: float, owner: str | None = None) -> list[Spent]:
    """Sums since the hour of `since_s`, the largest first; by hour the newest `_MOST_HOURS`. owner: of this one's keys
    and jobs alone. A year of twenty keys takes seconds: call it on a thread."""
    names, found = _names(db, by), dict[str, dict[str, Any]]()
    counts = ", ".join(f"sum({name}) AS {name}" for name in _COUNTS)
    newest = f" ORDER BY hour_s DESC LIMIT {_MOST_HOURS}" if by == "hour" else ""
    for row in db.execute(
        f"SELECT {_GROUPED[by]}, {counts} FROM usage WHERE hour_s >= ?1"
        " AND (?2 IS NULL OR key_id IN (SELECT id FROM keys WHERE owner = ?2))"
        f" GROUP BY {_GROUPED[by]}{newest}",
        [int(since_s // HOUR_S) * HOUR_S, owner],
    ).fetchall():
        name = names(tuple(row)[: -len(_COUNTS)])
        sums = found.setdefault(name, {"name": name, **dict.fromkeys(_COUNTS, 0)})
        for count in _COUNTS:
            sums[count] += row[count]
    if by in _JOB_NAME_OF:
        for job in db.execute(
            f"SELECT {_JOB_NAME_OF[by]} AS name, sum(devices"
            " * max(0, min(coalesce(to_s, ?1), ?1) - max(from_s, ?2))) / 3600.0 AS device_hours"
            " FROM device_time WHERE coalesce(to_s, ?1) > ?2 AND owner IS NOT NULL AND (?3 IS NULL OR owner = ?3)"
            " GROUP BY 1",
            [now_s, since_s, owner],
        ):
            found.setdefault(job["name"], {"name": job["name"]})["device_hours"] = job["device_hours"]
    rows = [Spent(**row) for row in found.values()]
    return sorted(rows, key=lambda s: (-(s.prompt_tokens + s.completion_tokens), -s.device_hours, s.name))


def _names(db: Database, by: By) -> Callable[[tuple[Any, ...]], str]:
    """How people call what was grouped by."""
    if by == "hour":
        return lambda key: time.strftime("%Y-%m-%dT%H:00Z", time.gmtime(key[0]))
    if by == "model":
        return lambda key: key[0] or _NO_MODEL
    if by == "version":
        return lambda key: f"{key[0]}@{key[1]}" if key[1] else key[0] or _NO_MODEL
    # What is asked on the box itself needs no key.
    told = {"": BOX_ITSELF}
    for row in db.execute("SELECT id, name, owner FROM keys"):
        told[row["id"]] = row["owner"] if by == "owner" else row["name"]
    return lambda key: told.get(key[0], key[0])
