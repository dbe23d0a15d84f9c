"""Whether a model's folder may be opened, whenever it came onto the box."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from weights.checkpoint.errors import CheckpointRefused, OpeningRefused
from weights.checkpoint.folder import check_folder, may_open
from weights.format.errors import VersionNotFound

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
def test_what_an_import_refuses_is_refused_wherever_the_folder_is_opened(folder, file, body, says):
    may_open(folder, "mine")
    (folder / file).write_text(json.dumps(body))
    with pytest.raises(OpeningRefused, match=says) as refused:
        may_open(folder, "mine")
    told = str(refused.value)
    assert refused.value.file == file and told.startswith(f"{file}: ")
    assert "appliance model rm mine" in told and "none was deleted" in told
    with pytest.raises(CheckpointRefused, match=says) as at_import:
        check_folder(folder)
    assert "model rm" not in str(at_import.value), "who imports has nothing on the box yet"


@pytest.mark.parametrize("kind", ["a link", "a folder"])
def test_nothing_stands_in_it_but_plain_files(folder, tmp_path, kind):
    (tmp_path / "first-key").write_text("sk-secret")
    if kind == "a link":
        (folder / "vocab.txt").symlink_to(tmp_path / "first-key")
    else:
        (folder / "1_Pooling").mkdir()
    with pytest.raises(OpeningRefused, match="not a regular file"):
        may_open(folder, "mine")


def test_an_adapter_has_no_config_of_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    may_open(tmp_path, "mine")
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(OpeningRefused, match="a pickle"):
        may_open(tmp_path, "mine")


def test_a_folder_that_left_shared_memory_is_gone_and_not_at_fault(tmp_path):
    with pytest.raises(VersionNotFound, match="is gone"):
        may_open(tmp_path / "v1", "mine")


def test_large_vocabularies_cost_an_engines_start_no_more_than_50_ms(folder):
    with open(folder / "tokenizer.json", "wb") as file:
        file.truncate(200 << 20)
    (folder / "vocab.json").write_text(json.dumps({str(n): n for n in range(260_000)}))
    added = {str(n): {"content": f"<extra_{n}>", "special": True} for n in range(4_000)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    took = []
    for _ in range(3):
        began_s = time.process_time()
        may_open(folder, "mine")
        took.append(time.process_time() - began_s)
    assert min(took) < 0.05
