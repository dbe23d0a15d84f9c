"""Canaries through the admin API: start, promotion and rollback."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from appliance.controller.bus.bus import CanaryLoad, Report, VersionLoad
from appliance.controller.interfaces.errors import SwapFailed
from appliance.controller.models import activation
from appliance.controller.models.activation import Canaries, decide
from appliance.gateway.core.table import bucket
from appliance.store import models
from appliance.store.rows import AUDIT, CANARIES, DEPLOYMENTS, CanaryRow, DeploymentRow, VersionRow

from .conftest import ADMIN, Control, insert_model

PATH = "/admin/v1/models/m/canary"


@pytest.fixture
def served(control: Control) -> Control:
    insert_model(control.db, "m", versions=("v2", "v1"))  # the last version, v1, is active
    DEPLOYMENTS.insert(control.db, DeploymentRow("m", 1.0))
    return control


async def ask(control: Control, method: str, path: str = PATH, status: int = 200, **body: Any) -> Any:
    answer = await control.http.request(method, path, headers=ADMIN, json=body or None)
    assert answer.status_code == status, answer.text
    return answer.json()


def counted(control: Control, **versions: VersionLoad) -> None:
    row = CANARIES.find(control.db, "m")
    assert row is not None
    control.context.bus.load = lambda: Report(canaries={"m": CanaryLoad(row.created_s, versions)})


def good(requests: int) -> VersionLoad:
    return VersionLoad(requests, 0, {bucket(0.1): requests}, {bucket(1.0): requests})


async def look_later(control: Control, after_s: float) -> CanaryRow:
    running = Canaries(control.context)
    await running.look(time.time() + after_s)
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "canary: m"))
    row = CANARIES.find(control.db, "m")
    assert row is not None
    return row


def active(control: Control) -> str | None:
    row = models.find(control.db, "m")
    assert row is not None
    return row.active_version


async def test_view_of_canary_has_its_decision(served: Control):
    begun = await ask(served, "PUT", version="v2", share=0.2)
    assert (begun["name"], begun["before"], begun["state"], begun["auto"]) == ("m@v2", "v1", "running", False)
    assert begun["decision"] == {"verdict": "wait", "reason": "v2 answered 0 of 50 requests"}
    served.scheduler.replicas = [{"model": "m@v2", "state": "open"}]
    counted(served, v2=good(60), v1=good(240))
    shown = await ask(served, "GET", "/admin/v1/models/m")
    assert shown["canary"]["versions"]["v2"]["requests"] == 60
    assert active(served) == "v1" and served.scheduler.converged == []
    (entry,) = AUDIT.page(served.db, after=None, limit=1).data
    assert (entry.action, entry.detail["version"]) == ("model.canary", "v2")


async def test_invalid_canary_requests_return_codes(served: Control):
    insert_model(served.db, "unserved", versions=("v2", "v1"))

    async def code(method: str, path: str, status: int, **body: Any) -> str:
        return (await ask(served, method, path, status, **body))["error"]["code"]

    assert await code("PUT", PATH, 404, version="v9") == "version_not_found"
    assert await code("PUT", PATH, 400, version="v1") == "invalid_value"
    await code("PUT", PATH, 400, version="v2", share=0.95)
    assert await code("POST", "/admin/v1/models/m/promote", 409) == "no_canary"
    assert await code("PUT", "/admin/v1/models/unserved/canary", 409, version="v2") == "not_deployed"
    served.scheduler.devices = served.scheduler.devices[:1]
    assert await code("PUT", PATH, 409, version="v2") == "no_room_for_canary"


async def test_good_canary_is_promoted_after_its_time(served: Control):
    await ask(served, "PUT", version="v2", auto=True)
    counted(served, v2=good(60), v1=good(540))
    assert (await look_later(served, 300)).state == "running"
    row = await look_later(served, 601)
    assert (row.state, active(served)) == ("promoted", "v2")
    assert row.compared is not None and row.compared["v1"]["requests"] == 540
    (entry,) = AUDIT.page(served.db, after=None, limit=1).data
    assert (entry.action, entry.key_id) == ("model.promote", None) and "as good as" in entry.detail["reason"]


async def test_bad_canary_is_rolled_back_only_with_auto(served: Control):
    bad = VersionLoad(20, 15)
    await ask(served, "PUT", version="v2")
    counted(served, v2=bad, v1=good(180))
    assert (await look_later(served, 5)).state == "running"
    assert (await ask(served, "GET", "/admin/v1/models/m"))["canary"]["decision"]["verdict"] == "roll back"
    await ask(served, "PUT", version="v2", auto=True)
    row = await look_later(served, 5)
    assert (row.state, row.reason) == ("rolled_back", "v2 failed 15 of 20 requests, v1 failed 0 of 180 requests")
    assert active(served) == "v1"


async def test_failing_engine_or_swap_rolls_the_canary_back(served: Control):
    await ask(served, "PUT", version="v2", auto=True)
    trouble = {"model": "m@v2", "reason": "the fingerprint is not finite", "message": "not serving", "lasting": False}
    served.scheduler.troubles = [trouble]
    assert (await look_later(served, 1)).state == "running", "it is tried again"
    trouble["lasting"] = True
    row = await look_later(served, 1)
    served.scheduler.troubles = []
    assert (row.state, row.reason) == ("rolled_back", "the engine of v2 does not start: the fingerprint is not finite")
    await ask(served, "PUT", version="v2", auto=True)
    counted(served, v2=good(60), v1=good(540))
    served.scheduler.swap_error = "the fingerprint differs"
    row = await look_later(served, 601)
    assert row.state == "rolled_back" and "the fingerprint differs" in row.reason
    assert active(served) == "v1"


async def test_look_rolls_back_bad_canary_while_swap_of_another_model_hangs(served: Control, monkeypatch: Any):
    insert_model(served.db, "n", versions=("v2", "v1"))
    DEPLOYMENTS.insert(served.db, DeploymentRow("n", 1.0))
    swaps, ends = list[str](), asyncio.Event()

    async def slow_switch(_: Any, row: Any, *__: Any) -> None:
        swaps.append(row.id)
        await ends.wait()

    monkeypatch.setattr(activation, "switch", slow_switch)
    for name in "mn":
        await ask(served, "PUT", f"/admin/v1/models/{name}/canary", version="v2", auto=True)
    counted(served, v2=good(60), v1=good(540))
    served.scheduler.troubles = [{"model": "n@v2", "reason": "no kernel image", "message": "", "lasting": True}]
    async with asyncio.timeout(5):  # `look` returns although the swap hangs
        await Canaries(served.context).look(time.time() + 601)
        while not swaps or models.find_canary(served.db, "n") is not None:
            await asyncio.sleep(0.001)
    row = CANARIES.find(served.db, "n")
    assert swaps == ["m"] and row is not None and row.state == "rolled_back"
    ends.set()
    assert (await look_later(served, 601)).state == "promoted"


async def test_activation_of_other_version_ends_canary(served: Control):
    await ask(served, "PUT", version="v2")
    models.activate(served.db, "m", "v2")
    assert (await look_later(served, 1)).state == "promoted"
    (entry,) = AUDIT.page(served.db, after=None, limit=1).data
    assert (entry.action, entry.detail["reason"]) == ("model.promote", "v2 answers all requests")
    models.activate(served.db, "m", "v1")
    await ask(served, "PUT", version="v2")
    version = models.find_version(served.db, "m", "v1")
    assert version is not None
    models.insert_version(served.db, replace(version, version="v3"))
    models.activate(served.db, "m", "v3")
    row = await look_later(served, 1)
    assert row.state == "rolled_back" and row.reason.startswith("v3 became the active version")


async def test_canary_weights_are_released_after_its_engine_ends(served: Control):
    await ask(served, "PUT", version="v2")
    served.scheduler.replicas = [{"model": "m@v2", "state": "starting"}]
    await ask(served, "POST", "/admin/v1/models/m/rollback")
    await look_later(served, 1)
    assert served.ops.let_go_of == []
    served.scheduler.replicas = []
    await look_later(served, 2)
    assert served.ops.let_go_of == ["m@v2"]


# --- decisions: errors decide at once, latency and request counts only after the watch time

ROW = CanaryRow("m", "v2", "v1", 0.1, created_s=0.0, watch_s=600.0, min_requests=50)
OVER_S = 601.0


def load(requests: int, errors: int = 0, *, first_s: float = 0.1, whole_s: float = 1.0) -> VersionLoad:
    good = requests - errors
    return VersionLoad(requests, errors, {bucket(first_s): good}, {bucket(whole_s): good})


@pytest.mark.parametrize(
    ("verdict", "new", "old", "now_s"),
    [
        ("promote", load(60), load(540), OVER_S),
        ("wait", load(60), load(540), 599.0),
        ("wait", load(49), load(540), OVER_S),
        ("wait", load(60), load(49), OVER_S),
        # A significantly higher share of errors causes an immediate rollback.
        ("roll back", load(20, 15), load(180), 1.0),
        ("wait", load(20, 1), load(180), 1.0),
        ("promote", load(60, 30), load(540, 270), OVER_S),
        ("promote", load(60, 1), load(540, 9), OVER_S),
        ("wait", load(3, 3), load(0), 1.0),
        # A much slower 95th percentile of request times causes a rollback after the watch time.
        ("roll back", load(60, first_s=0.2), load(540), OVER_S),
        ("roll back", load(60, whole_s=2.0), load(540), OVER_S),
        ("wait", load(60, whole_s=2.0), load(540), 599.0),
        ("promote", load(60, first_s=0.12), load(540), OVER_S),
        ("promote", load(60, first_s=0.004), load(540, first_s=0.001), OVER_S),
    ],
)
def test_decide_by_errors_times_and_counts(verdict: str, new: VersionLoad, old: VersionLoad, now_s: float):
    assert decide(ROW, new, old, now_s).verdict == verdict


async def test_failed_change_keeps_a_newer_published_version(control: Control, monkeypatch):
    insert_model(control.db, "m", versions=("v2", "v1"))

    async def overtaken(model: str) -> dict[str, Any]:
        models.insert_version(control.db, VersionRow(model, "v3", "test", 10, 1.0, disk_path="/models/v3"))
        models.activate(control.db, model, "v3")
        raise SwapFailed(model, "v2", "v3 came")

    monkeypatch.setattr(control.scheduler, "converge_model", overtaken)
    with pytest.raises(SwapFailed):
        await activation.switch(control.context, models.find(control.db, "m"), "v2", "a test")
    assert models.find(control.db, "m").active_version == "v3"


async def test_concurrent_rollbacks_run_one_after_the_other(control: Control, monkeypatch):
    insert_model(control.db, "m", versions=("v1", "v2", "v3"))
    waiting, go = [], asyncio.Event()

    async def slow(model: str) -> dict[str, Any]:
        waiting.append(models.find(control.db, model).active_version)
        await go.wait()
        if waiting == ["v2"]:
            raise SwapFailed(model, "v2", "no memory")
        return {}

    monkeypatch.setattr(control.scheduler, "converge_model", slow)
    asked = [asyncio.create_task(control.http.post("/admin/v1/models/m/rollback", headers=ADMIN)) for _ in range(2)]
    while not waiting:
        await asyncio.sleep(0)
    assert waiting == ["v2"], "the second waits for the first"
    go.set()
    first, second = await asyncio.gather(*asked)
    assert (first.status_code, second.status_code) == (409, 200)
    assert (second.json()["from"], second.json()["to"]) == ("v3", "v2")
