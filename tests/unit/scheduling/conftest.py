from __future__ import annotations

import time

import pytest

from appliance.controller.jobs.events import JobEvents
from appliance.paths import BoxPaths
from appliance.store.database import Database
from appliance.store.objects import jobs, models
from appliance.store.records import deployments
from appliance.store.rows import DeploymentRow, JobRow, ModelRow, VersionRow
from appliance.tiers.flow import TierFlow
from appliance.tiers.tiers import Tiers
from weights.format.config import WeightsConfig
from weights.memory.segment import forget_mappings
from weights.memory.store import WeightStore


@pytest.fixture
def db(tmp_path):
    with Database(tmp_path / "appliance.db") as database:
        yield database


@pytest.fixture
def events(db, tmp_path):
    (tmp_path / "files").mkdir()
    return JobEvents(db, tmp_path / "files", "local")


@pytest.fixture
def store(tmp_path):
    yield WeightStore(tmp_path / "shm", budget_bytes=None)
    forget_mappings()


@pytest.fixture
def tiers(db, store, tmp_path):
    """A disk and a remote directory below `tmp_path`, with the rules of the defaults."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "data").mkdir()
    config = WeightsConfig.model_validate({"disk": {"free_bytes": 0}, "remote": {"url": str(tmp_path / "mount")}})
    return Tiers(db, store, config, BoxPaths(tmp_path / "data", tmp_path / "shm"))


@pytest.fixture
def flow(db, tiers):
    return TierFlow(db, tiers, owner="box-1")


@pytest.fixture
def add_model(db):
    def add(name="starter", version="v1", deployed=True, params=5):
        models.insert(db, ModelRow(name, "base", "LlamaForCausalLM", params, 10, "org", "here", 1.0))
        models.insert_version(db, VersionRow(name, version, "here", 10, 1.0, disk_path=f"/models/{name}/{version}"))
        models.activate(db, name, version)
        if deployed:
            deployments.insert(db, DeploymentRow(name, 1.0))

    return add


@pytest.fixture
def add_adapter(db):
    """Two published versions of an adapter on `base` `base_version`, the newer one active."""

    def add(name, base="starter", base_version="v1", deployed=True, **columns):
        models.insert(db, ModelRow(name, "fine-tuned", "LlamaForCausalLM", 5, 1, "org", "job", 1.0, base=base))
        for version in ("step-1", "step-2"):
            meta = {"adapter": {"base": base, "base_version": base_version, "rank": 8}}
            models.insert_version(db, VersionRow(name, version, "job", 1, 1.0, disk_path="/a", meta=meta))
        models.activate(db, name, "step-2")
        if deployed:
            deployments.insert(db, DeploymentRow(name, 1.0, **columns))

    return add


@pytest.fixture
def add_job(db):
    def add(job_id="ftjob-1", **columns):
        given = {"phase": "queued", "resolved": {"publish": "end"}, "allowed_sizes": [1, 2, 4, 8], **columns}
        given.setdefault("method", "supervised")
        made = {"output_model": f"ft:starter:local::{job_id}", "created_s": time.time(), **given}
        jobs.insert(db, JobRow(job_id, "starter", training_file="file-1", seed=1, **made))
        return jobs.get(db, job_id)

    return add
