"""Keys with a list of models, whose owner has made thousands of names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.controller.access.model_access import may_use
from appliance.store.objects import job_records, jobs
from appliance.store.rows import CheckpointRow

from .conftest import Control, insert_model


async def test_whether_a_name_is_ones_own_is_told_without_a_list_of_all(
    control: Control, monkeypatch: pytest.MonkeyPatch
):
    """Of 5,000 names each question took 5 ms of the controller's loop, and a request asks one for each judge: an
    evaluation with seven hundred of them held it for 3.6 s, the end of a sharing beside a hundred jobs for 0.5 s."""
    key_id = control.as_key("carol", models=["starter"])
    control.as_key("dan")
    insert_model(control.db, "secret")
    row = replace(jobs.get(control.db, await control.job()), key_id=key_id, owner="carol")
    for place, (phase, name) in enumerate(
        [("succeeded", "made"), ("succeeded", "gone"), ("queued", "coming"), ("failed", "others")]
    ):
        jobs.insert(control.db, replace(row, id=f"ftjob-{place}", output_model=name, phase=phase))  # type: ignore[arg-type]
    for name, owner in (("made", "carol"), ("coming", "carol"), ("others", "dan")):
        insert_model(control.db, name, kind="fine-tuned", owner=owner)
    job_records.insert_checkpoint(
        control.db,
        CheckpointRow(
            id="ckpt",
            job_id="ftjob-0",
            name="made:ckpt-step-1",
            model="made",
            version="v1",
            step=1,
            created_s=0.0,
            metrics={},
        ),
    )
    names = ["made", "gone", "coming", "others", "made:ckpt-step-1", "starter", "secret", "none"]
    listed = jobs.names_made_by(control.db, "carol")
    assert [jobs.has_made(control.db, "carol", name) for name in names] == [name in listed for name in names]
    monkeypatch.setattr(jobs, "names_made_by", lambda *_: pytest.fail("all names were read"))
    asked = [*names, "made@v1", "starter@v1", "secret@v1"]
    assert [name for name in asked if may_use(control.db, key_id, name)] == [
        "made",
        "coming",
        "made:ckpt-step-1",
        "starter",
        "made@v1",
        "starter@v1",
    ]
