from __future__ import annotations

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


async def test_files_of_a_version_are_listed_and_downloaded(control: Control, folder: Path):
    listed = (await control.http.get("/v1/models/starter/files")).json()
    assert [file["name"] for file in listed["data"]] == ["config.json", "model.safetensors"]
    for file in listed["data"]:
        answer = await control.http.get(f"/v1/models/{listed['id']}/files/{file['name']}")
        assert answer.content == (folder / file["name"]).read_bytes() and len(answer.content) == file["bytes"]


async def test_download_resumes_at_a_range(control: Control, folder: Path):
    path = "/v1/models/starter/files/model.safetensors"
    answer = await control.http.get(path, headers={"Range": "bytes=100-199"})
    assert (answer.status_code, answer.content) == (206, (folder / "model.safetensors").read_bytes()[100:200])


@pytest.mark.parametrize("file", ["manifest.json", "..%2Fsecret", "none"])
async def test_download_of_another_file_is_not_found(control: Control, folder: Path, file: str):
    (folder.parent / "secret").write_text("x")
    assert (await control.http.get(f"/v1/models/starter/files/{file}")).status_code == 404
