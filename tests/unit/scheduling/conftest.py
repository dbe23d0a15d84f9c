import time

import pytest

from appliance.controller.jobs.events import JobEvents
from appliance.paths import BoxPaths
from appliance.store import jobs, models
from appliance.store.database import Database
from appliance.store.rows import DEPLOYMENTS, DeploymentRow, JobRow, ModelRow, VersionRow
from appliance.tiers.tiers import TierFlow, Tiers
from weights.format.config import WeightsConfig
from weights.memory.segment import mappings
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
    mappings.clear()


@pytest.fixture
def tiers(store, tmp_path):
    """A disk tier and a remote tier below `tmp_path`, with default rules."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "data").mkdir()
    config = WeightsConfig.model_validate({"disk": {"free_bytes": 0}, "remote": {"url": str(tmp_path / "mount")}})
    return Tiers(store, config, BoxPaths(tmp_path / "data", tmp_path / "shm"))


@pytest.fixture
def flow(db, tiers):
    return TierFlow(db, tiers, owner="box-1")


def _insert_model(db, name, *, kind, versions, deployed, meta=None, **columns):
    shared = {"arch": "LlamaForCausalLM", "bytes": 10, "owned_by": "org", "created_s": 1.0}
    models.insert(db, ModelRow(id=name, kind=kind, **shared, **columns))
    for version in versions:
        path = f"/models/{name}/{version}"
        models.insert_version(db, VersionRow(name, version, "here", 10, 1.0, disk_path=path, meta=meta or {}))
    models.activate(db, name, versions[-1])
    if deployed is not None:
        DEPLOYMENTS.insert(db, DeploymentRow(name, 1.0, **deployed))


@pytest.fixture
def add_model(db):
    def add(name="starter", version="v1", deployed=True, params=5):
        rows = {} if deployed else None
        _insert_model(db, name, kind="base", versions=[version], deployed=rows, params=params, source="here")

    return add


@pytest.fixture
def add_adapter(db):
    """Add an adapter of `base` at `base_version`, with two published versions; the newer version is active."""

    def add(name, base="starter", base_version="v1", **columns):
        meta = {"adapter": {"base": base, "base_version": base_version, "rank": 8}}
        of = {"kind": "fine-tuned", "base": base, "params": 5, "source": "job"}
        _insert_model(db, name, versions=["step-1", "step-2"], deployed=columns, meta=meta, **of)

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
