"""The controller's metrics in Prometheus format."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from appliance.store import jobs
from appliance.store.rows import JobMetricRow

from .conftest import ADMIN, Control


async def scrape(control: Control) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await control.http.get("/admin/v1/metrics", headers=ADMIN)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_metrics_of_idle_box(control: Control) -> None:
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


async def test_metrics_of_jobs_and_devices(control: Control) -> None:
    running, waiting = await control.job(), await control.job()
    told = {"loss": 1.5, "tokens_per_s": 900.0, "step": 3, "total_steps": 9}
    jobs.set_phase(control.db, running, "running", devices=["n0/0", "n0/1"], **told)
    control.scheduler.devices[0]["holder"] = {"kind": "job", "id": running}
    control.scheduler.devices[1]["health"] = "failed"
    found = await scrape(control)
    job = (("job", running), ("model", "starter"))
    assert found["appliance_job_loss", job] == 1.5 and found["appliance_job_tokens_per_second", job] == 900
    assert found["appliance_job_step", job] == 3 and found["appliance_job_devices", job] == 2
    assert ("appliance_job_energy_joules", job) not in found, "nothing counts it"
    assert ("appliance_job_gradient_norm", job) not in found, "no step has told it yet"
    assert not any(dict(labels).get("job") == waiting for _, labels in found)
    assert found["appliance_job_queue_length", ()] == 1
    assert found["appliance_devices", (("health", "ok"), ("holder", "job"))] == 1
    assert found["appliance_devices", (("health", "failed"), ("holder", "none"))] == 1
    for step, norm, rate in ((2, 9.0, 2e-4), (3, 0.7, 1e-4)):
        row = JobMetricRow(running, step, time.time(), grad_norm=norm, learning_rate=rate)
        jobs.upsert_metric(control.db, row)
    jobs.add_energy(control.db, running, 250.0, 5.0)
    found = await scrape(control)
    assert (found["appliance_job_gradient_norm", job], found["appliance_job_learning_rate", job]) == (0.7, 1e-4)
    assert found["appliance_job_energy_joules", job] == 250


# Lines of an engine's metrics in vLLM's format, which has hundreds of other lines.
