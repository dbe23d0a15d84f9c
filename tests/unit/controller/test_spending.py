"""Spending of keys arrives from the bus and appears in the usage report; limits go to the gateways' table."""

from __future__ import annotations

import calendar
import sqlite3
import time

import pytest

from appliance.controller.access.limits import spent_quota
from appliance.store import keys, usage
from tests.unit.controller.conftest import Control
from tests.unit.controller.test_admin import ask

NOON = float(calendar.timegm((2026, 11, 21, 12, 30, 0)))


def row(key: str, *, requests: int = 1, errors: int = 0, prompt: int = 10, completion: int = 5, model: str = "m"):
    told = {"key": key, "model": model, "version": "v1", "requests": requests, "errors": errors}
    return told | {"prompt_tokens": prompt, "completion_tokens": completion}


async def test_key_limits_reach_gateways(control: Control):
    made = await ask(control, "POST", "/keys", json={"name": "trial", "requests_per_minute": 60, "models": ["starter"]})
    table = control.gateway_keys[keys.fingerprint(made["key"])]
    assert table["requests_per_minute"] == 60 and table["models"] == ["starter"] and "tokens_per_minute" not in table
    changed = await ask(control, "PATCH", "/keys/trial", json={"models": None, "tokens_per_minute": 5000})
    assert (changed["models"], changed["tokens_per_minute"], changed["requests_per_minute"]) == (None, 5000, 60)
    table = control.gateway_keys[keys.fingerprint(made["key"])]
    assert "models" not in table and table["tokens_per_minute"] == 5000
    await ask(control, "PATCH", "/keys/nobody", 404, json={"tokens_per_minute": 1})
    await ask(control, "PATCH", "/keys/trial", 400, json={"tokens_per_minute": 0})
    await ask(control, "PATCH", "/keys/trial", 400, json={"tokens_per_second": 1})


async def test_used_up_quota_reaches_gateways(control: Control):
    made = await ask(control, "POST", "/keys", json={"name": "trial", "tokens_per_day": 100})
    digest, spending = keys.fingerprint(made["key"]), control.context.spending
    generation = control.context.bus.generation
    spending.take([row(made["id"], prompt=60, completion=39)])
    assert control.context.bus.generation == generation and "spent_until_s" not in control.gateway_keys[digest]
    spending.take([row(made["id"], prompt=1, completion=0)])
    assert control.gateway_keys[digest]["spent_until_s"] % 86400 == 0
    assert control.gateway_keys[digest]["spent_quota"] == "100 tokens a day"


def test_spent_quota_renews_by_utc_day_and_month(control: Control):
    made, _ = keys.create(control.db, "k", ["inference"], tokens_per_day=10, tokens_per_month=100)
    yesterday = NOON - 86400
    usage.add(control.db, [row(made.id, prompt=50, completion=0)], yesterday)
    assert spent_quota(control.db, made, NOON) == (None, "")
    assert spent_quota(control.db, made, yesterday)[0] == calendar.timegm((2026, 11, 21, 0, 0, 0))
    usage.add(control.db, [row(made.id, prompt=50, completion=0)], NOON)
    assert spent_quota(control.db, made, NOON) == (calendar.timegm((2026, 12, 1, 0, 0, 0)), "100 tokens a month")


async def test_device_time_ends_at_last_step_before_crash(control: Control):
    job_id = await control.job()
    usage.devices_held(control.db, job_id, 8, NOON)
    control.db.execute("INSERT INTO job_metrics (job_id, step, created_s) VALUES (?, 1, ?)", [job_id, NOON + 1800])
    usage.close_left_open(control.db, {"another"})
    (spent,) = usage.report(control.db, "model", NOON, NOON + 86400)
    assert spent["device_hours"] == pytest.approx(4.0)


async def test_usage_on_full_disk_is_written_later(control: Control, monkeypatch):
    """The controller must keep usage while the disk is full, because gateways forget usage that they have sent."""
    made = await ask(control, "POST", "/keys", json={"name": "trial", "tokens_per_day": 100})
    spending = control.context.spending
    with monkeypatch.context() as full:

        def refuses(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        full.setattr(usage, "add", refuses)
        for _ in range(3):
            with pytest.raises(sqlite3.OperationalError):
                spending.take([row(made["id"], prompt=30, completion=1), row(made["id"], model="other", prompt=7)])
    await spending.flush()
    await spending.flush()
    day_s = time.time() // 86400 * 86400
    assert usage.tokens_since(control.db, made["id"], day_s) == 3 * (31 + 12)
    assert control.gateway_keys[keys.fingerprint(made["key"])]["spent_until_s"] > time.time()
