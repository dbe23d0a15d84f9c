"""The controller's Prometheus series."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from appliance.controller.jobs.events import fail
from appliance.store.objects import jobs
from appliance.store.records import energy, handovers
from appliance.store.rows import HandoverRow

from .conftest import ADMIN, Control


async def scrape(control: Control) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await control.http.get("/admin/v1/metrics", headers=ADMIN)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_box_at_rest(control: Control) -> None:
    found = await scrape(control)
    assert found["appliance_devices", (("health", "ok"), ("holder", "none"))] == 8
    assert found["appliance_device_healthy", (("device", "n0/0"), ("kind", "cpu"))] == 1
    assert sum(value for (name, _), value in found.items() if name == "appliance_mode") == 1
    assert found["appliance_weight_store_bytes", (("what", "budget"),)] == 2**30
    assert found["appliance_tier_bytes", (("tier", "disk"),)] == 10
    assert found["appliance_job_queue_length", ()] == 0
    assert found["appliance_scheduler_plan_seconds", ()] == 0.001
    counted = "appliance_handover_seconds_count"
    ended = {dict(labels)["outcome"]: count for (name, labels), count in found.items() if name == counted}
    assert ended == {"done": 0, "undone": 0, "failed": 0}, "there before the first one fails"


async def test_jobs_devices_and_handovers(control: Control) -> None:
    running, waiting = await control.job(), await control.job()
    jobs.set_phase(
        control.db, running, "running", devices=["n0/0", "n0/1"], loss=1.5, tokens_per_s=900.0, step=3, total_steps=9
    )
    control.scheduler.devices[0]["holder"] = {"kind": "job", "id": running}
    control.scheduler.devices[1]["health"] = "failed"
    now_s = time.time()
    for number, state, seconds in ((1, "done", 2.0), (2, "done", 3.0), (3, "undone", 1.0)):
        handovers.insert(control.db, HandoverRow(str(number), "r", state, now_s, now_s + seconds), [])
    handovers.insert(control.db, HandoverRow("4", "r", "running", now_s), [])
    found = await scrape(control)
    job = (("job", running), ("model", "starter"))
    assert found["appliance_job_loss", job] == 1.5 and found["appliance_job_tokens_per_second", job] == 900
    assert found["appliance_job_step", job] == 3 and found["appliance_job_devices", job] == 2
    assert ("appliance_job_energy_joules", job) not in found, "nothing counts it"
    energy.add(control.db, {("job", running): (250.0, 5.0)}, now_s)
    assert (await scrape(control))["appliance_job_energy_joules", job] == 250
    assert not any(dict(labels).get("job") == waiting for _, labels in found)
    assert found["appliance_job_queue_length", ()] == 1
    assert found["appliance_devices", (("health", "ok"), ("holder", "job"))] == 1
    assert found["appliance_devices", (("health", "failed"), ("holder", "none"))] == 1
    assert found["appliance_handover_seconds_count", (("outcome", "done"),)] == 2
    assert round(found["appliance_handover_seconds_sum", (("outcome", "done"),)], 3) == 5
    assert found["appliance_handover_seconds_count", (("outcome", "undone"),)] == 1
    assert found["appliance_handovers_running", ()] == 1


async def test_what_fails_is_told_to_whoever_is_on_duty(control: Control) -> None:
    found = await scrape(control)
    assert found["appliance_doctor_findings", (("state", "fail"),)] == 0
    assert found["appliance_jobs_failed", (("code", "training_failed"),)] == 0, "there before the first one fails"
    context = control.context
    context.main_troubles = lambda: [{"name": "tracking: MLflow of ann"}, {"name": "backup"}]
    context.doctor_findings = lambda: [{"state": "fail"}, {"state": "warn"}, {"state": "warn"}]
    for code in ("training_failed", "training_failed", "invalid_training_file"):
        fail(control.db, await control.job(), code, "so it is")
    found = await scrape(control)
    parts = {dict(labels)["part"] for name, labels in found if name == "appliance_degraded"}
    assert parts == {"tracking", "backup"}, "names behind the colon are for operators"
    assert found["appliance_doctor_findings", (("state", "fail"),)] == 1
    assert found["appliance_doctor_findings", (("state", "warn"),)] == 2
    assert found["appliance_jobs_failed", (("code", "training_failed"),)] == 2
    assert found["appliance_jobs_failed", (("code", "invalid_training_file"),)] == 1


async def test_only_for_admins(control: Control) -> None:
    assert (await control.http.get("/admin/v1/metrics")).status_code == 403
