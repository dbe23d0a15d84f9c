"""What was spent: tokens by the hour, key, model and version; devices by the time that jobs held them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from appliance.store.database import Database

HOUR_S = 3600
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


def move(db: Database, from_key: str, to_key: str) -> None:
    """Count what one key spent as another's from now on."""
    columns = {row["name"]: row["pk"] for row in db.execute("PRAGMA table_info(usage)")}
    counts = [name for name, key in columns.items() if not key]
    names = ["hour_s", "key_id", "model", "version", *counts]
    with db.transaction():
        db.execute(
            f"INSERT INTO usage ({', '.join(names)}) SELECT hour_s, ?2, model, version, {', '.join(counts)} FROM usage"
            f" WHERE key_id = ?1 ON CONFLICT DO UPDATE SET {', '.join(f'{c} = {c} + excluded.{c}' for c in counts)}",
            [from_key, to_key],
        )
        db.execute("DELETE FROM usage WHERE key_id = ?", [from_key])


def tokens_since(db: Database, key_id: str, since_s: float) -> int:
    """Prompt and completion tokens of a key since `since_s`, which is on the hour."""
    (total,) = db.execute(
        "SELECT coalesce(sum(prompt_tokens + completion_tokens), 0) FROM usage WHERE key_id = ? AND hour_s >= ?",
        [key_id, int(since_s)],
    ).fetchone()
    return total


def devices_held(db: Database, job_id: str, devices: int, now_s: float) -> None:
    """Note that the job holds so many devices from now on. The same number again changes nothing."""
    with db.transaction():
        row = db.execute("SELECT seq, devices FROM device_time WHERE job_id = ? AND to_s IS NULL", [job_id]).fetchone()
        if row is not None and row["devices"] == devices:
            return
        if row is not None:
            db.execute("UPDATE device_time SET to_s = ? WHERE seq = ?", [now_s, row["seq"]])
        if devices:
            db.execute("INSERT INTO device_time (job_id, devices, from_s) VALUES (?, ?, ?)", [job_id, devices, now_s])


def device_s(db: Database, job_ids: list[str], now_s: float) -> float:
    """Seconds of devices that these jobs have held, together."""
    found = 0.0
    for job_id in job_ids:
        (held,) = db.execute(
            "SELECT coalesce(sum(devices * max(0, coalesce(to_s, ?2) - from_s)), 0) FROM device_time WHERE job_id = ?1",
            [job_id, now_s],
        ).fetchone()
        found += held
    return found


def close_left_open(db: Database, running: set[str]) -> None:
    """After a restart, note that jobs which do not run held their devices until the last step that they reported."""
    marks = ", ".join("?" * len(running))
    db.execute(
        "UPDATE device_time SET to_s = max(from_s, coalesce((SELECT max(created_s) FROM job_metrics"
        f" WHERE job_metrics.job_id = device_time.job_id), from_s)) WHERE to_s IS NULL AND job_id NOT IN ({marks})",
        sorted(running),
    )


# Batches made on the box need no key, and each `appliance chat` there has a new one that the box owns.
_BOX_ITSELF = "CASE usage.key_id WHEN '' THEN 'the box itself' ELSE usage.key_id END"
_NAME_OF: dict[By, str] = {
    "key": "coalesce((SELECT CASE owner WHEN 'the box itself' THEN owner ELSE name END FROM keys"
    f" WHERE keys.id = usage.key_id), {_BOX_ITSELF})",
    "owner": f"coalesce((SELECT owner FROM keys WHERE keys.id = usage.key_id), {_BOX_ITSELF})",
    "model": "CASE usage.model WHEN '' THEN '(no such model)' ELSE usage.model END",
    "version": "CASE usage.version WHEN '' THEN CASE usage.model WHEN '' THEN '(no such model)' ELSE usage.model END"
    " ELSE usage.model || '@' || usage.version END",
    "hour": "strftime('%Y-%m-%dT%H:00Z', usage.hour_s, 'unixepoch')",
}
# A job's devices count for the key and the owner that made it, and for the model that it tunes.
_JOB_NAME_OF: dict[By, str] = {
    "key": "coalesce((SELECT name FROM keys WHERE keys.id = jobs.key_id), jobs.key_id, 'the box itself')",
    "owner": "CASE jobs.owner WHEN '' THEN 'the box itself' ELSE jobs.owner END",
    "model": "jobs.model",
}


def report(db: Database, by: By, since_s: float, now_s: float, owner: str | None = None) -> list[Spent]:
    """Sums since the hour of `since_s`, the largest first. owner: of this owner's keys and jobs alone."""
    found: dict[str, dict[str, Any]] = {}
    for row in db.execute(
        f"SELECT {_NAME_OF[by]} AS name, sum(requests) AS requests, sum(errors) AS errors,"
        " sum(refused) AS refused,"
        " sum(prompt_tokens) AS prompt_tokens, sum(completion_tokens) AS completion_tokens"
        " FROM usage WHERE hour_s >= ?1"
        " AND (?2 IS NULL OR usage.key_id IN (SELECT id FROM keys WHERE keys.owner = ?2)) GROUP BY 1",
        [int(since_s // HOUR_S) * HOUR_S, owner],
    ):
        found[row["name"]] = dict(row)
    if by in _JOB_NAME_OF:
        for row in db.execute(
            f"SELECT {_JOB_NAME_OF[by]} AS name,"
            " sum(device_time.devices * max(0, min(coalesce(to_s, ?1), ?1) - max(from_s, ?2))) / 3600.0 AS device_hours"
            " FROM device_time JOIN jobs ON jobs.id = device_time.job_id WHERE coalesce(to_s, ?1) > ?2"
            " AND (?3 IS NULL OR jobs.owner = ?3) GROUP BY 1",
            [now_s, since_s, owner],
        ):
            found.setdefault(row["name"], {"name": row["name"]})["device_hours"] = row["device_hours"]
    rows = [Spent(**row) for row in found.values()]
    return sorted(rows, key=lambda s: (-(s.prompt_tokens + s.completion_tokens), -s.device_hours, s.name))
