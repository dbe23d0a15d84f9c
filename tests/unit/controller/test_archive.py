from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from appliance.controller.interfaces.errors import ApiError
from appliance.controller.openai import model_routes
from weights.format.manifest import Manifest
from weights.tiers.archive import Archive
from weights.tiers.directory import seal_dir


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Archive]:
    folder = tmp_path_factory.mktemp("archive") / "v1"
    folder.mkdir()
    save_file({"w": np.arange(3000, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    seal_dir(folder, kind="version", model="m", version="v1")
    return folder, Archive.of(folder)


def test_archive_is_a_tar_file_with_the_manifest_first(made):
    folder, whole = made
    content = b"".join(whole.chunks(0, whole.nbytes))
    assert len(content) == whole.nbytes
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = tar.getnames()
        assert names[0] == "manifest.json" and set(names[1:]) == set(Manifest.read(folder).files)
        for name in names:
            assert tar.extractfile(name).read() == (folder / name).read_bytes()


@given(start=st.integers(0, 20_000), length=st.integers(1, 20_000))
def test_archive_chunks_are_a_slice_of_the_whole(made, start, length):
    _, whole = made
    content = b"".join(whole.chunks(0, whole.nbytes))
    end = min(whole.nbytes, start + length)
    assert b"".join(whole.chunks(start, end)) == content[start:end]


@pytest.mark.parametrize(
    "asked, if_range, status, sent",
    [
        (None, None, 200, slice(0, None)),
        ("bytes=100-", None, 206, slice(100, None)),
        ("bytes=100-199", "same", 206, slice(100, 200)),
        ("bytes=100-", '"another"', 200, slice(0, None)),
        ("lines=1-2", None, 200, slice(0, None)),
    ],
)
async def test_answer_sends_the_range_of_the_same_archive(made, asked, if_range, status, sent):
    _, whole = made
    given_tag = f'"{whole.tag}"' if if_range == "same" else if_range
    response = model_routes._download(whole, "ft:a/b", asked, given_tag)
    body = b"".join([bytes(part) async for part in response.body_iterator])
    assert response.status_code == status
    assert body == b"".join(whole.chunks(0, whole.nbytes))[sent]
    assert int(response.headers["content-length"]) == len(body)
    assert re.search(r'filename="ft-a-b.tar"', response.headers["content-disposition"])


def test_answer_beyond_the_end_is_refused(made):
    _, whole = made
    with pytest.raises(ApiError) as refused:
        model_routes._download(whole, "m", f"bytes={whole.nbytes}-", None)
    assert (refused.value.status_code, refused.value.code) == (416, "range_not_satisfiable")
