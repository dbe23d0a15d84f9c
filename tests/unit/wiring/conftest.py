from __future__ import annotations

import time

import pytest

from appliance.controller.job_events import JobEvents
from appliance.store import deployments, jobs, models
from appliance.store.database import Database
from appliance.store.rows import DeploymentRow, JobRow, ModelRow, VersionRow


@pytest.fixture
def db(tmp_path):
    with Database(tmp_path / "appliance.db") as database:
        yield database


@pytest.fixture
def events(db, tmp_path):
    (tmp_path / "files").mkdir()
    return JobEvents(db, tmp_path / "files", "local")


@pytest.fixture
def add_model(db):
    def add(name="starter", version="v1", deployed=True, params=5):
        models.insert(db, ModelRow(id=name, kind="base", arch="LlamaForCausalLM", params=params, bytes=10,
                                   owned_by="org", source="here", created_s=1.0))  # fmt: skip
        models.insert_version(db, VersionRow(name, version, "here", 10, 1.0, disk_path=f"/models/{name}/{version}"))
        models.activate(db, name, version)
        if deployed:
            deployments.insert(db, DeploymentRow(name, 1.0))

    return add


@pytest.fixture
def add_job(db):
    def add(job_id="ftjob-1", **columns):
        given = {"phase": "queued", "resolved": {"publish": "end"}, "allowed_sizes": [1, 2, 4, 8], **columns}
        jobs.insert(db, JobRow(id=job_id, model="starter", method="supervised", training_file="file-1", seed=1,
                               output_model=f"ft:starter:local::{job_id}", created_s=time.time(), **given))  # fmt: skip
        return jobs.get(db, job_id)

    return add
