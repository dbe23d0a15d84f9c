"""A backup of a running box is brought back on an empty machine: another directory, nothing in shared memory."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box
from tests.e2e.machines_support import deploy_tiny

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

SETTINGS = "[box]\ndevices = 2\nstart_timeout_s = 300\n[serve]\nstart_timeout_s = 400\n"


def test_keys_files_models_and_jobs_are_as_they_were(tmp_path):
    for name in ("first", "place"):
        (tmp_path / name).mkdir()
    place, second = str(tmp_path / "place"), WholeBox(tmp_path / "second")
    with whole_box(tmp_path / "first", SETTINGS) as first:
        deploy_tiny(first)
        said = answer(first, "tiny")
        file = first.upload(gsm8k("train", 24))
        tuned = first.tuned(first.tune("tiny", file, request={"suffix": "kept"}, n_epochs=1, batch_size=8))
        of_tuned = answer(first, tuned)
        paused = first.client().fine_tuning.jobs.create(model="tiny", training_file=file)
        first.client().fine_tuning.jobs.pause(paused.id)
        assert first.ask("status")["box"]["backup"] is None
        # Copies into the disk tier that are still under way are new to a second backup.
        wait_for(lambda: not any(tier["backlog_bytes"] for tier in first.admin("tiers")["data"]), "the disk tier", 60)
        made = first.ask("backup", "make", place)
        assert first.ask("status")["box"]["backup"]["name"] == made["name"]
        again = first.ask("backup", "make", place)
        assert again["new_bytes"] < made["new_bytes"] / 2, "only what is new"
        assert [one["name"] for one in first.ask("backup", "list", place)["data"]] == [made["name"], again["name"]]
    shutil.rmtree(first.data_dir)
    try:
        back = second.ask("restore", place)
        assert back["name"] == again["name"]
        second.run("restore", place, code=1)  # never onto something
        second.key = first.key
        second.up()
        assert {model.id for model in second.client().models.list().data} >= {"tiny", tuned}
        assert answer(second, "tiny") == said and answer(second, tuned) == of_tuned
        assert second.client().files.content(file).read() == gsm8k("train", 24)
        jobs = {job.id: job for job in second.client().fine_tuning.jobs.list().data}
        assert jobs[paused.id].status == "queued", jobs[paused.id].error
        assert sorted(job.status for job in jobs.values()) == ["queued", "succeeded"]
        second.run("down")
        assert second.left() == []
        wait_for(lambda: not second.segments_left(), "segments of ended engines to be gone", 10)
    finally:
        second.destroy()


def answer(box: WholeBox, model: str) -> list[str]:
    return box.greedy(model, "How many?", 12)[1]
