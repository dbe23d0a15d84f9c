"""Files that an import rejects, and the tokens it finds."""

import json
from pathlib import Path

import pytest

from weights.checkpoint.folder import CheckpointRefused, check_folder, tokens_of

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
        ("config.json", {"speculators_config": {"verifier": "/etc"}}, "outside the checkpoint: '/etc'"),
        ("config.json", {"model_type": "../llama"}, "model_type"),
        ("tokenizer_config.json", {"vocab": "/etc/passwd"}, "'vocab'"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, "auto_map"),
        ("generation_config.json", {"custom_generate": "evil"}, "auto_map"),
        ("modules.json", [{"idx": 0, "path": "/usr"}], "'/usr'"),
        ("pytorch_model.bin", {}, "a pickle"),
    ],
)
def test_check_folder_names_the_rejected_file(folder, file, body, says):
    check_folder(folder)
    (folder / file).write_text(json.dumps(body))
    with pytest.raises(CheckpointRefused, match=says) as refused:
        check_folder(folder)
    assert refused.value.file == file and str(refused.value).startswith(f"{file}: ")


@pytest.mark.parametrize("kind", ["a link", "a folder"])
def test_check_folder_rejects_links_and_subfolders(folder, tmp_path, kind):
    (tmp_path / "first-key").write_text("sk-secret")
    if kind == "a link":
        (folder / "vocab.txt").symlink_to(tmp_path / "first-key")
    else:
        (folder / "1_Pooling").mkdir()
    with pytest.raises(CheckpointRefused, match="not a regular file"):
        check_folder(folder)


BEGINS = "<｜tool▁calls▁begin｜>"
WANTED = ("[TOOL_CALLS]", BEGINS)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    ("name", "body", "found"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 3, "content": BEGINS}]}, {BEGINS}),
        ("tokenizer.json", {"model": {"vocab": [[BEGINS, -1.5]]}}, {BEGINS}),
        ("vocab.json", {BEGINS: 5}, {BEGINS}),
        ("tokenizer_config.json", {"chat_template": "{{ '[TOOL_CALLS]' }}", "vocab": {"[TOOL_CALLS]s": 1}}, set()),
        ("tekken.json", {}, {"[TOOL_CALLS]"}),
    ],
)
def test_tokens_of_finds_token_in_each_file(tmp_path, name, body, found, ascii_only):
    (tmp_path / name).write_text(json.dumps(body, ensure_ascii=ascii_only))
    assert tokens_of(tmp_path, WANTED) == found


def test_tokens_of_reads_files_in_chunks(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x10" + BEGINS.encode() + b"\x00")
    assert tokens_of(tmp_path, WANTED) == {BEGINS}
