"""Planned files load in the safetensors library, with aligned tensors."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file

from weights.format.errors import IntegrityError
from weights.format.layout import DTYPE_BITS, Layout, TensorSpec, rename_tensors
from weights.format.torch_views import dtype_code


def lay_down(layout: Layout, directory) -> None:
    for file in layout.files:
        data = bytearray(file.nbytes)
        data[: len(file.header)] = file.header
        for placed in file.tensors:
            data[placed.start : placed.end] = bytes(i % 251 for i in range(placed.nbytes))
        (directory / file.name).write_bytes(data)
    index = layout.index_file()
    if index:
        (directory / index[0]).write_bytes(index[1])


def test_planned_file_loads_with_safetensors(tmp_path):
    specs = [
        TensorSpec("odd", "U8", (3, 5)),
        TensorSpec("w", "BF16", (64, 32)),
        TensorSpec("scalar", "F32", ()),
        TensorSpec("empty", "I64", (0, 7)),
        TensorSpec("fp8", "F8_E4M3", (10,)),
    ]
    layout = Layout.plan(specs)
    lay_down(layout, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == {spec.name for spec in specs}
    for spec in specs:
        assert tuple(loaded[spec.name].shape) == spec.shape
        assert dtype_code(loaded[spec.name].dtype) == spec.dtype
        expected = bytes(i % 251 for i in range(spec.nbytes))
        flat = loaded[spec.name].contiguous().view(torch.uint8).flatten() if spec.shape else loaded[spec.name].view(1)
        assert flat.view(torch.uint8).numpy().tobytes() == expected
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # required by transformers
    assert Layout.read(tmp_path) == layout


@pytest.mark.parametrize("code", DTYPE_BITS)
def test_every_dtype_opens_with_safetensors(tmp_path, code):
    lay_down(Layout.plan([TensorSpec("x", code, (16,))]), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "numpy") as opened:
        assert opened.get_slice("x").get_dtype() == code


def test_plan_splits_files_with_transformers_index(tmp_path):
    specs = [TensorSpec(f"t{i}", "F32", (100,)) for i in range(5)]
    layout = Layout.plan(specs, max_file_bytes=800)
    assert [file.name for file in layout.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    name, body = layout.index_file()
    assert name == "model.safetensors.index.json"
    assert json.loads(body) == {
        "metadata": {"total_size": 2000},
        "weight_map": {f"t{i}": f"model-0000{i // 2 + 1}-of-00003.safetensors" for i in range(5)},
    }
    lay_down(layout, tmp_path)
    assert Layout.read(tmp_path) == layout


def test_index_unlike_files_is_refused(tmp_path):
    layout = Layout.plan([TensorSpec(f"t{i}", "F32", (100,)) for i in range(3)], max_file_bytes=500)
    lay_down(layout, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"]["ghost"] = layout.files[0].name
    index.write_text(json.dumps(body))
    with pytest.raises(IntegrityError, match="ghost"):
        Layout.read(tmp_path)


@pytest.mark.parametrize("target", ["../../etc/passwd.safetensors", "/etc/x.safetensors", ".x.safetensors", 7, "a.bin"])
def test_index_with_unsafe_file_name_is_refused(tmp_path, target):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(IntegrityError):
        Layout.read(tmp_path)


@pytest.mark.parametrize("prefix", ["", "a.much.longer.name.than.before." * 20])
def test_rename_tensors_keeps_data(tmp_path, prefix):
    data = {f"module.t{n}": np.arange(n, n + 6, dtype=np.float32) for n in range(3)}
    save_arrays(data, tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(data, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = {name: prefix + name.removeprefix("module.") for name in data}
    rename_tensors(tmp_path, names)
    found = load_arrays(tmp_path / "model.safetensors")
    assert found.keys() == set(names.values()) and len([*Layout.read(tmp_path)]) == 3
    assert all((found[names[name]] == value).all() for name, value in data.items())
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].keys() == found.keys()
