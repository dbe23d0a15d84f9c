"""What an import refuses in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weights.checkpoint.folder import CheckpointRefused, check_folder

PLAIN = {
    "config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "tokenizer_config.json": {"eos_token": "</s>"},
    "tokenizer.json": {"version": "1.0"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "v1"
    made.mkdir()
    for name, body in PLAIN.items():
        (made / name).write_text(json.dumps(body))
    (made / "model.safetensors").write_bytes(b"weights")
    (made / ".pinned").touch()
    return made


@pytest.mark.parametrize(
    ("file", "body", "says"),
    [
        ("config.json", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ("config.json", {"speculators_config": {"verifier": "/etc"}}, "names '/etc'"),
        ("config.json", {"model_type": "../llama"}, "model_type"),
        ("tokenizer_config.json", {"vocab": "/etc/passwd"}, "'vocab'"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, "auto_map"),
        ("generation_config.json", {"custom_generate": "evil"}, "auto_map"),
        ("modules.json", [{"idx": 0, "path": "/usr"}], "'/usr'"),
        ("pytorch_model.bin", {}, "a pickle"),
    ],
)
def test_check_folder_refuses_by_file(folder, file, body, says):
    check_folder(folder)
    (folder / file).write_text(json.dumps(body))
    with pytest.raises(CheckpointRefused, match=says) as refused:
        check_folder(folder)
    assert refused.value.file == file and str(refused.value).startswith(f"{file}: ")


@pytest.mark.parametrize("kind", ["a link", "a folder"])
def test_nothing_stands_in_it_but_plain_files(folder, tmp_path, kind):
    (tmp_path / "first-key").write_text("sk-secret")
    if kind == "a link":
        (folder / "vocab.txt").symlink_to(tmp_path / "first-key")
    else:
        (folder / "1_Pooling").mkdir()
    with pytest.raises(CheckpointRefused, match="not a regular file"):
        check_folder(folder)
