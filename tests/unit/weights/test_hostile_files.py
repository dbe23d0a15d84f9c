"""Malformed files are never mapped: every refusal is a named error with the position."""

import json
import os
import pickle
import struct

import pytest

from tests.unit.weights.conftest import write
from weights.checkpoint.folder import NotACheckpoint
from weights.format.errors import IntegrityError
from weights.format.layout import Layout
from weights.format.manifest import Manifest
from weights.format.names import decode_name, encode_name
from weights.tiers.copies import seal_dir


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def raw_file(header: bytes, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def json_file(body: object, data: bytes = b"\0" * 8) -> bytes:
    return raw_file(json.dumps(body).encode(), data)


HOSTILE = {
    "length beyond the file": raw_file(b"{}", length=1000),
    "pickle": pickle.dumps({"w": [0.0] * 100}),
    "100k deep": raw_file(b'{"a":' + b"[" * 100_000),
    "two million lists": raw_file(b'{"a":[' + b"[]," * 2_100_000 + b"[]]}"),
    "5000-digit integer": raw_file(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'),
    "more dimensions than a tensor has": json_file({"a": entry(shape=[1] * 32 + [2])}),
    "shape that wraps to 8 bytes": json_file({"a": entry(shape=[2**61, 2**3, 2])}),
    "overlap": json_file({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12),
    "hole": json_file({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20),
    "trailing bytes": json_file({"a": entry()}, b"\0" * 9),
    "truncated": json_file({"a": entry()}, b"\0" * 7),
    "lone surrogate name": raw_file(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_layout_of_hostile_header_is_rejected(tmp_path, case):
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[case])
    with pytest.raises(IntegrityError) as caught:
        Layout.read(tmp_path)
    assert caught.value.file == "model.safetensors" and caught.value.path == str(tmp_path)
    with pytest.raises(IntegrityError):
        seal_dir(tmp_path, kind="version", model="m", version="1")


def test_symlinks_devices_and_pipes_are_rejected(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "model.safetensors").write_bytes(json_file({"w": entry()}))
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(real / "model.safetensors")
    with pytest.raises(IntegrityError):
        Layout.read(linked)
    piped = tmp_path / "piped"
    piped.mkdir()
    os.mkfifo(piped / "model.safetensors")
    with pytest.raises(IntegrityError, match="regular"):
        Layout.read(piped)
    (real / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(IntegrityError, match="config.json"):
        seal_dir(real, kind="version", model="m", version="1")


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw.replace(b'"step":3', b'"step":4'),
        lambda raw: b"",
        lambda raw: b"{" * 50_000,
        lambda raw: raw.replace(b"model.safetensors", b"../el.safetensors"),
    ],
)
def test_damaged_manifest_is_rejected(store, damage):
    stored = write(store)
    path = stored.path / "manifest.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IntegrityError):
        Manifest.read(stored.path)
    with pytest.raises(IntegrityError):
        store.find("version", "starter", "1")
    assert store.list("version") == []
    assert stored.path.exists()


@pytest.mark.parametrize("name", ["ft:starter:acme/x:1", "..", ".hidden", "%2E", "modèle 1"])
def test_encode_name_returns_one_safe_path_segment(store, name):
    encoded = encode_name(name)
    assert "/" not in encoded and not encoded.startswith(".")
    assert decode_name(encoded) == name
    stored = write(store, model=name, version=name)
    assert stored.path.parent.parent == store.root / "versions"
    assert store.find("version", name, name) == stored


@pytest.mark.parametrize("error", [IntegrityError("bad", path="/p", file="f"), NotACheckpoint("config.json", "is bad")])
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
