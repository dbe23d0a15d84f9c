"""Import of GGUF files to checkpoints whose logits equal those of the original model."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from appliance.models import trial
from appliance.models.errors import NotEnoughMemory, SourceNotFound
from tests.unit.models import checkpoints
from tests.unit.train import gguf_files
from train.convert import gguf as convert
from weights.checkpoint.folder import CheckpointRefused, UnsafeLink

TOKENS = torch.tensor([[1, 20, 33, 41, 5, 60, 7, 19]])


@pytest.fixture(autouse=True)
def converts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run conversions in this process; a separate process spends 6 s of CPU time on imports."""

    def run_here(subject: str, module: str, file: str, out: str, *, on_event: Any, **_: Any) -> dict[str, Any]:
        said: list[dict[str, Any]] = []
        monkeypatch.setattr(convert, "_say", lambda event, **fields: said.append(fields))
        convert.main(Path(file), Path(out))
        for event in said[:-1]:
            on_event(event)
        return said[-1]

    run_trial = trial.run_trial
    monkeypatch.setattr(
        trial, "run_trial", lambda *of, **how: (run_here if of[1] == "train.convert.gguf" else run_trial)(*of, **how)
    )
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(convert.Bounds, "hold", lambda _: None)  # it would limit the test process


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_import_gguf_preserves_logits(family, tmp_path, capsys):
    made = gguf_files.model(family)
    file = gguf_files.write(tmp_path / "m.gguf", made, family)
    convert._convert(file, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.allclose(logits(found), logits(made), atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("AB", add_special_tokens=False)) == "AB"
    assert tokenizer.chat_template == gguf_files.TEMPLATE and tokenizer.eos_token == "<eos>"


def test_import_gguf_keeps_scaled_rope_of_llama_3(tmp_path, capsys):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    made = gguf_files.model("llama", rope_parameters=rope)
    plain = 1 / 500000.0 ** (torch.arange(4) / 4)
    factors = plain / made.model.rotary_emb.inv_freq
    assert factors.max() > 31
    file = gguf_files.write(tmp_path / "m.gguf", made, "llama", **{"rope_freqs.weight": factors})
    convert._convert(file, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.allclose(found.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)
    other = gguf_files.write(tmp_path / "o.gguf", made, "llama", **{"rope_freqs.weight": factors * 1.1})
    with pytest.raises(convert._Refused, match="rotary"):
        convert._convert(other, tmp_path / "other")


def test_import_gguf_ignores_other_files_in_folder(library, tmp_path):
    """Except sampling settings. transformers would ask to run code that a tokenizer_config.json names."""
    folder = tmp_path / "some-model-GGUF"
    folder.mkdir()
    file = gguf_files.write(folder / "tiny.Q8.gguf", gguf_files.model("llama"), "llama")
    (folder / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["x.T", null]}, "tokenizer_class": "T"}'
    )
    (folder / "x.py").write_text("raise SystemExit(3)")
    seen: list[str] = []
    made = library.import_model(str(file), report=lambda done, total, unit, message: seen.append(message))
    assert (made.name, made.version, made.arch, made.task) == ("tiny.Q8", "v1", "LlamaForCausalLM", "generate")
    assert made.max_model_len == 128 and made.source == str(file) and "dequantising" in seen
    assert seen[0] == "reading tiny.Q8.gguf"
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.2, "eos_token_id": 77}')
    other = library.import_model(str(folder), name="other")
    sampling, own = (json.loads((one.path / "generation_config.json").read_text()) for one in (other, made))
    assert other.name == "other" and sampling == {**own, "do_sample": True, "temperature": 0.2}
    for one in (made, other):
        assert not (one.path / "x.py").exists() and "auto_map" not in (one.path / "tokenizer_config.json").read_text()
    (folder / "second.gguf").write_bytes(file.read_bytes())
    with pytest.raises(SourceNotFound, match="second.gguf, tiny.Q8.gguf"):
        library.import_model(str(folder))
    assert not list((tmp_path / "models" / ".staging").iterdir())


def test_import_gguf_rejects_links_and_pipes(library, tmp_path):
    folder, elsewhere = tmp_path / "some-model", tmp_path / "of-somebody-else"
    folder.mkdir()
    elsewhere.mkdir()
    theirs = gguf_files.write(elsewhere / "theirs.gguf", gguf_files.model("llama"), "llama")
    (folder / "m.gguf").symlink_to(theirs)
    with pytest.raises(UnsafeLink, match="m.gguf"):
        library.import_model(str(folder))
    (folder / "m.gguf").unlink()
    os.mkfifo(folder / "m.gguf")
    with pytest.raises(UnsafeLink, match="not a regular file"):  # opening a FIFO could wait forever for a writer
        library.import_model(str(folder))
    (folder / "m.gguf").unlink()
    (folder / "m.gguf").write_bytes(theirs.read_bytes())
    (elsewhere / "generation_config.json").write_text('{"temperature": 0.2}')
    (folder / "generation_config.json").symlink_to(elsewhere / "generation_config.json")
    with pytest.raises(UnsafeLink, match="generation_config.json"):
        library.import_model(str(folder))
    assert not checkpoints.stored(tmp_path)


def test_import_gguf_rejects_files_without_whole_model(library, tmp_path):
    made = gguf_files.model("llama")
    sound = gguf_files.write(tmp_path / "sound.gguf", made, "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(CheckpointRefused, match="cut.gguf.*not a valid GGUF"):
        library.import_model(str(cut))
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    with pytest.raises(CheckpointRefused, match="hostile.gguf.*not a valid GGUF"):
        library.import_model(str(hostile))
    odd = gguf_files.write(tmp_path / "odd.gguf", made, "llama", **{"general.type": "adapter"})
    with pytest.raises(CheckpointRefused, match="odd.gguf.*'adapter', not a model"):
        library.import_model(str(odd))
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    with pytest.raises(SourceNotFound, match="not GGUF"):
        library.import_model(str(text))


def test_import_gguf_rejects_model_larger_than_memory(library, tmp_path, monkeypatch):
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.model("llama"), "llama")
    monkeypatch.setattr(convert.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    with pytest.raises(NotEnoughMemory, match="1.1 GB"):
        library.import_model(str(file))
