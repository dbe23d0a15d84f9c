"""Usage: tokens by hour, key, model and version, and the time for which jobs held devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from appliance.store.database import Database

HOUR_S, DAY_S = 3600, 86400
By = Literal["key", "owner", "model", "version", "hour"]
_COUNTS = ("requests", "errors", "refused", "prompt_tokens", "completion_tokens")


def add(db: Database, rows: Iterable[Mapping[str, Any]], now_s: float) -> None:
    """Add usage that the gateways report. A row has key, model, version, requests, errors, prompt_tokens,
    completion_tokens and maybe refused. The model is empty if a refused request named an unknown model."""
    hour_s = int(now_s // HOUR_S) * HOUR_S
    sums = ", ".join(f"{count} = {count} + excluded.{count}" for count in _COUNTS)
    counted = f"INSERT INTO usage (hour_s, key_id, model, version, {', '.join(_COUNTS)}) VALUES ({', '.join('?' * 9)})"
    with db.transaction():
        for row in rows:
            values = [hour_s, row["key"], row["model"], row["version"], *(row.get(name, 0) for name in _COUNTS)]
            db.execute(f"{counted} ON CONFLICT DO UPDATE SET {sums}", values)


def last_used(db: Database) -> dict[str, float]:
    """Return {key id: beginning of the last hour with a request to a model}."""
    newest = "SELECT id, (SELECT max(hour_s) FROM usage WHERE key_id = keys.id) AS hour_s FROM keys"
    return {row["id"]: float(row["hour_s"]) for row in db.execute(newest) if row["hour_s"] is not None}


def tokens_since(db: Database, key_id: str, since_s: float) -> int:
    """Return the number of a key's prompt and completion tokens since `since_s`, the beginning of an hour."""
    spent = "SELECT coalesce(sum(prompt_tokens + completion_tokens), 0) FROM usage WHERE key_id = ? AND hour_s >= ?"
    return int(db.value(spent, [key_id, int(since_s)]))


def devices_held(db: Database, job_id: str, devices: int, now_s: float) -> None:
    """Record that the job holds this many devices from now on. An unchanged number changes nothing."""
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


def device_s(db: Database, job_id: str, now_s: float) -> float:
    """Return the device-seconds that this job has held so far."""
    held = "SELECT coalesce(sum(devices * max(0, coalesce(to_s, ?2) - from_s)), 0) FROM device_time WHERE job_id = ?1"
    return float(db.value(held, [job_id, now_s]))


def close_left_open(db: Database, running: set[str]) -> None:
    """After a restart, record that jobs not in `running` held their devices until their last reported step."""
    marks = ", ".join("?" * len(running))
    db.execute(
        "UPDATE device_time SET to_s = max(from_s, coalesce((SELECT max(created_s) FROM job_metrics"
        f" WHERE job_metrics.job_id = device_time.job_id), from_s)) WHERE to_s IS NULL AND job_id NOT IN ({marks})",
        sorted(running),
    )


BOX_ITSELF, _NO_MODEL = "the box itself", "(no model)"
_MOST_HOURS = 2400
_KEY = f"coalesce((SELECT name FROM keys WHERE keys.id = key_id), nullif(key_id, ''), '{BOX_ITSELF}')"
_MODEL = f"coalesce(nullif(model, ''), '{_NO_MODEL}')"
# SQL of the name shown for each group of requests. Requests from the box itself have no key.
_NAMES: dict[By, str] = {
    "key": _KEY,
    "owner": f"coalesce((SELECT owner FROM keys WHERE keys.id = key_id), nullif(key_id, ''), '{BOX_ITSELF}')",
    "model": _MODEL,
    "version": f"iif(version = '', {_MODEL}, model || '@' || version)",
    "hour": "strftime('%Y-%m-%dT%H:00Z', hour_s, 'unixepoch')",
}
# A job's devices count for the key and owner that made the job, and for its base model.
_JOB_NAMES: dict[By, str] = {"key": _KEY, "owner": f"coalesce(nullif(owner, ''), '{BOX_ITSELF}')", "model": "model"}


def report(db: Database, by: By, since_s: float, now_s: float, owner: str | None = None) -> list[dict[str, Any]]:
    """Return rows of name, requests, errors, refused (before any engine), prompt_tokens, completion_tokens and
    device_hours (of training; 0 by hour and version), largest first. By hour: the newest `_MOST_HOURS` rows.

    since_s: the hour around it counts in full. owner: only this owner's keys and jobs. Call it on a thread: a year of
    twenty keys takes seconds.
    """
    asked = (
        f"SELECT {_NAMES[by]} AS name, {', '.join(_COUNTS)}, 0.0 AS device_hours FROM usage"
        " WHERE hour_s >= ?1 AND (?2 IS NULL OR key_id IN (SELECT id FROM keys WHERE owner = ?2))"
    )
    held = (
        f"SELECT {_JOB_NAMES.get(by, 'NULL')}, 0, 0, 0, 0, 0,"
        " devices * max(0, min(coalesce(to_s, ?3), ?3) - max(from_s, ?4)) / 3600.0 FROM device_time"
        f" WHERE {by in _JOB_NAMES} AND coalesce(to_s, ?3) > ?4 AND owner IS NOT NULL AND (?2 IS NULL OR owner = ?2)"
    )
    sums = ", ".join(f"sum({count}) AS {count}" for count in (*_COUNTS, "device_hours"))
    newest = f" ORDER BY name DESC LIMIT {_MOST_HOURS}" if by == "hour" else ""
    rows = db.execute(
        f"SELECT name, {sums} FROM ({asked} UNION ALL {held}) GROUP BY name{newest}",
        [int(since_s // HOUR_S) * HOUR_S, owner, now_s, since_s],
    )
    return sorted(
        map(dict, rows), key=lambda s: (-(s["prompt_tokens"] + s["completion_tokens"]), -s["device_hours"], s["name"])
    )
