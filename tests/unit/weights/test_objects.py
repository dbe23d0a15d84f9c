"""The same contract for a directory and for S3, the latter against a real S3 server on loopback."""

from __future__ import annotations

import logging

import pytest
from moto.server import ThreadedMotoServer

from tests.unit.weights.conftest import check, write
from weights.format.errors import ObjectDamaged, TierUnavailable
from weights.tiers.objects import DirectoryObjects
from weights.tiers.objects_s3 import S3Objects
from weights.tiers.packed import PackedTier
from weights.tiers.record import Name

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@pytest.fixture(scope="module")
def server():
    running = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def credentials(tmp_path):
    path = tmp_path / "credentials"
    path.write_text(f"[box]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = {SECRET}\n")
    return {"credentials_file": str(path), "credentials_profile": "box"}


@pytest.fixture
def s3(server, credentials):
    made = S3Objects("weights-test", "box-1/", endpoint=server, page_keys=3, **credentials)
    made._client.create_bucket(Bucket="weights-test")
    yield made
    for key, _ in list(made.list("")):
        made.delete(key)


@pytest.fixture(params=["directory", "s3"])
def objects(request, tmp_path):
    if request.param == "directory":
        return DirectoryObjects(tmp_path / "objects", create=True)
    return request.getfixturevalue("s3")


def test_what_is_put_is_there_whole_until_it_is_deleted(objects):
    assert objects.size("objects/ab/x") is None and list(objects.list("objects/")) == []
    objects.put("objects/ab/x", b"one")
    objects.put("objects/ab/x", b"other")
    objects.put("records/versions/ft:a%2Fb/v1", b"")
    assert objects.get("objects/ab/x") == b"other" and objects.size("objects/ab/x") == 5
    assert list(objects.list("objects/")) == [("objects/ab/x", 5)]
    assert list(objects.list("records/")) == [("records/versions/ft:a%2Fb/v1", 0)]
    objects.delete("objects/ab/x")
    objects.delete("objects/ab/x")
    with pytest.raises(ObjectDamaged, match="missing"):
        objects.get("objects/ab/x")
    objects.sweep()
    assert list(objects.list("records/")) == [("records/versions/ft:a%2Fb/v1", 0)]


def test_a_version_travels_through_either(objects, store):
    stored = write(store)
    tier = PackedTier("remote", objects)
    assert tier.put(stored.path) > 0
    store.remove(stored)
    name = Name("version", "starter", "1")
    again = PackedTier("remote", objects).restore(store, name)
    check(store, again)
    (big,) = [key for key, nbytes in objects.list("objects/") if nbytes > 10_000][:1]
    objects.put(big, objects.get(big)[:-1])
    store.remove(again)
    with pytest.raises(ObjectDamaged, match="those of its name"):
        tier.restore(store, name)
    tier.quarantine(name)
    tier.collect()
    assert list(objects.list("")) == []


def test_listing_goes_past_one_page(s3):
    for number in range(7):
        s3.put(f"objects/{number}", b"")
    s3._client.put_object(Bucket="weights-test", Key="box-10/objects/x", Body=b"")
    assert [key for key, _ in s3.list("objects/")] == [f"objects/{number}" for number in range(7)]


def test_what_cannot_be_reached_says_so_without_credentials(server, credentials, caplog):
    caplog.set_level(logging.DEBUG)
    nowhere = S3Objects("weights-test", endpoint="http://127.0.0.1:9", timeout_s=0.2, **credentials)
    with pytest.raises(TierUnavailable, match="cannot be used") as refused:
        nowhere.put("k", b"1")
    with pytest.raises(TierUnavailable, match="NoSuchBucket") as missing:
        S3Objects("no-such-bucket", endpoint=server, **credentials).put("k", b"1")
    with pytest.raises(TierUnavailable, match="nobody"):
        S3Objects("weights-test", endpoint=server, credentials_profile="nobody")
    said = caplog.text + str(refused.value) + str(missing.value)
    assert SECRET not in said and "AKIA" not in said
