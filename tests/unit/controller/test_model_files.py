from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.store.objects import models
from tests.unit.controller.conftest import Control
from weights.tiers.copies import seal_dir


@pytest.fixture
def folder(control: Control, tmp_path: Path) -> Path:
    """The files of a version of `starter` on disk."""
    folder = tmp_path / "stored"
    folder.mkdir()
    save_file({"w": np.arange(3000, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    seal_dir(folder, kind="version", model="starter", version="v1")
    (version,) = models.list_versions(control.db, "starter")
    models.update_version(control.db, "starter", version.version, disk_path=str(folder))
    return folder


async def test_archive_is_a_tar_file_of_all_files_and_resumes_at_a_range(control: Control, folder: Path):
    whole = await control.http.get("/v1/models/starter/archive")
    assert int(whole.headers["content-length"]) == len(whole.content)
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
        assert tar.getnames() == ["manifest.json", "config.json", "model.safetensors"]
        assert all(tar.extractfile(name).read() == (folder / name).read_bytes() for name in tar.getnames())
    for asked, if_range, status, sent in (
        ("bytes=100-", None, 206, slice(100, None)),
        ("bytes=5000-7000", whole.headers["etag"], 206, slice(5000, 7001)),
        ("bytes=100-", '"another"', 200, slice(0, None)),
        ("bytes=" + "9" * 5000 + "-", None, 200, slice(0, None)),
        (f"bytes={len(whole.content)}-", None, 416, None),
    ):
        headers = {"range": asked} | ({"if-range": if_range} if if_range else {})
        answer = await control.http.get("/v1/models/starter/archive", headers=headers)
        assert answer.status_code == status and (sent is None or answer.content == whole.content[sent])
