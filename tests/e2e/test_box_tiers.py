"""A box that lost what was near: its model comes back from the remote tier, and a damaged copy from the next one."""

from __future__ import annotations

import json
import shutil

import pytest
from moto.server import ThreadedMotoServer

from tests.e2e.box_support import wait_for, whole_box
from tests.e2e.engine_support import save_model
from weights.format.config import Location
from weights.tiers.objects import S3Objects

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture
def s3(tmp_path):
    """Settings of [weights.remote] for a real S3 server on loopback."""
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
    """Tokens and log-probabilities; the first ones of a random model are telling enough."""
    made = box.client(max_retries=5).completions.create(
        model="tiny", prompt="the quick brown fox", max_tokens=6, temperature=0, logprobs=1
    )
    return made.choices[0].logprobs.tokens, made.choices[0].logprobs.token_logprobs


def tiers(box):
    return set(box.ask("model", "show", "tiny")["versions"][0]["tiers"])


def test_what_is_gone_from_memory_and_disk_or_damaged_is_served_from_the_remote_tier(box, tmp_path):
    box.run("model", "import", str(save_model(tmp_path / "tiny", seed=3)), "--name", "tiny")
    first = answer(box)
    wait_for(lambda: {"disk", "remote"} <= tiers(box), "a copy in every tier")
    (on_disk,) = (box.data_dir / "models" / "tiny").iterdir()

    box.run("down")  # which clears shared memory
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
