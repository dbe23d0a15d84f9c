"""Several jobs make versions of the same model: who owns the name, what must be equal, which version is active."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from appliance.controller.jobs.events import JobEvents
from appliance.store import jobs, models
from tests.unit.controller.conftest import Control, insert_model
from tests.unit.controller.test_admin import ask, ended


async def made(control: Control, **fields: Any) -> str:
    """Create a job that makes a version of `fraud`, wait until it is queued, and return its id."""
    return await control.job(extra_body={"publish_as": "fraud", **fields})


def published(control: Control, job_id: str, step: int, **more: Any) -> dict[str, Any]:
    version = f"{job_id.removeprefix('ftjob-')[:8]}-step-{step}"
    path = f"/dev/shm/x/{version}"
    return {"event": "published", "version": version, "path": path, "step": step, "bytes": 1000, "epoch": 1, **more}


def run(control: Control, events: JobEvents, job_id: str, step: int = 10, **more: Any) -> str:
    """Let the job start, publish a version and succeed; return the version."""
    events.started(job_id, ["n0/0"])
    event = published(control, job_id, step, **more)
    events.ingest(job_id, event)
    events.succeeded(job_id)
    return str(event["version"])


def active(control: Control) -> str | None:
    row = models.find(control.db, "fraud")
    return row.active_version if row is not None else None


async def test_retrain_makes_a_version_of_the_model(control: Control, events: JobEvents):
    first = await made(control)
    v1 = run(control, events, first)
    assert (await control.sdk.fine_tuning.jobs.retrieve(first)).fine_tuned_model == "fraud"
    assert active(control) == v1 and (await control.messages(first))[-2] == f"New version of fraud: {v1}, which answers"
    second = await made(control)
    v2 = run(control, events, second)  # equal steps of two jobs make different versions
    assert v1 != v2 and active(control) == v2
    assert (await control.messages(second))[-2] == f"New version of fraud: {v2}, which answers in place of {v1}"
    assert [row.version for row in models.list_versions(control.db, "fraud")] == [v1, v2]
    (checkpoint,) = (await control.sdk.fine_tuning.jobs.checkpoints.list(second)).data
    assert checkpoint.fine_tuned_model_checkpoint == f"fraud:ckpt-{v2}"
    assert models.find_checkpoint(control.db, f"fraud:ckpt-{v1}") is not None
    assert [model.id for model in (await control.sdk.models.list()).data].count("fraud") == 1
    assert (await ask(control, "POST", "/models/fraud/rollback"))["to"] == v1
    shown = await ask(control, "GET", f"/v1/fine_tuning/jobs/{second}")
    assert (shown["publish_as"], shown["activate"]) == ("fraud", True)


async def test_inactive_version_can_be_a_canary(control: Control, events: JobEvents):
    v1 = run(control, events, await made(control, activate=False))
    assert active(control) == v1, "nothing else would answer"
    second = await made(control, activate=False)
    v2 = run(control, events, second)
    assert active(control) == v1
    assert f"New version of fraud: {v2}. {v1} goes on answering" in (await control.messages(second))[-2]
    v3 = run(control, events, await made(control))
    assert active(control) == v3
    shown = {
        version["version"]: version["held_back"] for version in (await ask(control, "GET", "/models/fraud"))["versions"]
    }
    assert shown == {v1: False, v2: True, v3: False}
    # Rollback skips versions that were never active, unless the request names the version.
    assert (await ask(control, "POST", "/models/fraud/rollback"))["to"] == v1
    path = "/models/fraud/canary"
    await ask(control, "PUT", path, json={"version": v2})
    await ask(control, "POST", "/models/fraud/promote")
    assert active(control) == v2 and models.running_canaries(control.db) == []
    assert (await ask(control, "POST", "/models/fraud/rollback", json={"version": v3}))["to"] == v3
    assert (await ask(control, "POST", "/models/fraud/rollback"))["to"] == v2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"publish_as": "ft:starter:local:x:12345678"}, "publish_as"),
        ({"publish_as": "a@b"}, "publish_as"),
        ({"publish_as": "fraud", "suffix": "x"}, "suffix"),
        ({"activate": False}, "activate"),
    ],
)
async def test_publish_as_invalid_name_is_rejected(control: Control, fields: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        await control.job(extra_body=fields)
    assert caught.value.param == param
    assert jobs.page(control.db, viewer=None, after=None, limit=10).data == []


async def refused(control: Control, **fields: Any) -> str:
    with pytest.raises(openai.ConflictError) as caught:
        await made(control, **fields)
    assert (caught.value.code, caught.value.param) == ("model_exists", "publish_as")
    return str(caught.value)


async def test_stable_name_belongs_to_its_first_owner(control: Control, events: JobEvents):
    first = await made(control)
    control.as_key("bob", owner="bob")
    assert "is taken" in await refused(control), "the job has made nothing yet"
    control.http.headers.update({"x-appliance-key-id": "key_test", "x-appliance-scopes": "inference,fine_tuning"})
    run(control, events, first)
    models.share(control.db, "fraud", "*")
    control.as_key("ann", owner="ann")
    assert "is taken" in await refused(control), "who may call a model may not make versions of it"


async def test_import_under_a_name_made_by_jobs_is_refused(control: Control, events: JobEvents):
    first = await made(control)
    body = {"source": "/data/x", "name": "fraud"}
    for _ in ("while the job waits", "when its model is there"):
        assert (await ask(control, "POST", "/models/import", 409, json=body))["error"]["code"] == "model_exists"
        done = await ended(control, await ask(control, "POST", "/models/import", 202, json={"source": "/data/fraud"}))
        assert done["state"] == "failed" and "--name" in done["error"]["message"]
        if jobs.get(control.db, first).phase == "queued":
            version = run(control, events, first)
    assert [row.version for row in models.list_versions(control.db, "fraud")] == [version]


async def test_versions_of_model_must_share_base(control: Control, events: JobEvents):
    insert_model(control.db, "other")
    file_id = await control.upload()
    first = await made(control)

    async def of_other() -> None:
        body = {"publish_as": "fraud"}
        await control.sdk.fine_tuning.jobs.create(model="other", training_file=file_id, extra_body=body)

    for _ in ("while the first waits", "when its model is there"):
        with pytest.raises(openai.ConflictError, match="is made of starter, and this job trains other"):
            await of_other()
        if jobs.get(control.db, first).phase == "queued":
            run(control, events, first)
    # A job may also train `fraud` itself, because `fraud` has the same base.
    body = {"publish_as": "fraud"}
    again = await control.sdk.fine_tuning.jobs.create(model="fraud", training_file=file_id, extra_body=body)
    assert jobs.get(control.db, again.id).output_model == "fraud"


async def test_adapter_and_full_versions_cannot_replace_each_other(control: Control, events: JobEvents):
    control.context.sizes.adapter_rank_limit = lambda row: 32
    adapter = {"adapter": {"base": "starter", "base_version": "v1", "rank": 8}}
    first = await control.job(hyperparameters={"lora_rank": 8}, extra_body={"publish_as": "fraud"})
    early = await made(control, hyperparameters={"full": True})
    v1 = run(control, events, first, **adapter)
    message = await refused(control, hyperparameters={"full": True})
    assert "is served as an adapter, and this job would make whole weights" in message
    # Both first jobs were accepted: the later version, of another kind, does not replace the active version.
    run(control, events, early)
    assert active(control) == v1 and "goes on answering" in (await control.messages(early))[-2]
