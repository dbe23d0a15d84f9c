"""Import of checkpoint directories: accepted files, and refusals that name the fault and write nothing."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.models.errors import (
    InvalidModelName,
    MissingTokenizer,
    NotEnoughDisk,
    SourceNotFound,
    TemplateRefused,
    TrialEnded,
)
from tests.unit.models import checkpoints
from weights.checkpoint.folder import NotACheckpoint, PickleRefused, RemoteCodeRefused, UnsafeLink, UnsupportedModel
from weights.format.errors import IntegrityError
from weights.tiers.copies import verify


def nothing_there(tmp_path: Path) -> bool:
    """Whether the library has no version and no staging directory."""
    models = tmp_path / "models"
    return (
        not models.exists() or not [p for p in models.rglob("*") if p.is_file()] and not any(models.glob(".staging/*"))
    )


def test_import_path_creates_version_1_with_identical_weights(library, source, tmp_path):
    (source / "README.md").write_text("# mine")
    (source / "modeling_evil.py").write_text("import os")
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (source / "original").mkdir()
    heard = []
    taken = library.import_model(source, report=lambda *progress: heard.append(progress))
    assert (taken.name, taken.version, taken.path) == ("source", "v1", tmp_path / "models" / "source" / "v1")
    assert taken.arch == "LlamaForCausalLM" and taken.task == "generate" and taken.max_model_len == 128
    assert taken.params == sum(a.size for a in checkpoints.tensors().values())
    kept = "README.md config.json manifest.json model.safetensors tokenizer.json tokenizer_config.json"
    assert sorted(p.name for p in taken.path.iterdir()) == kept.split()
    assert (taken.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert stat.S_IMODE(taken.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in taken.path.iterdir()} == {0o600}
    done, total, unit, _ = heard[-1]
    assert done == total > 0 and unit == "bytes" and heard == sorted(heard, key=lambda h: h[0])


def test_import_path_never_reuses_deleted_version_number(library, source, tmp_path):
    first = library.import_model(source, name="one")
    library.remove("one", first.version)
    assert not checkpoints.stored(tmp_path)
    assert library.import_model(source, name="one").version == "v2"
    assert library.import_model(source, name="two").version == "v1"
    library.remove("one", "v2")
    assert library.import_model(source, name="one").version == "v3"


def test_import_path_follows_links_of_hub_cache(library, tmp_path):
    real = checkpoints.write(tmp_path / "real")
    snapshot = tmp_path / "models--org--m" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in real.iterdir():
        file.rename(blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")
    taken = library.import_model(snapshot, name="m")
    assert not any(p.is_symlink() for p in taken.path.iterdir())
    assert verify(taken.path).tensors == len(checkpoints.tensors())


def test_import_path_without_chat_template_warns(library, tmp_path):
    taken = library.import_model(checkpoints.write(tmp_path / "base", template=None))
    assert taken.info["chat_template"] is False and "no chat template" in taken.warnings[0]


def test_import_path_rejects_template_over_memory_limit(library, tmp_path, own_process):
    with pytest.raises(TemplateRefused, match="memory"):
        library.import_model(checkpoints.write(tmp_path / "source", template="{{ 'x'.ljust(3000000000) }}"))


def test_import_path_with_template_that_fails_trial_warns(library, tmp_path):
    template = "{{ raise_exception('roles must be a and b') }}"
    taken = library.import_model(checkpoints.write(tmp_path / "source", template=template))
    assert "roles must be a and b" in taken.warnings[0]


def test_import_path_without_tool_parser_token_warns(library, tmp_path):
    source = checkpoints.write(tmp_path / "source", template=checkpoints.TEMPLATE + "{{ tools or '' }}")
    taken = library.import_model(source)
    assert taken.info["tool_parser"] is None
    assert len([note for note in taken.warnings if "'<|python_tag|>'" in note and "llama3_json" in note]) == 1


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 129, "ft:starter:me:x"])
def test_import_path_rejects_invalid_names(library, source, name):
    with pytest.raises(InvalidModelName, match="--name"):
        library.import_model(source, name=name)


def test_import_path_distinguishes_file_and_missing_path(library, source, tmp_path):
    with pytest.raises(SourceNotFound, match="is a file"):
        library.import_model(str(source / "config.json"))
    with pytest.raises(SourceNotFound, match="does not exist"):
        library.import_model(str(tmp_path / "nowhere"))
    with pytest.raises(SourceNotFound, match="revision"):
        library.import_model(str(source), revision="main")
    with pytest.raises(NotACheckpoint, match="no \\*.safetensors"):
        (tmp_path / "empty").mkdir()
        library.import_model(tmp_path / "empty")


def test_import_path_when_cancelled_leaves_nothing(library, source, tmp_path):
    class Cancelled(Exception):
        pass

    def report(done, total, unit, message):
        if done:
            raise Cancelled

    with pytest.raises(Cancelled):
        library.import_model(source, report=report)
    assert nothing_there(tmp_path)


def test_import_path_sweeps_staging_of_dead_processes(library, source, tmp_path):
    staging = tmp_path / "models" / ".staging"
    dead = staging / f"{2**22 + 5}-{'a' * 32}"  # a pid above Linux's maximum, so no process has it
    alive = staging / f"{os.getpid()}-{'b' * 32}"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x")
    library.import_model(source)
    assert not dead.exists() and alive.exists()


def test_import_path_without_disk_space_names_required_bytes(library, source, monkeypatch):
    import appliance.models.library as module

    usage = module.shutil.disk_usage(source)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=256 << 20))
    with pytest.raises(NotEnoughDisk, match="has 268 MB free, this model needs 0 MB and 268 MB must stay free"):
        library.import_model(source)


_SECRET = "/etc/passwd"
_TOKENIZER, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_OF_TOOLS = {"chat_template": {"default": "{{ messages }}", "tool_use": "{% if %}"}}
# Serving adds a tool prompt to templates without tools; this template attacks only if it sees a variable of the prompt.
_TELLS_THEM_APART = "{% if holder is defined %}{{ messages.__class__.__mro__ }}{% endif %}{{ messages[0].content }}"
# (file, content, error, message)
REFUSED = [
    ("config.json", "[]", NotACheckpoint, "config.json"),
    ("config.json", "[" * 100_000, NotACheckpoint, "config.json"),
    ("config.json", '{"x":' + "[" * 100 + "]" * 100 + "}", NotACheckpoint, "nested too deeply"),
    ("config.json", {"architectures": None}, NotACheckpoint, "architectures"),
    ("config.json", {"architectures": ["X; import os"]}, NotACheckpoint, "not a class name"),
    ("config.json", {"architectures": ["ViTForImageClassification"]}, UnsupportedModel, "ViTForImageClassification"),
    ("config.json", {"architectures": ["Qwen2ForRewardModel"]}, UnsupportedModel, "score_model, label_model"),
    ("config.json", {"model_type": ["llama"], "architectures": ["X"]}, NotACheckpoint, "model_type"),
    (_TOKENIZER, '{"x":[' + "[]," * 200_000 + "[]]}", NotACheckpoint, f"{_TOKENIZER}.*values"),
    (_TOKENIZER, {"chat_template": 7}, NotACheckpoint, f"{_TOKENIZER}.*chat_template"),
    (_TOKENIZER, {"chat_template": [{"name": "default"}]}, NotACheckpoint, f"{_TOKENIZER}.*chat_template"),
    (_TOKENIZER, _OF_TOOLS, TemplateRefused, "line 1"),
    ("chat_template.jinja", "{{ messages.__class__.__mro__ }}", TemplateRefused, "outside of the template"),
    ("chat_template.jinja", "x" * 300_000, TemplateRefused, "300000 characters"),
    ("chat_template.jinja", _TELLS_THEM_APART, TemplateRefused, "outside of the template"),
    ("model.safetensors", "pickle" * 20, IntegrityError, "model.safetensors"),
    ("generation_config.json", '{"\\u0061uto_map": {"A": "x.B"}}', RemoteCodeRefused, "generation_config.json"),
    ("anything_else.json", {"auto_map": {"A": "x.B"}}, RemoteCodeRefused, "anything_else.json"),
    (_TOKENIZER, {"tokenizer_class": "GemmaTokenizer", "vocab_file": _SECRET}, UnsafeLink, _TOKENIZER),
    (_TOKENIZER, {"sp_model_kwargs": {"deep": [{"model_file": _SECRET}]}}, UnsafeLink, _TOKENIZER),
    (_SPECIAL, {"eos_token": "</s>", "vocab_file": _SECRET}, UnsafeLink, _SPECIAL),
    ("preprocessor_config.json", {"frontend_conf": {"cmvn_file": _SECRET}}, UnsafeLink, "preprocessor_config.json"),
    ("modules.json", [{"idx": 0, "path": "../.."}], UnsafeLink, "modules.json"),
]


@pytest.mark.parametrize(("file", "content", "error", "says"), REFUSED, ids=[f"{row[0]}-{row[3]}" for row in REFUSED])
def test_import_path_rejects_hostile_file(library, source, tmp_path, file, content, error, says):
    (source / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(error, match=says):
        library.import_model(source)
    assert nothing_there(tmp_path)


def _link_out(source: Path) -> None:
    source.with_name("secret.json").write_text('{"a": 1}')
    (source / "generation_config.json").symlink_to(source.with_name("secret.json"))


def _fifo(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    os.mkfifo(source / "tokenizer.json")


def _without_a_shard(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (checkpoints.write(source, shards=3) / "model-00002-of-00003.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_link_out, UnsafeLink, "generation_config.json.*secret.json"),
        (_fifo, UnsafeLink, "tokenizer.json.*not a regular file"),
        (_without_a_shard, NotACheckpoint, "model-00002-of-00003.safetensors.*incomplete"),
        (
            lambda source: (source / "model.safetensors").rename(source / "pytorch_model.bin"),
            PickleRefused,
            "pytorch_model.bin.*save_pretrained",
        ),
        (lambda source: (source / "tokenizer.json").unlink(), MissingTokenizer, "copy the tokenizer files"),
        (
            lambda source: checkpoints.write(source, shards=2),  # transformers reads one file, engines read the shards
            NotACheckpoint,
            r"model-00001-of-00002\.safetensors.* model\.safetensors too",
        ),
    ],
)
def test_import_path_rejects_folder_with_wrong_files(library, source, tmp_path, change, error, says):
    change(source)
    with pytest.raises(error, match=says):
        library.import_model(source)
    assert nothing_there(tmp_path)


def test_import_path_drops_params_json_of_mistral_format(library, source):
    """vLLM reads a directory as Mistral's format if it has params.json and weights named consolidated*."""
    (source / "model.safetensors").rename(source / "consolidated.safetensors")
    weights = dict.fromkeys(checkpoints.tensors(), "consolidated.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (source / "params.json").write_text('{"dim": 1048576, "n_layers": 1000}')
    assert not (library.import_model(source).path / "params.json").exists()


def test_import_path_accepts_attributes_saved_with_tokenizer(library, source):
    said = {
        "tokenizer_class": "LlamaTokenizerFast",
        "tokenizer_file": "/home/somebody/tokenizer.json",  # ignored: transformers reads tokenizer.json here
        "special_tokens_map_file": "/home/somebody/special_tokens_map.json",
        "name_or_path": "/home/somebody/model",
        "vocab_file": None,
        "init_inputs": [],
        "sp_model_kwargs": {},
        "added_tokens_decoder": {"0": {"content": "</s>", "special": True}},
        "chat_template": checkpoints.TEMPLATE,
        "model_input_names": ["input_ids"],
    }
    special = {
        "eos_token": {"content": "</s>", "lstrip": False},
        "additional_special_tokens": ["<a>"],
        "pad_token": None,
    }
    (source / "tokenizer_config.json").write_text(json.dumps(said))
    (source / "special_tokens_map.json").write_text(json.dumps(special))
    assert library.import_model(source).version == "v1"


def test_import_path_with_killed_trial_reports_kill(library, source, monkeypatch, own_process):
    run = subprocess.Popen
    killed = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {signal.SIGKILL})"]
    monkeypatch.setattr("appliance.models.trial.subprocess.Popen", lambda _, **how: run(killed, **how))
    with pytest.raises(TrialEnded, match="its check was killed.*try again"):
        library.import_model(source)
