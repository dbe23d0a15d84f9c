"""Fills a store with what one owner may keep: so many rows of each table, with long texts, and little of another's.

Rows follow from the dataclasses of the tables (a new column is filled by its type), and the tables from the schema: one
that nobody has judged here fails a test.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from appliance.store import rows
from appliance.store.database import Database
from appliance.store.records import keys

OWNER, OTHER = "ann", "bob"
OF_OTHER = 12
LONG = 5000
"""Characters of what may be long: a row does not fit on a page of the database."""
DAY_S = 86400.0


@dataclass(frozen=True)
class Size:
    """kept: of each kind, what is over and stays. going: what goes on. due: what the next round is to end or delete."""

    kept: int
    going: int
    due: int

    @property
    def all(self) -> int:
        return self.kept + self.going + self.due


class At:
    """The row of a table that is made: its place, whose it is, and what has become of it."""

    def __init__(self, place: int, owner: str, size: Size, now_s: float):
        self.place, self.owner, self.size, self.now_s = place, owner, size, now_s
        self.key = f"key_{owner}"

    def id(self, kind: str, place: int | None = None) -> str:
        return f"{kind}-{self.owner}-{self.place if place is None else place}"

    @property
    def goes_on(self) -> bool:
        return self.size.kept <= self.place < self.size.kept + self.size.going

    @property
    def is_due(self) -> bool:
        return self.place >= self.size.kept + self.size.going

    def of(self, going: Any, over: Any) -> Any:
        return going if self.goes_on else over

    @property
    def old_s(self) -> float:
        """A time that retention is over for, if this is due."""
        return self.now_s - (400 * DAY_S if self.is_due else 60)


Make = Callable[[At], dict[str, Any]]
LONG_TEXT = "x" * LONG
LONG_JSON = {"text": LONG_TEXT}
METADATA = {f"key-{n}": LONG_TEXT[:512] for n in range(10)}
LIST_TEXT = [{"text": LONG_TEXT}]
MODEL = "starter"
FILE = b'{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n' * 12
"""What each file has in it."""
CRITERION = {
    "type": "string_check",
    "name": "same",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
_SAMPLED = {
    "type": "completions",
    "model": MODEL,
    "source": {"type": "file_id", "id": "file-ann-1"},
    "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
}


def _resolved(_: At) -> dict[str, Any]:
    return {
        "n_epochs": 1,
        "batch_size": 4,
        "max_length": 256,
        "full": True,
        "learning_rate": 1e-5,
        "options": {"rollouts": "engine"},
        "text": LONG_TEXT,
    }


def _completion(at: At) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": LONG_TEXT}}
    return {
        "id": at.id("chat"),
        "key_id": at.key,
        "owner": at.owner,
        "status": "completed",
        "kind": "chat.completion",
        "used_s": at.old_s,
        "created_s": at.old_s,
        "bytes": 3 * LONG,
        "input": json.dumps([{"role": "user", "content": LONG_TEXT}]),
        "response": json.dumps({"id": at.id("chat"), "object": "chat.completion", "choices": [choice]}),
        "previous_id": None,
        "background": 0,
        "request": None,
        "model": MODEL,
        "metadata": METADATA,
    }


def _response(at: At) -> dict[str, Any]:
    status = at.of("queued", "completed")
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": LONG_TEXT}]}
    made = {
        "id": at.id("resp"),
        "object": "response",
        "created_at": int(at.now_s),
        "status": status,
        "background": True,
        "error": None,
        "incomplete_details": None,
        "store": True,
        "previous_response_id": None,
        "output": [{**item, "id": at.id("msg"), "status": "completed"}],
        "model": MODEL,
        "tools": [],
    }
    asked = {"model": MODEL, "background": True}
    given = [{"type": "message", "role": "user", "content": LONG_TEXT, "id": at.id("in")}]
    return {
        "id": at.id("resp"),
        "key_id": at.key,
        "owner": at.owner,
        "status": status,
        "used_s": at.old_s,
        "created_s": at.old_s,
        "model": None,
        "metadata": None,
        "bytes": 2 * LONG,
        "background": 1,
        "input": json.dumps(given),
        "response": json.dumps(made),
        "request": json.dumps(asked) if at.goes_on else None,
        # One conversation of all that is over.
        "previous_id": at.id("resp", at.place - 1) if 0 < at.place < at.size.kept else None,
    }


# By table: its dataclass, and what of its rows does not follow from their types.
TABLES: dict[str, tuple[Any, Make]] = {
    "keys": (
        rows.KeyRow,
        # A few are of the owner, for administrators alone make them; the others are other people's.
        lambda at: {
            "id": at.id("key") if at.place else at.key,
            "name": at.id("key"),
            "sha256": at.id("sha"),
            "prefix": "sk-appl-abcd",
            "scopes": ["inference", "fine_tuning"],
            "owner": at.owner if at.place < FEW_ROWS else at.id("people"),
            "revoked_s": at.now_s if at.place % 2 else None,
            "expires_s": at.now_s if at.place % 2 else None,
            "models": [MODEL, *(f"name-{n}" for n in range(20))] if at.place % 4 == 2 else None,
            "tokens_per_day": 10**9,
            "subject": at.id("subject") if at.place % 8 == 3 else "",
        },
    ),
    "page_sessions": (
        rows.PageSessionRow,
        lambda at: {
            "id": at.id("session"),
            "sha256": at.id("token"),
            "key_id": at.key,
            "until_s": at.now_s + (-60 if at.is_due else DAY_S),
        },
    ),
    "files": (
        rows.FileRow,
        lambda at: {
            "id": at.id("file"),
            "filename": f"day-{at.place}.jsonl",
            "purpose": "batch" if at.place % 5 == 3 else "fine-tune",
            "key_id": at.key,
            "owner": at.owner,
            "status": "processed",
            "bytes": len(FILE),
            "report": {"n_examples": 12, "n_errors": 1, "errors": [[1, LONG_TEXT]], "warnings": [], "notes": []},
            "data_check": {"checks": {}, "examples": 12, "text": LONG_TEXT},
            "lineage": {"dropped": {}, "text": LONG_TEXT},
            "check_status": "done",
            "expires_s": at.now_s - 60 if at.is_due else None,
            "created_s": at.old_s,
        },
    ),
    "models": (
        rows.ModelRow,
        lambda at: {
            "id": at.id("model"),
            "kind": "fine-tuned",
            "arch": "llama",
            "task": "generate",
            "base": MODEL,
            "owner": at.owner,
            "active_version": "v0",
            "job_id": at.id("job"),
            "max_model_len": 2048,
            "bytes": 10,
            "params": 10,
        },
    ),
    "versions": (
        rows.VersionRow,
        lambda at: {
            "model": at.id("model", 0 if at.place < at.size.kept else at.place),
            "version": f"v{at.place}" if at.place < at.size.kept else "v0",
            "disk_path": "/models/v",
            "meta": {"job_id": at.id("job"), "step": 1, "chat_template": True, "text": LONG_TEXT},
        },
    ),
    "deployments": (
        rows.DeploymentRow,
        lambda at: {
            "model": at.id("model"),
            "idle": {},
            "served": {},
            "ttft_p95_s": None,
            "tpot_p95_ms": None,
            "max_replicas": 1,
        },
    ),
    "standby": (rows.StandbyRow, lambda at: {"model": at.id("model"), "arguments": [1.0], "state": LONG_JSON}),
    "canaries": (
        rows.CanaryRow,
        lambda at: {
            "model": at.id("model"),
            "version": "v0",
            "before": "v0",
            "state": at.of("running", "rolled_back"),
            "share": 0.1,
            "watch_s": 1e9,
            "created_s": at.now_s,
            "compared": LONG_JSON,
        },
    ),
    "model_settings": (rows.ModelSettingsRow, lambda at: {"model": at.id("model"), "number": 1, "settings": {}}),
    "jobs": (
        rows.JobRow,
        lambda at: {
            "id": at.id("job"),
            "model": MODEL,
            "method": "supervised",
            "training_file": at.id("file", 1),
            "validation_file": at.id("file", 2),
            "output_model": at.id("model"),
            "key_id": at.key,
            "owner": at.owner,
            "metadata": {"team": "a", "long": LONG_TEXT[:512]},
            "integrations": None,
            "hyperparameters": {"n_epochs": 1, "text": LONG_TEXT},
            "resolved": _resolved(at),
            "phase": at.of(("queued", "running", "suspended")[at.place % 3], ("succeeded", "failed")[at.place % 2]),
            "wanted": "run",
            "error": None,
            "min_devices": 1,
            "max_devices": 1,
            "allowed_sizes": [1],
            "asked_sizes": None,
            "devices": [],
            "snapshot": None,
            "result_files": [at.id("file", 3)],
            "deadline_s": None,
            "eta_s": None,
            "finished_s": None if at.goes_on else at.old_s,
            "held": 0,
            "preemptible": 1,
        },
    ),
    "job_judges": (
        rows.JobJudgeRow,
        lambda at: {"job_id": at.id("job"), "judge": {"grader": {**CRITERION, "text": LONG_TEXT}}},
    ),
    "job_events": (
        rows.JobEventRow,
        lambda at: {
            "id": at.id("event"),
            "job_id": at.id("job", 0 if at.place < at.size.kept else at.place),
            "level": "info",
            "type": "message",
            "message": LONG_TEXT[:500],
            "data": {"line": 1},
        },
    ),
    "job_metrics": (
        rows.JobMetricRow,
        lambda at: {
            "job_id": at.id("job", 0 if at.place < at.size.kept else at.place),
            "step": at.place,
            "rank_seconds": [0.1234] * 8,
            "communication": 0.25 if at.place % 2 else None,
            "measured": {"mean_token_accuracy": 0.5},
        },
    ),
    "checkpoints": (
        rows.CheckpointRow,
        lambda at: {
            "id": at.id("ckpt"),
            "job_id": at.id("job", 0),
            "name": f"{at.id('model', 0)}:ckpt-step-{at.place}",
            "model": at.id("model", 0),
            "version": f"v{at.place}",
            "step": at.place,
            "metrics": {"loss": 1.0},
        },
    ),
    "permissions": (
        rows.PermissionRow,
        lambda at: {
            "id": at.id("cp"),
            "checkpoint": f"{at.id('model', 0)}:ckpt-step-0",
            "project_id": at.id("project"),
        },
    ),
    "handovers": (
        rows.HandoverRow,
        lambda at: {"id": at.id("ho"), "state": "done", "ended_s": at.old_s, "detail": {}},
    ),
    "handover_steps": (
        rows.HandoverStepRow,
        lambda at: {
            "handover_id": at.id("ho"),
            "position": 0,
            "verb": "drain_replica",
            "state": "done",
            "arguments": {},
            "detail": {},
        },
    ),
    "tier_removals": (rows.TierRemovalRow, lambda at: {"tier": "remote", "kind": "version", "version": at.id("v")}),
    "idempotency": (
        rows.IdempotencyRow,
        lambda at: {
            "key_id": at.key,
            "route": "files",
            "idempotency_key": at.id("again") if at.place % 2 else None,
            "body_sha256": "0" * 64,
            "created_s": at.old_s,
        },
    ),
    "audit": (
        rows.AuditRow,
        lambda at: {"id": at.id("audit"), "key_id": at.key, "outcome": "done", "created_s": at.old_s},
    ),
    "operations": (
        rows.OperationRow,
        lambda at: {
            "id": at.id("op"),
            "kind": "verify",
            "state": "succeeded",
            "ended_s": at.old_s,
            "progress": {"done": 1, "total": 1, "unit": "", "message": ""},
            "error": None,
        },
    ),
    "windows": (
        rows.WindowRow,
        lambda at: {
            "id": at.id("window"),
            "cron": "0 8 * * *",
            "tz": "UTC",
            "policy": "serve",
            "for_s": 60.0,
            "until": None,
            "train_devices": None,
            "serving_floor": None,
        },
    ),
    "batches": (
        rows.BatchRow,
        lambda at: {
            "id": at.id("batch"),
            "endpoint": "/v1/chat/completions",
            "input_file_id": at.id("file", 3),
            "status": at.of("in_progress", "completed"),
            "key_id": at.key,
            "owner": at.owner,
            "model": MODEL,
            "metadata": {"long": LONG_TEXT[:512]},
            "errors": LIST_TEXT,
            "usage": None,
            "created_s": at.old_s,
            "expires_s": at.now_s + DAY_S,
        },
    ),
    "uploads": (
        rows.UploadRow,
        lambda at: {
            "id": at.id("upload"),
            "status": "pending" if at.goes_on or at.is_due or not at.place else "completed",
            "purpose": "fine-tune",
            "bytes": at.size.kept,
            "file_id": None,
            "key_id": at.key,
            "owner": at.owner,
            "expires_s": at.now_s + (-60 if at.is_due else DAY_S),
        },
    ),
    "upload_parts": (
        rows.UploadPartRow,
        lambda at: {"id": at.id("part"), "upload_id": at.id("upload", 0), "bytes": 1},
    ),
    "responses": (rows.ResponseRow, _response),
    "evals": (
        rows.EvalRow,
        lambda at: {
            "id": at.id("eval"),
            "owner": at.owner,
            "key_id": at.key,
            "criteria": [CRITERION],
            "item_schema": {"type": "object", "text": LONG_TEXT},
            "metadata": None,
            **({} if at.place else {"kept": None}),  # the first alone is over items of its own
        },
    ),
    "eval_runs": (
        rows.EvalRunRow,
        lambda at: {
            "id": at.id("evalrun"),
            "eval_id": at.id("eval", 0),
            "owner": at.owner,
            "key_id": at.key,
            "status": at.of("queued", "completed"),
            "model": MODEL,
            "data_source": {**_SAMPLED, "text": LONG_TEXT},
            "metadata": None,
            "results": {"same": {"passed": 1, "failed": 0}},
            "usage": {},
            "counts": {"pass": 1},
            "error": None,
            "ended_s": None if at.goes_on else at.old_s,
        },
    ),
    "eval_items": (
        rows.EvalItemRow,
        lambda at: {
            "id": at.id("item"),
            "run_id": at.id("evalrun", 0),
            "place": at.place,
            "status": "pass",
            "item": {"answer": LONG_TEXT, "messages": []},
            "sample": {"answer": {"text": LONG_TEXT}, "input": []},
            "results": [{"name": "same", "passed": True, "score": 1.0}],
        },
    ),
    # Without a dataclass: their columns by name.
    "model_shares": (None, lambda at: {"model": at.id("model", 0), "owner": at.id("friend"), "created_s": 1.0}),
    "usage": (
        None,
        lambda at: {
            "hour_s": (int(at.old_s) // 3600 - at.place) * 3600,
            "key_id": at.key,
            "model": MODEL,
            "version": "v1",
            **dict.fromkeys(("requests", "errors", "prompt_tokens", "completion_tokens", "refused"), 1),
        },
    ),
    "device_time": (
        None,
        lambda at: {
            "job_id": at.id("job"),
            "devices": 1,
            "from_s": at.old_s - 60,
            "to_s": at.old_s,
            **dict.fromkeys(("key_id", "owner", "model")),
        },
    ),
    "energy": (
        None,
        lambda at: {
            "kind": "job",
            "name": at.id("job"),
            "hour_s": int(at.old_s) // 3600 * 3600,
            "joules": 1.0,
            "metered_s": 1.0,
        },
    ),
    "eval_deletions": (None, lambda at: {"id": at.id("evalrun")} if at.is_due else {}),
}

FEW = {
    "windows": "appliance.controller.admin.mode.MAX_WINDOWS",
    "model_shares": "appliance.controller.openai.model_routes.MAX_SHARED_WITH, of a model",
    "page_sessions": "appliance.controller.admin.owners.logins.MOST_OF_A_KEY, of a key",
}
"""Tables of which an owner keeps two hundred rows at most, by what bounds them: they do not grow here."""
FEW_ROWS = 12
ALSO: dict[str, tuple[Any, Make]] = {"responses": (rows.ResponseRow, _completion)}
"""Rows of another kind in these tables."""
NOT_KEPT = {
    "held": "counters, which triggers keep",
    "spent": "sums of days, which triggers keep; a year of them is 365",
    "box": "facts about the box, by name",
    "handovers_gone": "a sum for each outcome, which a trigger keeps",
    "folder_trials": "one for each set of a model's settings and tokenizer, which its versions share; found by its key",
    "migrations": "one for each script",
    "reserve": "space for a full disk",
    "sqlite_sequence": "SQLite's own",
}
"""Tables that no owner adds to."""


def fill(db: Database, size: Size) -> None:
    """What OWNER keeps, and a little of OTHER's, and of an administrator's key."""
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA foreign_keys = OFF")
    now_s = time.time()
    little = Size(OF_OTHER, min(size.going, 2), 0)
    with db.transaction():
        admin = rows.KeyRow("key_admin", "admin", "0" * 64, "", 1.0, owner="key_admin", scopes=["admin"])
        keys.insert(db, admin)
        for table in TABLES:
            most = dataclasses.replace(size, kept=FEW_ROWS) if table in FEW else size
            for owner, whose in ((OTHER, little), (OWNER, most)):
                for of_table in (TABLES, ALSO):
                    if table in of_table:
                        _insert(
                            db, table, of_table[table], (At(place, owner, whose, now_s) for place in range(whose.all))
                        )
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA synchronous = FULL")


def _insert(db: Database, table: str, made_as: tuple[Any, Make], places: Iterator[At]) -> None:
    kind, make = made_as
    made = [values for at in places if (values := _values(kind, make, at))]
    if not made:
        return
    columns = list(made[0])
    marks = ", ".join("?" * len(columns))
    db._connection.executemany(
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", [list(one.values()) for one in made]
    )


def _values(kind: Any, make: Make, at: At) -> dict[str, Any]:
    said = make(at)
    if kind is None:
        return said
    types_ = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        value = said[field.name] if field.name in said else _by_type(types_[field.name], field, at)
        is_json = field.metadata.get("json") and value is not None
        found[field.name] = json.dumps(value, separators=(",", ":")) if is_json else value
    assert not said.keys() - found.keys(), f"{kind.__name__} has no {said.keys() - found.keys()}"
    return found


def _by_type(hint: Any, field: dataclasses.Field[Any], at: At) -> Any:
    """A value of a column that nothing is said of: long, where it may be."""
    if field.metadata.get("json"):
        inner = (
            next((one for one in typing.get_args(hint) if one is not types.NoneType), hint)
            if (isinstance(hint, types.UnionType))
            else hint
        )
        origin = typing.get_origin(inner)
        return [LONG_TEXT] if origin is list else LONG_JSON
    if field.name == "created_s":
        return at.now_s - 60
    if field.name.endswith("_s"):
        return at.now_s - 60
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if typing.get_origin(options[0]) is typing.Literal:
        return typing.get_args(options[0])[0]
    return {str: f"{field.name} {at.place} of {at.owner} {'y' * 40}", int: 1, float: 1.0}[options[0]]


def tables(db: Database) -> set[str]:
    """Of the schema."""
    found = db._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {name for (name,) in found}


def schema_columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
