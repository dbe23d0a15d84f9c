"""Tensors under other names: the same bytes, in a file with a shorter or a longer header."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from weights.format.layout import Layout, rename_tensors


@pytest.mark.parametrize("prefix", ["", "a.much.longer.name.than.before." * 20])
def test_rename_tensors_keeps_data(tmp_path, prefix):
    data = {f"module.t{n}": np.arange(n, n + 6, dtype=np.float32) for n in range(3)}
    save_file(data, tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(data, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = {name: prefix + name.removeprefix("module.") for name in data}
    rename_tensors(tmp_path, names)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == set(names.values()) and len([*Layout.read(tmp_path)]) == 3
    assert all((found[names[name]] == value).all() for name, value in data.items())
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].keys() == found.keys()
