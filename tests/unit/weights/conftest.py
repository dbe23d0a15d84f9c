"""Stores on tmp_path and small versions with known bytes."""

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from weights.format.layout import Layout, TensorSpec
from weights.memory.lease import StoredVersion
from weights.memory.segment import mappings
from weights.memory.store import WeightStore
from weights.tiers.copies import seal_dir

SPECS = (
    TensorSpec("model.embed_tokens.weight", "BF16", (320, 64)),
    TensorSpec("model.norm.weight", "F32", (3,)),
    TensorSpec("model.layers.0.mlp.weight", "F16", (64, 130)),
    TensorSpec("counter", "I64", ()),
)
AUX = {"config.json": b'{"model_type":"llama"}', "tokenizer.json": b"{}"}


def content(name: str, version: str, nbytes: int) -> bytes:
    """Deterministic bytes that differ for every tensor and version."""
    return hashlib.shake_128(f"{version}/{name}".encode()).digest(nbytes)


def fill(draft, version: str) -> None:
    for placed in draft.layout:
        draft.view(placed.spec.name)[:] = content(placed.spec.name, version, placed.nbytes)


def write(
    store: WeightStore, version: str = "1", *, model: str = "starter", kind: str = "version", sealed=True, pinned=True
) -> StoredVersion:
    """Write a committed version with known content. sealed: with checksums, as if from a tier."""
    draft = store.reserve(Layout.plan(SPECS), kind=kind, model=model, version=version, aux_files=AUX)
    fill(draft, version)
    stored = draft.commit(meta={"step": 3}, pinned=pinned)
    if sealed:
        seal_dir(stored.path, kind=kind, model=model, version=version, meta={"step": 3})
    return StoredVersion.read(stored.path)


def check(store: WeightStore, stored) -> None:
    """Assert that every tensor of `stored` has the bytes written by `write`."""
    with store.lease(stored) as lease:
        for placed in lease.layout:
            assert bytes(lease.view(placed.spec.name)) == content(placed.spec.name, stored.version, placed.nbytes)


def flip(path: Path) -> None:
    """Flip a bit in the middle of the file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


def deadly(limit: int, calls: Iterator[int], real, *arguments, **named):
    """Call `real`, but kill the process at call number `limit`."""
    if next(calls) == limit:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path):
    yield WeightStore(root, budget_bytes=None)
    mappings.clear()
