"""A box that lost its local data: models return from the remote tier, all state from a backup on an empty machine."""

import json
import shutil

import pytest
from moto.server import ThreadedMotoServer

from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box
from tests.e2e.engine_support import save_model
from tests.e2e.machines_support import deploy_tiny
from weights.format.config import Location
from weights.tiers.objects import S3Objects

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

SETTINGS = "[box]\ndevices = 2\nstart_timeout_s = 300\n[serve]\nstart_timeout_s = 400\n"


def test_restore_returns_keys_files_models_and_jobs(tmp_path):
    for name in ("first", "place"):
        (tmp_path / name).mkdir()
    place, second = str(tmp_path / "place"), WholeBox(tmp_path / "second")
    with whole_box(tmp_path / "first", SETTINGS) as first:
        deploy_tiny(first)
        said = first.greedy("tiny", "How many?", 12)[1]
        file = first.upload(gsm8k("train", 24))
        tuned = first.tuned(first.tune("tiny", file, request={"suffix": "kept"}, n_epochs=1, batch_size=8))
        of_tuned = first.greedy(tuned, "How many?", 12)[1]
        paused = first.client().fine_tuning.jobs.create(model="tiny", training_file=file)
        first.client().fine_tuning.jobs.pause(paused.id)
        assert first.ask("status")["box"]["backup"] is None
        # Copies to the disk tier that are still in progress would be new to a second backup.
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
        second.run("restore", place, code=1)  # refused: a restore never overwrites a box
        second.key = first.key
        second.up()
        assert {model.id for model in second.client().models.list().data} >= {"tiny", tuned}
        assert [second.greedy(model, "How many?", 12)[1] for model in ("tiny", tuned)] == [said, of_tuned]
        assert second.client().files.content(file).read() == gsm8k("train", 24)
        jobs = {job.id: job for job in second.client().fine_tuning.jobs.list().data}
        assert jobs[paused.id].status == "queued", jobs[paused.id].error
        assert sorted(job.status for job in jobs.values()) == ["queued", "succeeded"]
        second.run("down")
        assert second.left() == []
        wait_for(lambda: not second.segments_left(), "segments of ended engines to be gone", 10)
    finally:
        second.destroy()


# --- tiers


@pytest.fixture
def s3(tmp_path):
    """[weights.remote] settings of a real S3 server on loopback."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    credentials = tmp_path / "credentials"
    credentials.write_text("[box]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = secret\n")
    settings = {
        "endpoint": "http://{}:{}".format(*server.get_host_and_port()),
        "credentials_file": str(credentials),
        "credentials_profile": "box",
    }
    settings["url"] = "s3://weights/box"
    S3Objects(Location(**settings))._client.create_bucket(Bucket="weights")
    yield settings
    server.stop()


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "mount").mkdir()
    return {"url": str(tmp_path / "mount")}


@pytest.fixture(params=["directory", "s3"])
def box(request, tmp_path_factory):
    settings = request.getfixturevalue(request.param)
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    with whole_box(tmp_path_factory.mktemp("box"), f"[box]\ndevices = 2\n[weights.remote]\n{lines}\n") as one:
        yield one


def answer(box):
    """Return tokens and log-probabilities of an answer; a few tokens identify a random model."""
    made = box.client(max_retries=5).completions.create(
        model="tiny", prompt="the quick brown fox", max_tokens=6, temperature=0, logprobs=1
    )
    return made.choices[0].logprobs.tokens, made.choices[0].logprobs.token_logprobs


def tiers(box):
    return set(box.ask("model", "show", "tiny")["versions"][0]["tiers"])


def test_remote_tier_restores_lost_or_damaged_version(box, tmp_path):
    box.run("model", "import", str(save_model(tmp_path / "tiny", seed=3)), "--name", "tiny")
    first = answer(box)
    wait_for(lambda: {"disk", "remote"} <= tiers(box), "a copy in every tier")
    (on_disk,) = (box.data_dir / "models" / "tiny").iterdir()

    box.run("down")  # this clears shared memory
    shutil.rmtree(on_disk.parent)
    box.up()
    assert answer(box) == first
    wait_for(lambda: {"memory", "disk", "remote"} <= tiers(box), "the copy on disk to be made anew")

    box.run("down")
    raw = bytearray((on_disk / "model.safetensors").read_bytes())
    raw[-5] ^= 1
    (on_disk / "model.safetensors").write_bytes(raw)
    box.up()
    assert answer(box) == first
    wait_for(lambda: (on_disk / "model.safetensors").exists() and "disk" in tiers(box), "a whole copy on disk again")
